package server

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/client"
	"rocket/sessions"
)

// sseEvent is one event of a stream as it was sent; comment ones have no data.
type sseEvent struct{ id, kind, data, comment string }

// sse opens an event stream and returns a function that reads its next event.
func (w *world) sse(id, query string, header ...string) (next func() (sseEvent, bool), stop func()) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, w.base+"/v1/sessions/"+id+"/events"+query, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		w.t.Fatalf("status %d, type %s", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	return func() (e sseEvent, ok bool) {
			for lines.Scan() {
				line := lines.Text()
				name, value, _ := strings.Cut(line, ": ")
				switch {
				case line == "" && e != sseEvent{}:
					return e, true
				case strings.HasPrefix(line, ":"):
					e.comment = line
				case name == "id":
					e.id = value
				case name == "event":
					e.kind = value
				case name == "data":
					e.data += value
				}
			}
			return e, false
		}, func() {
			resp.Body.Close()
		}
}

// page reads a session's whole log as JSON pages of the given size.
func (w *world) page(id string, limit int) []client.Event {
	w.t.Helper()
	var all []client.Event
	pos := client.Position{From: 1}
	for {
		p, err := w.api.Events(w.ctx(), id, pos, limit)
		if err != nil {
			w.t.Fatal(err)
		}
		all = append(all, p.Data...)
		if !p.HasMore {
			return all
		}
		if len(p.Data) == 0 || p.Next != p.Data[len(p.Data)-1].Seq+1 {
			w.t.Fatalf("page of %d events, next %d", len(p.Data), p.Next)
		}
		pos.From = p.Next
	}
}

// TestEveryReaderSeesTheSameEvents: JSON pages of any size, a stream from the
// start, streams that come back with Last-Event-ID, and a socket give the same
// events with the same seq and cuts, and their tokens are the turn's.
func TestEveryReaderSeesTheSameEvents(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("func main() {")
	turn := w.turn(s.ID, 40)
	want := w.page(s.ID, 0)
	if diff := cmp.Diff(want, w.page(s.ID, 3)); diff != "" {
		t.Errorf("pages of 3 differ: %s", diff)
	}
	var tokens []int32
	var text strings.Builder
	for i, e := range want {
		if e.Seq != int64(i+1) || e.SessionID != s.ID || e.Time.IsZero() {
			t.Errorf("event %d has seq %d, session %s, time %v", i, e.Seq, e.SessionID, e.Time)
		}
		if e.Type == "turn.delta" {
			tokens = append(tokens, e.Tokens...)
			text.WriteString(*e.Text)
		}
	}
	if diff := cmp.Diff(turn.Tokens, tokens); diff != "" || text.String() != turn.Text {
		t.Errorf("deltas are not the turn: %s; %q, %q", diff, text.String(), turn.Text)
	}
	if last := want[len(want)-1]; last.Type != "turn.completed" || last.FinishReason != "length" || last.Usage == nil || last.Usage.CompletionTokens != 40 {
		t.Errorf("last event %+v", last)
	}

	// One stream that is cut off after each event and comes back.
	var got []client.Event
	lastID := ""
	for len(got) < len(want) {
		header := []string{}
		if lastID != "" {
			header = []string{"Last-Event-ID", lastID}
		}
		next, stop := w.sse(s.ID, "", header...)
		e, ok := next()
		stop()
		if !ok {
			t.Fatal("the stream ended")
		}
		var event client.Event
		if err := json.Unmarshal([]byte(e.data), &event); err != nil {
			t.Fatal(err)
		}
		if e.kind != event.Type || e.id != fmt.Sprintf("%d-%d", event.Epoch, event.Seq) {
			t.Errorf("event %s with id %s holds %+v", e.kind, e.id, event)
		}
		got, lastID = append(got, event), e.id
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events of interrupted streams differ: %s", diff)
	}
}

