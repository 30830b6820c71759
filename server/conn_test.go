package server

import (
	"bufio"
	"bytes"
	"compress/flate"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"rocket/client"
)

// rawSocket opens a WebSocket by hand, offering extensions as given, and returns what the server chose of them.
func rawSocket(t *testing.T, w *world, path, offer string) (conn net.Conn, r *bufio.Reader, chosen string) {
	t.Helper()
	host := strings.TrimPrefix(w.base, "http://")
	conn, err := net.Dial("tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	var key [16]byte
	_, _ = rand.Read(key[:])
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n",
		path, host, base64.StdEncoding.EncodeToString(key[:]))
	if offer != "" {
		fmt.Fprintf(conn, "Sec-WebSocket-Extensions: %s\r\n", offer)
	}
	fmt.Fprint(conn, "\r\n")
	r = bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("handshake: %+v, %v", resp, err)
	}
	return conn, r, resp.Header.Get("Sec-WebSocket-Extensions")
}

// readFrame reads one frame of a server.
func readFrame(t *testing.T, r *bufio.Reader) (compressed bool, payload []byte) {
	t.Helper()
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		t.Fatal(err)
	}
	n := uint64(head[1] & 0x7f)
	switch n {
	case 126:
		var b [2]byte
		_, _ = io.ReadFull(r, b[:])
		n = uint64(binary.BigEndian.Uint16(b[:]))
	case 127:
		var b [8]byte
		_, _ = io.ReadFull(r, b[:])
		n = binary.BigEndian.Uint64(b[:])
	}
	payload = make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		t.Fatal(err)
	}
	return head[0]&0x40 != 0, payload
}

// TestLongMessagesAreCompressed: for clients that offer it, as browsers do, without a window that would have to be kept;
// short ones never.
func TestLongMessagesAreCompressed(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	n := 40 // whose ids make one long event
	if _, err := w.api.Fork(w.ctx(), s.ID, client.ForkRequest{N: &n}, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	for offer, want := range map[string]string{
		"": "",
		"permessage-deflate; client_max_window_bits":                             "permessage-deflate; client_no_context_takeover; server_no_context_takeover", // Chromium, Firefox
		"permessage-deflate; server_max_window_bits=9":                           "",                                                                           // a window that we cannot keep to
		"permessage-deflate; server_max_window_bits=9, permessage-deflate":       "permessage-deflate; client_no_context_takeover; server_no_context_takeover",
		"permessage-deflate; server_no_context_takeover; client_max_window_bits": "permessage-deflate; client_no_context_takeover; server_no_context_takeover",
	} {
		conn, r, chosen := rawSocket(t, w, pathSessions+"/"+s.ID+"/stream", offer)
		if chosen != want {
			t.Errorf("offered %q, got %q, want %q", offer, chosen, want)
		}
		seen := map[bool]int{}
		for done := false; !done; {
			compressed, payload := readFrame(t, r)
			seen[compressed]++
			if compressed {
				// every message by itself: an empty dictionary
				plain, err := io.ReadAll(flate.NewReader(io.MultiReader(bytes.NewReader(payload), strings.NewReader("\x00\x00\xff\xff\x01\x00\x00\xff\xff"))))
				if err != nil {
					t.Fatalf("inflate: %v", err)
				}
				payload = plain
			}
			if compressed != (want != "" && len(payload) > compressMin) {
				t.Errorf("offered %q: a message of %d bytes, compressed %v", offer, len(payload), compressed)
			}
			done = bytes.Contains(payload, []byte(`"session.forked"`))
		}
		if want != "" && seen[true] == 0 || seen[false] == 0 {
			t.Errorf("offered %q: %d compressed messages, %d others", offer, seen[true], seen[false])
		}
		_ = conn.Close()
	}

	// A compressed message from a client, and its bound: what it becomes counts.
	p := w.dialWith(s.ID, "", &websocket.DialOptions{CompressionMode: websocket.CompressionNoContextTakeover, CompressionThreshold: 1})
	p.send(`{"type":"ping","ref":"` + strings.Repeat("r", 200) + `"}`)
	p.until("pong")
	_ = p.conn.Write(w.ctx(), websocket.MessageText, []byte(`{"type":"turn.create","input":"`+strings.Repeat("x", frameBytesMax)+`"}`))
	if code, _ := p.closed(); code != websocket.StatusMessageTooBig {
		t.Errorf("closed with %d", code)
	}
}

// countedConn counts the writes below a batchConn.
type countedConn struct {
	net.Conn
	writes int
	bytes  bytes.Buffer
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.writes++
	return c.bytes.Write(p)
}

func (c *countedConn) Read(p []byte) (int, error) { return copy(p, "later"), nil }

// TestWritesAreGathered: in their order, up to a bound, and only while they are held.
func TestWritesAreGathered(t *testing.T) {
	far, near := net.Pipe()
	defer far.Close()
	defer near.Close()
	below := &countedConn{Conn: near}
	c := &batchConn{Conn: below, timeout: patience, early: []byte("early")}
	var want bytes.Buffer
	put := func(n int, b byte) {
		t.Helper()
		p := bytes.Repeat([]byte{b}, n)
		want.Write(p)
		if n, err := c.Write(p); n != len(p) || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	put(10, 'a')
	if below.writes != 1 {
		t.Errorf("%d writes of one that is not held", below.writes)
	}
	c.hold()
	put(100, 'b')
	put(connHeldBytes-100, 'c')
	if below.writes != 1 {
		t.Errorf("%d writes while held", below.writes)
	}
	put(1, 'd') // one more than fits
	if below.writes != 2 || c.held.Len() != 1 {
		t.Errorf("%d writes, %d bytes held", below.writes, c.held.Len())
	}
	put(connHeldBytes+1, 'e') // what is before it first, then itself
	if below.writes != 4 || c.held.Len() != 0 {
		t.Errorf("%d writes, %d bytes held", below.writes, c.held.Len())
	}
	put(5, 'f')
	if err := c.release(); err != nil || below.writes != 5 || c.held != nil {
		t.Errorf("%d writes after the release, %v", below.writes, err)
	}
	if err := c.release(); err != nil || below.writes != 5 {
		t.Errorf("a second release wrote: %d, %v", below.writes, err)
	}
	if !bytes.Equal(below.bytes.Bytes(), want.Bytes()) {
		t.Error("what was written differs from what was put")
	}
	var got [3]byte
	for _, want := range []string{"ear", "ly", "lat"} {
		n, err := c.Read(got[:])
		if err != nil || string(got[:n]) != want {
			t.Errorf("read %q, %v, want %q", got[:n], err, want)
		}
	}
}
