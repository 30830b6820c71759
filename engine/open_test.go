package engine

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"rocket/radix"
)

// thirdCancelled is a context that is found cancelled when its Done is asked for the third time and later.
type thirdCancelled struct {
	context.Context
	asked int
}

func (c *thirdCancelled) Done() <-chan struct{} {
	if c.asked++; c.asked < 3 {
		return nil
	}
	done := make(chan struct{})
	close(done)
	return done
}

func (c *thirdCancelled) Err() error { return context.Canceled }

func TestOpenGivenUpLeavesNothingBehind(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(41, 42)), 20)
	gaveUp := 0
	for range 40 { // which of two ready channels counts is random
		s, _, err := e.Open(&thirdCancelled{Context: t.Context()}, line, OpenOptions{Lazy: true})
		if err != nil {
			gaveUp++
			continue
		}
		e.Release(s)
	}
	if gaveUp == 0 {
		t.Fatal("no Open was given up")
	}
	if n := e.Stats().Seqs; n != 0 {
		t.Errorf("%d timelines are left after %d that were given up", n, gaveUp)
	}
}

func TestFaultPublishesNothing(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(43, 44)), 50)
	s, _ := open(t, e, line)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 100000, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	for {
		if toks, _ := run.Read(0); len(toks) > 0 {
			break
		}
		<-run.Ready()
	}
	broken := errors.New("broken")
	var snaps, at int
	if err := e.do(t.Context(), func() {
		if s.run == nil {
			return
		}
		at = s.consumed
		e.faulted(&batch{seqs: []*Seq{s}}, broken)
		e.forest.Match(s.ns, s.line, &e.match)
		if e.match.Start() == at && e.match.Snapshot.Slot != radix.None {
			snaps++
		}
	}); err != nil {
		t.Fatal(err)
	}
	if _, st := run.Read(0); at == 0 || !errors.Is(st.Err, broken) {
		t.Fatalf("run: %q, %v", st.Finish, st.Err)
	}
	if snaps != 0 {
		t.Errorf("the state at %d, which the failed step may have touched, is in the tree", at)
	}
}

// TestNaNLogitsEndTheRun: a broken device must not turn into text, nor its state into a snapshot.
func TestNaNLogitsEndTheRun(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(45, 46)), 50)
	s, _ := open(t, e, line)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 1 << 20, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	for {
		if toks, _ := run.Read(0); len(toks) > 0 {
			break
		}
		<-run.Ready()
	}
	bad := make([]float32, e.opts.Model.Vocab())
	for i := range bad {
		bad[i] = float32(math.NaN())
	}
	if err := e.do(t.Context(), func() {
		if s.run != nil {
			e.emit(run, bad)
		}
	}); err != nil {
		t.Fatal(err)
	}
	ids, st := wait(t, run)
	if !errors.Is(st.Err, errNaN) {
		t.Fatalf("finish %q, error %v", st.Finish, st.Err)
	}
	whole := append(slices.Clone(line), ids...) // the line is good; it goes on from the tree or from nothing
	got, _ := turn(t, e, s, whole, 3)
	want, _ := cold(t, e, whole, 3)
	sameLogits(t, "after a broken step", got, want, 3)
}

// TestColdReasons: each recomputation says why, and from which token on.
func TestColdReasons(t *testing.T) {
	e := newTestEngine(t, 12, 8, func(o *Options) { o.HostBytes = -1 })
	r := rand.New(rand.NewPCG(71, 72))
	line := randomLine(r, 300)
	check := func(what string, line []int32, ns, reason string, at int) {
		t.Helper()
		s, got, err := e.Open(t.Context(), line, OpenOptions{Namespace: ns, Lazy: true})
		if err != nil {
			t.Fatal(err)
		}
		if got.ColdReason != reason || got.ColdAt != at || (got.Recomputed == 0) != (reason == "") {
			t.Errorf("%s: %+v, want %q at %d", what, got, reason, at)
		}
		e.Release(s)
	}
	check("an unknown line", line, "", ColdNew, 0)
	s, _ := open(t, e, line)
	_, ids := turn(t, e, s, line, 2)
	known := append(slices.Clone(line), ids...)
	e.Release(s)
	check("the same line", known, "", "", 0)
	check("with a new prompt behind it", append(slices.Clone(known), 7, 8, 9), "", ColdNew, len(known)-1)
	check("another way inside a page", append(slices.Clone(known[:200]), randomLine(r, 60)...), "", ColdDiverged, 200)
	check("another namespace", line, "b", ColdNew, 0)
	if got := e.Stats().ColdSalted; got != 1 {
		t.Errorf("%d lines counted that only another namespace knew", got)
	}
	check("before the first state", known[:120], "", ColdNoSnapshot, 0)
	for range 4 { // push it out
		other := randomLine(r, 500)
		o, _ := open(t, e, other)
		turn(t, e, o, other, 1)
		e.Release(o)
	}
	check("after others needed the room", known, "", ColdEvicted, 0)
}

// TestPinKeepsALineOnTheDevice: other lines take the room of what is not pinned; pins beyond half of the pool have no
// effect, and nothing deadlocks.
func TestPinKeepsALineOnTheDevice(t *testing.T) {
	e := newTestEngine(t, 24, 16, func(o *Options) { o.HostBytes = -1 })
	r := rand.New(rand.NewPCG(73, 74))
	var seqs []*Seq
	var lines [][]int32
	for i := range 3 { // pinned, pinned beyond the half, not pinned
		line := randomLine(r, 900)
		s, _ := open(t, e, line)
		e.Pin(s, i < 2)
		_, ids := turn(t, e, s, line, 1)
		seqs, lines = append(seqs, s), append(lines, append(line, ids...))
	}
	push := func(n int) {
		other := randomLine(r, n)
		o, _ := open(t, e, other)
		turn(t, e, o, other, 1)
		e.Release(o)
	}
	push(1700) // more than one line's room
	for i, s := range seqs {
		if got := s.Residency().Device; (got == 900) != (i == 0) {
			t.Errorf("line %d has %d tokens on the device", i, got)
		}
	}
	e.Pin(seqs[0], false)
	push(2500)
	if got := seqs[0].Residency().Device; got == 900 {
		t.Error("a line that is not pinned any more kept its room from one that needed it")
	}
	a, _ := turn(t, e, seqs[1], lines[1], 2)
	b, _ := cold(t, e, lines[1], 2)
	sameLogits(t, "after eviction", a, b, 2)
}

// TestPinnedTimelinesGiveWay: a pin keeps what the tree has of a line. What a pinned timeline holds beside that, the
// state at its end above all, is nobody's promise: else pins of half the states could take all of them.
func TestPinnedTimelinesGiveWay(t *testing.T) {
	e := newTestEngine(t, 64, 8, nil)
	r := rand.New(rand.NewPCG(73, 74))
	var lines [][]int32
	for range 4 {
		line := randomLine(r, 200)
		s, _ := open(t, e, line)
		for s.Residency().Device < len(line)-1 { // filled behind
			e.Stats()
		}
		e.Pin(s, true)
		lines = append(lines, line)
	}
	other := randomLine(r, 200)
	s, _ := open(t, e, other)
	turn(t, e, s, other, 2)
	if err := e.do(t.Context(), func() {
		for i, line := range lines {
			if e.forest.Match("", line[:130], &e.match); e.match.Device != 128 || e.match.Start() != 128 || e.match.Snapshot.Slot == radix.None {
				t.Errorf("pinned line %d: %+v", i, e.match)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
}
