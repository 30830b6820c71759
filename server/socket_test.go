package server

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/sessions"
)

// TestSocketEndsBesideWakes: a subscription that was dropped, and that a failed
// write has put back, may be woken while the socket ends.
func TestSocketEndsBesideWakes(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("func main() {")
	log, err := w.manager.Log(w.ctx(), sessions.DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	c := &socket{server: w.server, wake: make(chan struct{}, 1), subs: map[string]*subscription{}}
	sub := &subscription{id: s.ID}
	sub.tail = log.Tail(s.LastSeq+1, func() { c.enqueue(sub) })
	if events, _, err := sub.tail.Next(w.ctx(), patience, 1); err != nil || len(events) > 0 { // it waits
		t.Fatal(events, err)
	}
	sub.dropped.Store(true)
	c.ready = append(c.ready, sub)
	started := make(chan error, 1)
	ctx := w.ctx()
	go func() { // what this one waits for would be ordered for the race detector
		_, err := w.api.StartTurn(ctx, s.ID, greedy(3), client.CallOptions{})
		started <- err
	}()
	for end := time.Now().Add(patience); len(c.wake) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the subscription was not woken")
		}
	}
	c.letGo()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	c.enqueue(sub) // late, and nothing to anybody
	if len(c.ready) != 0 {
		t.Errorf("%d subscriptions are ready on a socket that has ended", len(c.ready))
	}
}

// someBuffers has a server's connections hold little of a large answer.
type someBuffers struct{ net.Listener }

func (l someBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetWriteBuffer(128 << 10)
	}
	return conn, err
}

// TestRepliesThatNobodyReads: a socket that asks for large replies and reads
// none has the server hold two of them, one that is written and the next, all
// of them as much as a tenant's answers may; who reads gets every one, in order.
func TestRepliesThatNobodyReads(t *testing.T) {
	const sockets, frames, size = 4, 5, 2_300_000 // as large as many tokens with their alternatives
	h := startHostile(t, worldOptions{listener: func(ln net.Listener) net.Listener { return someBuffers{ln} }})
	attacker, err := client.New(h.base, client.Options{APIKey: h.key.Secret, Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	turn, err := attacker.RunTurn(h.ctx(), h.sid, greedy(1), client.CallOptions{})
	attacker.Close()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), h.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "UPDATE turns SET text = repeat('x', $2) WHERE session_id IN (SELECT id FROM sessions WHERE tenant_id = $1)", "attacker", size); err != nil {
		t.Fatal(err)
	}
	wait := func(want string, enough func(sessions.Stats) bool) {
		t.Helper()
		for end := time.Now().Add(patience); !enough(h.manager.Stats()); time.Sleep(time.Millisecond) {
			if st := h.manager.Stats(); time.Now().After(end) {
				t.Fatalf("answers hold %d bytes and %d wait; want %s", st.AnswerBytes, st.AnswersWaiting, want)
			}
		}
	}
	before, base := h.goroutines(), heap()
	var open []*rawConn
	for range sockets {
		c := h.upgrade(pathSessions + "/" + h.sid + "/stream?follow=false")
		for i := range frames {
			c.put(textFrame(fmt.Sprintf(`{"type":"turn.cancel","ref":"%d"}`, i)))
		}
		open = append(open, c)
	}
	two := func(st sessions.Stats) bool {
		return st.AnswerBytes >= 2*sockets*size && st.AnswerBytes < 2*sockets*(size+size/8) && st.AnswersWaiting == 0
	}
	wait("two replies of each socket", two)
	for range 3 {
		h.works()
	}
	wait("no more than these", two)
	if grown := heap() - base; grown > 3*sockets*size+(8<<20) {
		t.Errorf("%d sockets that read nothing hold %d bytes", sockets, grown)
	}

	// Nor does more come of plain calls.
	const askers = 24
	for range askers {
		c := h.connect()
		c.put(h.with("GET "+pathSessions+"/"+h.sid+"/turns/"+turn.ID) + "\r\n")
		open = append(open, c)
	}
	wait("a tenant's share, and others that wait", func(st sessions.Stats) bool {
		return st.AnswerBytes > 64<<20-2*size && st.AnswerBytes <= 64<<20 && st.AnswersWaiting > 0
	})
	h.works()
	for _, c := range open[sockets:] {
		c.Close()
	}
	texts, code, reason := open[0].closedAfter(fmt.Sprintf(`"ref":"%d"`, frames-1), rawFrame(fin|opClose, 2, "\x03\xe8"))
	if code != 1000 || len(texts) != frames {
		t.Errorf("%d replies of %d, close %d %q", len(texts), frames, code, reason)
	}
	for i, text := range texts {
		if want := fmt.Sprintf(`{"type":"reply","to":"turn.cancel","ref":"%d"`, i); len(text) < size || !strings.HasPrefix(text, want) {
			t.Errorf("reply %d has %d bytes: %.100s", i, len(text), text)
		}
	}
	for _, c := range open[1:sockets] {
		c.Close()
	}
	wait("none", func(st sessions.Stats) bool { return st.AnswerBytes == 0 && st.AnswersWaiting == 0 })
	h.settled(before)
}

// TestCloseReasons: a reason fits into a close frame, and is text.
func TestCloseReasons(t *testing.T) {
	for _, text := range []string{"", "short", strings.Repeat("a", 123), strings.Repeat("a", 124), strings.Repeat("a", 122) + "é…",
		strings.Repeat("…", 60), strings.Repeat("a", 120) + "😀😀", "a\xff" + strings.Repeat("\xc3", 300), strings.Repeat("\x80", 130)} {
		got := closeReason(text)
		whole := strings.ToValidUTF8(text, "\uFFFD")
		if len(got) > closeReasonMax || !utf8.ValidString(got) || !strings.HasPrefix(whole, got) || len(whole)-len(got) > 0 && len(got) <= closeReasonMax-utf8.UTFMax {
			t.Errorf("%q became %q", text, got)
		}
	}
}

// TestWatcherThatStops: a watch whose client takes nothing is cut, and is no
// fault of the server's.
func TestWatcherThatStops(t *testing.T) {
	w := start(t, worldOptions{
		server:   Options{WriteTimeout: 200 * time.Millisecond},
		listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} },
	})
	s := w.create("func main() {")
	conn, _, _ := rawSocket(t, w, pathWatch, "")
	if err := conn.(*net.TCPConn).SetReadBuffer(1 << 10); err != nil {
		t.Fatal(err)
	}
	for range 8 { // more than all buffers on the way hold
		if _, err := w.api.Fork(w.ctx(), s.ID, client.ForkRequest{N: new(64)}, client.CallOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	values := w.scrape()
	for ctx := w.ctx(); values["rocket_websocket_connections"] != 0; values = w.scrape() {
		if ctx.Err() != nil {
			t.Fatal("a watcher that reads nothing is kept")
		}
	}
	for name, n := range values {
		if strings.HasPrefix(name, "rocket_websocket_closed_total") {
			t.Errorf("%s is %v", name, n)
		}
	}
	if lines := w.lines.String(); strings.Contains(lines, "watch failed") {
		t.Error(lines)
	}
}
