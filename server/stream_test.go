package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"rocket/client"
	"rocket/sessions"
)

// peer is a raw WebSocket client: what comes is decoded into maps, so that
// tests see the wire.
type peer struct {
	w    *world
	conn *websocket.Conn
}

type wireFrame map[string]any

func (f wireFrame) kind() string { s, _ := f["type"].(string); return s }

func (w *world) dial(id, query string) *peer {
	w.t.Helper()
	return w.dialWith(id, query, &websocket.DialOptions{Subprotocols: []string{subprotocol}})
}

func (w *world) dialWith(id, query string, opts *websocket.DialOptions) *peer {
	w.t.Helper()
	conn, _, err := websocket.Dial(w.ctx(), w.base+"/v1/sessions/"+id+"/stream"+query, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	conn.SetReadLimit(1 << 22)
	w.t.Cleanup(func() { _ = conn.CloseNow() })
	return &peer{w, conn}
}

// read returns the next frame, or the error that ended the socket.
func (p *peer) read() (wireFrame, error) {
	p.w.t.Helper()
	kind, data, err := p.conn.Read(p.w.ctx())
	if err != nil {
		return nil, err
	}
	var f wireFrame
	if err := json.Unmarshal(data, &f); err != nil || kind != websocket.MessageText {
		p.w.t.Fatalf("frame of kind %v: %s: %v", kind, data, err)
	}
	return f, nil
}

// until reads up to the first frame of a type and returns it with those before.
func (p *peer) until(kind string) (last wireFrame, before []wireFrame) {
	p.w.t.Helper()
	for {
		f, err := p.read()
		if err != nil {
			p.w.t.Fatalf("waiting for %s: %v; came %v", kind, err, before)
		}
		if f.kind() == kind {
			return f, before
		}
		before = append(before, f)
	}
}

// all reads until every kind has come, in whatever order.
func (p *peer) all(kinds ...string) map[string]wireFrame {
	p.w.t.Helper()
	seen := map[string]wireFrame{}
	for len(seen) < len(kinds) {
		f, err := p.read()
		if err != nil {
			p.w.t.Fatalf("waiting for %v: %v", kinds, err)
		}
		if slices.Contains(kinds, f.kind()) {
			seen[f.kind()] = f
		}
	}
	return seen
}

func (p *peer) send(text string) {
	p.w.t.Helper()
	if err := p.conn.Write(p.w.ctx(), websocket.MessageText, []byte(text)); err != nil {
		p.w.t.Fatal(err)
	}
}

// closed reads to the end and returns the close code and reason.
func (p *peer) closed() (websocket.StatusCode, string) {
	p.w.t.Helper()
	for {
		if _, err := p.read(); err != nil {
			var ce websocket.CloseError
			if !asClose(err, &ce) {
				p.w.t.Fatalf("ended without a close frame: %v", err)
			}
			return ce.Code, ce.Reason
		}
	}
}

func asClose(err error, ce *websocket.CloseError) bool {
	code := websocket.CloseStatus(err)
	if code == -1 {
		return false
	}
	for err != nil {
		if e, ok := err.(websocket.CloseError); ok {
			*ce = e
			return true
		}
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			return false
		}
		err = u.Unwrap()
	}
	return false
}

