package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// cutter stands between client and server and resets connections in the middle
// of an answer's body: after the client has the header, as the round trip's
// return says.
type cutter struct {
	target string
	left   int // answers that are still to be cut

	mu    sync.Mutex
	conns []*net.TCPConn // guarded by mu; the client's ends
	all   sync.WaitGroup
}

func (c *cutter) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil || c.left == 0 {
		return resp, err
	}
	c.left--
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.SetLinger(0) // its close is a reset
		_ = conn.Close()
	}
	c.conns = nil
	return resp, nil
}

func (c *cutter) listen(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.all.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", c.target)
			if err != nil {
				_ = conn.Close()
				return
			}
			c.mu.Lock()
			c.conns = append(c.conns, conn.(*net.TCPConn))
			c.mu.Unlock()
			c.all.Go(func() { _, _ = io.Copy(server, conn); _ = server.Close() })
			c.all.Go(func() { _, _ = io.Copy(conn, server); _ = conn.Close() })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		c.all.Wait()
	})
	return "http://" + ln.Addr().String()
}

// A call whose answer is cut, whatever it would have been, is repeated with its
// key, and has its effect once.
func TestCutAnswersAreRepeated(t *testing.T) {
	answers := map[string]func(w http.ResponseWriter) (rest string){
		"a result": func(w http.ResponseWriter) string {
			_, _ = io.WriteString(w, `{"id":"ses_1","title":"`)
			return `whole"}`
		},
		"an error that stays": func(w http.ResponseWriter) string {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, `{"code":"session_`)
			return `closed"}`
		},
	}
	for name, begin := range answers {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			calls, effects := 0, map[string]int{}
			free := make(chan struct{})
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				calls++
				first := calls == 1
				effects[r.Header.Get("Idempotency-Key")]++
				mu.Unlock()
				rest := begin(w)
				_ = http.NewResponseController(w).Flush()
				if first {
					<-free // the rest never comes
					return
				}
				_, _ = io.WriteString(w, rest)
			}))
			defer s.Close()
			defer close(free)
			cut := &cutter{target: strings.TrimPrefix(s.URL, "http://"), left: 1}
			c, err := New(cut.listen(t), Options{HTTP: &http.Client{Transport: cut}})
			if err != nil {
				t.Fatal(err)
			}
			got, err := c.Create(context.Background(), CreateRequest{}, CallOptions{})
			if name == "a result" && (err != nil || got.Title != "whole") || name != "a result" && CodeOf(err) != "session_closed" {
				t.Errorf("answer %+v, %v", got, err)
			}
			if calls != 2 || len(effects) != 1 {
				t.Errorf("%d calls with %d keys, want 2 with one", calls, len(effects))
			}
		})
	}
}

// What is no lost connection is not repeated: an answer that is larger than the
// client holds, and one that is no JSON.
func TestBadAnswersAreNotRepeated(t *testing.T) {
	read := func(text string, left int64) error {
		_, err := io.ReadAll(&answerReader{strings.NewReader(text), left})
		return err
	}
	if err := read("12345", 5); !errors.Is(err, errAnswerTooLarge) || again(fmt.Errorf("decode: %w", err)) {
		t.Errorf("an answer that is too large: %v", err)
	}
	if err := read("1234", 5); err != nil {
		t.Errorf("one that is not: %v", err)
	}
	resp := &http.Response{Body: io.NopCloser(strings.NewReader(`{"id":]`))}
	if err := readAnswer(resp, &Session{}); err == nil || again(err) {
		t.Errorf("no JSON: %v", err)
	}
	for _, text := range []string{"", `{"id":"a`} {
		resp := &http.Response{Body: io.NopCloser(strings.NewReader(text))}
		if err := readAnswer(resp, &Session{}); !again(err) {
			t.Errorf("%q, and then the connection's end: %v", text, err)
		}
	}
}
