package sessions

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/engine"
	"rocket/internal/localpg/pgtest"
)

func TestLedgerAwayInMidTurn(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	s := r.create("func main() {\n")
	undisturbed := r.fork(s.ID, ForkRequest{}).Sessions[0].ID
	turn := r.start(s.ID, endless)
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), turnStart+20); !ok || err != nil {
		t.Fatal(err)
	}
	p.Cut()
	seen, err := l.Read(t.Context(), turnStart, ReadMax)
	if err != nil {
		t.Fatal(err)
	}
	// deltas go on
	if ok, err := l.Wait(t.Context(), seen[len(seen)-1].Seq+1); !ok || err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return ErrorCode(r.Ready(t.Context())) == CodeLedgerUnavailable })
	_, err = r.Create(t.Context(), local, CreateRequest{})
	wantCode(t, err, CodeLedgerUnavailable, "")
	p.Restore()
	until(t, "cancel", func() (Turn, error) { return r.Cancel(t.Context(), local, s.ID) })
	got := r.wait(s.ID, turn.ID)
	want := r.turn(undisturbed, "", len(got.Tokens))
	if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" || got.Text != want.Text {
		t.Errorf("the turn came to something else:\n%s", diff)
	}
	waitFor(t, func() bool { return r.Ready(t.Context()) == nil })
}

// turnStart is the seq of a first turn's first delta in a session that was
// forked once.
const turnStart = 4

func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never came")
		}
	}
}

func TestLedgerAwayForTooLong(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	r.writer.awayMax = 50 * time.Millisecond
	s := r.create("a")
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(1_000_000), IgnoreEOS: true})
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), 5); !ok || err != nil {
		t.Fatal(err)
	}
	p.Cut()
	_, err := r.WaitTurn(t.Context(), DefaultTenant, s.ID, turn.ID)
	wantCode(t, err, CodeLedgerUnavailable, "")
	p.Restore()
	var got Turn
	waitFor(t, func() bool {
		got, err = r.Turn(t.Context(), DefaultTenant, s.ID, turn.ID)
		return err == nil && got.State.Final()
	})
	if got.State != TurnFailed || got.Error == nil || got.Error.Code != CodeLedgerUnavailable || *got.FinishReason != FinishError {
		t.Errorf("turn %+v", got)
	}
	after := r.turn(s.ID, "", 5) // and the session goes on
	if after.State != TurnCompleted || after.From != got.To {
		t.Errorf("turn after it: %+v", after)
	}
}

// The engine holds a run back that is too far ahead of the ledger.
func TestUncommittedTokensAreBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("decodes more than a thousand tokens")
	}
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	s := r.create("a")
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(engine.MaxUncommitted + 500), IgnoreEOS: true})
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), 5); !ok || err != nil {
		t.Fatal(err)
	}
	p.Cut()
	// A slow machine reaches the limit in seconds before the one in tokens: then the count stands still below it.
	last, since := 0, time.Now()
	waitFor(t, func() bool {
		n := r.Stats().TokensPending
		if n != last {
			last, since = n, time.Now()
		}
		return n >= engine.MaxUncommitted || n > 0 && time.Since(since) > 2*time.Second
	})
	if n := r.Stats().TokensPending; n > engine.MaxUncommitted+64 {
		t.Errorf("%d tokens are not committed", n)
	}
	p.Restore()
	if got := r.wait(s.ID, turn.ID); len(got.Tokens) != engine.MaxUncommitted+500 {
		t.Errorf("%d tokens", len(got.Tokens))
	}
}

// While the ledger is away for long, turns stand still even where the engine
// would let them go on.
func TestTurnsStandStillWithoutALedger(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	r.writer.holdAfter = 50 * time.Millisecond
	s := r.create("a")
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(800), IgnoreEOS: true})
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), 5); !ok || err != nil {
		t.Fatal(err)
	}
	p.Cut()
	steps := func() int64 { return r.eng.Stats().Steps }
	still := func() bool { // two looks at a quarter of a second with nothing between them
		before := steps()
		time.Sleep(250 * time.Millisecond)
		return steps() == before
	}
	waitFor(t, still)
	if n := r.Stats().TokensPending; n >= engine.MaxUncommitted {
		t.Skipf("%d tokens before it stood still: the engine's own limit was faster", n)
	}
	p.Restore()
	if got := r.wait(s.ID, turn.ID); len(got.Tokens) != 800 || got.State != TurnCompleted {
		t.Errorf("turn of %d tokens, %s", len(got.Tokens), got.State)
	}
}

