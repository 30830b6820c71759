package sessions

import (
	"context"
	"fmt"
	"testing"
)

func newHub() *Manager {
	m := &Manager{}
	m.hub.init()
	return m
}

func (h *hub) flood(tenant string, n int) {
	for range n {
		h.publish(tenant, "", Event{Type: EventSessionForked, SessionID: tenant})
	}
}

// held counts the events that are kept.
func (h *hub) held() (n int) {
	for _, r := range h.rings {
		n += len(r.events)
	}
	return n
}

// rest is all that a watch has now.
func (w *Watch) rest(ctx context.Context) (events []Event, lost int64, err error) {
	for {
		more, l, err := w.Next(ctx)
		events, lost = append(events, more...), lost+l
		if len(more) > watchBatch {
			err = fmt.Errorf("%d events at once", len(more))
		}
		if err != nil || w.next == w.ring.first+int64(len(w.ring.events)) {
			return events, lost, err
		}
	}
}

func TestWatchThatLagsLosesTheOldest(t *testing.T) {
	m := newHub()
	w := m.Watch("a", WatchOptions{})
	defer w.Close()
	m.hub.flood("a", watchRing+10)
	events, lost, err := w.rest(t.Context())
	if err != nil || lost != 10 || len(events) != watchRing {
		t.Errorf("%d events, %d lost, %v", len(events), lost, err)
	}
}

// Of a tenant's flood the watchers of another learn nothing: it is not in what
// they lost, does not wake them, and takes none of their events away.
func TestWatchesOfTenantsAreApart(t *testing.T) {
	m := newHub()
	a, b, all := m.Watch("a", WatchOptions{}), m.Watch("b", WatchOptions{}), m.WatchAll(WatchOptions{})
	defer a.Close()
	defer b.Close()
	defer all.Close()
	asleep := b.ring.wake
	m.hub.flood("b", 3)
	m.hub.flood("a", watchRing+10)
	m.hub.flood("nobody watches it", 5)
	events, lost, err := b.Next(t.Context())
	if err != nil || lost != 0 || len(events) != 3 {
		t.Errorf("beside a flood of another tenant: %d events, %d lost, %v; want 3 and none", len(events), lost, err)
	}
	select {
	case <-asleep:
	default:
		t.Error("own events wake nobody")
	}
	asleep = b.ring.wake
	m.hub.flood("a", 1)
	select {
	case <-asleep:
		t.Error("an event of another tenant wakes a watcher")
	default:
	}
	if events, lost, err := all.rest(t.Context()); err != nil || len(events) != watchRing || lost != 3+10+5+1 {
		t.Errorf("watch of all: %d events, %d lost, %v", len(events), lost, err)
	}
	if n := m.hub.published; n != 3+watchRing+10+5+1 {
		t.Errorf("%d published", n)
	}
}

// However many tenants are watched, what is kept for them is bounded, each has
// its part, and nothing is kept for a tenant that nobody watches any more.
func TestWatchedTenantsShareMemory(t *testing.T) {
	m := newHub()
	var watches []*Watch
	for i := range 40 {
		w := m.Watch(fmt.Sprint(i), WatchOptions{})
		watches = append(watches, w)
		m.hub.flood(w.tenant, watchRing)
		if n := m.hub.held(); n > watchHeldMax {
			t.Fatalf("%d events of %d tenants are kept", n, i+1)
		}
	}
	part := watchHeldMax / len(watches)
	for _, w := range watches {
		events, lost, err := w.rest(t.Context())
		if err != nil || len(events) != part || lost != int64(watchRing-part) {
			t.Errorf("tenant %s: %d events, %d lost, %v; want %d", w.tenant, len(events), lost, err, part)
		}
	}
	second := m.Watch("0", WatchOptions{})
	for _, w := range watches {
		w.Close()
	}
	m.hub.flood("0", 2)
	if events, lost, err := second.Next(t.Context()); len(events) != 2 || lost != 0 || err != nil {
		t.Errorf("after another watch was closed: %d events, %d lost, %v", len(events), lost, err)
	}
	second.Close()
	m.hub.flood("0", 2)
	if n := len(m.hub.rings); n != 0 || m.hub.held() != 0 {
		t.Errorf("%d rings are kept for nobody", n)
	}
	m.hub.close()
	ended := m.Watch("0", WatchOptions{})
	defer ended.Close()
	if _, _, err := ended.Next(context.Background()); ErrorCode(err) != CodeOverloaded {
		t.Errorf("a watch of a hub that is closed: %v", err)
	}
}
