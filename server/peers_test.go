package server

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/sessions"
)

// twoWorlds are two servers on one ledger.
func twoWorlds(t testing.TB, opts worldOptions) (a, b *world) {
	t.Helper()
	a = start(t, opts)
	opts.beside = a
	return a, start(t, opts)
}

// passedOn counts calls and frames that the server gave to another one.
func (w *world) passedOn() float64 {
	w.t.Helper()
	families, err := w.server.metrics.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "rocket_proxied_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	w.t.Fatal("there is no rocket_proxied_total")
	return 0
}

// onOneSession are the calls on a session with what they need; {turn} is one
// of its turns, {other} another session. What an answer has of its own moment
// is cut out.
var onOneSession = []struct{ call, body string }{
	{"GET /v1/sessions/{id}", ""},
	{"GET /v1/sessions/{id}/tree?depth=3", ""},
	{"GET /v1/sessions/{id}/ancestors", ""},
	{"GET /v1/sessions/{id}/common?with={other}", ""},
	{"GET /v1/sessions/{id}/path?to={other}", ""},
	{"GET /v1/sessions/{id}/turns?limit=1", ""},
	{"GET /v1/sessions/{id}/turns/{turn}", ""},
	{"GET /v1/sessions/{id}/tokens?from=1&to=4&pieces=true", ""},
	{"GET /v1/sessions/{id}/events?from=2&limit=3", ""},
	{"GET /v1/sessions/{id}/stream", ""}, // without an upgrade
	{"GET /v1/sessions/{id}/export", ""},
	{"PATCH /v1/sessions/{id}", `{"title":"über"}`},
	{"POST /v1/sessions/{id}/turns", `{"max_tokens":2}`},
	{"POST /v1/sessions/{id}/turns?wait=true", `{"max_tokens":2,"seed":1}`},
	{"POST /v1/sessions/{id}/cancel", ""},
	{"POST /v1/sessions/{id}/fork", `{"n":2,"at":3}`},
	{"POST /v1/sessions/{id}/detach", `{"tier":"host"}`},
	{"POST /v1/sessions/{id}/resume", ""},
	{"POST /v1/sessions/{id}/close", ""},
	{"DELETE /v1/sessions/{id}", ""},
	{"POST /v1/sessions/{id}/release", `{"cancel":true}`},
	// refusals of every layer
	{"GET /v1/sessions/{id}/tokens?from=x", ""},
	{"GET /v1/sessions/{id}/tokens?nonsense=%C3%BC+%26%3B", ""},
	{"GET /v1/sessions/{id}/events?nonsense=1", ""},
	{"GET /v1/sessions/{id}/stream?from=-1", ""},
	{"GET /v1/sessions/{id}/nothing", ""},
	{"PUT /v1/sessions/{id}", "{}"},
	{"POST /v1/sessions/{id}/turns", `{"max_tokens":`},
	{"POST /v1/sessions/{id}/turns", `{"unknown":1}`},
	{"POST /v1/sessions/{id}/turns", `{"input":"` + strings.Repeat("x", bodyBytesMax) + `"}`},
	{"POST /v1/sessions/{id}/fork", `{"at":100000}`},
	{"HEAD /v1/sessions/{id}", ""},
}

var ofTheMoment = regexp.MustCompile(`"residency":\{[^}]*\}|"(exported_at|sha256|time|ttft_ms|tokens_per_second)":("[^"]*"|[0-9.e+-]+)`)

