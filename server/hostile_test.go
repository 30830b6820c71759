package server

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"rocket/client"
	"rocket/sessions"
)

// hostile is a server whose patience is short, with one tenant that attacks
// and one that works.
type hostile struct {
	*world
	key    sessions.NewKey // the attacker's
	victim *client.Client
	sid    string // the attacker's session
	work   string // the victim's
}

// shortTimes end slow clients soon, and not those that a busy machine holds up
// for a moment.
var shortTimes = times{
	header: 2 * time.Second, bodyRead: time.Second, bodyAll: 1500 * time.Millisecond, bodyLeft: time.Second, frame: 1500 * time.Millisecond, idle: 2 * time.Second,
}

func startHostile(t *testing.T, opts worldOptions) *hostile {
	t.Helper()
	opts.server.RequireKeys = true
	if opts.server.times == (times{}) {
		opts.server.times = shortTimes
	}
	h := &hostile{world: start(t, opts)}
	var attacker *client.Client
	h.key, attacker = h.world.key("attacker", false)
	_, h.victim = h.world.key("victim", false)
	h.sid = h.createBy(attacker, "func main() {").ID
	attacker.Close()
	h.work = h.createBy(h.victim, "package main").ID
	return h
}

// works fails the test unless another client's turn runs to its end. The server
// is short of patience with that client too, and on a busy machine it may be
// slow once.
func (h *hostile) works() {
	h.t.Helper()
	var err error
	for range 3 {
		var turn client.Turn
		if turn, err = h.victim.RunTurn(h.ctx(), h.work, greedy(3), client.CallOptions{}); err == nil {
			if len(turn.Tokens) != 3 {
				h.t.Errorf("another client's turn has %d tokens", len(turn.Tokens))
			}
			return
		}
	}
	h.t.Errorf("another client's turn: %v", err)
}

// settled fails the test unless what an attack took is given back.
func (h *hostile) settled(goroutines int) {
	h.t.Helper()
	what := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		h.server.streamMu.Lock()
		streams := h.server.streamed
		h.server.streamMu.Unlock()
		h.server.held.mu.Lock()
		held, tenants := h.server.held.all, len(h.server.held.tenants)
		h.server.held.mu.Unlock()
		h.victim.Close() // its connections that wait are goroutines too
		now := runtime.NumGoroutine()
		if streams == 0 && held == 0 && tenants == 0 && now <= goroutines {
			return
		}
		what = fmt.Sprintf("%d streams, %d bytes held, %d goroutines of %d before", streams, held, now, goroutines)
	}
	stacks := make([]byte, 1<<20)
	h.t.Errorf("after the attack: %s\n%s", what, stacks[:runtime.Stack(stacks, true)])
}

// goroutines is how many there are when nobody is connected.
func (h *hostile) goroutines() int {
	h.victim.Close()
	h.api.Close()
	return runtime.NumGoroutine() + 4 // of pools that come and go: those of the ledger, the engine and the test itself
}

// rawConn is a client that sends whatever it likes.
type rawConn struct {
	net.Conn
	t  testing.TB
	in *bufio.Reader
}

func (h *hostile) connect() *rawConn {
	h.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.base, "http://"))
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { conn.Close() })
	_ = conn.SetReadDeadline(time.Now().Add(patience)) // nothing waits as long as that in a good run
	return &rawConn{conn, h.t, bufio.NewReader(conn)}
}

// put sends; a server that does not want any more is no fault of the test.
func (c *rawConn) put(text string) bool {
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	_, err := io.WriteString(c, text)
	return err == nil
}

// answer reads one HTTP answer; status 0: the connection ended without one.
func (c *rawConn) answer() answered {
	c.t.Helper()
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		if errors.Is(err, errTimeout(err)) {
			c.t.Errorf("the server neither answers nor ends it")
		}
		return answered{}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil && errors.Is(err, errTimeout(err)) {
		c.t.Errorf("the answer does not end: %.300s", body)
	}
	return answered{resp.StatusCode, resp.Header, body}
}

