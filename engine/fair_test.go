package engine

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// waiting is an engine with one place whose batch a held run of "flood" keeps.
func waiting(t *testing.T, queue int) (e *Engine, start func(ns string) (*Run, error), let func()) {
	t.Helper()
	e = newTestEngine(t, 64, 32, func(o *Options) { o.MaxSeqs, o.QueueLen = 1, queue })
	r := rand.New(rand.NewPCG(91, 92))
	begin := func(ns string, tokens int) (*Run, error) {
		line := randomLine(r, 20)
		s, _, err := e.Open(t.Context(), line, OpenOptions{Namespace: ns, Lazy: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Release(s) })
		return e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: tokens, IgnoreEOS: true, Logprobs: -1})
	}
	start = func(ns string) (*Run, error) { return begin(ns, 2) }
	first, err := begin("flood", 1<<20) // it must not end before the hold
	if err != nil {
		t.Fatal(err)
	}
	first.Hold(true)
	for _, st := first.Read(0); st.Phase == Queued; _, st = first.Read(0) {
		<-first.Ready()
	}
	return e, start, first.Cancel
}

func TestAdmissionByTurns(t *testing.T) {
	_, start, let := waiting(t, 64)
	var runs []*Run
	var names []string
	for _, ns := range []string{"flood", "flood", "flood", "flood", "flood", "b", "b", "c"} {
		r, err := start(ns)
		if err != nil {
			t.Fatal(err)
		}
		runs, names = append(runs, r), append(names, ns)
	}
	let()
	order := make([]int, len(runs))
	for i, r := range runs {
		wait(t, r)
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return int(runs[a].order - runs[b].order) })
	var got []string
	for _, i := range order {
		got = append(got, names[i])
	}
	if want := []string{"b", "c", "flood", "b", "flood", "flood", "flood", "flood"}; !slices.Equal(got, want) {
		t.Errorf("admitted %v, want %v", got, want)
	}
}

func TestQueueKeepsPlacesForOthers(t *testing.T) {
	_, start, let := waiting(t, 4)
	defer let()
	fill := func(ns string, want int) {
		t.Helper()
		for n := 0; ; n++ {
			if _, err := start(ns); errors.Is(err, ErrQueueFull) {
				if n != want {
					t.Errorf("%d runs of %s wait, want %d", n, ns, want)
				}
				return
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	fill("flood", 4)
	fill("b", 2) // half of it
	fill("c", 1) // a third
	fill("d", 1)
	fill("flood", 0)
	fill("e", 0) // twice the length: nobody more
}

// TestPrefillByTurns: a short prompt does not wait for another tenant's long one.
func TestPrefillByTurns(t *testing.T) {
	e := newTestEngine(t, 64, 32, func(o *Options) { o.PrefillRows = 16 })
	rnd := rand.New(rand.NewPCG(93, 94))
	var seqs []*Seq
	lines := [][]int32{randomLine(rnd, 1500), randomLine(rnd, 60)}
	for i, ns := range []string{"flood", "b"} {
		s, _, err := e.Open(t.Context(), lines[i], OpenOptions{Namespace: ns, Lazy: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Release(s) })
		seqs = append(seqs, s)
	}
	// the loop stands still until both turns wait for it
	entered, gate := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() { _ = e.do(t.Context(), func() { close(entered); <-gate }) })
	<-entered
	runs, errs := make([]*Run, 2), make([]error, 2)
	for i := range runs {
		all.Go(func() {
			runs[i], errs[i] = e.Start(t.Context(), seqs[i], TurnRequest{Line: lines[i], MaxTokens: 1, IgnoreEOS: true, Logprobs: -1})
		})
		for len(e.commands) <= i {
			runtime.Gosched()
		}
	}
	close(gate)
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	wait(t, runs[1])
	if _, st := runs[0].Read(0); st.Phase != Prefilling {
		t.Errorf("phase %v of the long prompt when the short one is answered, want %v", st.Phase, Prefilling)
	}
	wait(t, runs[0])
}
