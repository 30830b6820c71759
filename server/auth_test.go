package server

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"rocket/client"
	"rocket/sessions"
)

// key makes an API key and a client that calls with it.
func (w *world) key(tenant string, admin bool) (sessions.NewKey, *client.Client) {
	w.t.Helper()
	k, err := w.manager.Keys().Create(w.ctx(), sessions.KeyRequest{Tenant: tenant, Admin: admin})
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := client.New(w.base, client.Options{Retries: -1, APIKey: k.Secret})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	return k, c
}

// createBy makes a session of the key's tenant.
func (w *world) createBy(c *client.Client, text string) client.Session {
	w.t.Helper()
	s, err := c.Create(w.ctx(), client.CreateRequest{Input: &text}, client.CallOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func TestCredentials(t *testing.T) {
	for _, c := range []struct {
		header []string // name, value, ...
		want   string   // "": refused
	}{
		{[]string{"Authorization", "Bearer k1"}, "k1"},
		{[]string{"Authorization", "bearer  k1 "}, "k1"},
		{[]string{"Authorization", "BEARER k1"}, "k1"},
		{[]string{"X-Api-Key", "k1"}, "k1"},
		{[]string{"Sec-Websocket-Protocol", "rocket.v1, rocket.key.k1"}, "k1"},
		{[]string{"Sec-Websocket-Protocol", "rocket.v1", "Sec-Websocket-Protocol", "rocket.key.k1"}, "k1"},
		{[]string{"Authorization", "Bearer k1", "X-Api-Key", "k1"}, "k1"},
		{nil, ""},
		{[]string{"Authorization", ""}, ""},
		{[]string{"Authorization", "Bearer"}, ""},
		{[]string{"Authorization", "Bearer "}, ""},
		{[]string{"Authorization", "Basic azE6"}, ""},
		{[]string{"Authorization", "k1"}, ""},
		{[]string{"Authorization", "Bearer k1", "Authorization", "Bearer k2"}, ""},
		{[]string{"Authorization", "Basic azE6", "X-Api-Key", "k1"}, ""},
		{[]string{"Authorization", "Bearer k1", "X-Api-Key", "k2"}, ""},
		{[]string{"X-Api-Key", ""}, ""},
		{[]string{"X-Api-Key", "k1", "Sec-Websocket-Protocol", "rocket.key.k2"}, ""},
		{[]string{"Sec-Websocket-Protocol", "rocket.key."}, ""},
		{[]string{"Sec-Websocket-Protocol", "rocket.v1"}, ""},
		{[]string{"X-Api-Key", strings.Repeat("k", credentialsMax+1)}, ""},
	} {
		h := http.Header{}
		for i := 0; i+1 < len(c.header); i += 2 {
			h.Add(c.header[i], c.header[i+1])
		}
		got, err := credentials(h)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q: %q, %v, want %q", c.header, got, err, c.want)
		}
	}
}

// FuzzCredentials: no header makes two parts of a request disagree about the
// key, and what is refused is not repeated.
func FuzzCredentials(f *testing.F) {
	f.Add("Bearer k1", "", "")
	f.Add("", "k1", "rocket.v1, rocket.key.k1")
	f.Add("bearer k1", "k2", "rocket.key.k3")
	f.Add("Basic x", " ", ",,")
	f.Fuzz(func(t *testing.T, authorization, apiKey, protocol string) {
		h := http.Header{}
		for name, value := range map[string]string{"Authorization": authorization, "X-Api-Key": apiKey, "Sec-Websocket-Protocol": protocol} {
			if value != "" {
				h.Set(name, value)
			}
		}
		got, err := credentials(h)
		if (err == nil) != (got != "") || len(got) > credentialsMax || got != strings.TrimSpace(got) {
			t.Fatalf("%q, %v", got, err)
		}
		if err != nil {
			if secret := strings.TrimSpace(apiKey); len(secret) > 20 && strings.Contains(err.Error(), secret) {
				t.Fatalf("the error has the secret: %v", err)
			}
			return
		}
		if apiKey != "" && strings.TrimSpace(apiKey) != got || authorization != "" && !strings.HasSuffix(strings.TrimSpace(authorization), got) {
			t.Fatalf("%q is not what all headers say", got)
		}
	})
}

// operations are all that the API has, by method and path.
func (w *world) operations() []string {
	var all []string
	for path, item := range w.server.api.OpenAPI().Paths {
		for method, op := range map[string]any{"GET": item.Get, "POST": item.Post, "PATCH": item.Patch, "DELETE": item.Delete, "PUT": item.Put} {
			if fmt.Sprint(op) != "<nil>" {
				all = append(all, method+" "+path)
			}
		}
	}
	return all
}

// TestEveryRouteNeedsAKey goes through all routes there are, so that a new one
// is not forgotten.
func TestEveryRouteNeedsAKey(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	user, _ := w.key("a", false)
	admin, _ := w.key("a", true)
	for i, route := range w.operations() {
		w.from = net.IPv4(127, 0, 1, byte(i+1)) // no address fails too often
		method, path, _ := strings.Cut(route, " ")
		path = regexp.MustCompile(`\{\w+\}`).ReplaceAllString(path, "x")
		got := w.do(method, path, "")
		if openRoutes[path] {
			if got.status == http.StatusUnauthorized {
				t.Errorf("%s wants a key", route)
			}
			continue
		}
		if got.status != http.StatusUnauthorized || got.header.Get("WWW-Authenticate") == "" || !bytes.Contains(got.body, []byte(`"unauthenticated"`)) {
			t.Errorf("%s without a key: %d %s", route, got.status, got.body)
		}
		for _, bad := range []string{"rk_", user.Secret[:len(user.Secret)-1], user.Secret[:len(user.Secret)-1] + "1", user.ID, "' OR 1=1 --"} {
			if got := w.do(method, path, "", "Authorization", "Bearer "+bad); got.status != http.StatusUnauthorized {
				t.Errorf("%s with %q: %d %s", route, bad, got.status, got.body)
			}
		}
		got = w.do(method, path, "", "X-Api-Key", user.Secret)
		if adminRoutes[path] != (got.status == http.StatusForbidden) || got.status == http.StatusUnauthorized {
			t.Errorf("%s with a key: %d %s", route, got.status, got.body)
		}
		if got := w.do(method, path, "", "Authorization", "Bearer "+admin.Secret); got.status == http.StatusUnauthorized || got.status == http.StatusForbidden {
			t.Errorf("%s with an admin key: %d %s", route, got.status, got.body)
		}
	}
	for _, c := range []struct{ method, path string }{ // ways around the routes
		{"HEAD", "/metrics"}, {"HEAD", "/v1/sessions"}, {"OPTIONS", "/v1/sessions"}, {"PUT", "/v1/sessions"}, {"DELETE", "/metrics"},
		{"GET", "/v1/nothing"}, {"GET", "/v1"}, {"GET", "/v1/"}, {"GET", "/v1/%73essions"}, {"GET", "/v1/../v1/sessions"},
		{"TRACE", "/v1/stats"}, {"FOO", "/v1/stats"},
	} {
		if got := w.do(c.method, c.path, ""); got.status != http.StatusUnauthorized {
			t.Errorf("%s %s: %d %s", c.method, c.path, got.status, got.body)
		}
	}
	for _, path := range []string{"//v1/sessions", "/%76%31/sessions", "/metrics/", "/V1/sessions", "/docs/../v1/sessions"} {
		if got := w.do("GET", path, ""); got.status == http.StatusOK {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
}

// TestFailuresFromOneAddress: past the limit what is no key is 429 and says
// when to come back; keys that are good go on, new ones too.
func TestFailuresFromOneAddress(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	k, _ := w.key("a", false)
	w.from = net.IPv4(127, 0, 2, 1)
	wrong := sessions.KeySecretPrefix + strings.Repeat("A", len(k.Secret)-len(sessions.KeySecretPrefix))
	var got answered
	ctx := w.ctx()
	for i := 0; got.status != http.StatusTooManyRequests; i++ {
		if got = w.do("GET", pathSessions, "", "X-Api-Key", wrong); got.status != http.StatusUnauthorized && got.status != http.StatusTooManyRequests || ctx.Err() != nil {
			t.Fatalf("failure %d: %d %s", i, got.status, got.body)
		}
	}
	wantProblem(t, got.header, got.body, http.StatusTooManyRequests, "too_many_failures", "")
	if seconds, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || seconds < 1 || seconds > 60 {
		t.Errorf("Retry-After %q", got.header.Get("Retry-After"))
	}
	fresh, _ := w.key("a", false)
	for name, secret := range map[string]string{"a key in use": k.Secret, "a new key": fresh.Secret} {
		if got := w.do("GET", pathSessions, "", "X-Api-Key", secret); got.status != http.StatusOK {
			t.Errorf("%s from that address: %d %s", name, got.status, got.body)
		}
	}
	if got := w.do("GET", pathSessions, ""); got.status != http.StatusUnauthorized {
		t.Errorf("no key from that address: %d %s", got.status, got.body)
	}
	w.from = net.IPv4(127, 0, 2, 2)
	if got := w.do("GET", pathSessions, "", "X-Api-Key", wrong); got.status != http.StatusUnauthorized {
		t.Errorf("a failure from another address: %d %s", got.status, got.body)
	}
}

// TestRevoke: a key that is revoked while many calls use it is refused by every
// call that begins after, and what was opened with it ends.
func TestRevoke(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	k, c := w.key("a", false)
	_, other := w.key("a", false)
	s := w.createBy(c, "func main() {")
	p := w.dialWith(s.ID, "", &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + k.Secret}}})
	p.until("subscribed")
	watch, err := c.DialWatch(w.ctx(), "", false)
	if err != nil {
		t.Fatal(err)
	}
	defer watch.CloseNow()
	watcher := &peer{w, watch}
	watcher.until("watch.ready")
	next, stop := w.sse(s.ID, "", "Authorization", "Bearer "+k.Secret)
	defer stop()
	next()

	const callers = 8
	var revoked atomic.Bool
	var all sync.WaitGroup
	warm := make(chan struct{}, callers)
	for range callers {
		all.Go(func() {
			for i := 0; ; i++ {
				late := revoked.Load()
				_, err := c.Get(w.ctx(), s.ID)
				if i == 0 {
					warm <- struct{}{}
				}
				if err != nil && !refusedBy(err) || late && err == nil {
					t.Errorf("call %d, begun after the revocation %t: %v", i, late, err)
					return
				}
				if late {
					return
				}
			}
		})
	}
	for range callers {
		<-warm
	}
	if _, err := w.manager.Keys().Revoke(w.ctx(), k.ID); err != nil {
		t.Fatal(err)
	}
	revoked.Store(true)
	all.Wait()
	for name, p := range map[string]*peer{"stream": p, "watch": watcher} {
		if code, reason := p.closed(); code != websocket.StatusPolicyViolation || !strings.Contains(reason, "not valid") {
			t.Errorf("%s: close %d %q", name, code, reason)
		}
	}
	for _, ok := next(); ok; _, ok = next() { // to its end
	}
	if _, err := other.Get(w.ctx(), s.ID); err != nil {
		t.Errorf("another key of the tenant: %v", err)
	}
}

