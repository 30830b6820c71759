package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/coder/websocket"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

const (
	// subprotocol is what clients offer; another one, or none, is not refused,
	// so that command-line tools can connect.
	subprotocol = "rocket.v1"

	// repliesQueued bounds answers that the writer has not sent yet. A client
	// that sends commands and reads nothing stops being read.
	repliesQueued = 64

	// badFramesMax in a row end a socket with 1008: that client speaks
	// something else.
	badFramesMax = 32

	// compressMin is the longest message that is not compressed. A delta is
	// shorter, and compressing one would cost more than sending it.
	compressMin = 1 << 10

	// closeReasonMax is what a close frame can hold (RFC 6455, 5.5).
	closeReasonMax = 123
)

// socket is one WebSocket of /stream. Two goroutines serve it: one reads and
// executes commands in order, the other writes. A third one comes for each ping
// and one for the end. None of them is the request's: that has returned.
type socket struct {
	server  *Server
	conn    *wsConn
	session string // of the path
	who     sessions.Identity
	relays  *relays                 // to other servers; nil: none, the client is one
	end     context.CancelCauseFunc // ends the socket; set by start

	all  sync.WaitGroup // its goroutines
	wake chan struct{}  // cap 1: the writer has something to do
	room chan struct{}  // cap 1: somebody may queue replies again

	mu      sync.Mutex // nothing else is locked while it is held
	subs    map[string]*subscription
	replies [][]byte        // guarded by mu; from the reader and the relays to the writer
	ready   []*subscription // guarded by mu; those that have something, in turn
}

// subscription is one session's events on one socket.
type subscription struct {
	id      string
	queued  bool        // guarded by the socket's mu; in ready
	dropped atomic.Bool // no event of it may be sent any more

	// Only the writer, after start.
	tail  *sessions.Tail
	next  int64 // next seq to send
	bound int64 // lag that is allowed now
}

// closeError ends a socket with a code of RFC 6455, 7.4.
type closeError struct {
	code   websocket.StatusCode
	reason string
}

func (e *closeError) Error() string { return fmt.Sprintf("close %d: %s", e.code, e.reason) }

var errRevoked = &closeError{websocket.StatusPolicyViolation, "the API key is not valid any more"}

var errDrain = &closeError{websocket.StatusServiceRestart, "the server is shutting down"}

// closeSocket sends a close frame and waits a few seconds for the peer's.
func (s *Server) closeSocket(conn *wsConn, e *closeError) {
	s.metrics.closes.WithLabelValues(strconv.Itoa(int(e.code))).Inc()
	conn.end(e.code, e.reason[:min(len(e.reason), closeReasonMax)])
}

// accept upgrades a request. Origins other than our own host are refused, as
// any page could open a socket to loopback otherwise.
//
// Messages of more than compressMin bytes are compressed for clients that offer
// it. Without context takeover: nothing of a compressor stays with a socket.
func (s *Server) accept(w http.ResponseWriter, r *http.Request) (*wsConn, error) {
	if r.Header.Get("Upgrade") == "" {
		w.Header().Set("Upgrade", "websocket")
		w.Header().Set("Connection", "Upgrade")
		err := codeProblem(codeUpgradeRequired, "this is a WebSocket", "")
		writeProblem(w, err)
		return nil, err
	}
	if err := checkOrigin(r); err != nil {
		writeProblem(w, s.problem(err))
		return nil, err
	}
	markStream(w)
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols:    []string{subprotocol},
		CompressionMode: websocket.CompressionNoContextTakeover, CompressionThreshold: compressMin + 1,
	})
	if err != nil {
		return nil, err // Accept has answered
	}
	conn.SetReadLimit(frameBytesMax) // of what a compressed message becomes
	return &wsConn{conn, hijacked(w)}, nil
}

// serveStream is GET /v1/sessions/{id}/stream.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	id := chi.URLParam(r, "id")
	err := refuseUnknown(query, "from", "epoch", "follow")
	follow := query.Get("follow") // of the session of the path
	if err == nil && follow != "" && follow != "true" && follow != "false" {
		err = codeProblem(codeInvalid, "follow: expected boolean", "follow")
	}
	var pos position
	if err == nil {
		pos, err = parsePosition(query, "")
	}
	var log *sessions.Log
	var next int64
	if err == nil {
		log, next, err = s.openLog(r.Context(), id, pos)
	}
	var end func()
	if err == nil {
		end, err = s.beginStream(r.Context())
	}
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	conn, err := s.accept(w, r)
	if err != nil {
		end()
		return
	}
	c := s.newSocket(conn, r, id)
	c.start(end, func(ctx context.Context) error {
		if follow == "false" {
			return nil
		}
		return c.subscribe(ctx, c.session, log, next, "")
	})
}

