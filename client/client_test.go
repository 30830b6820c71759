package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"rocket/internal/leaktest"
)

// What needs a real server is tested in package server, where there is one.

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestNew(t *testing.T) {
	for base, ok := range map[string]bool{
		"http://127.0.0.1:8080": true, "https://host/prefix/": true, "http://[::1]:1": true,
		"127.0.0.1:8080": false, "ftp://host": false, "http://": false, "": false, "http://a b": false,
	} {
		if _, err := New(base, Options{}); (err == nil) != ok {
			t.Errorf("New(%q): %v", base, err)
		}
	}
}

func TestAdvance(t *testing.T) {
	for _, c := range []struct {
		name string
		pos  Position
		e    Event
		next Position
		ok   bool
		gap  bool
	}{
		{"first of all", Position{}, Event{Seq: 1, Epoch: 1}, Position{2, 1}, true, false},
		{"first that is left", Position{}, Event{Seq: 90, Epoch: 3}, Position{91, 3}, true, false},
		{"next", Position{5, 1}, Event{Seq: 5, Epoch: 1}, Position{6, 1}, true, false},
		{"seen", Position{5, 1}, Event{Seq: 4, Epoch: 1}, Position{5, 1}, false, false},
		{"missing ones", Position{5, 1}, Event{Seq: 7, Epoch: 1}, Position{5, 1}, false, true},
		{"cut by a restart", Position{50, 1}, Event{Seq: 31, Epoch: 2}, Position{32, 2}, true, false},
		{"restart that cut nothing", Position{50, 1}, Event{Seq: 50, Epoch: 2}, Position{51, 2}, true, false},
	} {
		next, ok, err := advance(c.pos, c.e)
		if next != c.next || ok != c.ok || errors.Is(err, errGap) != c.gap {
			t.Errorf("%s: %+v, %v, %v", c.name, next, ok, err)
		}
	}
}

// TestErrors: what a server says is kept, whatever form it has.
func TestErrors(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) {}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answer(w, r) }))
	defer s.Close()
	c, err := New(s.URL, Options{Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, x := range []struct {
		name, kind, body string
		status           int
		want             Error
	}{
		{"problem", "application/problem+json", `{"code":"invalid","field":"at","detail":"d","status":422,"title":"t"}`, 422, Error{Status: 422, Code: "invalid", Field: "at", Detail: "d", Title: "t"}},
		{"page of a proxy", "text/html", "<html>", 502, Error{Status: 502, Title: "Bad Gateway"}},
		{"broken problem", "application/problem+json", "{", 500, Error{Status: 500, Title: "Internal Server Error", Detail: "{"}},
		{"wait", "application/problem+json", `{"code":"queue_full"}`, 429, Error{Status: 429, Code: "queue_full", Title: "Too Many Requests", RetryAfter: 7 * time.Second}},
	} {
		answer = func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", x.kind)
			if x.want.RetryAfter > 0 {
				w.Header().Set("Retry-After", fmt.Sprint(int(x.want.RetryAfter.Seconds())))
			}
			w.WriteHeader(x.status)
			fmt.Fprint(w, x.body)
		}
		_, err := c.Get(context.Background(), "ses_x")
		e, ok := errors.AsType[*Error](err)
		if !ok || *e != x.want {
			t.Errorf("%s: %+v", x.name, err)
		}
	}
}

func TestScanEvents(t *testing.T) {
	const stream = "retry: 1000\n\n: heartbeat\n\nid: 1-1\nevent: session.created\ndata: {\"seq\":1,\"epoch\":1,\"type\":\"session.created\"}\n\n" +
		"id: 1-2\nevent: turn.delta\ndata: {\"seq\":2,\ndata: \"epoch\":1,\"type\":\"turn.delta\",\"text\":\"a\\nb\"}\n\ndata: {\"seq\":3}"
	var got []Event
	beats := 0
	err := scanEvents(strings.NewReader(stream), func() { beats++ }, func(e Event) error {
		got = append(got, e)
		return nil
	})
	if err != nil || len(got) != 2 || got[1].Seq != 2 || *got[1].Text != "a\nb" || beats < 10 {
		t.Errorf("%d beats, events %+v, %v", beats, got, err)
	}
	err = scanEvents(strings.NewReader("event: stream.error\ndata: {\"code\":\"gone\",\"first_seq\":9}\n\n"), func() {}, nil)
	if e, ok := errors.AsType[*Error](err); !ok || e.Code != "gone" || e.FirstSeq != 9 {
		t.Errorf("error event: %v", err)
	}
}

// FuzzScanEvents: whatever a server or a proxy sends, the client says so or
// takes it; it does not fall over, and ends.
func FuzzScanEvents(f *testing.F) {
	f.Add([]byte("id: 1-1\nevent: turn.delta\ndata: {\"seq\":1}\n\n"))
	f.Add([]byte("event: stream.error\ndata: {}\n\n"))
	f.Add([]byte("data\n\ndata:\n\n:\n\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		lines := bytes.Count(data, []byte("\n")) + 1
		events := 0
		_ = scanEvents(bytes.NewReader(data), func() {}, func(Event) error {
			events++
			return nil
		})
		if 2*events > lines {
			t.Fatalf("%d events out of %d lines", events, lines)
		}
	})
}

// TestRetriesKeepTheirKey: attempts of one call share an idempotency key, two
// calls do not; refusals that stay are not repeated.
func TestRetriesKeepTheirKey(t *testing.T) {
	var keys []string
	statuses := []int{503, 429, 201, 409}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(statuses[len(keys)-1])
		fmt.Fprint(w, `{}`)
	}))
	defer s.Close()
	c, err := New(s.URL, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Create(context.Background(), CreateRequest{}, CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Create(context.Background(), CreateRequest{}, CallOptions{}); err == nil {
		t.Fatal("409 was taken for an answer")
	}
	if len(keys) != 4 || keys[0] == "" || keys[0] != keys[1] || keys[1] != keys[2] || keys[3] == keys[0] {
		t.Errorf("keys %v", keys)
	}
}