func refusedBy(err error) bool { return client.CodeOf(err) == "unauthenticated" }

// TestRevokeEndsWaits: a call that waits for its turn's end is answered when its
// key is revoked; the turn goes on.
func TestRevokeEndsWaits(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}, keyFresh: 20 * time.Millisecond})
	k, c := w.key("a", false)
	_, other := w.key("a", false)
	s := w.createBy(c, "func main() {")
	done := make(chan answered, 1)
	go func() {
		done <- w.do("POST", pathSessions+"/"+s.ID+"/turns?wait=true", `{"max_tokens":30000,"ignore_eos":true}`, "X-Api-Key", k.Secret)
	}()
	running := func() bool {
		t.Helper()
		now, err := other.Get(w.ctx(), s.ID)
		if err != nil {
			t.Fatal(err)
		}
		return now.State == "running"
	}
	for ctx := w.ctx(); !running(); {
		if ctx.Err() != nil {
			t.Fatal("the turn does not begin")
		}
	}
	if _, err := w.manager.Keys().Revoke(w.ctx(), k.ID); err != nil {
		t.Fatal(err)
	}
	got := <-done
	wantProblem(t, got.header, got.body, http.StatusUnauthorized, "unauthenticated", "")
	if got.status != http.StatusUnauthorized || got.header.Get("WWW-Authenticate") == "" {
		t.Errorf("status %d, %v", got.status, got.header)
	}
	if !running() {
		t.Error("the turn has ended with its caller's key")
	}
	if turn, err := other.Cancel(w.ctx(), s.ID, client.CallOptions{}); err != nil || turn.State != "cancelled" {
		t.Errorf("cancel: %+v, %v", turn.State, err)
	}
}

