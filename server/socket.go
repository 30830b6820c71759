package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/coder/websocket"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

const (
	// subprotocol is what clients offer; another one, or none, is not refused,
	// so that command-line tools can connect.
	subprotocol = "rocket.v1"

	// badFramesMax in a row end a socket with 1008: that client speaks
	// something else.
	badFramesMax = 32

	// compressMin is the longest message that is not compressed. A delta is
	// shorter, and compressing one would cost more than sending it.
	compressMin = 1 << 10

	// closeReasonMax is what a close frame can hold, in bytes (RFC 6455, 5.5).
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
	room chan struct{}  // cap 1: whoever queues may look again
	turn sync.Mutex     // held by the one that queues next

	mu      sync.Mutex // nothing else is locked while it is held
	subs    map[string]*subscription
	replies []reply         // guarded by mu; from the reader and the relays to the writer
	waiting int             // guarded by mu; replies that are not written yet, those that the writer has among them
	held    int             // guarded by mu; bytes of these
	ready   []*subscription // guarded by mu; those that have something, in turn
	ended   bool            // guarded by mu; nothing is ready any more
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
	conn.end(e.code, closeReason(e.reason))
}

// closeReason is as much of a text as a close frame holds, in whole characters.
func closeReason(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= closeReasonMax {
		return text
	}
	end := closeReasonMax
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
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
		c.letGo()
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
	counted, sent := sessions.CountAnswer(ctx) // until the result is written
	limited, cancel := context.WithTimeout(counted, c.server.opts.CallTimeout)
	defer cancel()
	if request, ok := f.request.(*SubscribeFrame); ok {
		defer sent()
		return c.executeSubscribe(ctx, limited, head, request)
	}
	if head.Type == framePing {
		return c.sendCounted(counted, sent, PongFrame{Type: "pong", Ref: head.Ref})
	}
	result, err := c.command(limited, head, f.request)
	if err != nil {
		sent()
		return c.fail(ctx, head, c.server.problem(err))
	}
	var children []sessions.Session
	if request, ok := f.request.(*ForkFrame); ok && request.Follow {
		children = result.(sessions.ForkResult).Sessions
	}
	reply := ReplyFrame{Type: "reply", To: head.Type, Ref: head.Ref, SessionID: head.SessionID, Result: result}
	if err := c.sendCounted(counted, sent, reply); err != nil { // may wait for long: nothing has the result from here on
		return err
	}
	return c.follow(ctx, limited, head, children)
}

// command calls what the REST call does, and returns what that answers.
func (c *socket) command(ctx context.Context, head FrameHead, request any) (any, error) {
	switch request := request.(type) {
	case *TurnCreateFrame:
		return c.server.startTurn(ctx, head.IdempotencyKey, head.SessionID, request.TurnRequest, false)
	case *ForkFrame:
		return c.server.fork(ctx, head.IdempotencyKey, head.SessionID, request.ForkRequest)
	case *DetachFrame:
		return c.server.detach(ctx, head.IdempotencyKey, head.SessionID, request.DetachRequest)
	}
	switch head.Type {
	case frameTurnCancel:
		return c.server.cancel(ctx, head.IdempotencyKey, head.SessionID)
	case frameResume:
		return c.server.resume(ctx, head.IdempotencyKey, head.SessionID)
	case frameUnsubscribe:
		c.unsubscribe(head.SessionID)
	}
	return nil, nil
}

func (c *socket) executeSubscribe(ctx, limited context.Context, head FrameHead, request *SubscribeFrame) error {
	log, next, err := c.server.openLog(limited, head.SessionID, position{from: request.From, epoch: request.Epoch})
	if err != nil {
		return c.fail(ctx, head, c.server.problem(err))
	}
	err = c.subscribe(ctx, head.SessionID, log, next, head.Ref)
	if p, ok := errors.AsType[*Problem](err); ok {
		return c.fail(ctx, head, p)
	}
	return err
}

// follow subscribes to the children of a fork.
func (c *socket) follow(ctx, limited context.Context, head FrameHead, children []sessions.Session) error {
	for _, child := range children {
		log, next, err := c.server.openLog(limited, child.ID, position{})
		if err == nil {
			err = c.subscribe(ctx, child.ID, log, next, "")
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if e, ok := errors.AsType[*closeError](err); ok {
				return e
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