// TestWrongServerAnswersLikeTheOwner goes through every call on a session: one
// that came to the wrong server is answered as by the owner. For what changes
// something the owner is asked again with the same key: it has been done, once.
func TestWrongServerAnswersLikeTheOwner(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	for _, route := range a.operations() {
		known := slices.ContainsFunc(onOneSession, func(c struct{ call, body string }) bool {
			call, _, _ := strings.Cut(c.call, "?")
			return strings.ReplaceAll(call, "{other}", "{id}") == route
		})
		if strings.Contains(route, "{id}") && !known {
			t.Errorf("%s is not in this test's table", route)
		}
	}
	before := b.passedOn()
	for i, c := range onOneSession {
		s := a.create("func main() {")
		turn := a.turn(s.ID, 3)
		method, path, _ := strings.Cut(c.call, " ")
		path = strings.NewReplacer("{id}", s.ID, "{turn}", turn.ID, "{other}", s.ID).Replace(path)
		header := []string{"Idempotency-Key", fmt.Sprint("key-", i), "Origin", b.base, "Sec-Fetch-Site", "same-origin"}
		got := b.do(method, path, c.body, header...)
		want := a.do(method, path, c.body, header[:2]...)
		for _, x := range []*answered{&got, &want} {
			x.body = ofTheMoment.ReplaceAll(x.body, nil)
			x.header.Del("Date")
			if strings.Contains(c.call, "export") {
				x.header.Del("Content-Length")
			}
		}
		if strings.Contains(c.call, "release") { // there is nothing left to release
			want.body = []byte(strings.Replace(string(want.body), `:0}`, `:1}`, 1))
		}
		if got.status != want.status || string(got.body) != string(want.body) || cmp.Diff(want.header, got.header) != "" {
			t.Errorf("%s: %d %.500s\nthe owner: %d %.500s\nheaders (-owner +wrong server): %s", c.call, got.status, got.body, want.status, want.body, cmp.Diff(want.header, got.header))
		}
	}
	if n := b.passedOn() - before; int(n) != len(onOneSession) {
		t.Errorf("%v of %d calls were passed on", n, len(onOneSession))
	}
}

// TestStreamsThroughTheWrongServer: readers there see the same events, live.
func TestStreamsThroughTheWrongServer(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p := b.dial(s.ID, "")
	if first, before := p.until("subscribed"); len(before) > 0 || first["session_id"] != s.ID || first["from"] != 1.0 {
		t.Fatalf("first %v, then %v", before, first)
	}
	next, stop := b.sse(s.ID, "?from=1")
	defer stop()
	if e, ok := next(); !ok || e.kind != "session.created" {
		t.Fatalf("%+v", e)
	}
	if _, err := b.api.StartTurn(b.ctx(), s.ID, greedy(60), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	for e, _ := next(); e.kind != "turn.delta"; e, _ = next() { // while the turn runs
	}
	if got, err := a.api.Get(a.ctx(), s.ID); err != nil || got.State != "running" {
		t.Logf("the turn ended before its first delta was here: %+v, %v", got, err)
	}
	for _, sse := range []bool{false, true} {
		var got []client.Event
		for e, err := range b.api.Follow(b.ctx(), s.ID, client.Position{}, client.FollowOptions{SSE: sse}) {
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, e); e.Type == "turn.completed" {
				break
			}
		}
		if diff := cmp.Diff(a.page(s.ID, 0), got); diff != "" {
			t.Errorf("sse %v: events differ: %.2000s", sse, diff)
		}
	}
	p.until("turn.completed")
	for e, ok := next(); e.kind != "turn.completed"; e, ok = next() {
		if !ok {
			t.Fatal("the stream ended before the turn")
		}
	}
	for _, c := range []struct{ query, code string }{{"?from=x", codeInvalid}, {"?nothing=" + strings.Repeat("x", 2000), codeInvalid}} {
		_, resp, err := websocket.Dial(b.ctx(), b.base+"/v1/sessions/"+s.ID+"/stream"+c.query, nil)
		if err == nil || resp.StatusCode != statuses[c.code] {
			t.Errorf("%.20s: %v, %v", c.query, resp, err)
		}
	}
	_, resp, err := websocket.Dial(b.ctx(), b.base+"/v1/sessions/"+s.ID+"/stream", &websocket.DialOptions{HTTPHeader: http.Header{"Origin": {"http://evil.example"}}})
	if err == nil || resp.StatusCode != http.StatusForbidden {
		t.Errorf("from another page: %v", err)
	}
}

// TestSocketRelay: one socket drives sessions of both servers, whichever of
// them it was opened at.
func TestSocketRelay(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	for _, query := range []string{"", "?follow=false"} {
		for _, foreign := range []bool{false, true} {
			t.Run(fmt.Sprintf("path of another: %v, %s", foreign, query), func(t *testing.T) {
				path, other := b.create("package main").ID, a.create("func main() {").ID
				if foreign {
					path, other = other, path
				}
				p := b.dial(path, query)
				if query == "" {
					p.until("subscribed")
				}
				p.driveSession(path, query == "")
				p.driveSession(other, false)
				if diff := cmp.Diff(a.page(path, 0), b.page(path, 0)); diff != "" {
					t.Errorf("pages differ: %s", diff)
				}
			})
		}
	}
}

