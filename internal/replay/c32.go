package replay

import (
	"fmt"
	"math/rand/v2"
)

// C32 describes the made workload: agents on one root prompt that fork.
//
// Lanes sessions start from the root alone and run turns; the others fork off them, or off a fork, where a turn has
// ended, and run turns of their own. Lanes begin one after the other; every session stays until a last event, and
// these come after all lanes have begun, so that all sessions are resident at once. docs/replay.md derives the means.
type C32 struct {
	Root     int // tokens of the common prompt
	Lanes    int // sessions off the root
	Sessions int // with the forks
	Seed     uint64
	Waiting  float64 // part of the forks that run their first turn only when all lanes have begun: they share until then
}

// The workload's sizes: see docs/replay.md for the derivation from the published table.
const (
	DefaultLanes    = 32
	DefaultSessions = 555
	c32Further      = 33_336 // tokens of a session past the root, mean
	c32Own          = 12_951 // of them in no other session, mean: what a page table adds is on top
	c32Turns        = 8      // of a lane's first session
	c32ForkTurns    = 3
	c32TurnMS       = 1000
	c32Spread       = 0.5 // sizes vary by up to this part of their mean, either way
	c32DeepForks    = 0.2 // of the forks go off a fork
	c32PromptPart   = 0.7 // of a turn's tokens; the rest is its answer
	maxC32Sessions  = 20_000
)

// c32Session is one as planned: its sizes, where it forks off, and who forks off it.
type c32Session struct {
	number  int32
	id      uint64
	base    []Seg // the parent's line up to the fork
	turns   []int // own tokens of each turn
	edges   []int // offsets where the turns end
	forks   map[int][]*c32Session
	waiting bool
}

// Trace makes the workload: the same one for the same options.
func (c C32) Trace() (*Trace, error) {
	switch {
	case c.Root < 1 || c.Root > maxLineTokens/2:
		return nil, fmt.Errorf("root of %d tokens: want 1 to %d", c.Root, maxLineTokens/2)
	case c.Lanes < 1 || c.Sessions < c.Lanes || c.Sessions > maxC32Sessions:
		return nil, fmt.Errorf("%d sessions in %d lanes: want at least a session a lane, at most %d", c.Sessions, c.Lanes, maxC32Sessions)
	case !(c.Waiting >= 0 && c.Waiting <= 1):
		return nil, fmt.Errorf("%v of the forks wait: want 0 to 1", c.Waiting)
	}
	t := &Trace{Format: "c32", Resident: true, Root: c.Root}
	r := rand.New(rand.NewPCG(c.Seed, 32))
	forks := c.Sessions - c.Lanes
	// A lane's first session owns all that it has past the root; the forks' own tokens are what is left to the mean.
	forkOwn := 0
	if forks > 0 {
		forkOwn = max(c32ForkTurns, (c.Sessions*c32Own-c.Lanes*c32Further)/forks)
	}
	m := &c32Maker{c: c, t: t, r: r, heads: spread(r, c.Lanes, c32Further), forks: spread(r, forks, forkOwn), waiters: int64(c.Lanes) * c32LaneMS}
	for lane := range c.Lanes {
		n := forks*(lane+1)/c.Lanes - forks*lane/c.Lanes
		if err := m.lane(int64(lane)*c32LaneMS, n); err != nil {
			return nil, err
		}
	}
	for i := range t.Sessions {
		t.Sessions[i].Close = m.waiters + int64(i) // when the last lane and the forks that waited are over
	}
	t.finish()
	return t, nil
}

// spread draws n sizes around a mean: pairs of one that is larger and one that is as much smaller, so that any first
// part of the sessions has nearly the mean of all.
func spread(r *rand.Rand, n, mean int) []int {
	sizes := make([]int, n)
	for i := 0; i < n; i += 2 {
		d := int((2*r.Float64() - 1) * c32Spread * float64(mean))
		if i+1 == n {
			d = 0
		} else {
			sizes[i+1] = mean - d
		}
		sizes[i] = mean + d
	}
	return sizes
}

