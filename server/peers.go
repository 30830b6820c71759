package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"rocket/sessions"
)

// Several servers share a ledger, and each session's calls belong to the one
// that has it (sessions.Place). A call that comes to another one is passed on,
// once: with the caller's own credentials, which the owner checks anew, and
// with its idempotency key, so that a client may repeat what was cut.
//
//   - Calls and event streams are proxied (here), sockets relayed frame by
//     frame (relay.go), watches fanned in (peers_watch.go).
//   - What waits for a server that is found gone is cut: calls get 503, streams
//     end, sockets close with 1012. Their clients come back and are placed anew.
//   - No address of a client is passed on: whoever calls could make one up, and
//     nothing here asks for it.

const (
	// hopHeader marks what a server sends to another one; its value is the
	// sender's id. Such a call is never passed on again, so there are no loops.
	// It gives no rights: a client that sets it is served by whom it called.
	hopHeader = "Rocket-Hop"

	peerDialTimeout   = 3 * time.Second // a connection that takes longer was not taken
	peerTLSTimeout    = 5 * time.Second
	peerAnswerTimeout = 10 * time.Second // until a socket is open; then 503
	peerIdleMax       = 64               // connections to one server that are kept for the next calls
	peerIdleTimeout   = time.Minute      // of them; less than idleTimeout, or the other end closes them under a call
	peerBufferBytes   = 32 << 10         // of an answer that is passed on, at a time
	peerListFor       = time.Second      // a list of the servers is good for so long
)

var (
	errPeerGone    = errors.New("the server that has the session is gone")
	errPeerAddress = errors.New("address of a server")
)

// peers is what a server has to do with the others of its ledger.
type peers struct {
	transport *http.Transport
	buffers   sync.Pool
	loop      sync.Once // says in the log that an address leads back here

	mu     sync.Mutex
	list   []sessions.Server // guarded by mu
	listed time.Time         // guarded by mu
}

func newPeers(roots *x509.CertPool) *peers {
	dial := net.Dialer{Timeout: peerDialTimeout}
	return &peers{
		transport: &http.Transport{ // HTTP/1.1: sockets need it
			DialContext:            dial.DialContext,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
			TLSHandshakeTimeout:    peerTLSTimeout,
			DisableCompression:     true,
			MaxIdleConns:           0,
			MaxIdleConnsPerHost:    peerIdleMax,
			IdleConnTimeout:        peerIdleTimeout,
			MaxResponseHeaderBytes: headerBytesMax,
		},
		buffers: sync.Pool{New: func() any { return new([peerBufferBytes]byte) }},
	}
}

// Get and Put make peers a httputil.BufferPool.
func (p *peers) Get() []byte { return p.buffers.Get().(*[peerBufferBytes]byte)[:] }

// Put takes a buffer back.
func (p *peers) Put(b []byte) { p.buffers.Put((*[peerBufferBytes]byte)(b)) }

// servers lists the servers of the ledger, as they were a moment ago.
func (s *Server) servers(ctx context.Context) ([]sessions.Server, error) {
	p := s.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.list != nil && time.Since(p.listed) < peerListFor {
		return p.list, nil
	}
	list, err := s.manager.Servers(ctx)
	if err == nil {
		p.list, p.listed = list, time.Now()
	}
	return list, err
}

// sessionOfPath is the session that a path is about, as the router would see
// it, "" for none.
func sessionOfPath(u *url.URL) string {
	path := u.RawPath
	if path == "" {
		path = u.Path
	}
	rest, ok := strings.CutPrefix(path, pathSessions+"/")
	if !ok {
		return ""
	}
	id, _, _ := strings.Cut(rest, "/")
	return id
}

// fromPeer tells whether another server sent a request.
func fromPeer(r *http.Request) bool { return r.Header.Get(hopHeader) != "" }

