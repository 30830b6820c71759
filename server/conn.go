package server

import (
	"bufio"
	"bytes"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// A socket's buffers of its own. Frames are gathered in a shared buffer while
	// they are written, and a client's long frame is read past the small one.
	connReadBytes  = 512
	connWriteBytes = 128 // a control frame with its header

	// connHeldBytes is how much is gathered for one write; what is more goes out
	// before.
	connHeldBytes = 16 << 10
)

// batchConn is a socket's connection below the WebSocket library: it gathers frames
// into one write, and bounds the time of each. Without that, every frame would
// be a system call and a timer.
type batchConn struct {
	net.Conn
	timeout time.Duration // of a write, and up to a quarter more: deadlines are not renewed for each
	early   []byte        // what came with the handshake; only the one that reads

	mu       sync.Mutex    // held over writes; Close does without
	held     *bytes.Buffer // guarded by mu; not nil: gather here
	deadline time.Time     // guarded by mu; of writes
}

var heldBuffers = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, connHeldBytes)) }}

func (c *batchConn) Read(p []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(p, c.early)
		c.early = c.early[n:]
		return n, nil
	}
	c.early = nil
	return c.Conn.Read(p)
}

func (c *batchConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil {
		return c.writeLocked(p)
	}
	if c.held.Len() > 0 && c.held.Len()+len(p) > connHeldBytes {
		if err := c.flushLocked(); err != nil {
			return 0, err
		}
	}
	if len(p) > connHeldBytes {
		return c.writeLocked(p)
	}
	return c.held.Write(p)
}

// CloseWrite ends this side only, after what was gathered.
func (c *batchConn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held != nil {
		if err := c.flushLocked(); err != nil {
			return err
		}
	}
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// hold gathers what is written from now on, up to release.
func (c *batchConn) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil {
		c.held = heldBuffers.Get().(*bytes.Buffer)
	}
}

// release writes what was gathered.
func (c *batchConn) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil {
		return nil
	}
	err := c.flushLocked()
	c.held.Reset()
	heldBuffers.Put(c.held)
	c.held = nil
	return err
}

func (c *batchConn) flushLocked() error {
	if c.held.Len() == 0 {
		return nil
	}
	_, err := c.writeLocked(c.held.Bytes())
	c.held.Reset()
	return err
}

func (c *batchConn) writeLocked(p []byte) (int, error) {
	if now := time.Now(); c.deadline.Sub(now) < c.timeout {
		c.deadline = now.Add(c.timeout + c.timeout/4)
		if err := c.SetWriteDeadline(c.deadline); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(p)
}

// takeOver hijacks a connection from net/http, without its buffers: when the
// handler returns nothing of net/http's is left.
func takeOver(control *http.ResponseController, timeout time.Duration) (*batchConn, *bufio.ReadWriter, error) {
	conn, rw, err := control.Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, _ := rw.Peek(rw.Reader.Buffered()) // it has them
	c := &batchConn{Conn: conn, timeout: timeout, early: bytes.Clone(early)}
	return c, bufio.NewReadWriter(bufio.NewReaderSize(c, connReadBytes), bufio.NewWriterSize(c, connWriteBytes)), nil
}
