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
	"time"

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

	// closeReasonMax is what a close frame can hold (RFC 6455, 5.5).
	closeReasonMax = 123
)

// socket is one WebSocket of /stream. Three goroutines serve it: the handler
// reads and executes commands in order, one writes, one pings. Each
// subscription has one more that only waits for its log.
type socket struct {
	server  *Server
	conn    *wsConn
	session string // of the path
	who     sessions.Identity
	relays  *relays                 // to other servers; nil: none, the client is one
	end     context.CancelCauseFunc // ends the socket; set by serve

	replies chan []byte   // from the reader and the relays to the writer
	wake    chan struct{} // cap 1: a subscription has something
	drain   chan struct{} // closed when the server closes

	mu   sync.Mutex // guards subs
	subs map[string]*subscription
}

// subscription is one session's events on one socket.
type subscription struct {
	id     string
	log    *sessions.Log
	cancel context.CancelFunc
	ready  atomic.Bool             // set by the waiter, cleared by the writer
	ended  atomic.Pointer[Problem] // set by the waiter: why no event will come any more
	again  chan int64              // cap 1: the writer read everything below; wait from here

	// Only the writer, after start.
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
		Subprotocols: []string{subprotocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, err // Accept has answered
	}
	conn.SetReadLimit(frameBytesMax)
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
	defer end()
	conn, err := s.accept(w, r)
	if err != nil {
		return
	}
	c := s.newSocket(conn, r, id)
	c.serve(func(ctx context.Context, all *sync.WaitGroup) error {
		if follow == "false" {
			return nil
		}
		return c.subscribe(ctx, all, c.session, log, next, "")
	})
}

func (s *Server) newSocket(conn *wsConn, r *http.Request, session string) *socket {
	return &socket{
		server: s, conn: conn, session: session, who: callerOf(r.Context()), relays: newRelays(r),
		replies: make(chan []byte, repliesQueued), wake: make(chan struct{}, 1), drain: make(chan struct{}), subs: map[string]*subscription{},
	}
}

// serve serves the socket until one of its goroutines ends it, and returns
// when all of them are gone. begin is what the reader does first.
//
// ctx stops our own work. Reads and writes do not have it: the library cuts the
// connection when such a context ends, and a close frame must still go out.
func (c *socket) serve(begin func(ctx context.Context, all *sync.WaitGroup) error) {
	c.server.metrics.sockets.Inc()
	defer c.server.metrics.sockets.Dec()
	ctx, cancel := context.WithCancelCause(withCaller(context.Background(), c.who))
	c.end = cancel
	held, release := c.server.manager.Keys().Hold(ctx, c.who)
	defer release()
	defer context.AfterFunc(held, func() { cancel(errRevoked) })()
	defer context.AfterFunc(c.server.closing, func() { close(c.drain) })()
	var all sync.WaitGroup
	all.Go(func() { cancel(c.guard(func() error { return c.write(ctx) })) })
	all.Go(func() { cancel(c.guard(func() error { return c.ping(ctx) })) })
	all.Go(func() { cancel(c.guard(func() error { return c.read(ctx, &all, begin) })) })
	<-ctx.Done()
	if e, ok := errors.AsType[*closeError](context.Cause(ctx)); ok {
		// The peer's answer is read by the read that is going on, and ends it.
		c.server.closeSocket(c.conn, e)
	}
	_ = c.conn.CloseNow()
	all.Wait()
	c.server.log.Debug("socket ended", "session", c.session, "why", context.Cause(ctx))
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

// ping finds peers that are gone without a word.
func (c *socket) ping(ctx context.Context) error {
	tick := time.NewTicker(c.server.opts.Heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		wait, cancel := context.WithTimeout(context.Background(), c.server.opts.WriteTimeout+c.server.opts.CallTimeout)
		err := c.conn.Ping(wait)
		cancel()
		if err != nil {
			return fmt.Errorf("ping: %w", err)
		}
	}
}

// read takes frames in order and executes them.
func (c *socket) read(ctx context.Context, all *sync.WaitGroup, begin func(context.Context, *sync.WaitGroup) error) error {
	if err := begin(ctx, all); err != nil {
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
		if err := c.execute(ctx, all, f, data); err != nil {
			return err
		}
	}
}

// execute runs one command and queues its reply, or passes it on to the server
// that has its session. It returns an error only when the socket must end.
func (c *socket) execute(ctx context.Context, all *sync.WaitGroup, f frame, raw []byte) error {
	if f.head.SessionID == "" {
		f.head.SessionID = c.session
	}
	head := f.head
	if done, err := c.relay(ctx, all, head, raw); done {
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
			return c.forked(ctx, limited, all, head, forked, request.Follow)
		}
	case *DetachFrame:
		result, err = c.server.detach(limited, head.IdempotencyKey, head.SessionID, request.DetachRequest)
	case *SubscribeFrame:
		log, next, openErr := c.server.openLog(limited, head.SessionID, position{from: request.From, epoch: request.Epoch})
		if err = openErr; err == nil {
			err = c.subscribe(ctx, all, head.SessionID, log, next, head.Ref)
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
func (c *socket) forked(ctx, limited context.Context, all *sync.WaitGroup, head FrameHead, result sessions.ForkResult, follow bool) error {
	if err := c.send(ctx, ReplyFrame{Type: "reply", To: head.Type, Ref: head.Ref, SessionID: head.SessionID, Result: result}); err != nil {
		return err
	}
	if !follow {
		return nil
	}
	for _, child := range result.Sessions {
		log, next, err := c.server.openLog(limited, child.ID, position{})
		if err == nil {
			err = c.subscribe(ctx, all, child.ID, log, next, "")
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
	select {
	case c.replies <- data:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// subscribe queues the "subscribed" frame, then lets the events follow. A
// second subscription to a session takes the place of the first.
func (c *socket) subscribe(ctx context.Context, all *sync.WaitGroup, id string, log *sessions.Log, next int64, ref string) error {
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
	subCtx, cancel := context.WithCancel(ctx)
	sub := &subscription{
		id: id, log: log, cancel: cancel, again: make(chan int64, 1),
		next: next, bound: max(last-next, 0) + c.server.opts.LagMax,
	}
	c.mu.Lock()
	c.subs[id] = sub
	c.mu.Unlock()
	all.Go(func() { sub.await(subCtx, c.server, c.wake, next) })
	return nil
}

func (c *socket) unsubscribe(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if sub := c.subs[id]; sub != nil {
		sub.cancel()
		delete(c.subs, id)
	}
}

// await tells the writer when there is something to read, and then waits until
// the writer has read it.
func (sub *subscription) await(ctx context.Context, s *Server, wake chan<- struct{}, from int64) {
	for {
		more, err := sub.log.Wait(ctx, from)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			sub.ended.Store(s.problem(err))
		case !more:
			sub.ended.Store(codeProblem(string(sessions.CodeNotFound), fmt.Sprintf("session %q was deleted", sub.id), "session_id"))
		}
		sub.ready.Store(true)
		select {
		case wake <- struct{}{}:
		default:
		}
		select {
		case from = <-sub.again:
		case <-ctx.Done():
			return
		}
	}
}
