package server

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"rocket/client"
)

// onSessions are the calls on ids, with valid requests: the id is all that can
// be wrong with them. {id} is the id in question, {own} one of the caller's.
var onSessions = []struct{ route, query, body string }{
	{"GET /v1/sessions/{id}", "", ""},
	{"PATCH /v1/sessions/{id}", "", `{"title":"stolen"}`},
	{"DELETE /v1/sessions/{id}", "", ""},
	{"POST /v1/sessions/{id}/close", "", ""},
	{"GET /v1/sessions/{id}/tree", "", ""},
	{"GET /v1/sessions/{id}/tree", "?depth=1", ""},
	{"GET /v1/sessions/{id}/ancestors", "", ""},
	{"GET /v1/sessions/{id}/common", "?with={own}", ""},
	{"GET /v1/sessions/{own}/common", "?with={id}", ""},
	{"GET /v1/sessions/{id}/path", "?to={own}", ""},
	{"GET /v1/sessions/{own}/path", "?to={id}", ""},
	{"POST /v1/sessions/{id}/turns", "", `{"max_tokens":1}`},
	{"POST /v1/sessions/{id}/turns", "?wait=true", `{"max_tokens":1}`},
	{"GET /v1/sessions/{id}/turns", "", ""},
	{"GET /v1/sessions/{id}/turns/{turn}", "", ""},
	{"GET /v1/sessions/{own}/turns/{turn}", "", ""},
	{"GET /v1/sessions/{own}/turns", "?after={turn}", ""},
	{"POST /v1/sessions/{id}/cancel", "", ""},
	{"POST /v1/sessions/{id}/fork", "", `{"n":1}`},
	{"POST /v1/sessions/{id}/detach", "", `{}`},
	{"POST /v1/sessions/{id}/resume", "", ""},
	{"POST /v1/sessions/{id}/release", "", `{"subtree":true,"cancel":true}`},
	{"GET /v1/sessions/{id}/events", "", ""},
	{"GET /v1/sessions/{id}/events", "?from=1", "SSE"},
	{"GET /v1/sessions/{id}/tokens", "", ""},
	{"GET /v1/sessions/{id}/export", "", ""},
	{"GET /v1/sessions/{id}/stream", "", ""},
	{"GET /v1/sessions", "?root={id}", ""},
	{"GET /v1/sessions", "?parent={id}", ""},
	{"GET /v1/watch", "?root={id}", ""},
}

const (
	nowhere     = "ses_00000000-0000-7000-8000-000000000000"
	nowhereTurn = "turn_00000000-0000-7000-8000-000000000000"
)

// TestAnotherTenantsIDsDoNotExist: every call on an id of another tenant is
// answered to the byte like a call on an id that was never given.
func TestAnotherTenantsIDsDoNotExist(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	foreignIDs(t, w, w)
}