func TestStreamDrivesSessions(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("func main() {")
	p := w.dial(s.ID, "")
	if p.conn.Subprotocol() != subprotocol {
		t.Errorf("subprotocol %q", p.conn.Subprotocol())
	}
	first, before := p.until("subscribed")
	if len(before) != 0 || first["session_id"] != s.ID || first["from"] != 1.0 || first["last_seq"] != float64(s.LastSeq) {
		t.Errorf("first frame %v after %v", first, before)
	}
	p.until("session.created")

	p.send(`{"type":"ping","ref":"p1"}`)
	if pong, _ := p.until("pong"); pong["ref"] != "p1" {
		t.Errorf("pong %v", pong)
	}

	// A turn: its reply, and its events in order.
	p.send(`{"type":"turn.create","ref":"t1","max_tokens":12,"ignore_eos":true,"idempotency_key":"once"}`)
	done, before := p.until("turn.completed")
	reply := find(t, before, "reply")
	if reply["ref"] != "t1" || reply["to"] != "turn.create" || reply["session_id"] != s.ID {
		t.Errorf("reply %v", reply)
	}
	turn := reply["result"].(map[string]any)
	if turn["id"] != done["turn_id"] || turn["object"] != "turn" {
		t.Errorf("reply %v, event %v", reply, done)
	}
	tokens := 0
	seq := 0.0
	for _, f := range append(before, done) {
		if n, ok := f["seq"].(float64); ok {
			if seq != 0 && n != seq+1 {
				t.Errorf("seq %v after %v", n, seq)
			}
			seq = n
		}
		if list, ok := f["tokens"].([]any); ok {
			tokens += len(list)
		}
	}
	if tokens != 12 {
		t.Errorf("%d tokens in deltas", tokens)
	}

	// The REST call with the same key is the same call.
	again := w.do("POST", pathSessions+"/"+s.ID+"/turns", `{"max_tokens":12,"ignore_eos":true}`, "Idempotency-Key", "once")
	var same client.Turn
	again.into(t, http.StatusAccepted, &same)
	if same.ID != turn["id"] {
		t.Errorf("the same key made turns %v and %v", turn["id"], same.ID)
	}

	// Fork with follow: the children's events come on this socket.
	p.send(`{"type":"fork","ref":"f1","n":2,"at":5,"follow":true}`)
	reply, _ = p.until("reply")
	children := reply["result"].(map[string]any)["sessions"].([]any)
	if reply["ref"] != "f1" || len(children) != 2 || reply["result"].(map[string]any)["at"] != 5.0 {
		t.Fatalf("fork: %v", reply)
	}
	seen := map[string]bool{}
	for len(seen) < 2 {
		f, err := p.read()
		if err != nil {
			t.Fatal(err)
		}
		if f.kind() == "session.created" {
			seen[f["session_id"].(string)] = true
			if f["parent_id"] != s.ID || f["forked_at"] != 5.0 {
				t.Errorf("child's first event %v", f)
			}
		}
	}
	child := children[0].(map[string]any)["id"].(string)
	p.send(fmt.Sprintf(`{"type":"turn.create","ref":"t2","session_id":%q,"max_tokens":4,"ignore_eos":true}`, child))
	if done, _ := p.until("turn.completed"); done["session_id"] != child {
		t.Errorf("completed %v, want one of %s", done, child)
	}

	// Detach and resume, unsubscribe.
	p.send(`{"type":"detach","ref":"d1"}`)
	if f := p.all("session.detached", "reply")["reply"]; f["ref"] != "d1" {
		t.Errorf("reply %v", f)
	}
	p.send(`{"type":"resume","ref":"r1"}`)
	reply = p.all("session.resumed", "reply")["reply"]
	if reply["result"].(map[string]any)["restored"] == nil {
		t.Errorf("resume %v", reply)
	}
	p.send(fmt.Sprintf(`{"type":"unsubscribe","ref":"u1","session_id":%q}`, child))
	p.until("reply")
	p.send(fmt.Sprintf(`{"type":"turn.create","ref":"t3","session_id":%q,"max_tokens":4,"ignore_eos":true}`, child))
	p.until("reply")
	p.send(`{"type":"turn.create","ref":"t4","max_tokens":4,"ignore_eos":true}`)
	done, before = p.until("turn.completed")
	for _, f := range append(before, done) {
		if f["session_id"] == child && f["seq"] != nil {
			t.Errorf("event of an unsubscribed session: %v", f)
		}
	}
	// Subscribe from the start: everything again.
	p.send(fmt.Sprintf(`{"type":"subscribe","ref":"s1","session_id":%q,"from":1}`, child))
	sub, _ := p.until("subscribed")
	if sub["from"] != 1.0 {
		t.Errorf("subscribed %v", sub)
	}
	if f, _ := p.until("session.created"); f["session_id"] != child || f["seq"] != 1.0 {
		t.Errorf("first event %v", f)
	}
	if err := p.conn.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Error(err)
	}
}

func find(t testing.TB, frames []wireFrame, kind string) wireFrame {
	t.Helper()
	for _, f := range frames {
		if f.kind() == kind {
			return f
		}
	}
	t.Fatalf("no %s among %v", kind, frames)
	return nil
}

