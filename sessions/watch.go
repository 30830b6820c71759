package sessions

import (
	"context"
	"strings"
	"sync"
)

const (
	// watchRing is how many events of their tenant watchers may lag behind; one
	// that lags further loses the oldest and is told how many.
	watchRing = 4096

	// watchHeldMax is how many events of all tenants are kept for watchers. Where
	// more tenants are watched than it has room for full rings, each gets an equal
	// part, of watchRingMin at least: a flood of one takes nothing from another.
	watchHeldMax = 16 * watchRing
	watchRingMin = 16

	// watchBatch is how many events a watcher gets at a time: what it does not
	// read stays in the ring, which all share.
	watchBatch = 64
)

// WatchOptions narrows a watch.
type WatchOptions struct {
	Root  string // only this tree
	Turns bool   // also turn.* events, without deltas
}

// hub keeps the latest lifecycle events of the tenants that are watched, each
// tenant's in a ring of its own: what happens to one is neither told to the
// watchers of another nor in their way. Publishing never waits for a watcher.
type hub struct {
	mu        sync.Mutex
	rings     map[string]*watchLog // guarded by mu; by tenant, while somebody watches it
	all       *watchLog            // guarded by mu; of all tenants, for WatchAll; nil: nobody does
	published int64                // guarded by mu
	closed    bool                 // guarded by mu
}

// watchLog is what watchers of one tenant may still read: the events
// [first, first + len(events)). The hub's mu guards it.
type watchLog struct {
	first    int64
	events   []watched
	watchers int
	wake     chan struct{} // closed and replaced at every event
}

type watched struct {
	root  string
	event Event
}

func (h *hub) init() { h.rings = map[string]*watchLog{} }

func newWatchLog() *watchLog { return &watchLog{wake: make(chan struct{})} }

// add appends an event and lets go of what lies more than most behind.
func (r *watchLog) add(e watched, most int) {
	r.events = append(r.events, e)
	r.trim(most)
	close(r.wake)
	r.wake = make(chan struct{})
}

func (r *watchLog) trim(most int) {
	if n := len(r.events) - most; n > 0 {
		clear(r.events[:n]) // appending copies what is left, in its time
		r.events = r.events[n:]
		r.first += int64(n)
	}
}

// ringMaxLocked is how many events a ring of a tenant may hold.
func (h *hub) ringMaxLocked() int {
	return max(watchRingMin, min(watchRing, watchHeldMax/max(len(h.rings), 1)))
}

func (h *hub) publish(tenant, root string, e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.published++
	if h.closed {
		return
	}
	if r := h.rings[tenant]; r != nil {
		r.add(watched{root, e}, h.ringMaxLocked())
	}
	if h.all != nil {
		h.all.add(watched{root, e}, watchRing)
	}
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, r := range h.rings {
		close(r.wake)
	}
	if h.all != nil {
		close(h.all.wake)
	}
}

// Watch is a reader of the events of many sessions. It belongs to one
// goroutine and must be closed.
type Watch struct {
	h      *hub
	ring   *watchLog
	tenant string
	all    bool // of all tenants
	opts   WatchOptions
	next   int64
}

// Watch follows the lifecycle events of a tenant's sessions from now on.
func (m *Manager) Watch(tenant string, opts WatchOptions) *Watch {
	h := &m.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.rings[tenant]
	if r == nil {
		r = newWatchLog()
		h.rings[tenant] = r
		if most := h.ringMaxLocked(); most < watchRing {
			for _, other := range h.rings {
				other.trim(most)
			}
		}
	}
	return newWatch(h, r, &Watch{tenant: tenant, opts: opts})
}

// WatchAll is Watch over all tenants, for a server's own counts: nothing of it
// may reach a client.
func (m *Manager) WatchAll(opts WatchOptions) *Watch {
	h := &m.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil {
		h.all = newWatchLog()
	}
	return newWatch(h, h.all, &Watch{all: true, opts: opts})
}

func newWatch(h *hub, r *watchLog, w *Watch) *Watch {
	r.watchers++
	w.h, w.ring, w.next = h, r, r.first+int64(len(r.events))
	return w
}

// Close lets go of the events that were kept for the watch.
func (w *Watch) Close() {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.ring.watchers--; w.ring.watchers > 0 {
		return
	}
	if w.all {
		w.h.all = nil
	} else {
		delete(w.h.rings, w.tenant)
	}
}

// Next waits for events and returns up to watchBatch. lost is how many events of the
// tenant's sessions, wanted ones or not, were overwritten since the last call:
// the caller should list the sessions anew.
func (w *Watch) Next(ctx context.Context) (events []Event, lost int64, err error) {
	for {
		w.h.mu.Lock()
		r := w.ring
		if w.next < r.first {
			lost += r.first - w.next
			w.next = r.first
		}
		for end := r.first + int64(len(r.events)); w.next < end && len(events) < watchBatch; w.next++ {
			if x := &r.events[w.next-r.first]; w.wants(x) {
				events = append(events, x.event)
			}
		}
		wake, closed := r.wake, w.h.closed
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
	return (w.opts.Root == "" || w.opts.Root == x.root) && (w.opts.Turns || strings.HasPrefix(string(x.event.Type), "session."))
}