func (s *Server) newSocket(conn *wsConn, r *http.Request, session string) *socket {
	return &socket{
		server: s, conn: conn, session: session, who: callerOf(r.Context()), relays: newRelays(r),
		wake: make(chan struct{}, 1), room: make(chan struct{}, 1), subs: map[string]*subscription{},
	}
}

// start serves the socket until one of its goroutines ends it, and calls ended
// when all of them are gone. begin is what the reader does first.
//
// ctx stops our own work. Reads and writes do not have it: the library cuts the
// connection when such a context ends, and a close frame must still go out.
func (c *socket) start(ended func(), begin func(ctx context.Context) error) {
	c.server.metrics.sockets.Inc()
	ctx, cancel := context.WithCancelCause(withCaller(context.Background(), c.who))
	c.end = cancel
	held, release := c.server.manager.Keys().Hold(ctx, c.who)
	unhold := context.AfterFunc(held, func() { cancel(errRevoked) })
	undrain := context.AfterFunc(c.server.closing, func() { signal(c.wake) })
	c.all.Go(func() { cancel(c.guard(func() error { return c.write(ctx) })) })
	c.all.Go(func() { cancel(c.guard(func() error { return c.read(ctx, begin) })) })
	context.AfterFunc(ctx, func() {
		if e, ok := errors.AsType[*closeError](context.Cause(ctx)); ok {
			// The peer's answer is read by the read that is going on, and ends it.
			c.server.closeSocket(c.conn, e)
		}
		_ = c.conn.CloseNow()
		c.all.Wait()
		c.closeTails()
		unhold()
		undrain()
		release()
		c.server.metrics.sockets.Dec()
		c.server.log.Debug("socket ended", "session", c.session, "why", context.Cause(ctx))
		ended()
	})
}

// guard turns a panic of one socket's goroutine into that socket's end.
func (c *socket) guard(work func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.server.log.Error("socket failed", "session", c.session, "panic", v, "stack", string(debug.Stack()))
			err = &closeError{websocket.StatusInternalError, "internal error"}
		}
	}()
	return work()
}

// read takes frames in order and executes them.
func (c *socket) read(ctx context.Context, begin func(context.Context) error) error {
	if err := begin(ctx); err != nil {
		if p, ok := errors.AsType[*Problem](err); ok {
			return &closeError{websocket.StatusTryAgainLater, p.Detail}
		}
		return err
	}
	frames := c.server.newFrameReader(c.conn, c.who.Tenant)
	defer frames.close()
	bad := 0
	for {
		kind, data, err := frames.next()
		if err != nil {
			return err // gone, closed, too slow, or too large: the library has sent 1009
		}
		var f frame
		p := codeProblem(codeInvalid, "frame: want text, not binary", "frame")
		if kind == websocket.MessageText {
			f, p = c.server.frames.decode(data)
		}
		if p != nil {
			if bad++; bad >= badFramesMax {
				return &closeError{websocket.StatusPolicyViolation, fmt.Sprintf("%d bad frames in a row", bad)}
			}
			if err := c.fail(ctx, f.head, p); err != nil {
				return err
			}
			continue
		}
		bad = 0
		if err := c.execute(ctx, f, data); err != nil {
			return err
		}
	}
}

// execute runs one command and queues its reply, or passes it on to the server
// that has its session. It returns an error only when the socket must end.
func (c *socket) execute(ctx context.Context, f frame, raw []byte) error {
	if f.head.SessionID == "" {
		f.head.SessionID = c.session
	}
	head := f.head
	if done, err := c.relay(ctx, head, raw); done {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, c.server.opts.CallTimeout)
	defer cancel()
	var result any
	var err error
	switch request := f.request.(type) {
	case *TurnCreateFrame:
		result, err = c.server.startTurn(limited, head.IdempotencyKey, head.SessionID, request.TurnRequest, false)
	case *ForkFrame:
		var forked sessions.ForkResult
		if forked, err = c.server.fork(limited, head.IdempotencyKey, head.SessionID, request.ForkRequest); err == nil {
			return c.forked(ctx, limited, head, forked, request.Follow)
		}
	case *DetachFrame:
		result, err = c.server.detach(limited, head.IdempotencyKey, head.SessionID, request.DetachRequest)
	case *SubscribeFrame:
		log, next, openErr := c.server.openLog(limited, head.SessionID, position{from: request.From, epoch: request.Epoch})
		if err = openErr; err == nil {
			err = c.subscribe(ctx, head.SessionID, log, next, head.Ref)
			if p, ok := errors.AsType[*Problem](err); ok {
				return c.fail(ctx, head, p)
			}
			return err
		}
	case *PlainFrame:
		switch head.Type {
		case frameTurnCancel:
			result, err = c.server.cancel(limited, head.IdempotencyKey, head.SessionID)
		case frameResume:
			result, err = c.server.resume(limited, head.IdempotencyKey, head.SessionID)
		case frameUnsubscribe:
			c.unsubscribe(head.SessionID)
		case framePing:
			return c.send(ctx, PongFrame{Type: "pong", Ref: head.Ref})
		}
	}
	if err != nil {
		return c.fail(ctx, head, c.server.problem(err))
	}
	return c.send(ctx, ReplyFrame{Type: "reply", To: head.Type, Ref: head.Ref, SessionID: head.SessionID, Result: result})
}