// after reads on until a kind of frame is among those that came, replies and
// events being in no order.
func (p *peer) after(came []wireFrame, kind string) []wireFrame {
	p.w.t.Helper()
	if slices.ContainsFunc(came, func(f wireFrame) bool { return f.kind() == kind }) {
		return came
	}
	_, more := p.until(kind)
	return append(came, more...)
}

// driveSession sends every frame about a session and reads what it answers.
func (p *peer) driveSession(id string, subscribed bool) {
	t := p.w.t
	t.Helper()
	frame := func(text string) (before []wireFrame) {
		p.send(strings.Replace(text, `{`, fmt.Sprintf(`{"session_id":%q,"ref":"r",`, id), 1))
		for {
			f, err := p.read()
			if err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			before = append(before, f)
			switch {
			case f["ref"] != "r":
			case f.kind() != "reply" || f["session_id"] != id:
				t.Fatalf("%s: %v", text, f)
			default:
				return before
			}
		}
	}
	if !subscribed {
		frame(`{"type":"subscribe","from":1}`)
	}
	before := p.after(frame(`{"type":"turn.create","max_tokens":20,"ignore_eos":true,"idempotency_key":"`+uuid.NewString()+`"}`), "turn.completed")
	if f := find(t, before, "turn.delta"); f["session_id"] != id {
		t.Errorf("delta of %v", f["session_id"])
	}
	forked := frame(`{"type":"fork","n":2,"follow":true}`)
	children := map[any]bool{}
	for _, s := range forked[len(forked)-1]["result"].(map[string]any)["sessions"].([]any) {
		children[s.(map[string]any)["id"]] = true
	}
	for range 2 {
		if f, _ := p.until("subscribed"); !children[f["session_id"]] {
			t.Errorf("follows %v, not one of %v", f["session_id"], children)
		}
	}
	frame(`{"type":"detach"}`)
	frame(`{"type":"resume"}`)
	frame(`{"type":"turn.create","max_tokens":30000,"ignore_eos":true}`)
	p.after(frame(`{"type":"turn.cancel"}`), "turn.cancelled")
	frame(`{"type":"unsubscribe"}`)
	p.send(fmt.Sprintf(`{"type":"subscribe","session_id":%q,"from":1,"ref":"bad","idempotency_key":1}`, id))
	if f, _ := p.until("error"); f["ref"] != "bad" || f["code"] != codeInvalid {
		t.Errorf("bad frame: %v", f)
	}
	frame(`{"type":"subscribe","from":9007199254740991}`)
}

// TestFrameWithoutSession: a frame that names no session is about the path's
// wherever it is executed.
func TestFrameWithoutSession(t *testing.T) {
	for raw, want := range map[string]string{
		`{"type":"resume"}`:                               `{"session_id":"ses_x","type":"resume"}`,
		` {"type":"resume","session_id":""}`:              `{"session_id":"ses_x","type":"resume"}`,
		`{"type":"resume", "session_id":"ses_y"}`:         `{"type":"resume", "session_id":"ses_y"}`,
		`{"type":"turn.create","seed":72057594037927937}`: `{"seed":72057594037927937,"session_id":"ses_x","type":"turn.create"}`,
	} {
		if got, err := withSession([]byte(raw), "ses_x"); string(got) != want || err != nil {
			t.Errorf("%s: %s, %v", raw, got, err)
		}
	}
}

