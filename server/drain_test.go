package server

import (
	"errors"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/coder/websocket"

	"rocket/client"
)

func TestDrain(t *testing.T) {
	var listening net.Listener
	w := start(t, worldOptions{server: Options{DrainTimeout: patience}, listener: func(ln net.Listener) net.Listener {
		listening = ln
		return ln
	}})
	s := w.create("package main")
	idle := w.create("x")
	p := w.dial(s.ID, "")
	watcher, err := w.api.DialWatch(w.ctx(), "", false)
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.CloseNow()
	next, stopSSE := w.sse(s.ID, "")
	defer stopSSE()
	p.send(`{"type":"turn.create","max_tokens":30000,"ignore_eos":true}`) // longer than the test needs
	p.until("turn.delta")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		w.stop()
	}()
	for ctx := w.ctx(); w.do("GET", "/readyz", "").status != http.StatusServiceUnavailable; {
		if ctx.Err() != nil {
			t.Fatal("still ready")
		}
	}
	// While the turn runs: reads work, new turns and sessions do not.
	w.do("GET", pathSessions+"/"+idle.ID, "").into(t, http.StatusOK, nil)
	w.do("GET", "/healthz", "").into(t, http.StatusOK, nil)
	a := w.do("POST", pathSessions+"/"+idle.ID+"/turns", "{}")
	wantProblem(t, a.header, a.body, http.StatusServiceUnavailable, codeDraining, "")
	a = w.do("POST", pathSessions, "{}")
	wantProblem(t, a.header, a.body, http.StatusServiceUnavailable, codeDraining, "")
	// When the running turn ends, its readers see the end, then 1012.
	p.send(`{"type":"turn.cancel"}`)
	p.until("turn.cancelled")
	if code, _ := p.closed(); code != websocket.StatusServiceRestart {
		t.Errorf("socket closed with %d", code)
	}
	for {
		if _, _, err = watcher.Read(w.ctx()); err != nil {
			break
		}
	}
	if code := websocket.CloseStatus(err); code != websocket.StatusServiceRestart {
		t.Errorf("watch ended with %v", err)
	}
	var kinds []string
	for {
		e, ok := next()
		if !ok {
			break
		}
		kinds = append(kinds, e.kind)
	}
	if !slices.Contains(kinds, "turn.cancelled") {
		t.Error("the event stream ended before the turn")
	}
	<-stopped
	if err := listening.(*net.TCPListener).SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the server still listens: %v", err)
	}
}

// TestDrainIsBounded: a turn that takes too long is left to the manager.
func TestDrainIsBounded(t *testing.T) {
	w := start(t, worldOptions{server: Options{DrainTimeout: time.Millisecond}})
	s := w.create("package main")
	p := w.dial(s.ID, "")
	p.send(`{"type":"turn.create","max_tokens":30000,"ignore_eos":true}`)
	p.until("turn.delta")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		w.stop()
	}()
	if code, _ := p.closed(); code != websocket.StatusServiceRestart {
		t.Errorf("socket closed with %d", code)
	}
	<-stopped
}

func TestWatch(t *testing.T) {
	w := start(t, worldOptions{})
	root := w.create("func main() {")
	other := w.create("x")
	all, err := w.api.DialWatch(w.ctx(), "", true)
	if err != nil {
		t.Fatal(err)
	}
	defer all.CloseNow()
	one, err := w.api.DialWatch(w.ctx(), root.ID, false)
	if err != nil {
		t.Fatal(err)
	}
	defer one.CloseNow()
	a, b := &peer{w, all}, &peer{w, one}
	a.until("watch.ready")
	b.until("watch.ready")
	w.turn(other.ID, 3)
	forked, err := w.api.Fork(w.ctx(), root.ID, client.ForkRequest{}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	child := forked.Sessions[0].ID
	if _, err := w.api.CloseSession(w.ctx(), child, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := w.api.Delete(w.ctx(), child, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	_, before := b.until("session.deleted")
	var kinds []string
	for _, f := range before {
		if f["session_id"] == other.ID {
			t.Errorf("event of another tree: %v", f)
		}
		kinds = append(kinds, f.kind())
	}
	for _, want := range []string{"session.created", "session.forked", "session.closed"} {
		if !slices.Contains(kinds, want) {
			t.Errorf("watching the tree showed %v, no %s", kinds, want)
		}
	}
	last, before := a.until("session.deleted")
	if last["session_id"] != child {
		t.Errorf("deleted %v", last)
	}
	if f := find(t, before, "turn.completed"); f["session_id"] != other.ID {
		t.Errorf("turn %v", f)
	}
	for _, f := range before {
		if f.kind() == "turn.delta" {
			t.Fatal("a watch shows deltas")
		}
	}
	// Watchers have nothing to say.
	if err := all.Write(w.ctx(), websocket.MessageText, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if code, _ := a.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("closed with %d", code)
	}
}
