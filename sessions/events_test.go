package sessions

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// ledgerEvents reads the log past memory.
func (r *rig) ledgerEvents(id string) []Event {
	r.t.Helper()
	u, _ := parseSession(id)
	events, err := selectEvents(r.t.Context(), r.pool, r.tok, DefaultTenant, u, 1, r.get(id).LastSeq, 1<<60)
	if err != nil {
		r.t.Fatal(err)
	}
	return events
}

func kinds(events []Event) string {
	var out []string
	for _, e := range events {
		if k := string(e.Type); len(out) == 0 || out[len(out)-1] != k {
			out = append(out, k)
		}
	}
	return strings.Join(out, " ")
}

func TestEveryReaderSeesTheSameEvents(t *testing.T) {
	r := newRig(t)
	s := r.create("package main\n\nimport (\n")
	l, err := r.Log(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	live := make(chan []Event)
	go func() { // a reader that takes one event at a time while the turn runs
		var out []Event
		for next := int64(1); ; {
			if ok, err := l.Wait(t.Context(), next); err != nil || !ok {
				t.Errorf("wait: %v, %v", ok, err)
				break
			}
			part, err := l.Read(t.Context(), next, 1)
			if err != nil || len(part) != 1 {
				t.Errorf("read: %d events, %v", len(part), err)
				break
			}
			out = append(out, part[0])
			if next++; part[0].Type == EventTurnCancelled {
				break
			}
		}
		live <- out
	}()
	turn := r.start(s.ID, TurnRequest{MaxTokens: endless.MaxTokens, IgnoreEOS: true, Stop: []string{"\x01never"}})
	if ok, err := l.Wait(t.Context(), 6); !ok || err != nil {
		t.Fatal(err)
	}
	f := r.fork(s.ID, ForkRequest{N: ptr(2)}) // an event between deltas
	for next, behind := int64(1), 0; behind < 2; next++ {
		if kind := r.events(s.ID, next, next)[0].Type; kind == EventSessionForked || kind == EventTurnDelta && behind > 0 {
			behind++
		}
	}
	if _, err := r.Cancel(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
	end := r.wait(s.ID, turn.ID)
	fromLive := <-live

	memory := r.events(s.ID, 1, r.get(s.ID).LastSeq)
	ledger := r.ledgerEvents(s.ID)
	if diff := cmp.Diff(fromLive, memory, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("live and memory differ:\n%s", diff)
	}
	if diff := cmp.Diff(memory, ledger, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("memory and ledger differ:\n%s", diff)
	}
	if got, want := kinds(ledger), "session.created turn.started turn.delta session.forked turn.delta turn.cancelled"; got != want {
		t.Errorf("events %q, want %q", got, want)
	}
	var text strings.Builder
	var tokens []int32
	for i, e := range ledger {
		if e.Seq != int64(i+1) || e.Epoch != 1 {
			t.Fatalf("event %d has seq %d, epoch %d", i+1, e.Seq, e.Epoch)
		}
		if e.Type == EventTurnDelta {
			text.WriteString(*e.Text)
			tokens = append(tokens, e.Tokens...)
		}
	}
	if text.String() != end.Text || text.Len() == 0 {
		t.Errorf("deltas give %q, turn has %q", text.String(), end.Text)
	}
	if diff := cmp.Diff(end.Tokens, tokens); diff != "" {
		t.Errorf("deltas' tokens:\n%s", diff)
	}
	parent := r.line(s.ID)
	for _, c := range f.Sessions {
		if diff := cmp.Diff(parent[:f.At], r.line(c.ID)); diff != "" {
			t.Errorf("child of the running parent:\n%s", diff)
		}
		if f.At <= s.Length || f.At >= len(parent) {
			t.Errorf("forked at %d of a turn [%d, %d)", f.At, s.Length, len(parent))
		}
		n := min(40, len(parent)-f.At)
		got := r.turn(c.ID, "", n)
		if diff := cmp.Diff(parent[f.At:f.At+n], got.Tokens); diff != "" {
			t.Errorf("child goes on otherwise than its parent:\n%s", diff)
		}
	}
}

func TestLogWindowIsBounded(t *testing.T) {
	var w window
	w.init(0)
	for i := range 5 * logWindowMax {
		e := Event{Type: EventTurnDelta}
		if i%7 == 0 {
			e.Type = EventSessionForked
		}
		w.append(e)
		if i%3 == 0 {
			w.commit(w.next - 2)
		}
		w.advance()
		if len(w.events) > 2*logWindowMax+8 {
			t.Fatalf("%d events in memory", len(w.events))
		}
		if w.first > w.committed+1 || w.visible < w.committed || w.next != w.first+int64(len(w.events)) {
			t.Fatalf("window [%d, %d), committed %d, visible %d, %d events", w.first, w.next, w.committed, w.visible, len(w.events))
		}
		for seq := w.committed + 1; seq <= w.visible; seq++ {
			if w.events[seq-w.first].Type != EventTurnDelta {
				t.Fatalf("seq %d is visible before its commit", seq)
			}
		}
		if w.visible+1 < w.next && w.events[w.visible+1-w.first].Type == EventTurnDelta {
			t.Fatalf("delta %d is held back for nothing", w.visible+1)
		}
	}
	w.commit(w.next - 1)
	w.advance()
	w.append(Event{})
	w.commit(w.next - 1)
	w.advance()
	if w.first < 2 {
		t.Error("nothing was let go of")
	}
}

func TestReadPastTheWindow(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	r.turn(s.ID, "", 30)
	want := r.events(s.ID, 1, r.get(s.ID).LastSeq)
	u, _ := parseSession(s.ID)
	live, err := r.acquire(t.Context(), DefaultTenant, u)
	if err != nil {
		t.Fatal(err)
	}
	live.mu.Lock()                   // what a longer session does by itself
	gone := len(live.log.events) / 2 // how many there are depends on how tokens were gathered into deltas
	live.log.events, live.log.first = live.log.events[gone:], live.log.first+int64(gone)
	live.mu.Unlock()
	for _, step := range []int{1, 3, 1000} {
		l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
		var got []Event
		for next := int64(1); next <= want[len(want)-1].Seq; {
			part, err := l.Read(t.Context(), next, step)
			if err != nil || len(part) == 0 {
				t.Fatalf("read %d from %d: %d events, %v", step, next, len(part), err)
			}
			got = append(got, part...)
			next += int64(len(part))
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("in steps of %d:\n%s", step, diff)
		}
	}
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if part, err := l.Read(t.Context(), want[len(want)-1].Seq+1, 10); err != nil || len(part) != 0 {
		t.Errorf("past the end: %d events, %v", len(part), err)
	}
}

func TestPurgedEventsAreGone(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	r.turn(s.ID, "", 10)
	u, _ := parseSession(s.ID)
	if _, err := r.pool.Exec(t.Context(), "DELETE FROM events WHERE session_id = $1 AND seq < 3", u); err != nil {
		t.Fatal(err)
	}
	live, _ := r.acquire(t.Context(), DefaultTenant, u)
	r.forget(live)
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	_, err := l.Read(t.Context(), 1, 10)
	wantCode(t, err, CodeGone, "")
	if e := err.(*Error); e.FirstSeq != 3 {
		t.Errorf("first seq %d, want 3", e.FirstSeq)
	}
	// put back what Check wants
	_, err = r.pool.Exec(t.Context(), `INSERT INTO events (tenant_id, session_id, seq, epoch, type, time)
		SELECT 'local', $1, n, 1, 'session.created', now() FROM generate_series(1, 2) n`, u)
	if err != nil {
		t.Fatal(err)
	}
}

func TestWatch(t *testing.T) {
	r := newRig(t)
	all := r.Watch(DefaultTenant, WatchOptions{})
	a := r.create("a")
	tree := r.Watch(DefaultTenant, WatchOptions{Root: a.ID, Turns: true})
	other := r.Watch("other", WatchOptions{})
	b := r.create("b")
	f := r.fork(a.ID, ForkRequest{})
	child := f.Sessions[0].ID
	r.turn(child, "", 3)
	if _, err := r.Detach(t.Context(), local, child, DetachRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), local, b.ID); err != nil {
		t.Fatal(err)
	}
	read := func(w *Watch, n int) string {
		var out []string
		for len(out) < n {
			events, lost, err := w.Next(t.Context())
			if err != nil || lost != 0 {
				t.Fatal(err, lost)
			}
			for _, e := range events {
				out = append(out, strings.TrimPrefix(string(e.Type), "session."))
			}
		}
		return strings.Join(out, " ")
	}
	if got, want := read(all, 6), "created created created forked detached deleted"; got != want && got != "created created forked created detached deleted" {
		t.Errorf("watch of all: %q, want %q", got, want)
	}
	if got, want := read(tree, 5), "created forked turn.started turn.completed detached"; got != want && got != "forked created turn.started turn.completed detached" {
		t.Errorf("watch of one tree: %q, want %q", got, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if events, _, err := other.Next(ctx); err == nil {
		t.Errorf("another tenant sees %v", events)
	}
}

func TestEventJSON(t *testing.T) {
	e := deltaEvent(7, 2, "ses_x", "turn_x", time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), "", nil)
	got, err := json.Marshal(e)
	want := `{"seq":7,"epoch":2,"type":"turn.delta","session_id":"ses_x","turn_id":"turn_x","time":"2026-01-02T03:04:05.006Z","text":"","tokens":[]}`
	if err != nil || string(got) != want {
		t.Errorf("got  %s, %v\nwant %s", got, err, want)
	}
}
