package server

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/internal/localpg/pgtest"
	"rocket/internal/testaddr"
)

// seeming is a server that is a row in the ledger, and what the test wants
// behind its address.
type seeming struct {
	w    *world
	id   uuid.UUID
	conn *pgx.Conn // holds its lock
}

// giveAway makes a session that of a seeming server, whose process lives as far
// as the ledger knows if it has its lock.
func (w *world) giveAway(session, address string, lock bool) *seeming {
	w.t.Helper()
	if _, err := w.api.Release(w.ctx(), session, client.ReleaseRequest{}); err != nil {
		w.t.Fatal(err)
	}
	conn, err := pgx.Connect(w.ctx(), w.url)
	if err != nil {
		w.t.Fatal(err)
	}
	f := &seeming{w, uuid.New(), conn}
	w.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	f.exec(`INSERT INTO servers (id, lease_until, address, model, model_digest, parity_class) SELECT $1, now() + interval '1 hour', $2, model, model_digest, parity_class FROM servers LIMIT 1`, f.id, address)
	f.exec(`UPDATE sessions SET owner_server = $1, rev = rev + 1 WHERE 'ses_' || id = $2`, f.id, session)
	if lock {
		f.exec(`SELECT pg_advisory_lock(hashtextextended($1, 0))`, f.id.String())
	}
	return f
}

func (f *seeming) exec(sql string, args ...any) {
	f.w.t.Helper()
	if _, err := f.conn.Exec(f.w.ctx(), sql, args...); err != nil {
		f.w.t.Fatal(err)
	}
}