func TestStreamCancelsAndEnds(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	p := w.dial(s.ID, "")
	p.send(`{"type":"turn.create","max_tokens":20000,"ignore_eos":true}`)
	p.until("turn.delta")
	p.send(`{"type":"turn.create","ref":"x"}`)
	if f, _ := p.until("error"); f["code"] != "turn_in_progress" || f["status"] != 409.0 || f["ref"] != "x" || f["to"] != "turn.create" {
		t.Errorf("second turn: %v", f)
	}
	p.send(`{"type":"turn.cancel","ref":"c"}`)
	p.until("turn.cancelled")

	// A turn outlives its reader.
	p.send(`{"type":"turn.create","max_tokens":30,"ignore_eos":true}`)
	reply, _ := p.until("reply")
	for reply["to"] != "turn.create" {
		reply, _ = p.until("reply")
	}
	_ = p.conn.CloseNow()
	turn, err := w.manager.WaitTurn(w.ctx(), "local", s.ID, reply["result"].(map[string]any)["id"].(string))
	if err != nil || turn.State != "completed" || len(turn.Tokens) != 30 {
		t.Errorf("turn without a reader: %+v, %v", turn, err)
	}

	// Its events are there for who comes back with from.
	after := w.page(s.ID, 0)
	from := after[len(after)-1].Seq
	q := w.dial(s.ID, fmt.Sprintf("?from=%d&epoch=1", from))
	q.until("subscribed")
	if f, err := q.read(); err != nil || f.kind() != "turn.completed" || f["seq"] != float64(from) {
		t.Errorf("first event from %d: %v, %v", from, f, err)
	}
	// A deleted session ends its events, not the socket.
	if err := w.api.Delete(w.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if f, _ := q.until("error"); f["code"] != "not_found" || f["session_id"] != s.ID {
		t.Errorf("after delete: %v", f)
	}
	q.send(`{"type":"ping","ref":"still"}`)
	q.until("pong")
}

func TestStreamRefusesBadFrames(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("x")
	p := w.dial(s.ID, "")
	p.until("session.created")
	for _, c := range []struct{ name, text, code, field string }{
		{"invalid UTF-8", "{\"type\":\"ping\",\"ref\":\"\xff\"}", codeMalformed, "frame"},
		{"not JSON", "hello", codeMalformed, "frame"},
		{"unknown field", `{"type":"ping","pong":1}`, codeInvalid, "pong"},
		{"wrong type", `{"type":"turn.create","max_tokens":"many"}`, codeInvalid, "max_tokens"},
		{"unknown session", `{"type":"turn.create","session_id":"ses_x"}`, "not_found", "session_id"},
		{"fork past the end", `{"type":"fork","at":99999}`, "invalid", "at"},
		{"unknown tier", `{"type":"detach","tier":"moon"}`, "invalid", "tier"},
	} {
		p.send(c.text)
		if f, _ := p.until("error"); f["code"] != c.code || f["field"] != c.field || f["detail"] == "" {
			t.Errorf("%s: %v", c.name, f)
		}
	}
	if err := p.conn.Write(w.ctx(), websocket.MessageBinary, []byte{1, 2}); err != nil {
		t.Fatal(err)
	}
	if f, _ := p.until("error"); f["field"] != "frame" {
		t.Errorf("binary frame: %v", f)
	}
	for range badFramesMax {
		_ = p.conn.Write(w.ctx(), websocket.MessageText, []byte("nonsense")) // the last ones may meet a closed socket
	}
	if code, _ := p.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("closed with %d after %d bad frames", code, badFramesMax)
	}

	q := w.dial(s.ID, "")
	q.send(`{"type":"ping","ref":"` + strings.Repeat("r", 200) + `"}`)
	q.until("pong")
	_ = q.conn.Write(w.ctx(), websocket.MessageText, []byte(`{"type":"turn.create","input":"`+strings.Repeat("x", frameBytesMax)+`"}`))
	if code, _ := q.closed(); code != websocket.StatusMessageTooBig {
		t.Errorf("closed with %d after too large a frame", code)
	}
	if after, err := w.api.Get(w.ctx(), s.ID); err != nil || after.TurnCount != 0 {
		t.Errorf("bad frames had an effect: %+v, %v", after, err)
	}
}

// TestDeadPeer: a client that does not answer pings is let go of.
func TestDeadPeer(t *testing.T) {
	w := start(t, worldOptions{server: Options{Heartbeat: 10 * time.Millisecond, WriteTimeout: 50 * time.Millisecond, CallTimeout: 50 * time.Millisecond}})
	s := w.create("x")
	for _, path := range []string{pathSessions + "/" + s.ID + "/stream", pathWatch} {
		conn, in, _ := rawSocket(t, w, path, "")
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, in); errors.Is(err, errTimeout(err)) {
			t.Errorf("%s: a dead peer is kept", path)
		}
	}
	for ctx := w.ctx(); w.scrape()["rocket_websocket_connections"] != 0; {
		if ctx.Err() != nil {
			t.Fatal("dead peers are counted")
		}
	}
}

