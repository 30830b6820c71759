package server

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

// sizes counts the values of a decoded JSON text, names of fields among them,
// and how deep it is.
func sizes(v any) (values, depth int) {
	values = 1
	add := func(v any) {
		n, d := sizes(v)
		values, depth = values+n, max(depth, d)
	}
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			add(e)
		}
		depth++
	case map[string]any:
		for _, e := range v {
			values++
			add(e)
		}
		depth++
	}
	return values, depth
}

// FuzzJSON: what is taken is UTF-8 that the decoder changes nothing of, and no
// larger or deeper than was measured before it was decoded.
func FuzzJSON(f *testing.F) {
	for _, seed := range []string{
		`{"a":[1,2,{"b":"c"}]}`, `"\ud83d\ude00"`, `"\ud800"`, `"\\ud800"`, `[[[[]]]]`, `{"a":1,"a":2}`, `"[{,:"`, `"\"[,"`, "\xff", ` [ ] `, `"\u0000"`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var v any
		if unmarshalJSON(data, &v) != nil {
			return
		}
		values, depth := sizes(v)
		if n, d := measureJSON(data); values > 2*n+1 || depth > d {
			t.Fatalf("%s has %d values, %d deep, and was measured as %d, %d", data, values, depth, n, d)
		}
		if !utf8.Valid(data) || strings.ContainsRune(string(data), '\ufffd') {
			return
		}
		out, err := json.Marshal(v)
		if err != nil || strings.ContainsRune(string(out), '\ufffd') && !strings.Contains(strings.ToLower(string(data)), `\ufffd`) {
			t.Fatalf("%s became %s, %v", data, out, err)
		}
	})
}

// FuzzBodies: a body that its schema takes is one that the type takes too, and
// the same when it is written out.
func FuzzBodies(f *testing.F) {
	s, err := New(Options{Sessions: &sessions.Manager{}})
	if err != nil {
		f.Fatal(err)
	}
	registry := s.api.OpenAPI().Components.Schemas
	kinds := []reflect.Type{
		reflect.TypeFor[sessions.CreateRequest](), reflect.TypeFor[sessions.PatchRequest](), reflect.TypeFor[sessions.TurnRequest](),
		reflect.TypeFor[sessions.ForkRequest](), reflect.TypeFor[sessions.DetachRequest](),
	}
	for i, seed := range []string{
		`{"title":"t","labels":{"a":"b"},"input":"x","ttl_seconds":5,"pin":true}`, `{"labels":{},"ttl_seconds":0}`,
		`{"messages":[{"role":"user","content":"x","tool_calls":[{}]}],"max_tokens":5,"temperature":0.5,"stop":["a"],"mtp":{"max_depth":1},"logprobs":3}`,
		`{"at":3,"children":[{"title":"a","labels":{"k":"v"}}]}`, `{"tier":"host"}`,
	} {
		f.Add(uint8(i), []byte(seed))
	}
	f.Fuzz(func(t *testing.T, kind uint8, data []byte) {
		of := kinds[int(kind)%len(kinds)]
		check := func(data []byte) bool {
			var parsed any
			if unmarshalJSON(data, &parsed) != nil {
				return false
			}
			var result huma.ValidateResult
			path := huma.NewPathBuffer(make([]byte, 0, 128), 0)
			path.Push("body")
			huma.Validate(registry, registry.Schema(of, true, of.Name()), path, huma.ModeWriteToServer, parsed, &result)
			if len(result.Errors) == 0 {
				return true
			}
			if p := humaProblem(422, "validation failed", result.Errors...).(*Problem); p.Field == "" || p.Detail == "" || len(p.Detail) > 2*problemTextMax || !utf8.ValidString(p.Detail+p.Field) {
				t.Fatalf("%s: %+v", data, p)
			}
			return false
		}
		if !check(data) {
			return
		}
		v := reflect.New(of)
		if unmarshalJSON(data, v.Interface()) != nil {
			return // numbers that the type does not hold
		}
		out, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatal(err)
		}
		again := reflect.New(of)
		if err := json.Unmarshal(out, again.Interface()); err != nil || !reflect.DeepEqual(normal(v), normal(again)) {
			t.Fatalf("%s became %s, %v", data, out, err)
		}
	})
}

// normal is a value without what writing it out leaves out.
func normal(v reflect.Value) string {
	out, _ := json.Marshal(v.Interface())
	var parsed any
	_ = json.Unmarshal(out, &parsed)
	out, _ = json.Marshal(parsed)
	return string(out)
}

