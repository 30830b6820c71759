package soak

import (
	"context"
	"sync"
)

// gate brings the agents to a halt after a kill: each checks what is its own
// and waits until all have.
type gate struct {
	mu       sync.Mutex
	round    int           // guarded by mu; raised by each kill
	all      bool          // guarded by mu; in this round everything is checked
	released int           // guarded by mu; rounds up to this may go on
	at       []int         // guarded by mu; by agent, the round that it has checked
	change   chan struct{} // guarded by mu; closed at the next change
}

func newGate(agents int) *gate {
	return &gate{at: make([]int, agents), change: make(chan struct{})}
}

func (g *gate) changedLocked() {
	close(g.change)
	g.change = make(chan struct{})
}

// raise begins a round.
func (g *gate) raise(all bool) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.round++
	g.all = all
	g.changedLocked()
	return g.round
}

// now is the round, and whether everything is to be checked in it.
func (g *gate) now() (round int, all bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.round, g.all
}

// release lets the agents go on.
func (g *gate) release(round int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.released = round
	g.changedLocked()
}

// arrive says that an agent has checked a round, and returns when that round
// is over.
func (g *gate) arrive(ctx context.Context, agent, round int) error {
	return g.until(ctx, func() bool { return g.released >= round || g.round > round }, func() { g.at[agent] = round })
}

// wait returns when all agents have arrived.
func (g *gate) wait(ctx context.Context, round int) error {
	return g.until(ctx, func() bool {
		for _, at := range g.at {
			if at < round {
				return false
			}
		}
		return true
	}, func() {})
}

// until does first and waits for done, both with mu held.
func (g *gate) until(ctx context.Context, done func() bool, first func()) error {
	g.mu.Lock()
	first()
	g.changedLocked()
	for !done() {
		change := g.change
		g.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		g.mu.Lock()
	}
	g.mu.Unlock()
	return nil
}
