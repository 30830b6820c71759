package sessions

import (
	"context"
	"sync"
)

// Tokenising a text takes many times its own memory, and a core while it
// lasts, so large prompts go one after another.
const (
	promptLarge     = 64 << 10 // bytes of text; smaller ones wait for nobody
	promptsLargeMax = 4        // at once, of different tenants; others wait
)

// promptGate lets large prompts through, one of a tenant at a time: a tenant's
// flood does not hold back the others'.
type promptGate struct {
	mu      sync.Mutex
	busy    map[string]bool // guarded by mu; tenants with one under way
	changed chan struct{}   // guarded by mu; closed when one is through
}

// enter waits for a place; leave must be called after.
func (g *promptGate) enter(ctx context.Context, tenant string) (leave func(), err error) {
	for ctx.Err() == nil {
		g.mu.Lock()
		if !g.busy[tenant] && len(g.busy) < promptsLargeMax {
			if g.busy == nil {
				g.busy = map[string]bool{}
			}
			g.busy[tenant] = true
			g.mu.Unlock()
			return func() { g.leave(tenant) }, nil
		}
		if g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return nil, ctx.Err()
}

func (g *promptGate) leave(tenant string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.busy, tenant)
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// promptBytes is how much text there is to tokenise.
func promptBytes(msgs []Message, input *string) int {
	n := 0
	if input != nil {
		n = len(*input)
	}
	for i := range msgs {
		n += len(msgs[i].Content) + len(msgs[i].ToolCalls)
	}
	return n
}