// FuzzPosition: whatever a reader asks for, it gets a position that a log can
// have, or the name of what is wrong.
func FuzzPosition(f *testing.F) {
	for _, seed := range [][2]string{{"from=1&epoch=2", ""}, {"", "1-5"}, {"from=x", "1-"}, {"from=%zz", "-"}, {"from=1&from=2", "9223372036854775807-4611686018427387904"}, {"epoch=-1", "1-2-3"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, query, lastEventID string) {
		values, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		p, err := parsePosition(values, lastEventID)
		if err == nil {
			if p.from < 0 || p.from > 1<<62 || p.epoch < 0 {
				t.Fatalf("%+v", p)
			}
			return
		}
		if problem, ok := err.(*Problem); !ok || problem.Field == "" || problem.Status != 422 {
			t.Fatalf("%v", err)
		}
	})
}

// FuzzPaths: the session that a call is placed by is the one that the router
// hands to its handler.
func FuzzPaths(f *testing.F) {
	s, err := New(Options{Sessions: &sessions.Manager{}})
	if err != nil {
		f.Fatal(err)
	}
	router := s.handler.(chi.Routes)
	for _, seed := range []string{
		"/v1/sessions/ses_x/turns", "/v1/sessions/", "/v1/sessions//turns", "/v1/sessions/a%2fb/turns", "/v1/sessions/a%00", "//v1/sessions/x", "/v1/sessions/x/turns/y", "/v1/%73essions/x",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, path string) {
		u, err := url.ParseRequestURI(path)
		if err != nil || u.Host != "" || u.Scheme != "" {
			return
		}
		r := &http.Request{Method: http.MethodGet, URL: u, Header: http.Header{}}
		pattern, ok := routeOfPath(router, r)
		if !ok {
			return
		}
		routed := u.RawPath
		if routed == "" {
			routed = u.Path
		}
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete} {
			ctx := chi.NewRouteContext()
			if router.Match(ctx, method, routed) && strings.Contains(ctx.RoutePattern(), "{id}") && ctx.URLParam("id") != sessionOfPath(u) {
				t.Fatalf("%s %s is of session %q, and is placed by %q", method, path, ctx.URLParam("id"), sessionOfPath(u))
			}
		}
		if strings.HasPrefix(pattern, "/v1") && openRoutes[pattern] {
			t.Fatalf("%s is open to all", path)
		}
	})
}

// FuzzHosts: a Host that is let in is one of the list, and a page whose origin
// is let in has that very host.
func FuzzHosts(f *testing.F) {
	for _, seed := range [][2]string{{"localhost:80", "http://localhost:80"}, {"[::1]:80", "http://[::1]:80"}, {"localhost.evil", "null"}, {"[localhost", "http://a@localhost:80"}, {"127.0.0.1:80:80", "//localhost:80"}} {
		f.Add(seed[0], seed[1])
	}
	passed := false
	h := allowHosts([]string{"rocket.test"})(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed = true }))
	f.Fuzz(func(t *testing.T, host, origin string) {
		passed = false
		r := &http.Request{Method: http.MethodGet, Host: host, Header: http.Header{}, URL: &url.URL{Path: "/"}}
		h.ServeHTTP(httptest.NewRecorder(), r)
		if passed {
			rest := strings.ToLower(host)
			found := false
			for _, name := range append([]string{"rocket.test"}, loopbackHosts...) {
				after, ok := strings.CutPrefix(strings.TrimPrefix(rest, "["), name)
				found = found || ok && (after == "" || strings.HasPrefix(after, ":") || strings.HasPrefix(after, "]"))
			}
			if !found {
				t.Fatalf("%q is let in", host)
			}
		}
		if origin == "" {
			return
		}
		r.Header.Set("Origin", origin)
		if checkOrigin(r) == nil && !strings.HasSuffix(strings.ToLower(origin), strings.ToLower(host)) && !strings.Contains(strings.ToLower(origin), strings.ToLower(host)) {
			t.Fatalf("a page of %q may open sockets of %q", origin, host)
		}
	})
}

// FuzzWithSession: a frame that is passed on to another server is the frame
// that came, with its session named.
func FuzzWithSession(f *testing.F) {
	d := decoder(f)
	for _, seed := range []string{
		`{"type":"ping"}`, `{"type":"fork","session_id":"","n":2}`, `{"type":"turn.create","session_id":"x","input":"\u00e9"}`, `{"type":"turn.create","seed":9007199254740993}`, `{"type":"fork","session_id":"a","session_id":""}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		fr, p := d.decode(raw)
		if p != nil {
			return
		}
		passed, err := withSession(raw, "ses_here")
		if err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		again, p := d.decode(passed)
		if p != nil {
			t.Fatalf("%s became %s: %s", raw, passed, p.Detail)
		}
		want := fr.head
		if want.SessionID == "" {
			want.SessionID = "ses_here"
		}
		if again.head != want {
			t.Fatalf("%s became %s: %+v, want %+v", raw, passed, again.head, want)
		}
		a, b := reflect.ValueOf(fr.request).Elem(), reflect.ValueOf(again.request).Elem()
		b.FieldByName("FrameHead").Set(a.FieldByName("FrameHead"))
		if x, y := normal(a), normal(b); x != y {
			t.Fatalf("%s became %s", x, y)
		}
	})
}
