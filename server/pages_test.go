package server

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"rocket/web"
)

// TestPagesHideNoRoute: the dashboard is at / and at its own files; what the API has not stays a problem of the API,
// with the right status.
func TestPagesHideNoRoute(t *testing.T) {
	w := start(t, worldOptions{})
	s, err := New(Options{Sessions: w.manager, Web: web.Handler()})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		method, path string
		status       int
		kind         string
	}{
		{"GET", "/", 200, "text/html; charset=utf-8"},
		{"HEAD", "/", 200, "text/html; charset=utf-8"},
		{"GET", "/v1/nothing", 404, "application/problem+json"},
		{"GET", "/v1/sessions/", 404, "application/problem+json"},
		{"GET", "/v1/sessions/ses_01a22a89-5012-7afe-9bec-dbf3af2c906e/cancel", 405, "application/problem+json"},
		{"POST", "/", 404, "application/problem+json"},
		{"HEAD", "/healthz", 200, "application/json"},
	} {
		r := httptest.NewRequest(c.method, "http://127.0.0.1"+c.path, http.NoBody)
		got := httptest.NewRecorder()
		s.Handler().ServeHTTP(got, r)
		if got.Code != c.status || got.Header().Get("Content-Type") != c.kind {
			t.Errorf("%s %s: %d %s, want %d %s", c.method, c.path, got.Code, got.Header().Get("Content-Type"), c.status, c.kind)
		}
	}
}
