package server

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"rocket/sessions"
)

func TestLoopback(t *testing.T) {
	for _, c := range []struct {
		addr string
		ok   bool
	}{
		{"127.0.0.1:8080", true}, {"127.0.0.53:0", true}, {"[::1]:8080", true}, {"localhost:1", true}, {"LOCALHOST:1", true},
		{"0.0.0.0:8080", false}, {":8080", false}, {"[::]:8080", false}, {"192.168.1.5:80", false}, {"example.com:80", false},
		{"127.0.0.1", false}, {"", false}, {"localhost.example.com:80", false},
	} {
		if ok, err := Loopback(c.addr); (ok && err == nil) != c.ok {
			t.Errorf("Loopback(%q) = %v, %v, want %v", c.addr, ok, err, c.ok)
		}
	}
}

// bare is a server whose manager does nothing: enough for what never gets there.
func bare(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Sessions = &sessions.Manager{}
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestBrowserAttacks(t *testing.T) {
	s := bare(t, Options{AllowedHosts: []string{"rocket.test"}})
	for _, c := range []struct {
		name, method, path, host string
		header                   map[string]string
		status                   int
		code, field              string
	}{
		{"loopback name", "GET", "/healthz", "localhost:8080", nil, 200, "", ""},
		{"loopback address", "GET", "/healthz", "127.0.0.1", nil, 200, "", ""},
		{"loopback address, version 6", "GET", "/healthz", "[::1]:8080", nil, 200, "", ""},
		{"allowed name", "GET", "/healthz", "rocket.test:80", nil, 200, "", ""},
		{"rebound name", "GET", "/healthz", "evil.example:8080", nil, 403, codeHostNotAllowed, "Host"},
		{"rebound name that begins well", "GET", "/healthz", "localhost.evil.example", nil, 403, codeHostNotAllowed, "Host"},
		{"no name", "GET", "/healthz", "", nil, 403, codeHostNotAllowed, "Host"},
		{"rebound name, dashboard", "GET", "/docs", "evil.example", nil, 403, codeHostNotAllowed, "Host"},
		{"form of another site", "POST", "/v1/sessions", "localhost", map[string]string{"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}, 403, codeCrossOrigin, "Origin"},
		{"page of another port", "POST", "/v1/sessions", "localhost:8080", map[string]string{"Origin": "http://localhost:3000"}, 403, codeCrossOrigin, "Origin"},
		{"delete from another site", "DELETE", "/v1/sessions/ses_x", "localhost", map[string]string{"Origin": "https://evil.example"}, 403, codeCrossOrigin, "Origin"},
		{"own page, bad body", "POST", "/v1/sessions", "localhost:8080", map[string]string{"Origin": "http://localhost:8080", "Sec-Fetch-Site": "same-origin"}, 400, codeMalformed, "body"},
		{"other media type", "POST", "/v1/sessions", "localhost", map[string]string{"Content-Type": "text/plain"}, 415, codeMediaType, "body"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest(c.method, c.path, strings.NewReader("{"))
			r.Host = c.host
			for k, v := range c.header {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			s.Handler().ServeHTTP(w, r)
			if w.Code != c.status {
				t.Fatalf("status %d, want %d: %s", w.Code, c.status, w.Body)
			}
			if c.code != "" {
				wantProblem(t, w.Result().Header, w.Body.Bytes(), c.status, c.code, c.field)
			}
		})
	}
}

func TestEveryAnswerHasPageHeaders(t *testing.T) {
	s := bare(t, Options{})
	for _, path := range []string{"/healthz", "/docs", "/openapi.json", "/nothing"} {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Host = "localhost"
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		if got := w.Header().Get("X-Content-Type-Options"); got != "nosniff" {
			t.Errorf("%s: X-Content-Type-Options %q", path, got)
		}
		if csp := w.Header().Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Errorf("%s: Content-Security-Policy %q", path, csp)
		}
	}
}
