package sessions

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/internal/localpg/pgtest"
)

// faults makes the tests of faults longer: every combination where a short run
// takes a part of them by chance, and as many rounds of load.
var faults = flag.Int("faults", 0, "rounds of the long tests of faults; 0: a short choice")

// messagesMax bounds the messages of one call that are lost one after the
// other: a call that needs more is a fault of its own.
const messagesMax = 60

// lossy is a manager whose messages to the ledger can be lost one by one.
type lossy struct {
	*rig
	p *pgtest.Proxy
}

func newLossy(t *testing.T) *lossy {
	t.Helper()
	p := pgtest.NewProxy(t, pgtest.New(t))
	return &lossy{openRig(t, p.URL), p}
}

// everyLoss runs one for the loss of the first message after it calls arm, then
// of the second, until nothing is lost any more; then the same with answers. A
// short run takes one of the two, and leaves about every second message out.
func (l *lossy) everyLoss(t *testing.T, one func(name string, arm func())) {
	losses := 0
	kinds := []string{"message", "answer to message"}
	if *faults == 0 {
		kinds = kinds[rand.IntN(2):][:1]
	}
	for _, fault := range kinds {
		set := map[string]func(int) <-chan struct{}{"message": l.p.LoseAt, "answer to message": l.p.LoseAnswerAt}[fault]
		for i := 1; ; i++ {
			if *faults == 0 {
				i += rand.IntN(3)
			}
			if i > messagesMax {
				t.Fatalf("more than %d messages", messagesMax)
			}
			var hit <-chan struct{}
			one(fmt.Sprintf("%s %d lost", fault, i), func() { hit = set(i) })
			l.p.Unset()
			if !done(hit) {
				break
			}
			losses++
		}
	}
	t.Logf("%d losses", losses)
}