// forked answers a fork and, with follow, subscribes to the children.
func (c *socket) forked(ctx, limited context.Context, head FrameHead, result sessions.ForkResult, follow bool) error {
	if err := c.send(ctx, ReplyFrame{Type: "reply", To: head.Type, Ref: head.Ref, SessionID: head.SessionID, Result: result}); err != nil {
		return err
	}
	if !follow {
		return nil
	}
	for _, child := range result.Sessions {
		log, next, err := c.server.openLog(limited, child.ID, position{})
		if err == nil {
			err = c.subscribe(ctx, child.ID, log, next, "")
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			head.SessionID = child.ID
			if err := c.fail(ctx, head, c.server.problem(err)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *socket) fail(ctx context.Context, head FrameHead, p *Problem) error {
	return c.send(ctx, ErrorFrame{
		Type: "error", To: head.Type, Ref: head.Ref, SessionID: head.SessionID,
		Status: p.Status, Code: p.Code, Detail: p.Detail, Field: p.Field, FirstSeq: p.FirstSeq,
	})
}

// send queues a frame for the writer; it waits while the queue is full.
func (c *socket) send(ctx context.Context, v any) error {
	data, err := compact(v)
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	return c.queue(ctx, data)
}

func (c *socket) queue(ctx context.Context, data []byte) error {
	for {
		c.mu.Lock()
		full := len(c.replies) >= repliesQueued
		if !full {
			c.replies = append(c.replies, data)
		}
		c.mu.Unlock()
		signal(c.wake)
		if !full {
			return nil
		}
		select {
		case <-c.room:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// signal leaves one signal in a channel of capacity 1.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// subscribe queues the "subscribed" frame, then lets the events follow. A
// second subscription to a session takes the place of the first.
func (c *socket) subscribe(ctx context.Context, id string, log *sessions.Log, next int64, ref string) error {
	c.unsubscribe(id)
	c.mu.Lock()
	full := len(c.subs) >= subscriptionsMax
	c.mu.Unlock()
	if full {
		return codeProblem(codeSubscriptionsMax, fmt.Sprintf("a socket follows at most %d sessions", subscriptionsMax), "session_id")
	}
	epoch, last, err := log.Last(ctx)
	if err != nil {
		return c.server.problem(err)
	}
	position := SubscribedFrame{Type: "subscribed", SessionID: id, From: next, Epoch: epoch, LastSeq: last}
	if err := c.send(ctx, position); err != nil {
		return err
	}
	if ref != "" {
		if err := c.send(ctx, ReplyFrame{Type: "reply", To: frameSubscribe, Ref: ref, SessionID: id, Result: position}); err != nil {
			return err
		}
	}
	sub := &subscription{id: id, next: next, bound: max(last-next, 0) + c.server.opts.LagMax}
	sub.tail = log.Tail(next, func() { c.enqueue(sub) })
	c.mu.Lock()
	c.subs[id] = sub
	c.mu.Unlock()
	c.enqueue(sub)
	return nil
}

// enqueue tells the writer that a subscription has something. It is called with
// a session's locks held.
func (c *socket) enqueue(sub *subscription) {
	c.mu.Lock()
	if !sub.queued {
		sub.queued = true
		c.ready = append(c.ready, sub)
	}
	c.mu.Unlock()
	signal(c.wake)
}

// unsubscribe leaves closing the tail to the writer, whose it is.
func (c *socket) unsubscribe(id string) {
	c.mu.Lock()
	sub := c.subs[id]
	delete(c.subs, id)
	c.mu.Unlock()
	if sub != nil {
		sub.dropped.Store(true)
		c.enqueue(sub)
	}
}

// closeTails is for the end, when nobody else has the socket any more.
func (c *socket) closeTails() {
	for _, sub := range c.subs {
		sub.tail.Close()
	}
	for _, sub := range c.ready {
		sub.tail.Close()
	}
}
