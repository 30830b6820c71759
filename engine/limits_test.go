package engine

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestCancelInEveryPhase(t *testing.T) {
	e := newTestEngine(t, 64, 32, func(o *Options) { o.MaxSeqs = 1; o.PrefillRows = 16 })
	r := rand.New(rand.NewPCG(17, 18))
	first, second := randomLine(r, 200), randomLine(r, 200)
	a, _ := open(t, e, first)
	b, _ := open(t, e, second)
	ra, err := e.Start(t.Context(), a, TurnRequest{Line: first, MaxTokens: 10000, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	rb, err := e.Start(t.Context(), b, TurnRequest{Line: second, MaxTokens: 5, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	rb.Cancel() // queued: one at a time runs
	if ids, st := wait(t, rb); st.Finish != FinishCancelled || len(ids) != 0 {
		t.Fatalf("queued: %q after %d tokens", st.Finish, len(ids))
	}
	for {
		if toks, _ := ra.Read(0); len(toks) > 2 {
			break
		}
		<-ra.Ready()
	}
	ra.Cancel()
	ids, st := wait(t, ra)
	if st.Finish != FinishCancelled || len(ids) < 3 {
		t.Fatalf("decoding: %q after %d tokens", st.Finish, len(ids))
	}
	line := append(slices.Clone(first), ids...) // and the line goes on exactly
	got, _ := turn(t, e, a, line, 4)
	want, _ := cold(t, e, line, 4)
	sameLogits(t, "after cancel", got, want, 4)
	long := randomLine(r, 900)
	c, _, err := e.Open(t.Context(), long, OpenOptions{Lazy: true})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Release(c)
	rc, err := e.Start(t.Context(), c, TurnRequest{Line: long, MaxTokens: 5, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	rc.Cancel()
	if _, st := wait(t, rc); st.Finish != FinishCancelled {
		t.Fatalf("prefilling: %q", st.Finish)
	}
	got, _ = turn(t, e, c, long, 4)
	want, _ = cold(t, e, long, 4)
	sameLogits(t, "after cancel in prefill", got, want, 4)
}

func TestRefusals(t *testing.T) {
	e := newTestEngine(t, 64, 32, func(o *Options) { o.MaxSeqs = 1; o.QueueLen = 1 })
	line := randomLine(rand.New(rand.NewPCG(19, 20)), 50)
	s, _ := open(t, e, line)
	req := TurnRequest{Line: line, MaxTokens: 100000, IgnoreEOS: true, Logprobs: -1}
	run, err := e.Start(t.Context(), s, req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Start(t.Context(), s, req); !errors.Is(err, ErrBusy) {
		t.Errorf("second turn: %v", err)
	}
	for { // running, no longer queued
		if _, st := run.Read(0); st.Phase == Decoding {
			break
		}
		<-run.Ready()
	}
	others := make([]*Seq, 3)
	for i := range others {
		others[i], _ = open(t, e, line)
	}
	if _, err := e.Start(t.Context(), others[0], req); err != nil {
		t.Errorf("first in the queue: %v", err)
	}
	if _, err := e.Start(t.Context(), others[1], req); !errors.Is(err, ErrQueueFull) {
		t.Errorf("queue of one takes two: %v", err)
	}
	if _, err := e.Start(t.Context(), others[2], TurnRequest{Line: line[1:], MaxTokens: 1, Logprobs: -1}); !errors.Is(err, ErrLine) && !errors.Is(err, ErrQueueFull) {
		t.Errorf("another line: %v", err)
	}
	if _, err := e.Start(t.Context(), others[1], TurnRequest{MaxTokens: 1}); !errors.Is(err, ErrRange) {
		t.Errorf("empty line: %v", err)
	}
	if _, _, err := e.Open(t.Context(), []int32{5, -1}, OpenOptions{}); !errors.Is(err, ErrRange) {
		t.Errorf("negative token: %v", err)
	}
	if _, _, err := e.Open(t.Context(), []int32{1 << 20}, OpenOptions{}); !errors.Is(err, ErrRange) {
		t.Errorf("token past the vocabulary: %v", err)
	}
	if _, err := e.Mark(t.Context(), s, 1<<20); !errors.Is(err, ErrRange) {
		t.Errorf("fork past the end: %v", err)
	}
	if _, err := e.Detach(t.Context(), s, TierHost); !errors.Is(err, ErrBusy) {
		t.Errorf("detach of a running timeline: %v", err)
	}
	run.Cancel()
	wait(t, run)
}

// TestUncommittedTokensHoldTheRun: a ledger that does not acknowledge stops one run, not the others.
func TestUncommittedTokensHoldTheRun(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	r := rand.New(rand.NewPCG(21, 22))
	line := randomLine(r, 20)
	s, _ := open(t, e, line)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: MaxUncommitted + 10, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	for {
		if toks, _ := run.Read(0); len(toks) == MaxUncommitted {
			break
		}
		<-run.Ready()
	}
	other := randomLine(r, 20)
	o, _ := open(t, e, other)
	turn(t, e, o, other, 5) // the loop is alive, and has had steps to go on in
	if toks, _ := run.Read(0); len(toks) != MaxUncommitted {
		t.Fatalf("%d tokens without an acknowledgement, limit %d", len(toks), MaxUncommitted)
	}
	if ids, st := wait(t, run); st.Finish != FinishLength || len(ids) != MaxUncommitted+10 {
		t.Fatalf("%q after %d tokens", st.Finish, len(ids))
	}
}

func TestCloseEndsRuns(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(23, 24)), 20)
	s, _ := open(t, e, line)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 1 << 20, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	<-run.Ready()
	e.Close()
	if _, st := wait(t, run); !errors.Is(st.Err, ErrClosed) {
		t.Fatalf("finish %q, error %v", st.Finish, st.Err)
	}
	if _, _, err := e.Open(t.Context(), line, OpenOptions{}); !errors.Is(err, ErrClosed) {
		t.Fatalf("open after close: %v", err)
	}
	e.Close()
}
