package server

import (
	"errors"
	"io"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/go-chi/chi/v5"
)

// observe is the outermost layer, inside the router so that it knows the route: it counts and times requests, turns panics
// into 500, and gives every write to a client a deadline.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin := time.Now()
		rec := &recorder{ResponseWriter: w, control: http.NewResponseController(w), timeout: s.opts.WriteTimeout}
		defer func() {
			if v := recover(); v != nil {
				if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
					panic(v)
				}
				if r.Context().Err() != nil { // huma panics when the client went away in mid-answer
					s.log.Debug("client gone", "method", r.Method, "path", r.URL.Path, "err", v)
				} else {
					s.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "panic", v, "stack", string(debug.Stack()))
				}
				if rec.status == 0 {
					writeProblem(rec, codeProblem(codeInternal, "internal error; the server's log has the cause", ""))
				}
			}
			route := chi.RouteContext(r.Context()).RoutePattern()
			if rec.proxied {
				route = "proxied"
			}
			s.metrics.request(r.Method, route, rec.status, time.Since(begin), rec.stream)
			s.log.Debug("request", "method", r.Method, "path", r.URL.Path, "status", rec.status, "took", time.Since(begin))
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
	status  int
	stream  bool // a socket or an event stream: its duration says nothing
	proxied bool // another server answered
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
func (w *recorder) extend() { _ = w.control.SetWriteDeadline(time.Now().Add(w.timeout)) }

// Unwrap lets http.ResponseController and the WebSocket upgrade through.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

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

// limitBody gives every read of a request body a deadline and takes it away at
// the end: a deadline that stays would cancel requests that wait for a turn.
// The size limit is huma's (bodyBytesMax); what no handler reads is bounded by
// net/http.
func limitBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != nil && r.Body != http.NoBody {
			r.Body = &timedBody{ReadCloser: r.Body, control: http.NewResponseController(w), last: time.Now().Add(bodyTimeMax)}
		}
		next.ServeHTTP(w, r)
	})
}

type timedBody struct {
	io.ReadCloser
	control *http.ResponseController
	last    time.Time // no read goes on after it
}

func (b *timedBody) Read(p []byte) (int, error) {
	deadline := time.Now().Add(bodyReadTimeout)
	if b.last.Before(deadline) {
		deadline = b.last
	}
	_ = b.control.SetReadDeadline(deadline)
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// Close reads on for a while where the body is too large, so that the client
// gets to read the refusal instead of a reset connection.
func (b *timedBody) Close() error {
	_, _ = io.CopyN(io.Discard, b, bodyDiscardMax) // the end, or more than anybody should send
	_ = b.control.SetReadDeadline(time.Time{})
	return b.ReadCloser.Close()
}