// TestOwnerIsGone: a session whose server's process is gone is served by whom
// is asked, at once.
func TestOwnerIsGone(t *testing.T) {
	w := start(t, worldOptions{})
	for name, use := range map[string]func(id string) error{
		"turn": func(id string) error {
			turn, err := w.api.RunTurn(w.ctx(), id, greedy(3), client.CallOptions{})
			if err == nil && len(turn.Tokens) != 3 {
				err = fmt.Errorf("%+v", turn)
			}
			return err
		},
		"read": func(id string) error { _, err := w.api.Get(w.ctx(), id); return err },
		"events": func(id string) error {
			for e, err := range w.api.Follow(w.ctx(), id, client.Position{}, client.FollowOptions{SSE: true}) {
				if err != nil || e.Type != "session.created" {
					return fmt.Errorf("%+v, %w", e, err)
				}
				break
			}
			return nil
		},
		"socket": func(id string) error { w.dial(id, "").until("session.created"); return nil },
		"frame": func(id string) error {
			p := w.dial(w.create("x").ID, "")
			p.until("session.created")
			p.send(fmt.Sprintf(`{"type":"subscribe","session_id":%q}`, id))
			if f, _ := p.until("session.created"); f["session_id"] != id {
				return fmt.Errorf("%v", f)
			}
			return nil
		},
	} {
		s := w.create("package main")
		w.giveAway(s.ID, "http://"+testaddr.Refusing(t), false)
		if err := use(s.ID); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got, err := w.api.Get(w.ctx(), s.ID); err != nil || got.Epoch != 2 {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// TestOwnerRefuses: a server that lives and takes no connections keeps its
// sessions; what is in the ledger can be read.
func TestOwnerRefuses(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	w.giveAway(s.ID, "http://"+testaddr.Refusing(t), true)
	path := pathSessions + "/" + s.ID
	for _, c := range []string{path, path + "/turns", path + "/tokens", path + "/events", path + "/tree", path + "/export"} {
		w.do("GET", c, "").into(t, http.StatusOK, nil)
	}
	refused := func(got answered) {
		t.Helper()
		wantProblem(t, got.header, got.body, http.StatusServiceUnavailable, codePeerGone, "")
		if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
			t.Errorf("%d, %v", got.status, got.header)
		}
	}
	refused(w.do("POST", path+"/turns", "{}"))
	refused(w.do("DELETE", path, ""))
	refused(w.do("GET", path+"/events", "", "Accept", "text/event-stream"))
	_, resp, err := websocket.Dial(w.ctx(), w.base+path+"/stream", nil)
	if err == nil || resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("socket: %v", err)
	}
	p := w.dial(w.create("x").ID, "")
	p.send(fmt.Sprintf(`{"type":"resume","session_id":%q,"ref":"r"}`, s.ID))
	if f, _ := p.until("error"); f["code"] != codePeerGone || f["ref"] != "r" {
		t.Errorf("frame: %v", f)
	}
}

// TestPeersOverHTTPS: their certificates are checked.
func TestPeersOverHTTPS(t *testing.T) {
	peer := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") }))
	defer peer.Close()
	peer.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	roots := x509.NewCertPool()
	roots.AddCert(peer.Certificate())
	for _, c := range []struct {
		roots  *x509.CertPool
		status int
	}{{roots, http.StatusOK}, {x509.NewCertPool(), http.StatusServiceUnavailable}} {
		w := start(t, worldOptions{server: Options{PeerCA: c.roots}})
		s := w.create("x")
		w.giveAway(s.ID, peer.URL, true)
		if got := w.do("POST", pathSessions+"/"+s.ID+"/close", ""); got.status != c.status {
			t.Errorf("%d %s, want %d", got.status, got.body, c.status)
		}
	}
}

// TestAddressLeadsBack: the worst that a wrong address does is 503.
func TestAddressLeadsBack(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	a.giveAway(s.ID, b.base, true)
	path := pathSessions + "/" + s.ID
	for _, w := range []*world{a, b} {
		got := w.do("POST", path+"/turns", "{}")
		if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if n := b.passedOn(); n != 1 {
		t.Errorf("%v calls were passed on by the one that the address leads to", n)
	}
	if n := a.passedOn(); n != 1 {
		t.Errorf("%v calls were passed on by the other", n)
	}
}

// mute takes connections and requests, and answers nothing but their headers,
// if told so.
func mute(t *testing.T, header string) (address string, asked chan string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asked = make(chan string, 16)
	done := make(chan struct{})
	conns := make(chan net.Conn, 16)
	go func() {
		defer close(done)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conns <- conn
			buf := make([]byte, 4096)
			n, _ := conn.Read(buf)
			_, _ = io.WriteString(conn, header)
			asked <- string(buf[:n])
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		close(conns)
		for conn := range conns {
			conn.Close()
		}
	})
	return "http://" + ln.Addr().String(), asked
}

// TestPausedOwner: what waits for a server that stands still is cut when its
// lease is over; its clients come back, and each call has its effect once.
func TestPausedOwner(t *testing.T) {
	w := start(t, worldOptions{})
	patient, err := client.New(w.base, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer patient.Close()
	s, other := w.create("package main"), w.create("x")
	address, asked := mute(t, "")
	f := w.giveAway(s.ID, address, true)
	turned := make(chan client.Turn)
	go func() {
		turn, err := patient.RunTurn(w.ctx(), s.ID, greedy(3), client.CallOptions{IdempotencyKey: "once"})
		if err != nil {
			t.Error(err)
		}
		turned <- turn
	}()
	if text := <-asked; !strings.Contains(text, "Idempotency-Key: once\r\n") || !strings.Contains(text, hopHeader+": "+w.manager.ID()+"\r\n") || strings.Contains(text, "X-Forwarded") {
		t.Errorf("asked %s", text)
	}
	answer := make(chan answered)
	go func() { answer <- w.do("PATCH", pathSessions+"/"+s.ID, `{"title":"x"}`) }()
	<-asked
	p := w.dial(other.ID, "")
	f.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1`, f.id)
	w.do("GET", pathSessions+"/"+s.ID, "").into(t, http.StatusOK, nil) // takes over
	got := <-answer
	wantProblem(t, got.header, got.body, http.StatusServiceUnavailable, codePeerGone, "")
	if turn := <-turned; turn.State != "completed" || len(turn.Tokens) != 3 {
		t.Errorf("%+v", turn)
	}
	again, err := w.api.RunTurn(w.ctx(), s.ID, greedy(3), client.CallOptions{IdempotencyKey: "once"})
	if after, _ := w.api.Get(w.ctx(), s.ID); err != nil || after.TurnCount != 1 || again.State != "completed" {
		t.Errorf("%d turns, %+v, %v", after.TurnCount, again, err)
	}
	p.send(`{"type":"ping"}`)
	p.until("pong")
}

// TestPausedOwnersStreams: event streams end cleanly, sockets with 1012.
func TestPausedOwnersStreams(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	address, asked := mute(t, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	f := w.giveAway(s.ID, address, true)
	next, stop := w.sse(s.ID, "")
	defer stop()
	<-asked
	f.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1`, f.id)
	w.do("GET", pathSessions+"/"+s.ID, "").into(t, http.StatusOK, nil)
	if e, ok := next(); ok {
		t.Errorf("%+v", e)
	}
}

// TestOwnerDies: a call whose answer is lost is 503, so that it is repeated.
func TestOwnerDies(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 1000))
			conn.Close()
		}
	}()
	w.giveAway(s.ID, "http://"+ln.Addr().String(), true)
	for _, c := range []struct{ method, path, body string }{{"POST", "/turns", `{}`}, {"GET", "", ""}, {"POST", "/close", ""}} {
		got := w.do(c.method, pathSessions+"/"+s.ID+c.path, c.body)
		wantProblem(t, got.header, got.body, http.StatusServiceUnavailable, codePeerGone, "")
	}
	p := w.dial(w.create("x").ID, "")
	p.send(fmt.Sprintf(`{"type":"resume","session_id":%q,"ref":"r"}`, s.ID))
	if f, _ := p.until("error"); f["code"] != codePeerGone {
		t.Errorf("frame: %v", f)
	}
	ln.Close()
	<-gone
}

// TestReadsWithoutTheLedger: who has a session cannot be told then; what is in
// memory of one that nobody has is read all the same.
func TestReadsWithoutTheLedger(t *testing.T) {
	var c *pgtest.Proxy
	w := start(t, worldOptions{database: func(dsn string) string {
		c = pgtest.NewProxy(t, dsn)
		return c.URL
	}})
	s := w.create("package main")
	path := pathSessions + "/" + s.ID
	if _, err := w.api.Release(w.ctx(), s.ID, client.ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	news := fmt.Sprintf("%s/events?from=%d", path, s.LastSeq+1)
	w.do("GET", news, "").into(t, http.StatusOK, nil)
	c.Cut()
	w.do("GET", news, "").into(t, http.StatusOK, nil)
	c.Restore()
}
