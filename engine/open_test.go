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
