package sessions

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// lateCommit makes a call whose COMMIT reaches the ledger only when the
// returned function is called, and whose answer nobody hears.
// It is the n-th message with the text.
func (l *lossy) lateCommit(t *testing.T, n int, text string, call func() error) (pass func()) {
	t.Helper()
	hit, pass := l.p.Hold(n, text)
	t.Cleanup(pass)
	wantCode(t, call(), CodeLedgerUnavailable, "")
	if !done(hit) {
		t.Fatalf("no message with %q", text)
	}
	return pass
}

// Calls that come while nobody knows yet whether a turn has started wait until
// it is known: they neither miss the turn nor deny it.
func TestCallsWaitForAnUnknownStart(t *testing.T) {
	l := newLossy(t)
	for name, x := range map[string]struct {
		want State // afterwards; "": gone
		call func(id string) error
	}{
		"cancel": {StateIdle, func(id string) error {
			turn, err := l.Cancel(t.Context(), local, id)
			if err == nil && turn.State != TurnCancelled {
				t.Errorf("cancelled %+v", turn)
			}
			return err
		}},
		"close": {StateClosed, func(id string) error {
			_, err := l.Close(t.Context(), local, id)
			return err
		}},
		"delete": {"", func(id string) error { return l.Delete(t.Context(), local, id) }},
		"prune":  {"", func(id string) error { return l.Prune(t.Context(), local, id) }},
		"wait": {StateIdle, func(id string) error {
			var turn string
			waitFor(t, func() bool { // the moment at which it is in the ledger
				page, err := l.Turns(t.Context(), DefaultTenant, id, TurnFilter{})
				if err == nil && len(page.Data) > 0 {
					turn = page.Data[0].ID
				}
				return turn != ""
			})
			_, err := l.WaitTurn(t.Context(), DefaultTenant, id, turn)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := l.create("func main() {\n")
			pass := l.lateCommit(t, 1, `"max_tokens":321`, func() error {
				_, err := l.StartTurn(t.Context(), local, s.ID, TurnRequest{MaxTokens: ptr(321), IgnoreEOS: true})
				return err
			})
			answered := make(chan error, 1)
			go func() { answered <- x.call(s.ID) }()
			time.Sleep(20 * time.Millisecond) // it may have begun by now, or not: both must do
			pass()
			if err := <-answered; err != nil {
				t.Fatal(err)
			}
			got, err := l.Get(t.Context(), DefaultTenant, s.ID)
			if x.want == "" {
				wantCode(t, err, CodeNotFound, "")
			} else if err != nil || got.State != x.want || got.TurnCount != 1 {
				t.Errorf("the session is %+v, %v", got, err)
			}
			waitFor(t, func() bool { return l.Stats().TurnsOpen == 0 })
			if err := l.Check(t.Context(), DefaultTenant); err != nil {
				t.Error(err)
			}
		})
	}
}

// A call that is repeated with its key while the first one's commit is still on
// its way gets the first one's answer, not a refusal that the first one caused.
func TestRepeatedWhileItsCommitIsOnTheWay(t *testing.T) {
	l := newLossy(t)
	for name, kind := range l.calls(t) {
		if name == "cancel" { // names its turn before it cancels it, see Cancel
			continue
		}
		t.Run(name, func(t *testing.T) {
			s := l.create("package main\n")
			id := s.ID
			if kind.prepare != nil {
				id = kind.prepare(s)
			}
			s = l.get(s.ID)
			c := Call{Tenant: DefaultTenant, IdempotencyKey: "late " + name, Route: name + id}
			// the first message with the key asks whether there is an answer already
			pass := l.lateCommit(t, 2, c.IdempotencyKey, func() error {
				_, err := kind.call(t.Context(), c, id)
				return err
			})
			type answer struct {
				v   any
				err error
			}
			second := make(chan answer, 1)
			go func() {
				v, err := kind.call(t.Context(), c, id)
				second <- answer{v, err}
			}()
			time.Sleep(20 * time.Millisecond) // it may have asked for a stored answer by now, or not: both must do
			pass()
			got := <-second
			if got.err != nil {
				t.Fatalf("the second call is refused: %v", got.err)
			}
			third := until(t, name, func() (any, error) { return kind.call(t.Context(), c, id) })
			if diff := cmp.Diff(third, got.v, cmpopts.EquateEmpty(), cmpopts.IgnoreTypes(Residency{})); diff != "" {
				t.Errorf("answered with something else:\n%s", diff)
			}
			if err := kind.check(s, id, got.v); err != nil {
				t.Error(err)
			}
		})
	}
}

// A deletion whose commit had no answer is as complete as another: watchers
// learn of it, nobody finds the session in memory, nothing of it is kept on
// the device.
func TestDeletionSettledLater(t *testing.T) {
	l := newLossy(t)
	parent := l.create("func main() {\n")
	s := l.fork(parent.ID, ForkRequest{}).Sessions[0]
	l.turn(s.ID, "x", 3)
	w := l.Watch(DefaultTenant, WatchOptions{})
	seqs := l.Stats().Engine.Seqs
	call := Call{Tenant: DefaultTenant, IdempotencyKey: "the deletion"}
	l.lateCommit(t, 2, call.IdempotencyKey, func() error { return l.Delete(t.Context(), call, s.ID) })()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		e, _, err := w.Next(ctx)
		if err != nil {
			t.Fatalf("no watcher learns of it: %v", err)
		}
		if len(e) > 0 && e[len(e)-1].Type == EventSessionDeleted {
			break
		}
	}
	waitFor(t, func() bool { return l.Stats().Engine.Seqs < seqs })
	_, err := l.Log(t.Context(), DefaultTenant, s.ID)
	wantCode(t, err, CodeNotFound, "")
	if got := l.get(parent.ID); got.ChildCount != 0 {
		t.Errorf("%d children", got.ChildCount)
	}
}