// A commit whose answer is lost happened: nothing is done twice, nothing is
// lost, the log stays dense (checked on cleanup).
func TestLostAnswerOfACommit(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	s := r.create("func main() {\n")
	want := r.turn(r.fork(s.ID, ForkRequest{}).Sessions[0].ID, "", 60)

	t.Run("writer", func(t *testing.T) {
		p.LoseAnswer("turn.completed")
		turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(60), IgnoreEOS: true})
		got := r.wait(s.ID, turn.ID)
		if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" {
			t.Errorf("tokens:\n%s", diff)
		}
	})
	t.Run("fork", func(t *testing.T) {
		p.LoseAnswer("session.forked")
		call := Call{Tenant: DefaultTenant, IdempotencyKey: "k", Route: "fork"}
		_, err := r.Fork(t.Context(), call, s.ID, ForkRequest{N: ptr(2)})
		wantCode(t, err, CodeLedgerUnavailable, "")
		f, err := r.Fork(t.Context(), call, s.ID, ForkRequest{N: ptr(2)})
		if err != nil || len(f.Sessions) != 2 {
			t.Fatalf("repeated fork: %+v, %v", f, err)
		}
		if got := r.get(s.ID); got.ChildCount != 3 {
			t.Errorf("%d children, want 3", got.ChildCount)
		}
		if got := r.turn(f.Sessions[1].ID, "", 3); got.State != TurnCompleted {
			t.Errorf("turn of a child: %+v", got)
		}
	})
	t.Run("turn", func(t *testing.T) {
		p.LoseAnswer(`"max_tokens":3`)
		_, err := r.StartTurn(t.Context(), local, s.ID, TurnRequest{MaxTokens: ptr(3), IgnoreEOS: true})
		wantCode(t, err, CodeLedgerUnavailable, "")
		waitFor(t, func() bool { return r.get(s.ID).State == StateIdle && r.get(s.ID).TurnCount == 2 })
		if n := len(must(r.Turns(t.Context(), DefaultTenant, s.ID, TurnFilter{})).Data); n != 2 {
			t.Errorf("%d turns, want 2", n)
		}
	})
}

// A transaction that did not happen leaves nothing behind, in memory or on the
// device, whichever message of it was lost.
func TestFailedCallsLeaveNothing(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	r := openRig(t, p.URL)
	s := r.create("func main() {\n")
	r.turn(s.ID, "", 20)
	calls := map[string]func() error{
		"fork": func() error {
			_, err := r.Fork(t.Context(), local, s.ID, ForkRequest{N: ptr(4)})
			return err
		},
		"turn": func() error {
			turn, err := r.StartTurn(t.Context(), local, s.ID, TurnRequest{Input: ptr("x"), MaxTokens: ptr(2), IgnoreEOS: true})
			if err == nil {
				p.Unset()
				r.wait(s.ID, turn.ID)
			}
			return err
		},
		"patch": func() error {
			_, err := r.Patch(t.Context(), local, s.ID, PatchRequest{Title: ptr("new")})
			return err
		},
		"detach": func() error {
			_, err := r.Detach(t.Context(), local, s.ID, DetachRequest{})
			return err
		},
		"resume": func() error {
			_, err := r.Resume(t.Context(), local, s.ID)
			return err
		},
		"close": func() error {
			_, err := r.Close(t.Context(), local, s.ID)
			return err
		},
		"delete": func() error { return r.Delete(t.Context(), local, s.ID) },
	}
	total := 0
	for _, name := range []string{"fork", "turn", "patch", "detach", "resume", "close", "delete"} {
		failures := 0
		for i := 1; ; i++ {
			before := r.get(s.ID)
			p.LoseAt(i)
			err := calls[name]()
			p.Unset()
			if err == nil {
				break
			}
			wantCode(t, err, CodeLedgerUnavailable, "")
			failures++
			got := r.get(s.ID)
			got.Residency, before.Residency = Residency{}, Residency{} // detach: the device goes first
			if diff := cmp.Diff(before, got); diff != "" {
				t.Errorf("%s with message %d lost changed:\n%s", name, i, diff)
			}
		}
		total += failures
	}
	// Each call has two messages at least. Now and then the lost one is the keeper's, and a call succeeds early.
	if total < 12 {
		t.Errorf("the seven calls failed %d times only", total)
	}
	_, err := r.Get(t.Context(), DefaultTenant, s.ID)
	wantCode(t, err, CodeNotFound, "")
}
