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
// session does not hold back the others. What there is at once goes out in one
// write.
func (c *socket) write(ctx context.Context) error {
	beat := c.server.newPinger(c.conn, &c.all, c.server.opts.CallTimeout)
	defer beat.Stop()
	for {
		busy, err := c.writeRound(ctx)
		if err != nil {
			return err
		}
		if c.server.closing.Err() != nil {
			return c.flush(ctx)
		}
		if busy {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.wake:
		case <-beat.C:
			beat.ping()
		}
	}
}

// flushRounds bounds what a closing server still sends to one socket, in
// batches of each session.
const flushRounds = 8

// flush sends what is there already, the ends of turns above all, before the
// socket is closed with 1012.
func (c *socket) flush(ctx context.Context) error {
	c.mu.Lock()
	subs := slices.Collect(maps.Values(c.subs))
	c.mu.Unlock()
	for _, sub := range subs {
		c.enqueue(sub)
	}
	for range flushRounds {
		busy, err := c.writeRound(ctx)
		if err != nil {
			return err
		}
		if !busy {
			break
		}
	}
	return errDrain
}

// writeRound writes what is queued now, and reports whether there is more.
func (c *socket) writeRound(ctx context.Context) (busy bool, err error) {
	written, finished := 0, false
	// Both at once: the replies that were queued before a session was subscribed
	// to go before its events, and after the reply that ends a subscription
	// nothing of it comes.
	c.mu.Lock()
	replies, ready := c.replies, c.ready
	c.replies, c.ready = nil, nil
	for _, sub := range ready {
		sub.queued = false
	}
	c.mu.Unlock()
	if len(replies) == 0 && len(ready) == 0 {
		return false, nil
	}
	c.conn.tcp.hold()
	defer func() {
		// also on failure: a close frame names the last seq that was written
		if e := c.conn.tcp.release(); e != nil && err == nil {
			err = writeError(e)
		}
		if err != nil || !finished { // for letGo
			c.mu.Lock()
			c.ready = append(c.ready, ready...)
			c.replies = append(c.replies, replies[written:]...)
			c.mu.Unlock()
		}
	}()
	for i, r := range replies {
		if err := c.put(r.data); err != nil {
			return false, err
		}
		replies[i] = reply{} // whatever else is written, its text is free
		written = i + 1
		c.wrote(r)
	}
	for _, sub := range ready {
		if err := c.writeSome(ctx, sub); err != nil {
			return false, err
		}
	}
	finished = true
	return true, nil
}

// writeSome sends one batch of a session's events, and closes the socket with
// 1013 when the client falls behind more than it may.
func (c *socket) writeSome(ctx context.Context, sub *subscription) error {
	if sub.dropped.Load() {
		sub.tail.Close()
		return nil
	}
	events, last, err := sub.tail.Next(ctx, c.server.opts.CallTimeout, eventsPerRead)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return c.dropSubscription(sub, c.server.problem(err))
	}
	if last-(sub.next-1) > sub.bound {
		return &closeError{websocket.StatusTryAgainLater, fmt.Sprintf("too slow: session=%s last_seq=%d", sub.id, sub.next-1)}
	}
	for i := range events {
		data, err := c.server.encodings.encode(c.who.Tenant, &events[i])
		if err != nil {
			return fmt.Errorf("encode event: %w", err)
		}
		if err := c.put(data); err != nil {
			return err
		}
		sub.next = events[i].Seq + 1
	}
	if sub.next <= last {
		c.enqueue(sub)
	} else {
		sub.bound = c.server.opts.LagMax // caught up once: from now on it is a live reader
	}
	return nil
}

// dropSubscription tells the client that a session's events end, and why.
func (c *socket) dropSubscription(sub *subscription, p *Problem) error {
	c.mu.Lock()
	if c.subs[sub.id] == sub {
		delete(c.subs, sub.id)
	}
	c.mu.Unlock()
	sub.dropped.Store(true)
	sub.tail.Close()
	data, err := compact(ErrorFrame{
		Type: "error", To: frameSubscribe, SessionID: sub.id,
		Status: p.Status, Code: p.Code, Detail: p.Detail, Field: p.Field, FirstSeq: p.FirstSeq,
	})
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	return c.put(data)
}

func (c *socket) put(data []byte) error { return c.conn.put(data) }

// put writes one frame. A client that takes nothing for WriteTimeout is cut
// off: no close frame would reach it either.
func (c *wsConn) put(data []byte) error {
	if err := c.Write(context.Background(), websocket.MessageText, data); err != nil {
		return writeError(err)
	}
	return nil
}

// errTakesNothing is about a peer that is gone or does not read.
var errTakesNothing = errors.New("the client has left or takes no data")

func writeError(err error) error { return fmt.Errorf("write frame: %w: %w", errTakesNothing, err) }
