package server

import (
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"rocket/sessions"
)

// TestSecretsInEveryPlace drives every route with a key in every place that a
// client can put one, right or wrong: it is in no log line at any level, no
// error, no metric, and not among the audit records.
func TestSecretsInEveryPlace(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true}, logLevel: slog.LevelDebug - 4})
	good, c := w.key("a", true)
	revoked, _ := w.key("a", true)
	if _, err := w.manager.Keys().Revoke(w.ctx(), revoked.ID); err != nil {
		t.Fatal(err)
	}
	own := w.createBy(c, "func main() {")
	h := &hostile{world: w, key: good, sid: own.ID}
	secrets := []string{good.Secret, revoked.Secret, sessions.KeySecretPrefix + strings.Repeat("Z", len(good.Secret)-len(sessions.KeySecretPrefix))}
	leaks := func(text string) bool {
		for _, s := range secrets {
			if strings.Contains(text, s) || strings.Contains(text, strings.TrimPrefix(s, sessions.KeySecretPrefix)) {
				return true
			}
		}
		return false
	}
	id := regexp.MustCompile(`\{\w+\}`)
	routes := append(w.operations(), "GET /", "GET /nothing", "GET /v1/nothing", "GET /metrics", "GET /docs", "PUT /v1/sessions")
	for i, route := range routes {
		method, path, _ := strings.Cut(route, " ")
		if strings.HasSuffix(path, "/detach") || path == "/v1/check-cache" {
			continue // slow, and nothing of their own to say
		}
		secret := secrets[i%len(secrets)]
		w.from = []byte{127, 1, byte(i), 1} // each its own address: none fails too often
		filled := id.ReplaceAllString(path, own.ID)
		named := id.ReplaceAllString(path, secret)
		bearer := "Bearer " + secret
		with := []string{"X-Api-Key", good.Secret}
		for _, r := range []struct {
			path, body string
			header     []string
		}{
			{named, "", []string{"Authorization", bearer}},
			{named, "", with},
			{named + "x", "", with},
			{filled + "?key=" + secret, "", with},
			{filled + "?" + secret + "=1&" + secret + "=2", "", with},
			{filled + "?limit=" + secret + "&from=" + secret + "&root=" + secret + "&to=" + secret + "&with=" + secret, "", with},
			{filled + "?%zz" + secret, "", with},
			{filled, "", []string{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+secret))}},
			{filled, "", []string{"Authorization", secret}},
			{filled, "", []string{"Authorization", "Bearer " + secret + " " + secret}},
			{filled, "", []string{"Authorization", bearer, "X-Api-Key", secret[:30]}},
			{filled, "", []string{"Sec-WebSocket-Protocol", keyProtocol + secret + ", " + keyProtocol}},
			{filled, "", []string{"Cookie", "key=" + secret, "Referer", "http://localhost/" + secret, "User-Agent", secret}},
			{filled, "{" + secret, with},
			{filled, `{"` + secret + `":1}`, with},
			{filled, `{"title":5,"model":"` + secret + `","tier":"` + secret + `","at":"` + secret + `"}`, with},
			{filled, `{"messages":[{"role":"` + secret + `","content":"` + secret + `"}],"labels":{"` + secret + `":5}}`, with},
			{filled, "{}", append([]string{"Idempotency-Key", strings.Repeat(secret, 10)}, with...)},
			{filled, "{}", append([]string{"Last-Event-ID", secret, "Accept", secret, "Content-Type", secret}, with...)},
			{filled, "{}", append([]string{"Content-Type", "application/json; charset=" + secret, "Content-Encoding", secret}, with...)},
			{filled, "", append([]string{"Origin", "http://" + secret, "Upgrade", "websocket", "Connection", "Upgrade"}, with...)},
			{filled, "", append([]string{hopHeader, secret}, with...)},
		} {
			if method == "DELETE" && !strings.Contains(r.path, secret) || method == "POST" && strings.HasSuffix(path, "/close") && !strings.Contains(r.path, secret) {
				continue // the session is needed for the others
			}
			got := w.do(method, r.path, r.body, r.header...)
			if got.status >= 400 && leaks(string(got.body)) || leaks(fmt.Sprint(got.header)) {
				t.Errorf("%s %s with %q, %q: the answer has the key: %.300s", method, r.path, r.body, r.header, got.body)
			}
			if got.status >= 500 && got.status != 501 {
				t.Errorf("%s %s with %q, %q: %d %s", method, r.path, r.body, r.header, got.status, got.body)
			}
		}
	}
	for _, secret := range secrets {
		for _, request := range []string{ // what no client library sends
			secret + " / HTTP/1.1\r\nHost: localhost\r\n\r\n",
			"GET / HTTP/1.1\r\nHost: " + secret + "\r\n\r\n",
			"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\n" + secret + ": x\r\n\r\n",
			"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization : Bearer " + secret + "\r\n\r\n",
			"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + secret + "\x00\r\n\r\n",
			"GET /v1/sessions HTTP/" + secret + "\r\n\r\n",
			"GET http://" + secret + "@localhost/v1/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n",
			"GET /v1/sessions/" + url.PathEscape("\xff"+secret) + " HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: " + good.Secret + "\r\n\r\n",
			secret + "\r\n\r\n",
		} {
			r := h.connect()
			r.put(request)
			if got := r.answer(); leaks(string(got.body)) {
				t.Errorf("%q: the answer has the key: %s", request, got.body)
			}
			r.Close()
		}
		s := h.stream()
		for _, f := range []string{
			secret, `{"type":"` + secret + `"}`, `{"type":"ping","` + secret + `":1}`, `{"type":"fork","session_id":"` + secret + `"}`,
			`{"type":"fork","idempotency_key":"` + secret + `","at":-1}`, `{"type":"subscribe","from":"` + secret + `"}`, `{"type":"detach","tier":"` + secret + `"}`,
		} {
			s.put(textFrame(f))
		}
		s.put(textFrame(`{"type":"ping","ref":"still here"}`))
		texts, _, _ := s.closedAfter("still here", rawFrame(fin|opClose, 2, "\x03\xe8"))
		for _, text := range texts {
			if leaks(strings.ReplaceAll(text, `"session_id":"`+secret+`"`, "")) { // what a frame names is named in its answer
				t.Errorf("a frame has the key: %s", text)
			}
		}
	}
	w.from = nil
	if got := w.do("GET", "/metrics", "", "X-Api-Key", good.Secret); got.status != 200 || leaks(string(got.body)) {
		t.Errorf("metrics %d, or they have the key", got.status)
	}
	w.stop() // the last failures are recorded
	conn, err := pgx.Connect(w.ctx(), w.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(w.ctx())
	var kept string
	if err := conn.QueryRow(w.ctx(), `SELECT string_agg(a::text, E'\n') || (SELECT string_agg(k::text, E'\n') FROM api_keys k) FROM audit_events a`).Scan(&kept); err != nil {
		t.Fatal(err)
	}
	if leaks(kept) || !strings.Contains(kept, "auth.failed") {
		t.Errorf("audit records and keys: %s", kept)
	}
	log := w.lines.String()
	for line := range strings.Lines(log) {
		if leaks(line) {
			t.Errorf("the log has the key: %.500s", line)
		}
	}
	if !strings.Contains(log, "path=/v1/sessions/rk_…") {
		t.Error("the log does not tell of addresses with keys")
	}
}
