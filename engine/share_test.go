package engine

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
)

// A tenant whose turns fill the batch for long leaves others their places, and its turns go on later with the same
// tokens as if nothing had come between.
func TestPlacesAreShared(t *testing.T) {
	for name, pages := range map[string]int{"room": 256, "too few pages": 24} {
		t.Run(name, func(t *testing.T) { sharePlaces(t, pages) })
	}
}

func sharePlaces(t *testing.T, pages int) {
	const most, floods, tokens = 4, 6, 400
	e := newTestEngine(t, pages, 32, func(o *Options) { o.MaxSeqs = most })
	ref := newTestEngine(t, 64, 8, nil)
	rnd := rand.New(rand.NewPCG(95, 96))
	start := func(e *Engine, ns string, line []int32, n int) *Run {
		t.Helper()
		s, _, err := e.Open(t.Context(), line, OpenOptions{Namespace: ns, Lazy: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Release(s) })
		r, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: n, IgnoreEOS: true, Logprobs: -1})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	var flood []*Run
	var lines [][]int32
	for range floods {
		line := randomLine(rnd, 70)
		lines, flood = append(lines, line), append(flood, start(e, "flood", line, tokens))
		flood[len(flood)-1].Ack(tokens)
	}
	decoding := func() (n int) {
		for _, r := range flood {
			if _, st := r.Read(0); st.Phase == Decoding {
				n++
			}
		}
		return n
	}
	for range 5 { // one after the other: each finds the batch full anew
		r := start(e, "b", randomLine(rnd, 40), 3)
		wait(t, r)
	}
	if n := decoding(); n == 0 {
		t.Error("the flood is over before the others' turns, which proves nothing")
	}
	if e.Stats().Preemptions == 0 {
		t.Error("no run gave up its place")
	}
	var others []*Run
	for range 3 { // half of the places for half of the tenants, not more
		others = append(others, start(e, "b", randomLine(rnd, 40), tokens))
		others[len(others)-1].Ack(tokens)
	}
	for _, r := range append(slices.Clone(others[:2]), flood...) {
		wait(t, r)
	}
	wait(t, others[2])
	for i, r := range flood {
		want := start(ref, "", lines[i], tokens)
		want.Ack(tokens)
		wait(t, want)
		a, _ := r.Read(0)
		b, _ := want.Read(0)
		if !slices.EqualFunc(a, b, func(x, y Token) bool { return x.ID == y.ID }) {
			t.Errorf("turn %d gave up its place and went on with other tokens", i)
		}
	}
}

// A turn that is cancelled in its prompt has computed what it has computed, and no more.
func TestCancelledPromptCountsWhatWasComputed(t *testing.T) {
	e := newTestEngine(t, 64, 8, func(o *Options) { o.PrefillRows = 16 })
	line := randomLine(rand.New(rand.NewPCG(97, 98)), 2000)
	s, _, err := e.Open(t.Context(), nil, OpenOptions{Lazy: true})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Release(s)
	r, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 1, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	for e.Stats().RowsPrefill == 0 {
		runtime.Gosched()
	}
	r.Cancel()
	<-r.Done()
	_, st := r.Read(0)
	rows := e.Stats().RowsPrefill
	if got := st.Usage.BySource; int64(got.Recomputed) != rows || rows >= int64(len(line)) || got.ColdReason != ColdNew || got.ColdAt != 0 {
		t.Errorf("%d rows were computed, the turn says %+v", rows, got)
	}
	if got := e.Stats().TokensRecomputed; got != rows {
		t.Errorf("%d rows were computed, the counter says %d", rows, got)
	}
}

// Equal shares move no more: what waits is not worth a place that would be waited for in turn.
func TestEqualSharesStay(t *testing.T) {
	_, start, let := waiting(t, 64)
	r, err := start("b")
	if err != nil {
		t.Fatal(err)
	}
	if _, st := r.Read(0); st.Phase != Queued {
		t.Errorf("one place, and the run of another tenant is in phase %v", st.Phase)
	}
	let()
	wait(t, r)
}