// place serves what is this server's to serve and passes the rest on.
func (s *Server) place(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if hop := r.Header.Get(hopHeader); hop != "" {
			if hop == s.manager.ID() {
				s.peers.loop.Do(func() {
					s.log.Error("the address of another server leads back to this one: each needs an --advertise of its own", "host", r.Host)
				})
				writeProblem(w, s.problem(errPeerAddress))
				return
			}
			next.ServeHTTP(w, mayAskOthers(r))
			return
		}
		id := sessionOfPath(r.URL)
		if id == "" {
			next.ServeHTTP(w, r)
			return
		}
		p, err := s.manager.Place(r.Context(), tenantOf(r.Context()), id)
		switch {
		case err != nil && (!isRead(r) || sessions.ErrorCode(err) == sessions.CodeQuarantined && (isSocket(r) || isEventStream(r))):
			writeProblem(w, s.problem(err))
		case err != nil || p.Here(): // of what is in memory reads need no ledger
			next.ServeHTTP(w, mayAskOthers(r))
		case isSocket(r):
			s.relayStream(w, r, p, next)
		default:
			s.proxy(w, r, p, next)
		}
	})
}

// mayAskOthers readies a request for a call that may have to ask other servers
// to let go of sessions.
func mayAskOthers(r *http.Request) *http.Request {
	if r.Method != http.MethodDelete {
		return r
	}
	return r.WithContext(withCredentials(r.Context(), r.Header))
}

func isRead(r *http.Request) bool { return r.Method == http.MethodGet || r.Method == http.MethodHead }

// isSocket tells whether a request opens a session's WebSocket.
func isSocket(r *http.Request) bool {
	return r.Method == http.MethodGet && r.Header.Get("Upgrade") != "" && strings.HasSuffix(r.URL.Path, "/stream")
}

// isEventStream tells whether the answer to a request goes on until somebody leaves.
func isEventStream(r *http.Request) bool {
	return isRead(r) && strings.HasSuffix(r.URL.Path, "/events") && strings.Contains(r.Header.Get("Accept"), "text/event-stream")
}

// proxied is one call on its way to another server.
type proxied struct {
	server *Server
	place  sessions.Place
	base   *url.URL
	r      *http.Request   // the caller's
	ctx    context.Context // its context, cut when the other server is found gone or this one closes
	body   *notedBody
	stream bool
	end    func() // of the stream's place among those of this server
	next   http.Handler
}

// proxy passes a call on and its answer back.
func (s *Server) proxy(w http.ResponseWriter, r *http.Request, p sessions.Place, next http.Handler) {
	base, err := peerURL(p.Address)
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(p.Alive, func() { cancel(errPeerGone) })()
	defer context.AfterFunc(s.closing, func() { cancel(errDraining) })()
	c := &proxied{server: s, place: p, base: base, r: r, ctx: ctx, stream: isEventStream(r), end: func() {}, next: next}
	if c.stream {
		end, err := s.beginStream(r.Context())
		if err != nil {
			writeProblem(w, s.problem(err))
			return
		}
		markStream(w)
		s.metrics.sse.Inc()
		c.end = sync.OnceFunc(func() {
			s.metrics.sse.Dec()
			end()
		})
		defer c.end()
	}
	out := r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		passBody(r)
		c.body = &notedBody{ReadCloser: r.Body}
		out.Body = c.body
	}
	s.metrics.proxied.Inc()
	(&httputil.ReverseProxy{
		Rewrite: c.rewrite, ModifyResponse: func(resp *http.Response) error { return c.answer(w, resp) }, ErrorHandler: c.failed,
		Transport: s.peers.transport, BufferPool: s.peers, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}).ServeHTTP(w, out)
}

