package sessions

import (
	"context"
	"strings"
	"sync"
)

// watchRing is how many events watchers may lag behind; one that lags further
// loses the oldest and is told how many.
const watchRing = 4096

// WatchOptions narrows a watch.
type WatchOptions struct {
	Root  string // only this tree
	Turns bool   // also turn.* events, without deltas
}

// hub keeps the latest lifecycle events of all sessions in a ring. Publishing
// never waits for a watcher.
type hub struct {
	mu     sync.Mutex
	ring   []watched     // guarded by mu; event n lies at n % watchRing
	next   int64         // guarded by mu
	wake   chan struct{} // guarded by mu; closed and replaced at every event
	closed bool          // guarded by mu
}

type watched struct {
	tenant, root string
	event        Event
}

func (h *hub) init() {
	h.ring = make([]watched, watchRing)
	h.wake = make(chan struct{})
}

func (h *hub) publish(tenant, root string, e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ring[h.next%watchRing] = watched{tenant, root, e}
	h.next++
	if !h.closed {
		close(h.wake)
		h.wake = make(chan struct{})
	}
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	close(h.wake)
}

// Watch is a reader of the events of many sessions. It belongs to one
// goroutine and needs no closing.
type Watch struct {
	h      *hub
	tenant string
	all    bool // of all tenants
	opts   WatchOptions
	next   int64
}

// Watch follows the lifecycle events of many sessions from now on.
func (m *Manager) Watch(tenant string, opts WatchOptions) *Watch {
	m.hub.mu.Lock()
	defer m.hub.mu.Unlock()
	return &Watch{h: &m.hub, tenant: tenant, opts: opts, next: m.hub.next}
}

// WatchAll is Watch over all tenants, for a server's own counts: nothing of it
// may reach a client.
func (m *Manager) WatchAll(opts WatchOptions) *Watch {
	w := m.Watch("", opts)
	w.all = true
	return w
}

// Next waits for events and returns them. lost is how many events, of all
// sessions, were overwritten since the last call: the caller should list the
// sessions anew.
func (w *Watch) Next(ctx context.Context) (events []Event, lost int64, err error) {
	for {
		w.h.mu.Lock()
		if behind := w.h.next - watchRing; w.next < behind {
			lost += behind - w.next
			w.next = behind
		}
		for ; w.next < w.h.next; w.next++ {
			if x := &w.h.ring[w.next%watchRing]; w.wants(x) {
				events = append(events, x.event)
			}
		}
		wake, closed := w.h.wake, w.h.closed
		w.h.mu.Unlock()
		if len(events) > 0 || lost > 0 {
			return events, lost, nil
		}
		if closed {
			return nil, 0, fail(CodeOverloaded, "the server is shutting down")
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

func (w *Watch) wants(x *watched) bool {
	return (w.all || x.tenant == w.tenant) && (w.opts.Root == "" || w.opts.Root == x.root) &&
		(w.opts.Turns || strings.HasPrefix(string(x.event.Type), "session."))
}