// TestRevokeElsewhere: a revocation that another process writes holds here
// within the time that a key counts as fresh.
func TestRevokeElsewhere(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}, keyFresh: 20 * time.Millisecond})
	k, c := w.key("a", false)
	s := w.createBy(c, "func main() {")
	p := w.dialWith(s.ID, "", &websocket.DialOptions{HTTPHeader: http.Header{"X-Api-Key": {k.Secret}}})
	p.until("subscribed")
	elsewhere, err := sessions.OpenKeys(w.ctx(), w.url)
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close()
	if _, err := elsewhere.Revoke(w.ctx(), k.ID); err != nil {
		t.Fatal(err)
	}
	if code, _ := p.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("close code %d", code)
	}
	for !refusedBy(err) {
		if _, err = c.Get(w.ctx(), s.ID); err != nil && !refusedBy(err) {
			t.Fatal(err)
		}
	}
}

// TestQuotaAnswers: a limit is 429, names itself, and says when to come back
// where that is known.
func TestQuotaAnswers(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}})
	k, c := w.key("a", false)
	one := 1
	if err := w.manager.Keys().SetQuotas(w.ctx(), "a", sessions.Quotas{Sessions: &one, TokensPerMinute: &one}); err != nil {
		t.Fatal(err)
	}
	s := w.createBy(c, "func main() {")
	var p Problem
	got := w.do("POST", "/v1/sessions/"+s.ID+"/turns", `{"max_tokens":1}`, "X-Api-Key", k.Secret)
	got.into(t, http.StatusTooManyRequests, &p)
	if p.Code != "limit" || p.Field != "tokens_per_minute" || len(got.header.Get("Retry-After")) < 2 { // some minutes
		t.Errorf("%+v, Retry-After %q", p, got.header.Get("Retry-After"))
	}
	none := 0
	kb, _ := w.key("b", false)
	if err := w.manager.Keys().SetQuotas(w.ctx(), "b", sessions.Quotas{Sessions: &none}); err != nil {
		t.Fatal(err)
	}
	got = w.do("POST", "/v1/sessions", `{}`, "X-Api-Key", kb.Secret)
	got.into(t, http.StatusTooManyRequests, &p)
	if p.Code != "limit" || p.Field != "sessions" {
		t.Errorf("%+v", p)
	}
}