// c32LaneMS is how long one lane takes until the next begins: its turns, and its forks' after each other.
const c32LaneMS = 1000 * c32TurnMS

// c32Maker builds the trace lane by lane.
type c32Maker struct {
	c            C32
	t            *Trace
	r            *rand.Rand
	heads, forks []int // own tokens still to be given out
	further      int   // tokens past the root of the forks so far
	made         int   // forks so far
	late         int   // of them, those that wait
	waiters      int64 // when the next of these runs
}

// lane plans a session off the root and its forks, then plays them.
func (m *c32Maker) lane(at int64, forks int) error {
	root := []Seg{{ID: stream(scopeC32, m.c.Seed), N: int32(m.c.Root)}}
	family := []*c32Session{m.session(root, -1, take(&m.heads), c32Turns)}
	for range forks {
		parent := family[0]
		if len(family) > 1 && m.r.Float64() < c32DeepForks {
			parent = family[1+m.r.IntN(len(family)-1)]
		}
		own := take(&m.forks)
		k := m.branchTurn(parent, own)
		s := m.session(cut(parent.line(k), 0, parent.edges[k]), parent.number, own, c32ForkTurns)
		m.t.Sessions[s.number].ForkAt = parent.edges[k]
		parent.forks[k] = append(parent.forks[k], s)
		m.further += parent.edges[k] - m.c.Root + own
		m.made++
		if s.waiting = int(float64(m.made)*m.c.Waiting) > m.late; s.waiting {
			m.late++
		} else {
			family = append(family, s)
		}
	}
	_, err := m.play(family[0], at)
	return err
}

func take(list *[]int) int {
	n := (*list)[0]
	*list = (*list)[1:]
	return n
}

// branchTurn chooses among the parent's turns the one whose end keeps the mean of all forks' lines nearest to the
// workload's.
func (m *c32Maker) branchTurn(p *c32Session, own int) int {
	want := (m.made+1)*c32Further - m.further - own + m.c.Root
	best := 0
	for k, e := range p.edges {
		if max(e-want, want-e) < max(p.edges[best]-want, want-p.edges[best]) {
			best = k
		}
	}
	return best
}

func (m *c32Maker) session(base []Seg, parent int32, own, turns int) *c32Session {
	n := m.t.session(fmt.Sprint("session ", len(m.t.Sessions)))
	m.t.Sessions[n].Parent = parent
	s := &c32Session{number: n, base: base, id: stream(stream(scopeC32, m.c.Seed), uint64(n)+1), forks: map[int][]*c32Session{}}
	own = max(own, 2*turns)
	end := length(base)
	for k := range turns {
		s.turns = append(s.turns, own*(k+1)/turns-own*k/turns)
		end += s.turns[k]
		s.edges = append(s.edges, end)
	}
	return s
}

// line is the session's line after turn k, one segment a prompt and an answer.
func (s *c32Session) line(k int) []Seg {
	line := append([]Seg{}, s.base...)
	own := 0
	for _, n := range s.turns[:k+1] {
		prompt := max(1, int(float64(n)*c32PromptPart))
		line = append(line, Seg{s.id, int32(own), int32(prompt)}, Seg{s.id, int32(own + prompt), int32(n - prompt)})
		own += n
	}
	return line
}

// play runs a session's turns from a time on, and after each the forks that go off there. One that waits runs when
// all lanes are over.
func (m *c32Maker) play(s *c32Session, at int64) (end int64, err error) {
	for k := range s.turns {
		line := s.line(k)
		req := Request{At: at, Done: at + c32TurnMS/2, Session: s.number, Prompt: line[:len(line)-1], Output: line[len(line)-1:]}
		if err := m.t.add(req); err != nil {
			return 0, err
		}
		at += c32TurnMS
		for _, child := range s.forks[k] {
			m.t.Sessions[child.number].Fork = at
			at++
			if child.waiting {
				if _, err := m.play(child, m.waiters); err != nil {
					return 0, err
				}
				m.waiters += c32ForkTurns * c32TurnMS
				continue
			}
			if at, err = m.play(child, at); err != nil {
				return 0, err
			}
		}
	}
	return at, nil
}
