package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/coder/websocket"

	"rocket/sessions"
)

// A socket's frames may name sessions of other servers. Each of those servers
// gets one socket from here for each client's socket that needs it: frames go
// there as they came, and what comes back goes to the client as it is. So a
// session's replies and events keep their order, a client that reads slowly
// holds up its own relays only, and when a relay ends the client's socket does.

const (
	relaysMax     = 16       // other servers that one socket may need; more: error frame
	relayFrameMax = 16 << 20 // of a server's frame: a delta of a long stall may be large
	refusalMax    = 64 << 10 // of an answer to a socket that was refused
	relayMoved    = "the server that has the session is gone: come back"
	relayCut      = "the connection to the server that has the session is lost: come back"
)

// relays are one socket's.
type relays struct {
	header http.Header                // the client's request's
	by     map[string]*websocket.Conn // only the socket's reader
	frame  sync.Mutex                 // held by the relay that has a frame of its server in memory
}

func newRelays(r *http.Request) *relays {
	if fromPeer(r) {
		return nil // what a server passed on is not passed on again
	}
	return &relays{header: r.Header, by: map[string]*websocket.Conn{}}
}

// peerHeader is what a server sends to another one in a caller's name.
func (s *Server) peerHeader(from http.Header) http.Header {
	h := http.Header{hopHeader: {s.manager.ID()}}
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if v := from.Values(name); len(v) > 0 {
			h[name] = v
		}
	}
	return h
}

// peerProtocols are the subprotocols of a socket in a caller's name; a browser
// has its key there.
func peerProtocols(from http.Header) []string {
	protocols := []string{subprotocol}
	for _, list := range from.Values("Sec-Websocket-Protocol") {
		for entry := range strings.SplitSeq(list, ",") {
			if entry = strings.TrimSpace(entry); strings.HasPrefix(entry, keyProtocol) {
				protocols = append(protocols, entry)
			}
		}
	}
	return protocols
}

// refusal is another server's answer to a socket that it did not open.
type refusal struct {
	status int
	header http.Header
	body   []byte
}

func (f *refusal) Error() string { return fmt.Sprintf("another server answered %d", f.status) }

// problem is the refusal for an error frame.
func (f *refusal) problem() *Problem {
	var p Problem
	if err := json.Unmarshal(f.body, &p); err != nil || p.Code == "" {
		return codeProblem(codePeerGone, f.Error(), "")
	}
	return &p
}

func (f *refusal) write(w http.ResponseWriter) {
	h := w.Header()
	for _, name := range []string{"Content-Type", "Retry-After", "Www-Authenticate"} {
		if v := f.header.Values(name); len(v) > 0 {
			h[name] = v
		}
	}
	w.WriteHeader(f.status)
	_, _ = w.Write(f.body) // the client is gone; nobody is left to tell
}

// keepRefusal is a transport that keeps the whole of a refusal, which the
// WebSocket library shortens.
type keepRefusal struct {
	http.RoundTripper
	kept *refusal
}

func (k *keepRefusal) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := k.RoundTripper.RoundTrip(r)
	if err != nil || resp.StatusCode == http.StatusSwitchingProtocols {
		return resp, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, refusalMax))
	if err != nil {
		return nil, err
	}
	k.kept = &refusal{resp.StatusCode, resp.Header, body}
	resp.Body = io.NopCloser(bytes.NewReader(nil))
	return resp, nil
}

// dialPeer opens a socket at another server in a caller's name. The error is a
// *refusal where that server answered otherwise.
func (s *Server) dialPeer(ctx context.Context, address, path, query string, from http.Header) (*websocket.Conn, error) {
	base, err := peerURL(address)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, peerAnswerTimeout, errPeerGone)
	defer cancel()
	transport := &keepRefusal{RoundTripper: s.peers.transport}
	base.Path, base.RawQuery = path, query
	conn, _, err := websocket.Dial(ctx, base.String(), &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: transport}, HTTPHeader: s.peerHeader(from), Subprotocols: peerProtocols(from),
	})
	if transport.kept != nil {
		return nil, transport.kept
	}
	if err != nil {
		return nil, fmt.Errorf("open a socket at another server: %w", err)
	}
	conn.SetReadLimit(relayFrameMax)
	return conn, nil
}

// openRelay opens a relay to the server that has a session, or says that the
// session is this server's by now.
func (s *Server) openRelay(ctx context.Context, p sessions.Place, path, query string, from http.Header) (conn *websocket.Conn, here bool, err error) {
	cut, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.Alive, func() { cancel(errPeerGone) })()
	conn, err = s.dialPeer(cut, p.Address, path, query, from)
	if err == nil {
		return conn, false, nil
	}
	if _, ok := errors.AsType[*refusal](err); ok {
		return nil, false, err
	}
	if notTaken(err) && cut.Err() == nil {
		here, err = s.unreachable(ctx, p, false) // not cut: who is faster to take it over says that it is gone
		return nil, here, err
	}
	s.log.Warn("another server did not open a socket", "server", p.Server, "address", p.Address, "err", err)
	return nil, false, errPeerGone
}

