package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/coder/websocket"
)

// write is the socket's only writer. It sends replies first, then takes one
// batch of events of each session that has some, in turn, so that a busy
// session does not hold back the others.
func (c *socket) write(ctx context.Context) error {
	for {
		if err := c.writeReplies(); err != nil {
			return err
		}
		busy, err := c.writeEvents(ctx, c.readySubs)
		if err != nil {
			return err
		}
		if busy {
			select {
			case <-c.drain:
				return c.flush(ctx)
			default:
				continue
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.drain:
			return c.flush(ctx)
		case <-c.wake:
		case data := <-c.replies:
			if err := c.put(data); err != nil {
				return err
			}
		}
	}
}

// flushRounds bounds what a closing server still sends to one socket, in
// batches of each session.
const flushRounds = 8

// flush sends what is there already, the ends of turns above all, before the
// socket is closed with 1012.
func (c *socket) flush(ctx context.Context) error {
	for range flushRounds {
		if err := c.writeReplies(); err != nil {
			return err
		}
		busy, err := c.writeEvents(ctx, c.allSubs)
		if err != nil {
			return err
		}
		if !busy {
			break
		}
	}
	return errDrain
}

func (c *socket) writeReplies() error {
	for {
		select {
		case data := <-c.replies:
			if err := c.put(data); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// writeEvents reports whether some session still has events to send. Replies
// that were queued before a session was subscribed to go first; only then is it
// looked up which subscriptions there are, since a reply may end one.
func (c *socket) writeEvents(ctx context.Context, subs func() []*subscription) (busy bool, err error) {
	if err := c.writeReplies(); err != nil {
		return false, err
	}
	for _, sub := range subs() {
		more, err := c.writeSome(ctx, sub)
		if err != nil {
			return false, err
		}
		busy = busy || more
	}
	return busy, nil
}

func (c *socket) readySubs() []*subscription {
	return slices.DeleteFunc(c.allSubs(), func(sub *subscription) bool { return !sub.ready.Load() })
}

func (c *socket) allSubs() []*subscription {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.subs))
}

// writeSome sends one batch of a session's events, and closes the socket with
// 1013 when the client falls behind more than it may.
func (c *socket) writeSome(ctx context.Context, sub *subscription) (more bool, err error) {
	if p := sub.ended.Load(); p != nil {
		return false, c.dropSubscription(sub, p)
	}
	limited, cancel := context.WithTimeout(ctx, c.server.opts.CallTimeout)
	events, err := sub.log.Read(limited, sub.next, eventsPerRead)
	cancel()
	if err != nil {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		return false, c.dropSubscription(sub, c.server.problem(err))
	}
	for i := range events {
		data, err := c.server.encodings.encode(c.who.Tenant, &events[i])
		if err != nil {
			return false, fmt.Errorf("encode event: %w", err)
		}
		if err := c.put(data); err != nil {
			return false, err
		}
		sub.next = events[i].Seq + 1
	}
	_, last, err := sub.log.Last(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		return false, c.dropSubscription(sub, c.server.problem(err))
	}
	switch lag := last - (sub.next - 1); {
	case lag > sub.bound:
		return false, &closeError{websocket.StatusTryAgainLater, fmt.Sprintf("too slow: session=%s last_seq=%d", sub.id, sub.next-1)}
	case lag > 0 && len(events) > 0:
		return true, nil
	case lag <= 0:
		sub.bound = c.server.opts.LagMax // caught up once: from now on it is a live reader
	}
	if sub.ready.Swap(false) {
		sub.again <- sub.next
	}
	return false, nil
}

// dropSubscription tells the client that a session's events end, and why.
func (c *socket) dropSubscription(sub *subscription, p *Problem) error {
	c.mu.Lock()
	if c.subs[sub.id] == sub {
		delete(c.subs, sub.id)
	}
	c.mu.Unlock()
	sub.cancel()
	data, err := compact(ErrorFrame{
		Type: "error", To: frameSubscribe, SessionID: sub.id,
		Status: p.Status, Code: p.Code, Detail: p.Detail, Field: p.Field, FirstSeq: p.FirstSeq,
	})
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	return c.put(data)
}

// put writes one frame. A client that takes nothing for WriteTimeout is cut
// off: no close frame would reach it either.
func (c *socket) put(data []byte) error {
	limited, cancel := context.WithTimeout(context.Background(), c.server.opts.WriteTimeout)
	defer cancel()
	if err := c.conn.Write(limited, websocket.MessageText, data); err != nil {
		if errors.Is(limited.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("the client takes no data: %w", err)
		}
		return fmt.Errorf("write frame: %w", err)
	}
	return nil
}
