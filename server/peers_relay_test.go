package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/sessions"
)

// TestSocketRelay: one socket drives sessions of both servers, whichever of
// them it was opened at.
func TestSocketRelay(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	for _, query := range []string{"", "?follow=false"} {
		for _, foreign := range []bool{false, true} {
			t.Run(fmt.Sprintf("path of another: %v, %s", foreign, query), func(t *testing.T) {
				path, other := b.create("package main").ID, a.create("func main() {").ID
				if foreign {
					path, other = other, path
				}
				p := b.dial(path, query)
				if query == "" {
					p.until("subscribed")
				}
				p.driveSession(path, query == "")
				p.driveSession(other, false)
				if diff := cmp.Diff(a.page(path, 0), b.page(path, 0)); diff != "" {
					t.Errorf("pages differ: %s", diff)
				}
			})
		}
	}
}

// after reads on until a kind of frame is among those that came, replies and
// events being in no order.
func (p *peer) after(came []wireFrame, kind string) []wireFrame {
	p.w.t.Helper()
	if slices.ContainsFunc(came, func(f wireFrame) bool { return f.kind() == kind }) {
		return came
	}
	_, more := p.until(kind)
	return append(came, more...)
}

// driveSession sends every frame about a session and reads what it answers.
func (p *peer) driveSession(id string, subscribed bool) {
	t := p.w.t
	t.Helper()
	frame := func(text string) (before []wireFrame) {
		p.send(strings.Replace(text, `{`, fmt.Sprintf(`{"session_id":%q,"ref":"r",`, id), 1))
		for {
			f, err := p.read()
			if err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			before = append(before, f)
			switch {
			case f["ref"] != "r":
			case f.kind() != "reply" || f["session_id"] != id:
				t.Fatalf("%s: %v", text, f)
			default:
				return before
			}
		}
	}
	if !subscribed {
		frame(`{"type":"subscribe","from":1}`)
	}
	before := p.after(frame(`{"type":"turn.create","max_tokens":20,"ignore_eos":true,"idempotency_key":"`+uuid.NewString()+`"}`), "turn.completed")
	if f := find(t, before, "turn.delta"); f["session_id"] != id {
		t.Errorf("delta of %v", f["session_id"])
	}
	forked := frame(`{"type":"fork","n":2,"follow":true}`)
	children := map[any]bool{}
	for _, s := range forked[len(forked)-1]["result"].(map[string]any)["sessions"].([]any) {
		children[s.(map[string]any)["id"]] = true
	}
	for range 2 {
		if f, _ := p.until("subscribed"); !children[f["session_id"]] {
			t.Errorf("follows %v, not one of %v", f["session_id"], children)
		}
	}
	frame(`{"type":"detach"}`)
	frame(`{"type":"resume"}`)
	frame(`{"type":"turn.create","max_tokens":30000,"ignore_eos":true}`)
	p.after(frame(`{"type":"turn.cancel"}`), "turn.cancelled")
	frame(`{"type":"unsubscribe"}`)
	p.send(fmt.Sprintf(`{"type":"subscribe","session_id":%q,"from":1,"ref":"bad","idempotency_key":1}`, id))
	if f, _ := p.until("error"); f["ref"] != "bad" || f["code"] != codeInvalid {
		t.Errorf("bad frame: %v", f)
	}
	frame(`{"type":"subscribe","from":9007199254740991}`)
}

// TestFrameWithoutSession: a frame that names no session is about the path's
// wherever it is executed.
func TestFrameWithoutSession(t *testing.T) {
	for raw, want := range map[string]string{
		`{"type":"resume"}`:                               `{"session_id":"ses_x","type":"resume"}`,
		` {"type":"resume","session_id":""}`:              `{"session_id":"ses_x","type":"resume"}`,
		`{"type":"resume", "session_id":"ses_y"}`:         `{"type":"resume", "session_id":"ses_y"}`,
		`{"type":"turn.create","seed":72057594037927937}`: `{"seed":72057594037927937,"session_id":"ses_x","type":"turn.create"}`,
	} {
		if got, err := withSession([]byte(raw), "ses_x"); string(got) != want || err != nil {
			t.Errorf("%s: %s, %v", raw, got, err)
		}
	}
}

