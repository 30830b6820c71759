package server

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

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
