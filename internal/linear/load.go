package linear

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
)

// Load is many clients at once on the same few sessions.
type Load struct {
	// Do makes one call and returns what it was told, and the children that a
	// fork made. The call End waits for the end of a turn; an answer to it that
	// is Unknown is asked for again until ctx is over.
	Do func(ctx context.Context, client int, session string, c Call) (Answer, []string)

	Seed     uint64
	Clients  int
	Calls    int // of each client
	Sessions int // alive at once, at most
	Prompt   int // tokens that Do gives every turn
	Max      int // tokens that a turn generates at most

	mu      sync.Mutex
	alive   []string          // guarded by mu
	parents map[string]string // guarded by mu
	waits   sync.WaitGroup    // for ends of turns
}

// Begin takes in a session that was made before the load.
func (l *Load) Begin(h *History, session string, v View) {
	h.Add(0, session, Call{Kind: Born}, h.Now(), Answer{View: v})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alive = append(l.alive, session)
}

// Run makes the calls and waits for the ends of all turns, which it cancels.
func (l *Load) Run(ctx context.Context, h *History) {
	var clients sync.WaitGroup
	for n := range l.Clients {
		clients.Go(func() {
			r := rand.New(rand.NewPCG(l.Seed, uint64(n)))
			for i := range l.Calls {
				if id := l.pick(r); id != "" {
					l.one(ctx, h, n, id, l.draw(r, fmt.Sprintf("%d.%d", n, i)))
				}
			}
		})
	}
	clients.Wait()
	for _, id := range l.Alive() {
		l.one(ctx, h, 0, id, Call{Kind: Cancel})
	}
	l.waits.Wait()
	for _, id := range l.Alive() {
		l.one(ctx, h, 0, id, Call{Kind: Get})
	}
}

// Alive lists the sessions that nobody has deleted.
func (l *Load) Alive() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.alive...)
}

func (l *Load) pick(r *rand.Rand) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.alive) == 0 {
		return ""
	}
	return l.alive[r.IntN(len(l.alive))]
}

func (l *Load) draw(r *rand.Rand, name string) Call {
	room := func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.alive) < l.Sessions
	}
	switch n := r.IntN(100); {
	case n < 26:
		return Call{Kind: Start, Prompt: l.Prompt, Max: 1 + r.IntN(l.Max)}
	case n < 46 && room():
		c := Call{Kind: Fork, At: -1, N: 1 + r.IntN(3)}
		if r.IntN(3) == 0 {
			c.At = r.IntN(20)
		}
		return c
	case n < 58:
		return Call{Kind: Cancel}
	case n < 66:
		return Call{Kind: Detach}
	case n < 73:
		return Call{Kind: Resume}
	case n < 77:
		return Call{Kind: Patch, Title: name}
	case n < 79:
		return Call{Kind: Close}
	case n < 82:
		return Call{Kind: Delete}
	}
	return Call{Kind: Get}
}

// one makes a call and records what came of it.
func (l *Load) one(ctx context.Context, h *History, client int, id string, c Call) {
	began := h.Now()
	a, children := l.Do(ctx, client, id, c)
	h.Add(client, id, c, began, a)
	if c.Kind == Delete && (a.Code == "" || a.Unknown) {
		l.mu.Lock()
		parent := l.parents[id]
		for i, other := range l.alive {
			if other == id && !a.Unknown {
				l.alive = append(l.alive[:i:i], l.alive[i+1:]...)
				break
			}
		}
		l.mu.Unlock()
		if parent != "" {
			h.Add(client, parent, Call{Kind: ChildGone}, began, Answer{Unknown: a.Unknown})
		}
		return
	}
	if a.Unknown || a.Code != "" {
		return
	}
	switch c.Kind {
	case Start:
		l.waits.Go(func() { l.wait(ctx, h, client, id, a.Turn, began) })
	case Fork:
		l.mu.Lock()
		if l.parents == nil {
			l.parents = map[string]string{}
		}
		for _, child := range children {
			h.Add(client, child, Call{Kind: Born}, began, Answer{View: View{State: "idle", Length: a.At, Title: a.Title}})
			l.parents[child] = id
			l.alive = append(l.alive, child)
		}
		l.mu.Unlock()
	}
}

// wait records the end of a turn. Of one whose session is gone nobody learns it.
func (l *Load) wait(ctx context.Context, h *History, client int, id, turn string, began int64) {
	c := Call{Kind: End, Turn: turn}
	a, _ := l.Do(ctx, client, id, c)
	for a.Unknown && ctx.Err() == nil {
		a, _ = l.Do(ctx, client, id, c)
	}
	a.Unknown = a.Unknown || a.Code != ""
	h.Add(client, id, c, began, a)
}