// TestLivePeer: one that answers them is kept.
func TestLivePeer(t *testing.T) {
	w := start(t, worldOptions{server: Options{Heartbeat: 10 * time.Millisecond}})
	s := w.create("x")
	pings := make(chan struct{}, 8)
	live := w.dialWith(s.ID, "", &websocket.DialOptions{OnPingReceived: func(context.Context, []byte) bool {
		select {
		case pings <- struct{}{}:
		default:
		}
		return true
	}})
	ponged := make(chan struct{})
	go func() { // reads, and so answers pings
		defer close(ponged)
		live.until("pong")
	}()
	for range cap(pings) {
		select {
		case <-pings:
		case <-ponged:
			t.Fatal("a pong that nobody asked for, or the socket ended")
		}
	}
	live.send(`{"type":"ping"}`)
	<-ponged
}

func TestStreamRefusesForeignPages(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("x")
	for _, path := range []string{pathSessions + "/" + s.ID + "/stream", "/v1/watch"} {
		for origin, want := range map[string]int{
			w.base: http.StatusSwitchingProtocols, "": http.StatusSwitchingProtocols,
			"http://evil.example": http.StatusForbidden, "http://localhost:1": http.StatusForbidden, "null": http.StatusForbidden,
		} {
			header := http.Header{}
			if origin != "" {
				header.Set("Origin", origin)
			}
			conn, resp, err := websocket.Dial(w.ctx(), w.base+path, &websocket.DialOptions{HTTPHeader: header})
			if resp == nil || resp.StatusCode != want {
				t.Errorf("%s from %q: %v, %v", path, origin, resp, err)
			}
			if conn != nil {
				_ = conn.CloseNow()
			}
		}
	}
}

// smallBuffers makes a server's sockets hold little, so that a slow reader
// shows soon.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetWriteBuffer(4 << 10)
	}
	return conn, err
}

// TestSlowReader: it lags, is closed with 1013 and the last seq it got, loses
// nothing when it comes back, and holds nobody up.
func TestSlowReader(t *testing.T) {
	w := start(t, worldOptions{
		server:   Options{LagMax: 64},
		deltas:   1, // many events
		listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} },
	})
	s := w.create("package main")
	dialer := &net.Dialer{}
	slow := w.dialWith(s.ID, "", &websocket.DialOptions{HTTPClient: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, addr)
			if err == nil {
				err = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
			}
			return conn, err
		},
	}}})
	slow.until("session.created")
	turn, err := w.api.StartTurn(w.ctx(), s.ID, greedy(30_000), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	log, err := w.manager.Log(w.ctx(), sessions.DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := log.Wait(w.ctx(), 1500); !ok || err != nil { // more than all buffers on the way hold
		t.Fatal(ok, err)
	}
	if _, err := w.api.Cancel(w.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	// A reader that reads sees the end although the slow one has read nothing. Where it has no time to read it is sent
	// away too, and comes back.
	for e, err := range w.api.Follow(w.ctx(), s.ID, client.Position{}, client.FollowOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Final() {
			if e.Type != "turn.cancelled" || e.TurnID != turn.ID {
				t.Errorf("ended with %+v", e)
			}
			break
		}
	}
	var got []client.Event
	code, reason := websocket.StatusCode(0), ""
	for code == 0 {
		_, data, err := slow.conn.Read(w.ctx())
		if err != nil {
			var ce websocket.CloseError
			if !asClose(err, &ce) {
				t.Fatalf("ended without a close frame: %v", err)
			}
			code, reason = ce.Code, ce.Reason
			break
		}
		var e client.Event
		if err := json.Unmarshal(data, &e); err != nil {
			t.Fatal(err)
		}
		if e.Seq > 0 {
			got = append(got, e)
		}
	}
	last := int64(1)
	if len(got) > 0 {
		last = got[len(got)-1].Seq
	}
	if code != websocket.StatusTryAgainLater || !strings.HasSuffix(reason, fmt.Sprintf("last_seq=%d", last)) {
		t.Fatalf("closed with %d %q after seq %d", code, reason, last)
	}
	want := w.page(s.ID, 0)
	for e, err := range w.api.Follow(w.ctx(), s.ID, client.Position{From: last + 1, Epoch: 1}, client.FollowOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e)
		if e.Final() {
			break
		}
	}
	if diff := cmp.Diff(want[1:], got); diff != "" {
		t.Errorf("events of the slow reader differ: %.2000s", diff)
	}
}