// rewrite makes the other server's request. Where the caller's page comes from
// was checked here, and means nothing under the other's name.
func (c *proxied) rewrite(pr *httputil.ProxyRequest) {
	out := pr.Out
	out.URL.Scheme, out.URL.Host = c.base.Scheme, c.base.Host
	out.URL.RawQuery = pr.In.URL.RawQuery // as it came, for the same refusal
	out.Host = ""
	out.Close = out.Method == http.MethodHead && c.stream // the other end goes on and on after the header
	h := out.Header
	h.Set(hopHeader, c.server.manager.ID())
	for _, name := range []string{"Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest", "Expect", "Upgrade", "Connection"} {
		h.Del(name)
	}
}

// answer readies an answer to be passed back.
func (c *proxied) answer(w http.ResponseWriter, resp *http.Response) error {
	markProxied(w)
	own := w.Header()
	for name := range resp.Header { // what both servers say is said once
		own.Del(name)
	}
	if resp.StatusCode == http.StatusUpgradeRequired { // proxies take it for their own
		resp.Header.Set("Upgrade", "websocket")
		resp.Header.Set("Connection", "Upgrade")
	}
	if c.stream {
		resp.Body = endingBody{resp.Body}
	}
	return nil
}

// failed answers when the other server has not.
func (c *proxied) failed(w http.ResponseWriter, _ *http.Request, err error) {
	s := c.server
	cause := context.Cause(c.ctx)
	switch {
	case errors.Is(cause, errDraining):
		writeProblem(w, s.problem(cause))
	case c.r.Context().Err() != nil:
		writeProblem(w, s.problem(c.r.Context().Err())) // the client has left: for the metrics
	case notTaken(err): // nothing was sent: also where somebody else has found that server gone meanwhile
		here, err := s.unreachable(c.r.Context(), c.place, isRead(c.r) && !c.stream)
		if err != nil {
			writeProblem(w, s.problem(err))
			return
		}
		c.end()
		if here {
			keepBody(c.r)
			c.next.ServeHTTP(w, c.r)
		}
	case errors.Is(cause, errPeerGone):
		writeProblem(w, s.problem(cause))
	case c.body.problem() != nil:
		writeProblem(w, c.body.problem())
	default:
		s.log.Warn("another server did not answer a call", "server", c.place.Server, "address", c.place.Address, "err", err)
		writeProblem(w, s.problem(errPeerGone))
	}
}

// unreachable is for a server that did not take a connection: its calls are
// this server's when it can be taken over, and reads in any case: the ledger
// has what it committed.
func (s *Server) unreachable(ctx context.Context, p sessions.Place, read bool) (here bool, err error) {
	taken, err := s.manager.Unreachable(ctx, p.Server)
	switch {
	case err != nil:
		return false, err
	case taken || read:
		return true, nil
	}
	return false, errPeerGone
}

// notTaken tells whether an error means that there is no connection, so that
// nothing of a call can have arrived.
func notTaken(err error) bool {
	e, ok := errors.AsType[*net.OpError](err)
	return ok && e.Op == "dial"
}

func peerURL(address string) (*url.URL, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%w: %q", errPeerAddress, address)
	}
	return u, nil
}

// notedBody remembers why reading a request's body failed: that is the
// client's fault, not the other server's.
type notedBody struct {
	io.ReadCloser
	mu  sync.Mutex
	err error // guarded by mu
}

func (b *notedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		b.mu.Lock()
		b.err = err
		b.mu.Unlock()
	}
	return n, err
}

// problem is what the owner itself would answer; nil: the body is not to blame.
func (b *notedBody) problem() *Problem {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err == nil:
		return nil
	case errors.Is(b.err, os.ErrDeadlineExceeded):
		return codeProblem(codeBodyTimeout, "request body read timeout", "body")
	}
	return codeProblem(codeMalformed, "the request body ended early", "body")
}

// keepBody takes passBody back: the body is decoded here after all.
func keepBody(r *http.Request) {
	if b, ok := r.Body.(*timedBody); ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.passed = false
	}
}

// endingBody is an event stream that ends instead of failing: its reader
// comes back for the rest in either case.
type endingBody struct{ io.ReadCloser }

func (b endingBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		err = io.EOF
	}
	return n, err
}