// TestSlowReaderOfAnotherServer is sent away by the owner, and told why.
func TestSlowReaderOfAnotherServer(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{
		server:   Options{LagMax: 8},
		listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} },
	})
	s := a.create("package main")
	dialer := &net.Dialer{}
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, network, addr)
		if err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
		}
		return conn, err
	}
	b.server.peers.transport.DialContext = dial
	slow := b.dialWith(s.ID, "", &websocket.DialOptions{HTTPClient: &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}})
	slow.until("session.created")
	for range 100 { // three events each, more than all buffers on the way hold
		a.turn(s.ID, 1)
	}
	if code, reason := slow.closed(); code != websocket.StatusTryAgainLater || !strings.Contains(reason, s.ID) {
		t.Errorf("closed with %d %q", code, reason)
	}
}

// TestMovedSession: its reader is told, and comes back to where it is.
func TestMovedSession(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p := a.dial(s.ID, "")
	p.until("session.created")
	var got []client.Event
	followed := make(chan struct{})
	first := make(chan struct{})
	go func() {
		defer close(followed)
		for e, err := range a.api.Follow(a.ctx(), s.ID, client.Position{}, client.FollowOptions{}) {
			if err != nil {
				t.Error(err)
				return
			}
			if got = append(got, e); e.Seq == 1 {
				close(first)
			}
			if e.Type == "turn.completed" {
				return
			}
		}
	}()
	<-first
	if _, err := a.api.Release(a.ctx(), s.ID, client.ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	b.turn(s.ID, 30)
	f, _ := p.until("error")
	if f["code"] != string(sessions.CodeMoved) || f["session_id"] != s.ID {
		t.Errorf("%v", f)
	}
	p.send(`{"type":"subscribe","from":2,"epoch":1}`)
	p.until("turn.completed")
	<-followed
	want, _ := json.Marshal(b.page(s.ID, 0))
	have, _ := json.Marshal(got)
	if string(want) != string(have) {
		t.Errorf("the follower has %s, want %s", have, want)
	}
}

// TestRelayedRepliesThatNobodyReads: replies that another server sends are held
// like own ones.
func TestRelayedRepliesThatNobodyReads(t *testing.T) {
	const frames, size = 4, 1_000_000
	a, b := twoWorlds(t, worldOptions{listener: func(ln net.Listener) net.Listener { return someBuffers{ln} }})
	s := a.create("func main() {")
	a.turn(s.ID, 1)
	conn, err := pgx.Connect(t.Context(), a.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), "UPDATE turns SET text = repeat('x', $1)", size); err != nil {
		t.Fatal(err)
	}
	p := b.dial(s.ID, "?follow=false")
	for i := range frames {
		p.send(fmt.Sprintf(`{"type":"turn.cancel","ref":"%d"}`, i))
	}
	for end := time.Now().Add(patience); b.manager.Stats().AnswerBytes < 2*size; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are counted, want those of two replies", b.manager.Stats().AnswerBytes)
		}
	}
	a.turn(a.create("x").ID, 3) // while nothing is read
	if n := b.manager.Stats().AnswerBytes; n >= 3*size {
		t.Errorf("%d bytes are counted for one socket", n)
	}
	for i := range frames {
		if f, err := p.read(); err != nil || f["ref"] != fmt.Sprint(i) || len(f["result"].(map[string]any)["text"].(string)) != size {
			t.Fatalf("reply %d: ref %v, %v", i, f["ref"], err)
		}
	}
	for end := time.Now().Add(patience); a.manager.Stats().AnswerBytes+b.manager.Stats().AnswerBytes != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d and %d bytes are counted when all is read", a.manager.Stats().AnswerBytes, b.manager.Stats().AnswerBytes)
		}
	}
	if _, err := conn.Exec(t.Context(), "UPDATE turns SET text = 'x'"); err != nil {
		t.Fatal(err)
	}
}
