package server

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"rocket/client"
)

// dribble sends text again and again, with pauses, until the server ends the
// connection: a client that is never done.
func (c *rawConn) dribble(text string) {
	for c.put(text) {
		time.Sleep(20 * time.Millisecond) // the pace of the attack
	}
}

// TestSlowClients: whoever sends slowly, or stops, is ended or answered, with
// or without a key, and takes nothing from others meanwhile.
func TestSlowClients(t *testing.T) {
	const each = 2
	h := startHostile(t, worldOptions{})
	before := h.goroutines()
	base := heap()
	json := "Content-Type: application/json"
	post := h.with("POST "+pathSessions, json)
	plain := func(status ...int) func(string, *rawConn) {
		return func(name string, c *rawConn) {
			if a := c.answer(); !slices.Contains(status, a.status) {
				t.Errorf("%s: status %d %s, want %d", name, a.status, a.body, status)
			}
			c.ends(name + ": after the answer")
		}
	}
	// a connection may be closed without an answer, as net/http does for headers
	cut := func(name string, c *rawConn) {
		if a := c.answer(); a.status != 0 && a.status != http.StatusRequestTimeout && a.status != http.StatusBadRequest && a.status != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("%s: status %d", name, a.status)
		}
		c.ends(name)
	}
	policy := func(name string, c *rawConn) {
		if _, code, reason := c.closed(); code != 1008 || !strings.Contains(reason, "longer than") {
			t.Errorf("%s: close %d %q", name, code, reason)
		}
	}
	var all sync.WaitGroup
	for name, a := range map[string]struct {
		open  func() *rawConn
		first string
		again string // is sent until the end
		end   func(string, *rawConn)
	}{
		"nothing":                 {h.connect, "", "", cut},
		"half a line":             {h.connect, "GET /v1/ses", "", cut},
		"headers without an end":  {h.connect, "GET / HTTP/1.1\r\nHost: localhost\r\n", "X-A: b\r\n", cut},
		"a header without an end": {h.connect, "GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", "b", cut},
		"half a handshake":        {h.connect, h.with("GET "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: websocket"), "", cut},
		"no body":                 {h.connect, post + "Content-Length: 100\r\n\r\n", "", plain(http.StatusRequestTimeout)},
		"half a body":             {h.connect, post + "Content-Length: 100\r\n\r\n{", "", plain(http.StatusRequestTimeout)},
		"a body that takes long":  {h.connect, post + "Content-Length: 1000000\r\n\r\n", " ", plain(http.StatusRequestTimeout)},
		"half a chunk":            {h.connect, post + "Transfer-Encoding: chunked\r\n\r\nff\r\n{", "", plain(http.StatusRequestTimeout)},
		"chunks without an end":   {h.connect, post + "Transfer-Encoding: chunked\r\n\r\n", "1\r\n \r\n", plain(http.StatusRequestTimeout)},
		"trailers without an end": {h.connect, post + "Transfer-Encoding: chunked\r\n\r\n0\r\n", "X-A: b\r\n", plain(http.StatusBadRequest)},
		"body that waits to be asked": {h.connect, post + "Expect: 100-continue\r\nContent-Length: 100\r\n\r\n", "", func(name string, c *rawConn) {
			if a := c.answer(); a.status != http.StatusContinue {
				t.Errorf("%s: status %d", name, a.status)
			}
			plain(http.StatusRequestTimeout)(name, c)
		}},
		"half a bundle":                      {h.connect, h.with("POST "+pathImport, "Content-Type: "+bundleType, "Content-Length: 1000000") + "\r\n{\"type\":", "", plain(http.StatusRequestTimeout, http.StatusServiceUnavailable)}, // one at a time
		"no key, half a body":                {h.connect, "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", "", plain(http.StatusUnauthorized)},
		"no key, slow body":                  {h.connect, "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{", " ", plain(http.StatusUnauthorized)},
		"no key, waits":                      {h.connect, "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n", "", plain(http.StatusUnauthorized)},
		"open route, half a body":            {h.connect, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", "", plain(http.StatusOK)},
		"long answer, half a body":           {h.connect, "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{", "", plain(http.StatusOK)},
		"answer without a body, half a body": {h.connect, h.with("DELETE "+pathSessions+"/"+nowhere, "Content-Length: 9") + "\r\n{", "", plain(http.StatusNotFound)},
		"idle after a request":               {h.connect, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", "", plain(http.StatusOK)},

		"half a frame":                   {h.stream, rawFrame(fin|opText, 1000, "{"), "", policy},
		"a huge claim":                   {h.stream, rawFrame(fin|opText, 1<<40, "{"), "", policy},
		"a frame that takes long":        {h.stream, rawFrame(fin|opText, 900_000, ""), "{", policy},
		"fragments without an end":       {h.stream, rawFrame(opText, 1, "{"), rawFrame(opContinue, 1, " "), policy},
		"empty fragments without an end": {h.stream, rawFrame(opText, 0, ""), rawFrame(opContinue, 0, ""), policy},
		"pings in a message":             {h.stream, rawFrame(opText, 1, "{"), rawFrame(fin|opPing, 0, ""), policy},
		"half a frame of a watch":        {func() *rawConn { return h.upgrade(pathWatch) }, rawFrame(fin|opText, 1<<40, "{"), "", policy},
	} {
		for range each {
			all.Go(func() {
				c := a.open()
				c.put(a.first)
				if a.again != "" {
					go c.dribble(a.again)
				}
				a.end(name, c)
				c.Close()
			})
		}
	}
	for range 3 { // they are all under way
		h.works()
	}
	all.Wait()
	h.works()
	h.settled(before)
	if grown := heap() - base; grown > 16<<20 {
		t.Errorf("%d bytes more are live after the attack", grown)
	}
}

// TestReadersThatStop: a client that takes nothing of its stream, or of an
// answer, is cut after WriteTimeout and holds nothing from then on; the turn
// it would not look at ends.
func TestReadersThatStop(t *testing.T) {
	const each = 4
	h := startHostile(t, worldOptions{
		server:   Options{WriteTimeout: 500 * time.Millisecond, Heartbeat: 100 * time.Millisecond},
		listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} },
	})
	before := h.goroutines()
	attacker, err := client.New(h.base, client.Options{APIKey: h.key.Secret})
	if err != nil {
		t.Fatal(err)
	}
	defer attacker.Close()
	if _, err := attacker.RunTurn(h.ctx(), h.sid, greedy(1000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	base := heap()
	var open []*rawConn
	for range each {
		for _, accept := range []string{"text/event-stream", "application/json"} {
			c := h.connect()
			_ = c.Conn.(*net.TCPConn).SetReadBuffer(1 << 10)
			c.put(h.with("GET "+pathSessions+"/"+h.sid+"/events", "Accept: "+accept) + "\r\n")
			open = append(open, c)
		}
		c := h.stream()
		_ = c.Conn.(*net.TCPConn).SetReadBuffer(1 << 10)
		c.put(strings.Repeat(textFrame(`{"type":"subscribe","session_id":"`+h.sid+`"}`), 200))
		open = append(open, c)
	}
	h.works()
	h.settled(before)
	if grown := heap() - base; grown > 16<<20 {
		t.Errorf("%d bytes more are live after the attack", grown)
	}
	for _, c := range open { // up to here their side was open
		c.Close()
	}
	h.works()
}

// TestUnfinishedRequestsAreCounted: what large bodies and frames hold that are
// never finished is known, is not much more than was sent, and goes with them.
func TestUnfinishedRequestsAreCounted(t *testing.T) {
	const sockets, frame, bodies = 32, frameBytesMax - 1<<10, 6
	h := startHostile(t, worldOptions{server: Options{times: standardTimes}})
	before := h.goroutines()
	base := heap()
	part := strings.Repeat("x", frame)
	var open []*rawConn
	for range sockets {
		c := h.stream()
		open = append(open, c)
		go c.put(rawFrame(fin|opText, frame+1, part))
	}
	for range bodies {
		c := h.connect()
		open = append(open, c)
		go c.put(h.with("POST "+pathSessions, "Content-Type: application/json", fmt.Sprintf("Content-Length: %d", bodyBytesMax)) + "\r\n" + strings.Repeat(part[:1<<20-1<<10], 7))
	}
	sent := int64(sockets*frame + bodies*7*(1<<20-1<<10))
	counted := func() int64 {
		h.server.held.mu.Lock()
		defer h.server.held.mu.Unlock()
		return h.server.held.all
	}
	for ctx := h.ctx(); counted() < sent-(sockets+bodies)*(heldFreeBytes+512<<10); { // a reader takes a frame by pieces of its buffer
		if ctx.Err() != nil {
			t.Fatalf("%d bytes are counted of %d", counted(), sent)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if grown := heap() - base; grown > 3*sent+(32<<20) { // the test has its own copies
		t.Errorf("%d bytes are live for %d that were sent", grown, sent)
	}
	h.works()
	for _, c := range open {
		c.Close()
	}
	open = nil
	h.settled(before)
	if grown := heap() - base; grown > 16<<20 {
		t.Errorf("%d bytes are live when all is over", grown)
	}
}

// TestSlowBodiesOverHTTP2: there a connection has many requests, and the same
// bounds hold for each.
func TestSlowBodiesOverHTTP2(t *testing.T) {
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS() // for its certificate
	pair, roots := s.TLS.Certificates, s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	s.Close()
	w := start(t, worldOptions{server: Options{times: shortTimes, TLS: &tls.Config{Certificates: pair}}})
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	c := &http.Client{Transport: transport}
	base := "https" + strings.TrimPrefix(w.base, "http")
	var all sync.WaitGroup
	for range 4 {
		for _, r := range []struct {
			method, path string
			status       int
		}{{"GET", "/healthz", 200}, {"POST", pathSessions, 408}, {"DELETE", pathSessions + "/" + nowhere, 404}, {"GET", "/openapi.json", 200}} {
			all.Go(func() {
				body, unfinished := io.Pipe()
				defer unfinished.Close()
				go func() { _, _ = unfinished.Write([]byte("{")) }() // and no more
				req, err := http.NewRequestWithContext(w.ctx(), r.method, base+r.path, body)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/json")
				resp, err := c.Do(req)
				if err != nil {
					t.Errorf("%s %s: %v", r.method, r.path, err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body) // the status is what counts
				resp.Body.Close()
				if resp.ProtoMajor != 2 || resp.StatusCode != r.status {
					t.Errorf("%s %s: %s %d, want %d", r.method, r.path, resp.Proto, resp.StatusCode, r.status)
				}
			})
		}
	}
	all.Wait()
}