// relayStream serves a session's WebSocket when another server has the
// session: what comes before it opens is that server's answer.
func (s *Server) relayStream(w http.ResponseWriter, r *http.Request, p sessions.Place, next http.Handler) {
	err := checkOrigin(r)
	var end func()
	if err == nil {
		end, err = s.beginStream(r.Context())
	}
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	path := r.URL.Path
	peer, here, err := s.openRelay(r.Context(), p, path, r.URL.RawQuery, r.Header)
	if here {
		end()
		next.ServeHTTP(w, r)
		return
	}
	if f, ok := errors.AsType[*refusal](err); ok {
		end()
		f.write(w)
		return
	}
	if err != nil {
		end()
		writeProblem(w, s.problem(err))
		return
	}
	conn, err := s.accept(w, r)
	if err != nil {
		end()
		_ = peer.CloseNow()
		return
	}
	c := s.newSocket(conn, r, sessionOfPath(r.URL))
	c.start(end, func(ctx context.Context) error {
		c.addRelay(ctx, p, peer)
		return nil
	})
}

// relay passes a frame on to the server that has its session. done is false
// for one that is this server's to execute.
func (c *socket) relay(ctx context.Context, head FrameHead, raw []byte) (done bool, err error) {
	if c.relays == nil || head.Type == framePing {
		return false, nil
	}
	limited, cancel := context.WithTimeout(ctx, c.server.opts.CallTimeout)
	defer cancel()
	p, err := c.server.manager.Place(limited, c.who.Tenant, head.SessionID)
	if err != nil {
		return true, c.fail(ctx, head, c.server.problem(err))
	}
	if p.Here() {
		return false, nil
	}
	conn := c.relays.by[p.Server]
	if conn == nil {
		if len(c.relays.by) >= relaysMax {
			return true, c.fail(ctx, head, codeProblem(codeSubscriptionsMax, fmt.Sprintf("a socket reaches at most %d other servers", relaysMax), "session_id"))
		}
		path := strings.Replace(pathStream, "{id}", head.SessionID, 1)
		peer, here, err := c.server.openRelay(limited, p, path, "follow=false", c.relays.header)
		if here {
			return false, nil
		}
		if f, ok := errors.AsType[*refusal](err); ok {
			return true, c.fail(ctx, head, f.problem())
		}
		if err != nil {
			return true, c.fail(ctx, head, c.server.problem(err))
		}
		conn = peer
		c.addRelay(ctx, p, peer)
	}
	data, err := withSession(raw, head.SessionID)
	if err != nil {
		return true, fmt.Errorf("pass a frame on: %w", err)
	}
	c.server.metrics.proxied.Inc()
	wait, stop := context.WithTimeout(context.Background(), c.server.opts.WriteTimeout)
	defer stop()
	if err := conn.Write(wait, websocket.MessageText, data); err != nil {
		return true, &closeError{websocket.StatusServiceRestart, relayCut}
	}
	return true, nil
}

// addRelay lets frames of another server's socket come to the client, until
// either ends.
func (c *socket) addRelay(ctx context.Context, p sessions.Place, conn *websocket.Conn) {
	c.relays.by[p.Server] = conn
	stop := context.AfterFunc(p.Alive, func() { c.end(&closeError{websocket.StatusServiceRestart, relayMoved}) })
	context.AfterFunc(ctx, func() {
		stop()
		_ = conn.CloseNow()
	})
	c.all.Go(func() { c.end(c.guard(func() error { return c.pump(ctx, conn) })) })
}

// pump waits while the client does not read: so does the other server then,
// until the client lags too far behind and is sent away from there.
func (c *socket) pump(ctx context.Context, conn *websocket.Conn) error {
	for {
		_, r, err := conn.Reader(context.Background())
		if err != nil {
			return relayEnd(err)
		}
		if err := c.passBack(ctx, r); err != nil {
			return err
		}
	}
}

// passBack queues one frame of another server. What is large of it counts among
// the tenant's answers as it comes, and waits for room with the rest not read.
func (c *socket) passBack(ctx context.Context, r io.Reader) error {
	c.relays.frame.Lock()
	defer c.relays.frame.Unlock()
	counted, sent := sessions.CountAnswer(ctx)
	data, err := io.ReadAll(&countedReader{Reader: r, hold: func(n int64) error {
		return c.server.manager.HoldAnswer(counted, c.who.Tenant, n, true)
	}})
	if err == nil {
		return c.queue(counted, reply{data, sent})
	}
	sent()
	if e, ok := errors.AsType[*sessions.Error](err); ok {
		return &closeError{websocket.StatusTryAgainLater, e.Message}
	}
	return relayEnd(err)
}

// countedReader calls hold with how much it has read, past repliesFreeBytes.
type countedReader struct {
	io.Reader
	read int64
	hold func(bytes int64) error
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if r.read += int64(n); r.read > repliesFreeBytes {
		if e := r.hold(r.read); e != nil {
			return 0, e
		}
	}
	return n, err
}

// relayEnd is how a client's socket ends when a relay does. What the client
// has to know is passed on; everything else means that it comes back.
func relayEnd(err error) *closeError {
	var e websocket.CloseError
	if errors.As(err, &e) {
		switch e.Code {
		case websocket.StatusPolicyViolation, websocket.StatusTryAgainLater, websocket.StatusServiceRestart, websocket.StatusInternalError:
			return &closeError{e.Code, e.Reason}
		}
	}
	return &closeError{websocket.StatusServiceRestart, relayCut}
}

// withSession is a frame that names its session. One that does already is
// left as it is.
func withSession(raw []byte, id string) ([]byte, error) {
	var head struct {
		SessionID string `json:"session_id"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return nil, err
	}
	if head.SessionID != "" {
		return raw, nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, err
	}
	name, err := json.Marshal(id)
	if err != nil {
		return nil, err
	}
	object["session_id"] = name
	return json.Marshal(object)
}
