package server

import (
	"context"
	"fmt"

	"github.com/coder/websocket"

	"rocket/sessions"
)

// Replies that a socket's writer has not written yet. Where they have no place
// nothing more is read, of the client or of a relay, until some are written.
const (
	repliesQueued    = 64       // of them
	repliesBytesMax  = 1 << 20  // of their text; one that is larger has a place when there is no other
	repliesFreeBytes = 64 << 10 // of a socket's, not counted among its tenant's answers: connectionsMax bounds them
)

// reply is one frame on its way to the writer. sent gives back what it holds of
// its tenant's room for answers.
type reply struct {
	data []byte
	sent func()
}

// send queues a frame for the writer; it waits while there is no place.
func (c *socket) send(ctx context.Context, v any) error {
	counted, sent := sessions.CountAnswer(ctx)
	return c.sendCounted(counted, sent, v)
}

// sendCounted is send for a result that ctx counts. sent is called when it is
// written, or will not be.
func (c *socket) sendCounted(ctx context.Context, sent func(), v any) error {
	data, err := compact(v)
	if err != nil {
		sent()
		return fmt.Errorf("encode frame: %w", err)
	}
	return c.queue(ctx, reply{data, sent})
}

// queue gives the writer a reply that ctx counts, the callers one after the
// other. What is not read while the tenant has no room for more makes its own
// socket wait, for as long as a write may take; one reply that alone is too much
// waits as long as reads do, and then ends the socket.
func (c *socket) queue(ctx context.Context, r reply) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	n := len(r.data)
	for counted := false; ; {
		c.mu.Lock()
		waiting, held := c.waiting, c.held
		c.mu.Unlock()
		room := waiting == 0 || waiting < repliesQueued && held+n <= repliesBytesMax
		if !counted && held+n > repliesFreeBytes {
			err := c.server.manager.HoldAnswer(ctx, c.who.Tenant, int64(n), waiting == 0)
			if err != nil && waiting == 0 {
				r.sent()
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return &closeError{websocket.StatusTryAgainLater, c.server.problem(err).Detail}
			}
			counted = err == nil
			room = room && counted
		}
		if room {
			c.mu.Lock()
			c.replies = append(c.replies, r)
			c.waiting++
			c.held += n
			c.mu.Unlock()
			signal(c.wake)
			return nil
		}
		select {
		case <-c.room:
		case <-ctx.Done():
			r.sent()
			return ctx.Err()
		}
	}
}

// wrote makes room for other replies.
func (c *socket) wrote(r reply) {
	c.mu.Lock()
	c.waiting--
	c.held -= len(r.data)
	c.mu.Unlock()
	r.sent()
	signal(c.room)
}

// signal leaves one signal in a channel of capacity 1.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// enqueue tells the writer that a subscription has something. It is called with
// a session's locks held.
func (c *socket) enqueue(sub *subscription) {
	c.mu.Lock()
	if !sub.queued && !c.ended {
		sub.queued = true
		c.ready = append(c.ready, sub)
	}
	c.mu.Unlock()
	signal(c.wake)
}

// letGo is for the end, when the socket's goroutines are gone. Sessions may
// still wake its subscriptions; their locks come before the socket's.
func (c *socket) letGo() {
	c.mu.Lock()
	c.ended = true
	subs, replies := c.ready, c.replies // those that were dropped are in ready only
	for _, sub := range c.subs {
		subs = append(subs, sub)
	}
	c.ready, c.replies = nil, nil
	c.mu.Unlock()
	for _, sub := range subs {
		sub.tail.Close()
	}
	for _, r := range replies {
		c.wrote(r)
	}
}
