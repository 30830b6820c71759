package sessions

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sort"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/internal/localpg/pgtest"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "seed of TestSimulation; 0: drawn")
	simSteps = flag.Int("sim.steps", 80, "operations of TestSimulation")
)

// simSession is what a session is by the simplest reading of the rules.
type simSession struct {
	line     []int32
	state    State
	parent   string
	forkedAt int
	turns    int
}

// sim drives random operations against a map of token lists.
type sim struct {
	*rig
	rnd  *rand.Rand
	all  map[string]*simSession
	next map[string]int32 // greedy continuation by line: the same for every session that has that line
}

// Random operations on a tree of sessions, the server restarted in between;
// every line, state and count must be what a list of tokens would give, and an
// import takes all exports.
func TestSimulation(t *testing.T) {
	seed := *simSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test -run TestSimulation -sim.seed=%d -sim.steps=%d", seed, *simSteps)
	m := &sim{rig: openRig(t, pgtest.New(t)), rnd: rand.New(rand.NewPCG(seed, 1)), all: map[string]*simSession{}, next: map[string]int32{}}
	for step := range *simSteps {
		name := m.step()
		m.check(fmt.Sprintf("step %d, %s", step, name))
		if t.Failed() {
			return
		}
	}
	for id := range m.all {
		m.reads("the export of "+id, m.export(id))
	}
}

func (m *sim) pick() (string, *simSession) {
	ids := make([]string, 0, len(m.all))
	for id := range m.all {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	if len(ids) == 0 {
		return "", nil
	}
	id := ids[m.rnd.IntN(len(ids))]
	return id, m.all[id]
}

func (m *sim) step() string {
	id, s := m.pick()
	n := m.rnd.IntN(100)
	switch {
	case s == nil || n < 8 && len(m.all) < 12:
		return m.doCreate()
	case n < 45:
		return m.doTurn(id, s)
	case n < 68 && len(m.all) < 24:
		return m.doFork(id, s)
	case n < 76:
		return m.doDetach(id, s)
	case n < 82:
		return m.doResume(id, s)
	case n < 84:
		return m.doClose(id, s)
	case n < 95:
		return m.doDelete(id, s)
	default:
		return m.doRestart()
	}
}

func (m *sim) doCreate() string {
	text := fmt.Sprint("package p", m.rnd.IntN(3), "\n\nfunc f() {\n")
	s := m.create(text)
	m.all[s.ID] = &simSession{line: m.tok.Encode(text), state: StateIdle}
	return "create " + s.ID
}

func (m *sim) doTurn(id string, s *simSession) string {
	input, n := "", 1+m.rnd.IntN(6)
	if m.rnd.IntN(2) == 0 {
		input = fmt.Sprint(" x", m.rnd.IntN(4))
	}
	name := fmt.Sprintf("turn of %d on %s with %q", n, id, input)
	turn, err := m.StartTurn(m.t.Context(), local, id, TurnRequest{Input: &input, MaxTokens: &n, IgnoreEOS: true})
	if s.state == StateClosed {
		wantCode(m.t, err, CodeSessionClosed, "")
		return name
	}
	if len(s.line) == 0 && input == "" {
		wantCode(m.t, err, CodeInvalid, "input")
		return name
	}
	if err != nil {
		m.t.Fatalf("%s: %v", name, err)
	}
	end := m.wait(id, turn.ID)
	line := append(append([]int32{}, s.line...), m.tok.Encode(input)...)
	if end.From != len(s.line) || end.To != len(line)+n {
		m.t.Errorf("%s: turn at [%d, %d) of a line of %d", name, end.From, end.To, len(s.line))
	}
	for _, got := range end.Tokens {
		key := fmt.Sprint(line)
		if want, ok := m.next[key]; ok && want != got {
			m.t.Errorf("%s: the line of %d tokens went on with %d before, now with %d", name, len(line), want, got)
		}
		m.next[key] = got
		line = append(line, got)
	}
	s.line, s.state = line, StateIdle
	s.turns++
	return name
}

func (m *sim) doFork(id string, s *simSession) string {
	at, n := m.rnd.IntN(len(s.line)+1), 1+m.rnd.IntN(3)
	name := fmt.Sprintf("fork %s at %d of %d into %d", id, at, len(s.line), n)
	f, err := m.Fork(m.t.Context(), local, id, ForkRequest{At: &at, N: &n})
	if s.state == StateClosed {
		wantCode(m.t, err, CodeSessionClosed, "")
		return name
	}
	if err != nil {
		m.t.Fatalf("%s: %v", name, err)
	}
	s.state = StateIdle
	for _, c := range f.Sessions {
		m.all[c.ID] = &simSession{line: s.line[:at:at], state: StateIdle, parent: id, forkedAt: at}
	}
	return name
}

func (m *sim) doDetach(id string, s *simSession) string {
	_, err := m.Detach(m.t.Context(), local, id, DetachRequest{})
	if s.state == StateClosed {
		wantCode(m.t, err, CodeSessionClosed, "")
	} else if err != nil {
		m.t.Fatalf("detach: %v", err)
	} else {
		s.state = StateDetached
	}
	return "detach " + id
}

func (m *sim) doResume(id string, s *simSession) string {
	got, err := m.Resume(m.t.Context(), local, id)
	if s.state == StateClosed {
		wantCode(m.t, err, CodeSessionClosed, "")
		return "resume " + id
	}
	if err != nil {
		m.t.Fatalf("resume: %v", err)
	}
	if r := got.Restored; s.state == StateDetached && r.Device+r.Host+r.Disk+r.Recomputed != max(0, len(s.line)-1) {
		m.t.Errorf("restored %+v of a line of %d", r, len(s.line))
	}
	s.state = StateIdle
	return "resume " + id
}

func (m *sim) doClose(id string, s *simSession) string {
	if _, err := m.Close(m.t.Context(), local, id); err != nil {
		m.t.Fatalf("close: %v", err)
	}
	s.state = StateClosed
	return "close " + id
}

func (m *sim) doDelete(id string, _ *simSession) string {
	if err := m.Delete(m.t.Context(), local, id); err != nil {
		m.t.Fatalf("delete: %v", err)
	}
	delete(m.all, id)
	return "delete " + id
}

func (m *sim) doRestart() string {
	if err := m.Shutdown(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	m.rig = openRig(m.t, m.url)
	return "restart"
}

func (m *sim) check(after string) {
	m.t.Helper()
	for id, want := range m.all {
		got := m.get(id)
		children := 0
		for _, c := range m.all {
			if c.parent == id {
				children++
			}
		}
		if got.State != want.state || got.Length != len(want.line) || got.TurnCount != want.turns || got.ChildCount != children || got.Epoch != 1 {
			m.t.Errorf("after %s: %+v, want state %s, length %d, %d turns, %d children", after, got, want.state, len(want.line), want.turns, children)
		}
		if diff := cmp.Diff(want.line, m.line(id)); diff != "" {
			m.t.Errorf("after %s: line of %s:\n%s", after, id, diff)
		}
	}
	if err := m.Check(m.t.Context(), DefaultTenant); err != nil {
		m.t.Errorf("after %s: %v", after, err)
	}
}
