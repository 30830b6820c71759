package server

import (
	"testing"
	"time"

	"rocket/client"
	"rocket/sessions"
)

// TestSocketEndsBesideWakes: a subscription that was dropped, and that a failed
// write has put back, may be woken while the socket ends.
func TestSocketEndsBesideWakes(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("func main() {")
	log, err := w.manager.Log(w.ctx(), sessions.DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	c := &socket{server: w.server, wake: make(chan struct{}, 1), subs: map[string]*subscription{}}
	sub := &subscription{id: s.ID}
	sub.tail = log.Tail(s.LastSeq+1, func() { c.enqueue(sub) })
	if events, _, err := sub.tail.Next(w.ctx(), patience, 1); err != nil || len(events) > 0 { // it waits
		t.Fatal(events, err)
	}
	sub.dropped.Store(true)
	c.ready = append(c.ready, sub)
	started := make(chan error, 1)
	ctx := w.ctx()
	go func() { // what this one waits for would be ordered for the race detector
		_, err := w.api.StartTurn(ctx, s.ID, greedy(3), client.CallOptions{})
		started <- err
	}()
	for end := time.Now().Add(patience); len(c.wake) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the subscription was not woken")
		}
	}
	c.letGo()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	c.enqueue(sub) // late, and nothing to anybody
	if len(c.ready) != 0 {
		t.Errorf("%d subscriptions are ready on a socket that has ended", len(c.ready))
	}
}
