package server

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

// observe is the outermost layer, inside the router so that it knows the route: it counts and times requests, turns panics
// into 500, and gives every read of a body and every write to a client a deadline.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		rec := &recorder{ResponseWriter: w, control: http.NewResponseController(w), timeout: s.opts.WriteTimeout, all: s.opts.times.answer}
		if r.Body != nil && r.Body != http.NoBody {
			rec.body = &timedBody{ReadCloser: r.Body, control: rec.control, times: s.opts.times, last: begin.Add(s.opts.times.bodyAll),
				asks: r.Header.Get("Expect") != "", hold: holding{held: &s.held}}
			r.Body = rec.body
			defer rec.body.finish()
		}
		ctx, sent := sessions.CountAnswer(r.Context())
		defer sent()
		r = r.WithContext(ctx)
		defer func() {
			v, begun := recover(), false
			if v != nil {
				if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
					panic(v)
				}
				if r.Context().Err() != nil { // huma panics when the client went away in mid-answer
					s.log.Debug("client gone", "method", r.Method, "path", r.URL.Path, "err", v)
				} else {
					s.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "panic", v, "stack", string(debug.Stack()))
				}
				if begun = rec.status != 0; !begun {
					writeProblem(rec, codeProblem(codeInternal, "internal error; the server's log has the cause", ""))
				}
			}
			route := chi.RouteContext(r.Context()).RoutePattern()
			if rec.proxied {
				route = "proxied"
			}
			s.metrics.request(r.Method, route, rec.status, time.Since(begin), rec.stream)
			s.log.Debug("request", "method", r.Method, "path", r.URL.Path, "status", rec.status, "took", time.Since(begin))
			if v != nil && begun {
				panic(http.ErrAbortHandler) // nobody may take it for a whole answer
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

// recorder notes the status and gives each write a deadline of its own: an
// answer may take long to come (wait=true, event streams), but not to be taken.
type recorder struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
	all     time.Duration // for the whole answer; 0: no limit
	last    time.Time     // when all is over; zero: nothing was written yet
	status  int
	stream  bool       // a socket or an event stream: its duration says nothing
	body    *timedBody // nil: the request has none
	proxied bool       // another server answered
	tcp     *batchConn // of a socket
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.extend()
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	w.extend()
	return w.ResponseWriter.Write(p)
}

// extend ignores the error: a connection that cannot have a deadline (tests
// with a recorder) writes without one.
func (w *recorder) extend() {
	now := time.Now()
	if w.last.IsZero() {
		w.last = now.Add(w.all)
	}
	deadline := now.Add(w.timeout)
	if w.all > 0 && !w.stream && w.last.Before(deadline) { // what a large answer holds is not there for others
		deadline = w.last
	}
	_ = w.control.SetWriteDeadline(deadline)
	if w.body != nil {
		w.body.leave()
	}
}

// Unwrap lets http.ResponseController and the WebSocket upgrade through.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Hijack is for websocket.Accept.
func (w *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buf, err := takeOver(w.control, w.timeout)
	w.tcp = conn
	return conn, buf, err
}

// hijacked is the connection that a socket took over.
func hijacked(w http.ResponseWriter) *batchConn { return w.(*recorder).tcp }

// markStream tells observe that w's duration is no request duration.
func markStream(w http.ResponseWriter) {
	if rec, ok := w.(*recorder); ok {
		rec.stream = true
	}
}

// markProxied tells observe that another server's answer is passed back.
func markProxied(w http.ResponseWriter) {
	if rec, ok := w.(*recorder); ok {
		rec.proxied = true
	}
}

// limitBody makes what a body holds in memory its tenant's. The size limit is
// huma's (bodyBytesMax).
func limitBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b, ok := r.Body.(*timedBody); ok { // nobody reads it yet
			b.hold.tenant = tenantOf(r.Context())
		}
		next.ServeHTTP(w, r)
	})
}

// timedBody gives every read of a request body a deadline and takes it away at
// the end: a deadline that stays would cancel requests that wait for a turn.
// What no handler reads is read here too before the answer: net/http would do
// it without a deadline, and a client that sends less than it promised would
// keep its connection for ever.
type timedBody struct {
	io.ReadCloser
	control *http.ResponseController
	times   times

	clock sync.Mutex
	last  time.Time // guarded by clock; no read goes on after it

	mu     sync.Mutex // held while one reads: what passes a body on may still do so when the answer is there
	asks   bool       // guarded by mu; the client sends nothing before it is asked to (Expect), which reading does
	err    error      // guarded by mu; io.EOF, or what broke it
	left   bool       // guarded by mu; nobody wants the rest
	hold   holding    // guarded by mu; what was read is in memory until the request ends
	passed bool       // guarded by mu; the handler keeps nothing of it
}

// longAgo is a deadline that lets no read begin.
var longAgo = time.Unix(1, 0)

func (b *timedBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.readLocked(p)
}

func (b *timedBody) readLocked(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	b.clock.Lock()
	deadline := time.Now().Add(b.times.bodyRead)
	if b.last.Before(deadline) {
		deadline = b.last
	}
	_ = b.control.SetReadDeadline(deadline)
	b.clock.Unlock()
	n, err := b.ReadCloser.Read(p)
	b.asks = false
	if b.err = err; err == io.EOF {
		_ = b.control.SetReadDeadline(time.Time{})
	}
	if !b.passed {
		if e := b.hold.add(n); e != nil {
			return 0, e
		}
	}
	return n, err
}

// discardLocked reads and forgets.
func (b *timedBody) discardLocked(most int64) {
	b.passed = true
	buf := make([]byte, 8<<10)
	for most > 0 && b.err == nil {
		n, _ := b.readLocked(buf)
		most -= int64(n)
	}
}

// Close reads on for a while where the body is too large, so that the client
// gets to read the refusal instead of a reset connection.
func (b *timedBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.discardLocked(bodyDiscardMax) // the end, or more than anybody should send
	return b.ReadCloser.Close()
}

// leave reads a little of what no handler has read, so that the connection can
// be used again, and lets nobody read what is left then.
func (b *timedBody) leave() {
	if b.mu.TryLock() {
		ended := b.err == io.EOF
		b.mu.Unlock()
		if ended {
			return
		}
	}
	b.clock.Lock()
	if soon := time.Now().Add(b.times.bodyLeft); soon.Before(b.last) {
		b.last = soon // also for a read that waits now
		_ = b.control.SetReadDeadline(soon)
	}
	b.clock.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == io.EOF {
		_ = b.control.SetReadDeadline(time.Time{}) // net/http waits for the next request, or for the client to leave
		return
	}
	if b.left {
		return
	}
	b.left = true
	if !b.asks {
		b.discardLocked(bodyLeftMax)
	}
	if b.err != io.EOF {
		_ = b.control.SetReadDeadline(longAgo)
	}
}

// finish is the end of the request.
func (b *timedBody) finish() {
	b.leave()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hold.release()
}

// passBody says that a handler reads the body as it comes and keeps nothing.
func passBody(r *http.Request) {
	if b, ok := r.Body.(*timedBody); ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.passed = true
	}
}

// lateBody tells whether a body did not come in time. Its handler's error may
// be another one: net/http ends a request's context when a read fails.
func lateBody(r *http.Request) bool {
	b, ok := r.Body.(*timedBody)
	if !ok {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Is(b.err, os.ErrDeadlineExceeded)
}