// errTimeout is err if it is a timeout.
func errTimeout(err error) error {
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return err
	}
	return errors.ErrUnsupported
}

// ends fails the test unless the server ends the connection.
func (c *rawConn) ends(what string) {
	c.t.Helper()
	if _, err := io.Copy(io.Discard, c.in); errors.Is(err, errTimeout(err)) {
		c.t.Errorf("%s: the connection stays open", what)
	}
}

// with is the head of a request with the attacker's key, but for the empty line.
func (h *hostile) with(line string, header ...string) string {
	return line + " HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + h.key.Secret + "\r\n" + strings.Join(append(header, ""), "\r\n")
}

// upgrade opens a WebSocket by hand.
func (h *hostile) upgrade(path string, header ...string) *rawConn {
	h.t.Helper()
	c, resp, err := h.tryUpgrade(path, header...)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		h.t.Fatalf("upgrade: %v, %v", resp, err)
	}
	return c
}

func (h *hostile) tryUpgrade(path string, header ...string) (*rawConn, *http.Response, error) {
	h.t.Helper()
	c := h.connect()
	c.put(h.with("GET "+path, append(header, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")...) + "\r\n")
	resp, err := http.ReadResponse(c.in, nil)
	return c, resp, err
}

func (h *hostile) stream() *rawConn { return h.upgrade(pathSessions + "/" + h.sid + "/stream") }

// Frames' first byte.
const (
	fin, rsv1, rsv2, rsv3                              = 0x80, 0x40, 0x20, 0x10
	opContinue, opText, opBinary, opClose, opPing byte = 0, 1, 2, 8, 9
)

// rawFrame is a masked frame that claims a length, whatever comes of it.
func rawFrame(first byte, claimed uint64, payload string) string {
	var b bytes.Buffer
	b.WriteByte(first)
	switch {
	case claimed < 126:
		b.WriteByte(0x80 | byte(claimed))
	case claimed < 1<<16:
		b.WriteByte(0x80 | 126)
		_ = binary.Write(&b, binary.BigEndian, uint16(claimed))
	default:
		b.WriteByte(0x80 | 127)
		_ = binary.Write(&b, binary.BigEndian, claimed)
	}
	var mask [4]byte
	_, _ = rand.Read(mask[:])
	b.Write(mask[:])
	for i := range len(payload) {
		b.WriteByte(payload[i] ^ mask[i%4])
	}
	return b.String()
}

func textFrame(text string) string { return rawFrame(fin|opText, uint64(len(text)), text) }

// closed reads frames to the end of a socket: the text that came, and the close
// code, 0 where the connection was cut without one.
func (c *rawConn) closed() (texts []string, code int, reason string) { return c.closedAfter("", "") }

// closedAfter is closed, and sends last when text has come.
func (c *rawConn) closedAfter(text, last string) (texts []string, code int, reason string) {
	c.t.Helper()
	defer c.Close() // the server need not wait for our close frame
	for {
		var head [2]byte
		if _, err := io.ReadFull(c.in, head[:]); err != nil {
			if errors.Is(err, errTimeout(err)) {
				c.t.Errorf("the socket stays open after %.300q", texts)
			}
			return texts, 0, ""
		}
		n := int64(head[1] & 0x7f)
		switch n {
		case 126:
			var length uint16
			_ = binary.Read(c.in, binary.BigEndian, &length)
			n = int64(length)
		case 127:
			_ = binary.Read(c.in, binary.BigEndian, &n)
		}
		payload := make([]byte, n)
		if _, err := io.ReadFull(c.in, payload); err != nil {
			return texts, 0, ""
		}
		switch head[0] & 0xf {
		case opText:
			texts = append(texts, string(payload))
			if text != "" && strings.Contains(string(payload), text) {
				c.put(last)
			}
		case opClose:
			if len(payload) < 2 {
				return texts, 1005, ""
			}
			return texts, int(binary.BigEndian.Uint16(payload)), string(payload[2:])
		}
	}
}

// heap is what is live.
func heap() int64 {
	runtime.GC()
	runtime.GC() // pools need two
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