// TestSlowReaderOfAnotherServer is sent away by the owner, and told why.
func TestSlowReaderOfAnotherServer(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{
		server:   Options{LagMax: 64},
		listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} },
	})
	s := a.create("package main")
	dialer := &net.Dialer{}
	slow := b.dialWith(s.ID, "", &websocket.DialOptions{HTTPClient: &http.Client{Transport: &http.Transport{
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
	if _, err := b.api.RunTurn(b.ctx(), s.ID, greedy(800), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if code, reason := slow.closed(); code != websocket.StatusTryAgainLater || !strings.Contains(reason, s.ID) {
		t.Errorf("closed with %d %q", code, reason)
	}
}

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

// closedAddress refuses connections.
func closedAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	return "http://" + ln.Addr().String()
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
		w.giveAway(s.ID, closedAddress(t), false)
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
	w.giveAway(s.ID, closedAddress(t), true)
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

// TestHopHeaderIsNoRight: whoever sets it is only not passed on.
func TestHopHeaderIsNoRight(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{server: Options{RequireKeys: true}})
	k, c := a.key("alice", false)
	s := a.createBy(c, "package main")
	path := pathSessions + "/" + s.ID
	hop := []string{hopHeader, a.manager.ID()}
	mine := append([]string{"Authorization", "Bearer " + k.Secret}, hop...)
	b.do("GET", path, "", mine...).into(t, http.StatusOK, nil)
	got := b.do("POST", path+"/turns", "{}", mine...)
	wantProblem(t, got.header, got.body, http.StatusServiceUnavailable, string(sessions.CodeOverloaded), "")
	if got := b.do("GET", path, "", hop...); got.status != http.StatusUnauthorized {
		t.Errorf("without a key: %d", got.status)
	}
	if got := b.do("GET", "/v1/stats", "", mine...); got.status != http.StatusForbidden {
		t.Errorf("an admin's route: %d", got.status)
	}
	other, _ := b.key("bob", false)
	if got := b.do("GET", path, "", append([]string{"Authorization", "Bearer " + other.Secret}, hop...)...); got.status != http.StatusNotFound {
		t.Errorf("another tenant: %d", got.status)
	}
	if n := b.passedOn(); n != 0 {
		t.Errorf("%v calls were passed on", n)
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

// TestOwnerDrains: sockets through another server close with 1012, event
// streams end, calls are served where they come.
func TestOwnerDrains(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p, here := b.dial(s.ID, ""), b.dial(b.create("x").ID, "")
	p.until("session.created")
	here.send(fmt.Sprintf(`{"type":"subscribe","session_id":%q,"ref":"r"}`, s.ID))
	here.until("reply")
	next, stop := b.sse(s.ID, "")
	defer stop()
	next()
	a.stop()
	for _, p := range []*peer{p, here} {
		if code, _ := p.closed(); code != websocket.StatusServiceRestart {
			t.Errorf("closed with %d", code)
		}
	}
	for _, ok := next(); ok; _, ok = next() { // ends
	}
	if got, err := b.api.RunTurn(b.ctx(), s.ID, greedy(2), client.CallOptions{}); err != nil || got.State != "completed" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := b.api.Get(b.ctx(), s.ID); err != nil || got.Epoch != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestWrongServerDrains: it cuts what it passes on.
func TestWrongServerDrains(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p := b.dial(s.ID, "")
	next, stop := b.sse(s.ID, "")
	defer stop()
	next()
	waited := make(chan error)
	go func() {
		_, err := b.api.RunTurn(b.ctx(), s.ID, greedy(30000), client.CallOptions{})
		waited <- err
	}()
	p.until("turn.delta")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		b.stop()
	}()
	if code, _ := p.closed(); code != websocket.StatusServiceRestart {
		t.Errorf("closed with %d", code)
	}
	<-stopped
	for _, ok := next(); ok; _, ok = next() {
	}
	if err := <-waited; client.CodeOf(err) != codeDraining {
		t.Errorf("the call that waited: %v", err)
	}
	if _, err := a.api.Cancel(a.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Errorf("the turn: %v", err)
	}
}

// TestDeleteSubtreeOfSeveralServers: they let go of it, then it goes at once.
func TestDeleteSubtreeOfSeveralServers(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{server: Options{RequireKeys: true}})
	k, api := a.key("alice", false)
	elsewhere, err := client.New(b.base, client.Options{APIKey: k.Secret, Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close()
	top := a.createBy(api, "func main() {")
	forked, err := api.Fork(a.ctx(), top.ID, client.ForkRequest{N: new(3)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kids := forked.Sessions
	if got, err := elsewhere.Release(a.ctx(), kids[0].ID, client.ReleaseRequest{}); err != nil || got.Released != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := elsewhere.StartTurn(a.ctx(), kids[0].ID, greedy(30000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := b.manager.Stats().TurnsOpen; n != 1 {
		t.Fatalf("%d open turns at b", n)
	}
	if err := elsewhere.Prune(a.ctx(), top.ID, client.CallOptions{}); err != nil { // goes to a, which asks b
		t.Fatal(err)
	}
	for _, s := range append(kids, top) {
		for _, c := range []*client.Client{api, elsewhere} {
			if _, err := c.Get(a.ctx(), s.ID); client.CodeOf(err) != "not_found" {
				t.Errorf("%s: %v", s.ID, err)
			}
		}
	}
}

// TestServersRoute lists them to an admin.
func TestServersRoute(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	list, err := b.api.Servers(b.ctx())
	if err != nil || len(list) != 2 || list[0].Address != a.base || list[1].Address != b.base || list[0].Self || !list[1].Self || !list[0].Alive {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestWatchSeesAllServers: those that are there at the start, come, and go.
func TestWatchSeesAllServers(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	root := a.create("func main() {")
	dial := func(id string) *peer {
		conn, err := b.api.DialWatch(b.ctx(), id, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.CloseNow() })
		p := &peer{b, conn}
		if _, before := p.until("watch.ready"); len(before) > 0 {
			t.Errorf("before watch.ready: %v", before)
		}
		return p
	}
	all, one := dial(""), dial(root.ID)
	hop, _, err := websocket.Dial(b.ctx(), b.base+pathWatch, &websocket.DialOptions{HTTPHeader: http.Header{hopHeader: {a.manager.ID()}}})
	if err != nil {
		t.Fatal(err)
	}
	defer hop.CloseNow()
	own := &peer{b, hop}
	own.until("watch.ready")
	turn := a.turn(root.ID, 2)
	here := b.create("package main")
	if f, _ := all.until("turn.completed"); f["turn_id"] != turn.ID {
		t.Errorf("%v", f)
	}
	if f, _ := all.until("session.created"); f["session_id"] != here.ID {
		t.Errorf("%v", f)
	}
	if f, before := one.until("turn.completed"); f["turn_id"] != turn.ID || len(before) != 1 {
		t.Errorf("%v after %v", f, before)
	}
	if f, err := own.read(); err != nil || f["session_id"] != here.ID {
		t.Errorf("what a server shows to another: %v, %v", f, err)
	}
	c := start(t, worldOptions{beside: a})
	all.until("watch.lost") // events of the new one may have been missed
	there := c.create("x")
	if f, _ := all.until("session.created"); f["session_id"] != there.ID {
		t.Errorf("%v", f)
	}
	c.stop()
	all.until("watch.lost")
}

// TestTenantsAtTheWrongServer: another tenant's ids are as unknown there, in
// calls and frames.
func TestTenantsAtTheWrongServer(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{server: Options{RequireKeys: true}})
	foreignIDs(t, a, b)
	foreignIDsInFrames(t, a, b)
}

// TestRevokedKeyAtTheWrongServer: streams through it end.
func TestRevokedKeyAtTheWrongServer(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{server: Options{RequireKeys: true}, keyFresh: 20 * time.Millisecond})
	k, c := a.key("alice", false)
	s := a.createBy(c, "func main() {")
	p := b.dialWith(s.ID, "", &websocket.DialOptions{Subprotocols: []string{subprotocol, keyProtocol + k.Secret}})
	p.until("session.created")
	next, stop := b.sse(s.ID, "", "X-Api-Key", k.Secret)
	defer stop()
	next()
	if _, err := b.manager.Keys().Revoke(b.ctx(), k.ID); err != nil {
		t.Fatal(err)
	}
	if code, _ := p.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("closed with %d", code)
	}
	if got := b.do("GET", pathSessions+"/"+s.ID, "", "X-Api-Key", k.Secret); got.status != http.StatusUnauthorized {
		t.Errorf("%d", got.status)
	}
	for _, ok := next(); ok; _, ok = next() {
	}
}

// TestMovedSession: its reader is told, and comes back to where it is.
func TestMovedSession(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p := a.dial(s.ID, "")
	p.until("session.created")
	var got []client.Event
	followed := make(chan struct{})
	first := make(chan struct{})
	go func() {
		defer close(followed)
		for e, err := range a.api.Follow(a.ctx(), s.ID, client.Position{}, client.FollowOptions{}) {
			if err != nil {
				t.Error(err)
				return
			}
			if got = append(got, e); e.Seq == 1 {
				close(first)
			}
			if e.Type == "turn.completed" {
				return
			}
		}
	}()
	<-first
	if _, err := a.api.Release(a.ctx(), s.ID, client.ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	b.turn(s.ID, 30)
	f, _ := p.until("error")
	if f["code"] != string(sessions.CodeMoved) || f["session_id"] != s.ID {
		t.Errorf("%v", f)
	}
	p.send(`{"type":"subscribe","from":2,"epoch":1}`)
	p.until("turn.completed")
	<-followed
	want, _ := json.Marshal(b.page(s.ID, 0))
	have, _ := json.Marshal(got)
	if string(want) != string(have) {
		t.Errorf("the follower has %s, want %s", have, want)
	}
}
