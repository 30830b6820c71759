package server

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"rocket/client"
	"rocket/engine"
	"rocket/sessions"
)

// TestBadInput: each wrong call is answered with a status, a code and, where a
// field is wrong, its name; and it changes nothing.
func TestBadInput(t *testing.T) {
	w := start(t, worldOptions{})
	open := w.create("func main() {")
	closed := w.create("x")
	if _, err := w.api.CloseSession(w.ctx(), closed.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	deleted := w.create("x")
	if err := w.api.Delete(w.ctx(), deleted.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	busy := w.create("package main")
	if _, err := w.api.StartTurn(w.ctx(), busy.ID, greedy(20_000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	unknown := "ses_01a22a7e-0000-7000-8000-000000000000"
	long := `{"input":"` + strings.Repeat("word ", 40_000) + `"}`
	session := func(id, rest string) string { return pathSessions + "/" + id + rest }
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code, field              string
	}{
		{"unknown session", "GET", session(unknown, ""), "", 404, "not_found", "session_id"},
		{"unknown session, turn", "POST", session(unknown, "/turns"), "{}", 404, "not_found", "session_id"},
		{"unknown session, fork", "POST", session(unknown, "/fork"), "{}", 404, "not_found", "session_id"},
		{"unknown session, events", "GET", session(unknown, "/events"), "", 404, "not_found", "session_id"},
		{"unknown session, tree", "GET", session(unknown, "/tree"), "", 404, "not_found", "session_id"},
		{"unknown session, cancel", "POST", session(unknown, "/cancel"), "", 404, "not_found", "session_id"},
		{"unknown session, delete", "DELETE", session(unknown, ""), "", 404, "not_found", "session_id"},
		{"id that is none", "GET", session("nonsense", ""), "", 404, "not_found", "session_id"},
		{"deleted session", "GET", session(deleted.ID, ""), "", 404, "not_found", "session_id"},
		{"unknown turn", "GET", session(open.ID, "/turns/turn_01a22a7e-0000-7000-8000-000000000000"), "", 404, "not_found", "turn_id"},

		{"fork past the end", "POST", session(open.ID, "/fork"), fmt.Sprintf(`{"at":%d}`, open.Length+1), 422, "invalid", "at"},
		{"fork below the start", "POST", session(open.ID, "/fork"), `{"at":-1}`, 422, "invalid", "at"},
		{"fork of a closed session", "POST", session(closed.ID, "/fork"), "{}", 409, "session_closed", ""},
		{"no children", "POST", session(open.ID, "/fork"), `{"n":0}`, 422, "invalid", "n"},
		{"too many children", "POST", session(open.ID, "/fork"), `{"n":65}`, 422, "invalid", "n"},
		{"children twice", "POST", session(open.ID, "/fork"), `{"n":1,"children":[{}]}`, 422, "invalid", "n"},
		{"turn on a closed session", "POST", session(closed.ID, "/turns"), "{}", 409, "session_closed", ""},
		{"two turns at once", "POST", session(busy.ID, "/turns"), "{}", 409, "turn_in_progress", ""},

		{"unknown field", "POST", pathSessions, `{"titel":"x"}`, 422, "invalid", "titel"},
		{"unknown field of a turn", "POST", session(open.ID, "/turns"), `{"prompt":"x"}`, 422, "invalid", "prompt"},
		{"unknown query parameter", "GET", pathSessions + "?page=2", "", 422, "invalid", "page"},
		{"unknown query parameter of events", "GET", session(open.ID, "/events?since=2"), "", 422, "invalid", "since"},
		{"wrong JSON type", "POST", pathSessions, `{"title":5}`, 422, "invalid", "title"},
		{"wrong JSON type inside", "POST", pathSessions, `{"labels":{"a":[]}}`, 422, "invalid", "labels.a"},
		{"wrong JSON type of the body", "POST", pathSessions, `[]`, 422, "invalid", "body"},
		{"not JSON", "POST", pathSessions, `{"title":`, 400, "malformed", "body"},
		{"not UTF-8", "POST", pathSessions, "{\"title\":\"\xff\xfe\"}", 400, "malformed", "body"},
		{"negative limit", "GET", pathSessions + "?limit=-1", "", 422, "invalid", "limit"},
		{"limit of zero", "GET", pathSessions + "?limit=0", "", 422, "invalid", "limit"},
		{"limit that is no number", "GET", pathSessions + "?limit=many", "", 422, "invalid", "limit"},
		{"negative max_tokens", "POST", session(open.ID, "/turns"), `{"max_tokens":-1}`, 422, "invalid", "max_tokens"},
		{"no tokens", "POST", session(open.ID, "/turns"), `{"max_tokens":0}`, 422, "invalid", "max_tokens"},
		{"negative temperature", "POST", session(open.ID, "/turns"), `{"temperature":-0.5}`, 422, "invalid", "temperature"},
		{"top_p over one", "POST", session(open.ID, "/turns"), `{"top_p":1.5}`, 422, "invalid", "top_p"},
		{"negative top_k", "POST", session(open.ID, "/turns"), `{"top_k":-1}`, 422, "invalid", "top_k"},
		{"too many logprobs", "POST", session(open.ID, "/turns"), `{"logprobs":21}`, 422, "invalid", "logprobs"},
		{"deep drafts", "POST", session(open.ID, "/turns"), `{"mtp":{"max_depth":8}}`, 422, "invalid", "mtp.max_depth"},
		{"negative ttl", "POST", pathSessions, `{"ttl_seconds":-1}`, 422, "invalid", "ttl_seconds"},
		{"negative from", "GET", session(open.ID, "/events?from=-1"), "", 422, "invalid", "from"},
		{"negative tokens", "GET", session(open.ID, "/tokens?from=-1"), "", 422, "invalid", "from"},
		{"tokens past the end", "GET", session(open.ID, "/tokens?to=100000"), "", 422, "invalid", "to"},
		{"input and messages", "POST", session(open.ID, "/turns"), `{"input":"x","messages":[{"role":"user","content":"x"}]}`, 422, "invalid", "input"},
		{"unknown role", "POST", session(open.ID, "/turns"), `{"messages":[{"role":"wizard","content":"x"}]}`, 422, "invalid", "messages[0].role"},
		{"unknown model", "POST", pathSessions, `{"model":"gpt-none"}`, 422, "invalid", "model"},
		{"unknown tier", "POST", session(open.ID, "/detach"), `{"tier":"moon"}`, 422, "invalid", "tier"},
		{"tier that this server does not have", "POST", session(open.ID, "/detach"), `{"tier":"disk"}`, 422, "invalid", "tier"},
		{"state that is none", "GET", pathSessions + "?state=asleep", "", 422, "invalid", "state"},
		{"label without a value", "GET", pathSessions + "?label=x", "", 422, "invalid", "label"},
		{"after that is no id", "GET", pathSessions + "?after=x", "", 422, "invalid", "after"},
		{"long title", "PATCH", session(open.ID, ""), `{"title":"` + strings.Repeat("t", sessions.TitleBytesMax+1) + `"}`, 422, "invalid", "title"},
		{"prompt over the context", "POST", session(open.ID, "/turns"), long, 422, "context_limit", "input"},
		{"first prompt over the context", "POST", pathSessions, long, 422, "context_limit", "input"},

		{"route that is none", "GET", "/v1/nothing", "", 404, "no_such_route", ""},
		{"method that is none", "PUT", pathSessions, "", 405, "method_not_allowed", ""},
		{"stream without an upgrade", "GET", session(open.ID, "/stream"), "", 426, "upgrade_required", ""},
		{"watch without an upgrade", "GET", "/v1/watch", "", 426, "upgrade_required", ""},
		{"watch of an unknown tree", "GET", "/v1/watch?root=" + unknown, "", 404, "not_found", "session_id"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := w.do(c.method, c.path, c.body)
			wantProblem(t, a.header, a.body, c.status, c.code, c.field)
			if a.status != c.status {
				t.Errorf("status %d, want %d", a.status, c.status)
			}
		})
	}
	after, err := w.api.Get(w.ctx(), open.ID)
	if err != nil {
		t.Fatal(err)
	}
	if after.LastSeq != open.LastSeq || after.Length != open.Length || after.ChildCount != 0 {
		t.Errorf("refused calls changed the session from %+v to %+v", open, after)
	}
}

func TestBodiesTooLarge(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("x")
	pad := strings.Repeat(" ", bodyBytesMax)
	for _, c := range []struct {
		name, path, body string
		status           int
	}{
		{"at the limit", pathSessions, "{}" + pad[:bodyBytesMax-2], http.StatusCreated},
		{"past the limit", pathSessions, "{}" + pad[:bodyBytesMax-1], http.StatusRequestEntityTooLarge},
		{"far past the limit", pathSessions + "/" + s.ID + "/turns", "{}" + pad + pad, http.StatusRequestEntityTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := w.do("POST", c.path, c.body)
			if a.status != c.status {
				t.Fatalf("status %d, want %d: %.200s", a.status, c.status, a.body)
			}
			if c.status >= 400 {
				wantProblem(t, a.header, a.body, c.status, codeTooLarge, "body")
			}
		})
	}
}

// TestQueueFull: past the queue's length a turn is refused with 429 and a time
// to wait, and leaves nothing behind.
func TestQueueFull(t *testing.T) {
	w := start(t, worldOptions{engine: engine.Options{MaxSeqs: 1, QueueLen: 1}})
	running, refused := w.create("a"), client.Session{}
	stream := w.dial(running.ID, "")
	stream.send(`{"type":"turn.create","max_tokens":20000,"ignore_eos":true}`)
	stream.until("turn.delta") // it is out of the queue
	for i := 0; refused.ID == ""; i++ {
		s := w.create("b")
		a := w.do("POST", pathSessions+"/"+s.ID+"/turns", `{"max_tokens":1}`)
		switch {
		case a.status == http.StatusTooManyRequests:
			wantProblem(t, a.header, a.body, http.StatusTooManyRequests, "queue_full", "")
			refused = s
		case a.status != http.StatusAccepted || i > 3:
			t.Fatalf("turn %d: status %d: %s", i, a.status, a.body)
		}
	}
	after, err := w.api.Get(w.ctx(), refused.ID)
	if err != nil || after.State != "idle" || after.TurnCount != 0 || after.Length != refused.Length {
		t.Errorf("after the refusal: %+v, %v", after, err)
	}
	stream.send(`{"type":"turn.cancel"}`)
	stream.until("turn.cancelled")
	if turn := w.turn(refused.ID, 2); len(turn.Tokens) != 2 {
		t.Errorf("turn after the queue: %+v", turn)
	}
}

func TestHeadOfProbes(t *testing.T) {
	w := start(t, worldOptions{})
	for _, path := range []string{"/healthz", "/readyz", "/version", "/docs", "/"} {
		if a := w.do("HEAD", path, ""); a.status != http.StatusOK && a.status != http.StatusFound || len(a.body) != 0 {
			t.Errorf("HEAD %s: %d, %d bytes", path, a.status, len(a.body))
		}
	}
}