func TestEventStreamIsLive(t *testing.T) {
	w := start(t, worldOptions{server: Options{Heartbeat: 20 * time.Millisecond}})
	s := w.create("x")
	next, stop := w.sse(s.ID, "?from=2")
	defer stop()
	if e, ok := next(); !ok || e.comment != ": heartbeat" {
		t.Fatalf("an idle stream sent %+v", e)
	}
	if _, err := w.api.StartTurn(w.ctx(), s.ID, greedy(10), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	for {
		e, ok := next()
		if !ok {
			t.Fatal("the stream ended before the turn")
		}
		if e.kind == "turn.completed" {
			break
		}
	}
	if err := w.api.Delete(w.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	for {
		e, ok := next()
		if !ok {
			break // the session is gone, and so is its stream
		}
		if e.comment == "" && !strings.HasPrefix(e.kind, "session.") {
			t.Errorf("after the delete came %+v", e)
		}
	}
}

func TestPositions(t *testing.T) {
	for _, c := range []struct {
		query, last string
		want        position
		field       string
	}{
		{"", "", position{}, ""},
		{"from=7", "", position{from: 7}, ""},
		{"from=7&epoch=2", "", position{from: 7, epoch: 2}, ""},
		{"", "2-7", position{from: 8, epoch: 2}, ""},
		{"from=1&epoch=1", "2-7", position{from: 8, epoch: 2}, ""},
		{"from=-1", "", position{}, "from"},
		{"from=x", "", position{}, "from"},
		{"from=99999999999999999999", "", position{}, "from"},
		{"epoch=-1", "", position{}, "epoch"},
		{"", "7", position{}, "Last-Event-ID"},
		{"", "2-x", position{}, "Last-Event-ID"},
		{"", "-2-7", position{}, "Last-Event-ID"},
		{"", "2--7", position{}, "Last-Event-ID"},
		{"", "2-9223372036854775807", position{}, "Last-Event-ID"},
	} {
		r, err := http.NewRequest(http.MethodGet, "/?"+c.query, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parsePosition(r.URL.Query(), c.last)
		if c.field != "" {
			p, ok := err.(*Problem)
			if !ok || p.Field != c.field || p.Code != codeInvalid {
				t.Errorf("%q, %q: %v", c.query, c.last, err)
			}
			continue
		}
		if err != nil || got != c.want {
			t.Errorf("%q, %q: %+v, %v", c.query, c.last, got, err)
		}
	}
}

// TestWireTypes: the client's types are the server's, field by field.
func TestWireTypes(t *testing.T) {
	w := start(t, worldOptions{})
	doc := openapi(t, w.server)
	for name, v := range map[string]any{
		"Session": client.Session{Elsewhere: true}, "Turn": client.Turn{Tokens: []int32{1}, Logprobs: []client.TokenProbs{{}}, Error: &client.TurnError{}, Inherited: true},
		"ForkResult": client.ForkResult{}, "Usage": client.Usage{ColdReason: "x", ColdAt: new(int)}, "EventPage": client.EventPage{}, "Version": client.Version{Commit: "x", Time: "x", Dirty: true},
		"TokenRange": client.TokenRange{Pieces: []string{""}}, "Residency": client.Residency{}, "Ancestry": client.Ancestry{}, "Common": client.Common{}, "Path": client.Path{}, "ImportResult": client.ImportResult{}, "Server": client.Server{Address: "x"}, "ServerList": client.ServerList{}, "ReleaseRequest": client.ReleaseRequest{Subtree: true, Cancel: true, Check: true}, "ReleaseResult": client.ReleaseResult{}, "Restored": client.Restored{}, "ResumeResult": client.ResumeResult{Session: client.Session{Elsewhere: true}},
		"CreateRequest": client.CreateRequest{Model: "x", Title: "x", Labels: map[string]string{"a": "b"}, Messages: []client.Message{{}}, Input: new(string), TTLSeconds: new(int), Pin: true},
		"PatchRequest":  client.PatchRequest{Title: new(string), Labels: &map[string]string{}, TTLSeconds: new(int), Pin: new(bool)},
		"ForkRequest":   client.ForkRequest{At: new(int), N: new(int), Children: []client.ForkChild{{}}, Title: new(string), Labels: map[string]string{"a": "b"}},
		"TurnRequest": client.TurnRequest{Messages: []client.Message{{}}, Input: new(string), MaxTokens: new(int), Temperature: new(float64), TopP: new(float64),
			TopK: new(int), Seed: new(int64), Stop: []string{""}, Logprobs: new(int), MTP: &client.MTPRequest{}, IgnoreEOS: true},
		"Event": client.Event{TurnID: "x", ParentID: new(string), ForkedAt: new(int), RootID: "x", Children: []string{""}, At: new(int), Tier: "x", Restored: &client.Restored{},
			Text: new(string), Tokens: []int32{1}, From: new(int), To: new(int), FinishReason: "x", Usage: &client.Usage{}, Error: &client.TurnError{}, LastSeq: new(int64)},
		"Message": client.Message{Name: "x", ToolCallID: "x", ToolCalls: json.RawMessage("[]")},
	} {
		var schema struct {
			Properties map[string]any `json:"properties"`
		}
		if err := json.Unmarshal(doc.Components.Schemas[name], &schema); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var fields map[string]any
		if err := json.Unmarshal(text, &fields); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(keys(schema.Properties), keys(fields)); diff != "" {
			t.Errorf("%s: server and client differ (-server +client): %s", name, diff)
		}
	}
}

func keys(m map[string]any) map[string]bool {
	set := map[string]bool{}
	for k := range m {
		set[k] = true
	}
	return set
}

// TestIdempotency: the same key and body give the first answer, once.
func TestIdempotency(t *testing.T) {
	w := start(t, worldOptions{})
	var first, second sessions.Session
	w.do("POST", pathSessions, `{"title":"a","labels":{"x":"y"}}`, "Idempotency-Key", "k1").into(t, 201, &first)
	w.do("POST", pathSessions, ` {"labels":{"x":"y"}, "title":"a"}`, "Idempotency-Key", "k1").into(t, 201, &second)
	if first.ID != second.ID {
		t.Errorf("two sessions for one key: %s, %s", first.ID, second.ID)
	}
	a := w.do("POST", pathSessions, `{"title":"b"}`, "Idempotency-Key", "k1")
	wantProblem(t, a.header, a.body, 422, "idempotency_mismatch", "Idempotency-Key")
	path := pathSessions + "/" + first.ID
	var fork1, fork2 sessions.ForkResult
	w.do("POST", path+"/fork", `{"n":2}`, "Idempotency-Key", "k1").into(t, 201, &fork1)
	w.do("POST", path+"/fork", `{"n":2}`, "Idempotency-Key", "k1").into(t, 201, &fork2)
	if len(fork1.Sessions) != 2 || len(fork2.Sessions) != 2 || fork1.Sessions[0].ID != fork2.Sessions[0].ID {
		t.Errorf("forks of one key: %+v, %+v", fork1, fork2)
	}
	// Two callers of one key wait for one turn.
	answers := make(chan answered, 2)
	for range 2 {
		go func() {
			answers <- w.do("POST", path+"/turns?wait=true", `{"input":"x","max_tokens":20,"ignore_eos":true}`, "Idempotency-Key", "t1")
		}()
	}
	var x, y sessions.Turn
	(<-answers).into(t, 200, &x)
	(<-answers).into(t, 200, &y)
	if x.ID != y.ID || x.State != sessions.TurnCompleted || y.State != sessions.TurnCompleted || len(x.Tokens) != 20 || len(y.Tokens) != 20 {
		t.Errorf("turns of one key: %+v, %+v", x, y)
	}
	long := strings.Repeat("k", idempotencyKeyMax+1)
	a = w.do("POST", pathSessions, `{}`, "Idempotency-Key", long)
	wantProblem(t, a.header, a.body, 422, codeInvalid, "Idempotency-Key")
}
