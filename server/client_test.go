package server

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rocket/client"
)

// flaky forwards connections and breaks each after some bytes of answers.
type flaky struct {
	ln     net.Listener
	target string
	after  int64 // bytes of answers until a connection breaks

	mu     sync.Mutex
	breaks int // guarded by mu; connections still to be broken, -1: all
	broken int // guarded by mu
	all    sync.WaitGroup
}

func newFlaky(t *testing.T, base string, after int64, breaks int) (*flaky, *client.Client) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &flaky{ln: ln, target: strings.TrimPrefix(base, "http://"), after: after, breaks: breaks}
	f.all.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			f.all.Go(func() { f.serve(in) })
		}
	})
	api, err := client.New("http://"+ln.Addr().String(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		api.Close()
		ln.Close()
		f.all.Wait()
	})
	return f, api
}

func (f *flaky) serve(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", f.target)
	if err != nil {
		return
	}
	defer out.Close()
	f.mu.Lock()
	breaks := f.breaks != 0
	if f.breaks > 0 {
		f.breaks--
	}
	f.mu.Unlock()
	f.all.Go(func() {
		_, _ = io.Copy(out, in) // either end going is the point
		out.Close()
	})
	if !breaks {
		_, _ = io.Copy(in, out)
		return
	}
	if n, _ := io.CopyN(in, out, f.after); n == f.after {
		f.mu.Lock()
		f.broken++
		f.mu.Unlock()
	}
}

// TestFollowOverBrokenConnections: each event comes once and in order, however
// often the connection breaks, over both transports.
func TestFollowOverBrokenConnections(t *testing.T) {
	for _, sse := range []bool{false, true} {
		t.Run(map[bool]string{false: "websocket", true: "events"}[sse], func(t *testing.T) {
			w := start(t, worldOptions{})
			s := w.create("package main")
			f, api := newFlaky(t, w.base, 2500, 8)
			if _, err := w.api.StartTurn(w.ctx(), s.ID, greedy(900), client.CallOptions{}); err != nil {
				t.Fatal(err)
			}
			var got []client.Event
			reconnected := 0
			opts := client.FollowOptions{SSE: sse, Reconnected: func(error) { reconnected++ }}
			for e, err := range api.Follow(w.ctx(), s.ID, client.Position{}, opts) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, e)
				if e.Type == "turn.completed" {
					break
				}
			}
			if diff := cmp.Diff(w.page(s.ID, 0), got); diff != "" {
				t.Errorf("events differ: %.2000s", diff)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.broken < 2 || reconnected < f.broken {
				t.Errorf("%d connections broke, %d reconnects: the test shows nothing", f.broken, reconnected)
			}
		})
	}
}

// TestCallsAreRepeatedOnce: an answer that is lost on the way costs another
// attempt, not another session.
func TestCallsAreRepeatedOnce(t *testing.T) {
	w := start(t, worldOptions{})
	f, api := newFlaky(t, w.base, 40, 3)
	title := "only one"
	s, err := api.Create(w.ctx(), client.CreateRequest{Title: title}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	page, err := w.api.List(w.ctx(), client.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Data) != 1 || page.Data[0].ID != s.ID || page.Data[0].Title != title {
		t.Errorf("sessions after a repeated call: %+v", page.Data)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken == 0 {
		t.Error("no connection broke: the test shows nothing")
	}
}

func TestFollowEnds(t *testing.T) {
	w := start(t, worldOptions{})
	for _, sse := range []bool{false, true} {
		opts := client.FollowOptions{SSE: sse}
		for _, err := range w.api.Follow(w.ctx(), "ses_01a22a7e-0000-7000-8000-000000000000", client.Position{}, opts) {
			if client.CodeOf(err) != "not_found" {
				t.Errorf("unknown session: %v", err)
			}
		}
		s := w.create("x")
		ctx, cancel := context.WithCancel(w.ctx())
		last := error(nil)
		for e, err := range w.api.Follow(ctx, s.ID, client.Position{}, opts) {
			if last = err; err == nil && e.Type == "session.created" {
				cancel()
			}
		}
		cancel()
		if last != context.Canceled {
			t.Errorf("cancelled follow ended with %v", last)
		}
	}
}