func done(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// until repeats what the ledger's absence refuses.
func until[T any](t *testing.T, name string, call func() (T, error)) T {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		out, err := call()
		if err == nil {
			return out
		}
		if ErrorCode(err) != CodeLedgerUnavailable || time.Now().After(deadline) {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

// lossyCall is one kind of call on a session s that was just made.
type lossyCall struct {
	prepare func(s Session) string // makes what the call is about; nil: it is s
	call    func(ctx context.Context, c Call, id string) (any, error)
	check   func(s Session, id string, answer any) error // that it had its effect once
}

func errorUnless(ok bool, s any) error {
	if ok {
		return nil
	}
	return fmt.Errorf("it came to %+v", s)
}

// Each call, whichever message to the ledger or answer of it is lost, has its
// effect once when it is repeated with its idempotency key, and one answer.
func TestEveryMessageOfEveryCallLost(t *testing.T) {
	l := newLossy(t)
	for name, kind := range l.calls(t) {
		t.Run(name, func(t *testing.T) {
			l.everyLoss(t, func(fault string, arm func()) {
				s := l.create("package main\n")
				id := s.ID
				if kind.prepare != nil {
					id = kind.prepare(s)
				}
				s = l.get(s.ID)
				c := Call{Tenant: DefaultTenant, IdempotencyKey: fault, Route: name + id}
				arm()
				answer := until(t, fault, func() (any, error) { return kind.call(t.Context(), c, id) })
				l.p.Unset()
				again := until(t, fault, func() (any, error) { return kind.call(t.Context(), c, id) })
				// where bytes are is reported after the fact, and no part of the stored answer
				if diff := cmp.Diff(answer, again, idempotentAnswers); diff != "" {
					t.Errorf("%s: the same call is answered with something else:\n%s", fault, diff)
				}
				if err := kind.check(s, id, answer); err != nil {
					t.Errorf("%s: %v", fault, err)
				}
			})
		})
	}
}

func (l *lossy) calls(t *testing.T) map[string]lossyCall {
	t.Helper()
	var bundle bytes.Buffer
	tree := l.create("package main\n")
	l.turn(tree.ID, "", 5)
	l.fork(tree.ID, ForkRequest{N: ptr(2)})
	if err := l.Export(t.Context(), DefaultTenant, tree.ID, &bundle); err != nil {
		t.Fatal(err)
	}
	child := func(s Session) string { return l.fork(s.ID, ForkRequest{}).Sessions[0].ID }
	childless := func(s Session, _ string, _ any) error {
		x := l.get(s.ID)
		return errorUnless(x.ChildCount == s.ChildCount-1, x)
	}
	became := func(state State, events int64) func(Session, string, any) error {
		return func(s Session, _ string, _ any) error {
			x := l.get(s.ID)
			return errorUnless(x.State == state && x.LastSeq == s.LastSeq+events, x)
		}
	}
	labelled := func(c Call) map[string]string { return map[string]string{"of": c.IdempotencyKey} }
	return map[string]lossyCall{
		"turn": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				turn, err := l.StartTurn(ctx, c, id, TurnRequest{Input: ptr("x"), MaxTokens: ptr(2), IgnoreEOS: true})
				return turn.ID, err
			},
			check: func(s Session, _ string, turn any) error {
				end := l.wait(s.ID, turn.(string))
				x := l.get(s.ID)
				return errorUnless(end.State == TurnCompleted && len(end.Tokens) == 2 && x.TurnCount == 1 && x.State == StateIdle, end)
			},
		},
		"cancel": {
			prepare: func(s Session) string { l.start(s.ID, endless); return s.ID },
			call: func(ctx context.Context, c Call, id string) (any, error) {
				turn, err := l.Cancel(ctx, c, id)
				return turn, err
			},
			check: func(s Session, _ string, turn any) error {
				x := l.get(s.ID)
				return errorUnless(turn.(Turn).State == TurnCancelled && x.TurnCount == 1 && x.State == StateIdle, x)
			},
		},
		"fork": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				return l.Fork(ctx, c, id, ForkRequest{N: ptr(3)})
			},
			check: func(s Session, _ string, f any) error {
				for _, x := range f.(ForkResult).Sessions {
					l.get(x.ID)
				}
				x := l.get(s.ID)
				return errorUnless(x.ChildCount == 3 && x.LastSeq == s.LastSeq+1, x)
			},
		},
		"patch": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				return l.Patch(ctx, c, id, PatchRequest{Title: &c.IdempotencyKey})
			},
			check: func(s Session, _ string, answer any) error {
				x := l.get(s.ID)
				return errorUnless(x.Title == answer.(Session).Title && x.Title != "", x)
			},
		},
		"detach": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				return l.Detach(ctx, c, id, DetachRequest{})
			},
			check: became(StateDetached, 1),
		},
		"resume": {
			prepare: func(s Session) string { must(l.Detach(t.Context(), local, s.ID, DetachRequest{})); return s.ID },
			call:    func(ctx context.Context, c Call, id string) (any, error) { return l.Resume(ctx, c, id) },
			check:   became(StateIdle, 1),
		},
		"close": {
			call:  func(ctx context.Context, c Call, id string) (any, error) { return l.Close(ctx, c, id) },
			check: became(StateClosed, 1),
		},
		"delete": {
			prepare: child,
			call:    func(ctx context.Context, c Call, id string) (any, error) { return nil, l.Delete(ctx, c, id) },
			check:   childless,
		},
		"prune": {
			prepare: func(s Session) string {
				c := child(s)
				l.fork(c, ForkRequest{})
				return c
			},
			call:  func(ctx context.Context, c Call, id string) (any, error) { return nil, l.Prune(ctx, c, id) },
			check: childless,
		},
		"release": {
			prepare: func(s Session) string { l.start(s.ID, endless); return s.ID },
			call: func(ctx context.Context, c Call, id string) (any, error) {
				return l.Release(ctx, c, id, ReleaseRequest{Cancel: true})
			},
			check: func(s Session, _ string, answer any) error {
				x := l.get(s.ID)
				owned := l.count("SELECT count(*) FROM sessions WHERE id = $1 AND owner_server IS NOT NULL", must(parseSession(s.ID)))
				return errorUnless(answer.(ReleaseResult).Released == 1 && owned == 0 && x.State == StateIdle && x.TurnCount == 1, x)
			},
		},
		"create": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				c.IdempotencyKey += id
				return l.Create(ctx, c, CreateRequest{Input: ptr("y"), Labels: labelled(c)})
			},
			check: func(_ Session, _ string, made any) error {
				page, err := l.List(t.Context(), DefaultTenant, ListFilter{Labels: made.(Session).Labels})
				return errorUnless(err == nil && len(page.Data) == 1 && page.Data[0].ID == made.(Session).ID, page)
			},
		},
		"import": {
			call: func(ctx context.Context, c Call, id string) (any, error) {
				return l.Import(ctx, c, bytes.NewReader(bundle.Bytes()))
			},
			check: func(_ Session, _ string, made any) error {
				x := made.(ImportResult).Session
				return errorUnless(l.get(x.ID).ChildCount == 2, x)
			},
		},
	}
}
