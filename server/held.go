package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// What clients send is in memory until it is whole, and some never finish.
const (
	heldFreeBytes = 64 << 10  // of each body and frame, not counted below: connectionsMax bounds them
	heldBytesMax  = 512 << 20 // of all bodies and frames beyond that; more: 503, or close 1013
	heldTenantMax = 256 << 20 // of one tenant's: it leaves others their half
)

// heldBytes counts what bodies and frames hold.
type heldBytes struct {
	mu      sync.Mutex
	all     int64            // guarded by mu
	tenants map[string]int64 // guarded by mu; those that hold something
}

// take counts n more bytes of a tenant's, unless that is too much.
func (h *heldBytes) take(tenant string, n int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all+n > heldBytesMax || h.tenants[tenant]+n > heldTenantMax {
		return false
	}
	if h.tenants == nil {
		h.tenants = map[string]int64{}
	}
	h.all += n
	h.tenants[tenant] += n
	return true
}

func (h *heldBytes) give(tenant string, n int64) {
	if n == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all -= n
	if h.tenants[tenant] -= n; h.tenants[tenant] == 0 {
		delete(h.tenants, tenant)
	}
}

// holding is one body or frame that is being read.
type holding struct {
	held   *heldBytes
	tenant string
	read   int64
	taken  int64
}

// add counts n bytes that were read. An error says that they must not be kept.
func (h *holding) add(n int) error {
	h.read += int64(n)
	more := h.read - heldFreeBytes - h.taken
	if more <= 0 {
		return nil
	}
	if !h.held.take(h.tenant, more) {
		return codeProblem(codeHeldMax, fmt.Sprintf("request bodies hold too much memory: %d bytes of all, %d of one tenant's", heldBytesMax, heldTenantMax), "")
	}
	h.taken += more
	return nil
}

func (h *holding) release() {
	h.held.give(h.tenant, h.taken)
	h.read, h.taken = 0, 0
}

// closeTimeMax bounds the end of a socket. The library waits 5 s for the peer's
// close frame, but for as long as it takes for the rest of a frame that the
// peer has begun.
const closeTimeMax = 10 * time.Second

// wsConn is a WebSocket and the connection below it.
type wsConn struct {
	*websocket.Conn
	tcp *batchConn
}

// end sends a close frame, waits a little for the peer's, and closes.
func (c *wsConn) end(code websocket.StatusCode, reason string) {
	late := time.AfterFunc(closeTimeMax, func() { _ = c.tcp.Close() })
	defer late.Stop()
	_ = c.Close(code, reason) // the peer may be gone
}

// A socket that the library has ended with a close frame lingers: a connection
// that is closed with something unread is reset, and the peer may never see why.
const (
	lingerTime  = time.Second
	lingerBytes = 4 * frameBytesMax
)

// linger lets the peer read what was sent last.
func (c *wsConn) linger() {
	if c.tcp.CloseWrite() != nil || c.tcp.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, c.tcp.Conn, lingerBytes) // its end, mostly; the library may read beside it
}

// frameReader reads the frames of one socket. Only the socket's reader uses it.
type frameReader struct {
	server *Server
	conn   *wsConn
	hold   holding
}

func (s *Server) newFrameReader(conn *wsConn, tenant string) *frameReader {
	return &frameReader{server: s, conn: conn, hold: holding{held: &s.held, tenant: tenant}}
}

// next waits for a frame, for as long as it takes to begin, and reads it. The
// frame before counts as held until then. A frame larger than frameBytesMax is
// closed with 1009 by the library as soon as that many bytes have come: its
// header's word is not taken for it, so one that claims to be large and then
// stops is one that takes too long.
func (f *frameReader) next() (websocket.MessageType, []byte, error) {
	f.hold.release()
	kind, r, err := f.conn.Reader(context.Background())
	if err != nil {
		f.conn.linger()
		return 0, nil, fmt.Errorf("read frame: %w", err)
	}
	limit := f.server.opts.times.frame
	late := time.AfterFunc(limit, func() {
		f.server.closeSocket(f.conn, &closeError{websocket.StatusPolicyViolation, fmt.Sprintf("a frame took longer than %v", limit)})
	})
	defer late.Stop()
	data, err := io.ReadAll(&heldReader{r, &f.hold})
	if p, ok := errors.AsType[*Problem](err); ok {
		return 0, nil, &closeError{websocket.StatusTryAgainLater, p.Detail}
	}
	if err != nil {
		f.conn.linger()
		return 0, nil, fmt.Errorf("read frame: %w", err)
	}
	return kind, data, nil
}

// close gives back what the last frame held.
func (f *frameReader) close() { f.hold.release() }

type heldReader struct {
	io.Reader
	hold *holding
}

func (r *heldReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if e := r.hold.add(n); e != nil {
		return 0, e
	}
	return n, err
}
