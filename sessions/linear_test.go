package sessions

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"rocket/internal/linear"
)

var (
	linearRounds = flag.Int("linear", 1, "rounds of TestLinearizable and its kin")
	linearSeed   = flag.Uint64("linear.seed", 0, "seed of the first round; 0: drawn")
)

// linearPatience bounds the search for a sequence of one session's calls.
const linearPatience = time.Minute

// firstSeed draws the seed of a test's first round, and says how to run it again.
func firstSeed(t *testing.T) uint64 {
	t.Helper()
	seed := *linearSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test ./sessions -run %s -linear.seed=%d -linear=%d", t.Name(), seed, *linearRounds)
	return seed
}

// Whatever many clients do at once on the same few sessions, what each of them
// is told is what some sequence of the calls gives.
func TestLinearizable(t *testing.T) {
	seed := firstSeed(t)
	operations, sessions := 0, 0
	for n := range uint64(*linearRounds) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			r := newRig(t)
			h := linear.NewHistory()
			l := r.load(seed+n, h, 3)
			if *linearRounds == 1 {
				l.Calls = 15
			}
			l.Run(t.Context(), h)
			r.checkLinear(h, l)
			if n == 0 {
				refusesAltered(t, h, l.Alive())
			}
			a, b := h.Len()
			operations, sessions = operations+a, sessions+b
		})
	}
	t.Logf("%d calls on %d sessions", operations, sessions)
}

// refusesAltered shows that the search refuses a history in which one answer is
// another.
func refusesAltered(t *testing.T, h *linear.History, alive []string) {
	t.Helper()
	for name, change := range map[string]func(c linear.Call, a *linear.Answer) bool{
		"a turn that starts behind the line's end": func(c linear.Call, a *linear.Answer) bool {
			a.From++
			return c.Kind == linear.Start
		},
		"a turn that ends behind its end": func(c linear.Call, a *linear.Answer) bool {
			a.To++
			return c.Kind == linear.End && a.Turned == "completed"
		},
		"many turns": func(c linear.Call, a *linear.Answer) bool {
			a.Turns += 1000
			return c.Kind == linear.Get
		},
		"many children": func(c linear.Call, a *linear.Answer) bool {
			a.Children += 1000
			return c.Kind == linear.Get
		},
		"another title": func(c linear.Call, a *linear.Answer) bool {
			a.Title += "x"
			return c.Kind == linear.Get
		},
		"a living session that is gone": func(c linear.Call, a *linear.Answer) bool {
			a.Code = linear.NotFound
			return c.Kind == linear.Get
		},
		"a fork past the end": func(c linear.Call, a *linear.Answer) bool {
			a.At += 1 << 20
			return c.Kind == linear.Fork
		},
	} {
		undo := h.Alter(func(id string, c linear.Call, a *linear.Answer) bool {
			if a.Code != "" || a.Unknown || !slices.Contains(alive, id) {
				return false
			}
			return change(c, a)
		})
		if undo == nil {
			t.Logf("%s: the load had no such answer", name)
			continue
		}
		if err := h.Check(linearPatience); err == nil {
			t.Errorf("%s: the history is accepted", name)
		}
		undo()
	}
}

const loadPrompt = "x y"

// load is many clients on n new sessions.
func (r *rig) load(seed uint64, h *linear.History, n int) *linear.Load {
	l := &linear.Load{Do: r.do, Seed: seed, Clients: 8, Calls: 25, Sessions: 10, Prompt: len(r.tok.Encode(loadPrompt)), Max: 40}
	for i := range n {
		s := r.create(fmt.Sprint("package p", i, "\n"))
		l.Begin(h, s.ID, linearView(s))
	}
	return l
}

func linearView(s Session) linear.View {
	return linear.View{State: string(s.State), Length: s.Length, Turns: s.TurnCount, Children: s.ChildCount, Title: s.Title}
}

// do makes one call of a load on the manager.
func (r *rig) do(ctx context.Context, _ int, id string, c linear.Call) (a linear.Answer, children []string) {
	var err error
	view := func(s Session, e error) { a.View, err = linearView(s), e }
	turn := func(t Turn, e error) { a.Turn, a.Turned, a.From, a.To, err = t.ID, string(t.State), t.From, t.To, e }
	switch c.Kind {
	case linear.Get:
		view(r.Get(ctx, DefaultTenant, id))
	case linear.Start:
		turn(r.StartTurn(ctx, local, id, TurnRequest{Input: ptr(loadPrompt), MaxTokens: &c.Max, IgnoreEOS: true}))
	case linear.End:
		turn(r.WaitTurn(ctx, DefaultTenant, id, c.Turn))
	case linear.Cancel:
		turn(r.Cancel(ctx, local, id))
	case linear.Patch:
		view(r.Patch(ctx, local, id, PatchRequest{Title: &c.Title}))
	case linear.Detach:
		view(r.Detach(ctx, local, id, DetachRequest{}))
	case linear.Resume:
		s, e := r.Resume(ctx, local, id)
		view(s.Session, e)
	case linear.Close:
		view(r.Close(ctx, local, id))
	case linear.Delete:
		err = r.Delete(ctx, local, id)
	case linear.Fork:
		req := ForkRequest{N: &c.N}
		if c.At >= 0 {
			req.At = &c.At
		}
		var f ForkResult
		f, err = r.Fork(ctx, local, id, req)
		a.At = f.At
		for _, s := range f.Sessions {
			children, a.Title = append(children, s.ID), s.Title
		}
	}
	if err != nil {
		code := ErrorCode(err)
		a = linear.Answer{Code: string(code), Unknown: code == CodeLedgerUnavailable}
		if ctx.Err() == nil && (code == CodeInternal || code == CodeQueueFull || code == CodeLimit) {
			r.t.Errorf("%s of %s: %v", c, id, err)
		}
	}
	return a, children
}

// checkLinear says whether a history is one of sessions, and whether their
// children have their parents' lines.
func (r *rig) checkLinear(h *linear.History, l *linear.Load) {
	r.t.Helper()
	if err := h.Check(linearPatience); err != nil {
		r.t.Error(err)
	}
	for _, id := range l.Alive() {
		s, err := r.Get(r.t.Context(), DefaultTenant, id)
		if ErrorCode(err) == CodeNotFound { // by a deletion that had no answer
			continue
		}
		if err != nil {
			r.t.Fatal(err)
		}
		if s.ParentID == nil {
			continue
		}
		if _, err := r.Get(r.t.Context(), DefaultTenant, *s.ParentID); ErrorCode(err) == CodeNotFound {
			continue
		}
		if at := *s.ForkedAt; !slices.Equal(r.line(id)[:at], r.line(*s.ParentID)[:at]) {
			r.t.Errorf("the first %d tokens of %s are not those of its parent", at, id)
		}
	}
}