// foreignIDs has bob ask a server for what alice has at another one, or at the same.
func foreignIDs(t *testing.T, hers, w *world) {
	_, alice := hers.key("alice", false)
	bob, bobs := w.key("bob", true) // nor does an admin key help
	theirs := hers.createBy(alice, "func main() {")
	turn, err := alice.RunTurn(w.ctx(), theirs.ID, greedy(2), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own := w.createBy(bobs, "package main")
	for _, route := range w.operations() {
		if !strings.Contains(route, "{") || slices.ContainsFunc(onSessions, func(c struct{ route, query, body string }) bool {
			return strings.ReplaceAll(c.route, "{own}", "{id}") == route
		}) {
			continue
		}
		t.Errorf("%s is not in this test's table", route)
	}
	fill := func(text, id, turn string) string {
		return strings.NewReplacer("{id}", id, "{turn}", turn, "{own}", own.ID).Replace(text)
	}
	for _, c := range onSessions {
		got := make([]answered, 2)
		for i, ids := range [][2]string{{theirs.ID, turn.ID}, {nowhere, nowhereTurn}} {
			method, path, _ := strings.Cut(c.route, " ")
			header, body := []string{"Authorization", "Bearer " + bob.Secret}, c.body
			if body == "SSE" {
				header, body = append(header, "Accept", "text/event-stream"), ""
			}
			got[i] = w.do(method, fill(path+c.query, ids[0], ids[1]), body, header...)
			got[i].header.Del("Date")
			got[i].body = []byte(strings.NewReplacer(ids[0], "ID", ids[1], "TURN").Replace(string(got[i].body)))
			got[i].header.Del("Content-Length") // ids have one length, but one may be answered with
		}
		if a, b := got[0], got[1]; a.status != b.status || string(a.body) != string(b.body) || fmt.Sprint(a.header) != fmt.Sprint(b.header) {
			t.Errorf("%s%s: %d %s %v, and of an id that does not exist %d %s %v", c.route, c.query, a.status, a.body, a.header, b.status, b.body, b.header)
		}
		if strings.Contains(c.route, "{id}") && got[0].status < 400 {
			t.Errorf("%s%s on another tenant's session: %d", c.route, c.query, got[0].status)
		}
	}
	page, err := bobs.List(w.ctx(), client.ListOptions{})
	if err != nil || len(page.Data) != 1 || page.Data[0].ID != own.ID {
		t.Errorf("bob's list: %+v, %v", page, err)
	}
	after, err := alice.Get(w.ctx(), theirs.ID)
	if err != nil || after.Title != theirs.Title || after.State != "idle" || after.TurnCount != 1 || after.ChildCount != 0 {
		t.Errorf("alice's session is %+v, %v", after, err)
	}
}

// TestAnotherTenantsIDsInFrames is the same over a WebSocket.
func TestAnotherTenantsIDsInFrames(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	foreignIDsInFrames(t, w, w)
}

func foreignIDsInFrames(t *testing.T, hers, w *world) {
	_, alice := hers.key("alice", false)
	bob, bobs := w.key("bob", false)
	theirs, own := hers.createBy(alice, "func main() {"), w.createBy(bobs, "package main")
	p := w.dialWith(own.ID, "", &websocket.DialOptions{Subprotocols: []string{subprotocol, keyProtocol + bob.Secret}})
	if got := p.conn.Subprotocol(); got != subprotocol {
		t.Errorf("subprotocol %q: the key must not come back", got)
	}
	p.until("subscribed")
	for _, f := range []string{
		`"type":"turn.create","max_tokens":1`, `"type":"turn.cancel"`, `"type":"fork","n":1`, `"type":"fork","n":1,"follow":true`,
		`"type":"detach"`, `"type":"resume"`, `"type":"subscribe"`, `"type":"subscribe","from":1,"epoch":1`, `"type":"unsubscribe"`,
	} {
		var got [2]string
		for i, id := range []string{theirs.ID, nowhere} {
			p.send(fmt.Sprintf(`{%s,"session_id":%q,"ref":"r"}`, f, id))
			for got[i] == "" {
				frame, err := p.read()
				if err != nil {
					t.Fatal(err)
				}
				if frame["ref"] == "r" {
					data, _ := json.Marshal(frame)
					got[i] = strings.ReplaceAll(string(data), id, "ID")
				}
			}
		}
		if got[0] != got[1] || !strings.Contains(f, "unsubscribe") && !strings.Contains(got[0], "not_found") {
			t.Errorf("{%s}: %s, and of an id that does not exist %s", f, got[0], got[1])
		}
	}
	if s, err := alice.Get(w.ctx(), theirs.ID); err != nil || s.TurnCount != 0 || s.ChildCount != 0 || s.State != "idle" {
		t.Errorf("alice's session is %+v, %v", s, err)
	}
}

// TestWatchAndKeysAreATenants: lifecycle events and idempotency keys stay inside one.
func TestWatchAndKeysAreATenants(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	_, alice := w.key("alice", false)
	_, bobs := w.key("bob", false)
	watch, err := bobs.DialWatch(w.ctx(), "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer watch.CloseNow()
	p := &peer{w, watch}
	p.until("watch.ready")
	text := "func main() {"
	create := func(c *client.Client) client.Session {
		s, err := c.Create(w.ctx(), client.CreateRequest{Input: &text}, client.CallOptions{IdempotencyKey: "one"})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	theirs := create(alice)
	if _, err := alice.RunTurn(w.ctx(), theirs.ID, greedy(1), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	own := create(bobs)
	if own.ID == theirs.ID {
		t.Error("bob's idempotency key gave alice's answer")
	}
	if again := create(bobs); again.ID != own.ID {
		t.Error("bob's idempotency key is forgotten")
	}
	if f, err := p.read(); err != nil || f["session_id"] != own.ID {
		t.Errorf("bob's watch saw %v, %v first", f, err)
	}
	// the same text of two tenants: neither is told that the other has it cached
	turn, err := bobs.RunTurn(w.ctx(), own.ID, greedy(1), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if reason := turn.Usage.ColdReason; reason != "" && reason != "new" {
		t.Errorf("cold_reason %q tells of another tenant", reason)
	}
}

// TestNoSecretsInLogs: whatever a client does with its key, it is in no log
// line, no answer and no metric.
func TestNoSecretsInLogs(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}, logLevel: slog.LevelDebug})
	k, c := w.key("a", true)
	s := w.createBy(c, "func main() {")
	if _, err := c.RunTurn(w.ctx(), s.ID, greedy(2), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	p := w.dialWith(s.ID, "", &websocket.DialOptions{Subprotocols: []string{subprotocol, keyProtocol + k.Secret}})
	p.until("subscribed")
	next, stop := w.sse(s.ID, "", "Authorization", "Bearer "+k.Secret)
	next()
	stop()
	good := []string{"Authorization", "Bearer " + k.Secret}
	for _, r := range []struct {
		method, path, body string
		header             []string
	}{
		{"GET", "/v1/sessions", "", good},
		{"GET", "/v1/sessions", "", []string{"Authorization", "Bearer " + k.Secret + "x"}},
		{"GET", "/v1/sessions", "", []string{"Authorization", "Basic " + k.Secret}},
		{"GET", "/v1/sessions", "", []string{"Authorization", k.Secret}},
		{"GET", "/v1/sessions", "", []string{"Authorization", "Bearer " + k.Secret, "X-Api-Key", "other"}},
		{"GET", "/v1/sessions", "", []string{"X-Api-Key", k.Secret + " " + k.Secret}},
		{"GET", "/v1/sessions?api_key=" + k.Secret, "", nil},
		{"GET", "/v1/sessions?key=" + k.Secret, "", good},
		{"POST", "/v1/check-cache", `{"n":1}`, good},
		{"GET", "/metrics", "", good},
		{"GET", "/v1/stats", "", good},
		{"GET", "/v1/sessions/" + s.ID + "/stream", "", append([]string{"Sec-WebSocket-Protocol", keyProtocol + k.Secret}, good...)},
	} {
		got := w.do(r.method, r.path, r.body, r.header...)
		if strings.Contains(string(got.body), k.Secret) || strings.Contains(fmt.Sprint(got.header), k.Secret) {
			t.Errorf("%s %s: the answer has the key: %s", r.method, r.path, got.body)
		}
	}
	if _, err := w.manager.Keys().Revoke(w.ctx(), k.ID); err != nil {
		t.Fatal(err)
	}
	if code, _ := p.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("close code %d after the key was revoked", code)
	}
	w.stop()
	log := w.lines.String()
	if strings.Contains(log, k.Secret) || strings.Contains(log, strings.TrimPrefix(k.Secret, "rk_")) {
		t.Error("the log has the key")
	}
	if !regexp.MustCompile(`path=/v1/sessions status=401`).MatchString(log) {
		t.Errorf("the log does not tell of refused calls:\n%s", log)
	}
}
