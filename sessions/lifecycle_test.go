package sessions

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/engine/chat"
)

// TestSharedSystemPromptIsReused: the second session with a system prompt finds a state at its end, although the first
// went on with another message and no page ends there.
func TestSharedSystemPromptIsReused(t *testing.T) {
	r := newRig(t)
	system := Message{Role: "system", Content: strings.Repeat("You write Go. ", 20) + t.Name()}
	var last Turn
	for _, question := range []string{"Write a function that adds.", "Sort a slice of strings."} {
		s, err := r.Create(t.Context(), local, CreateRequest{})
		if err != nil {
			t.Fatal(err)
		}
		last = r.wait(s.ID, r.start(s.ID, TurnRequest{Messages: []Message{system, {Role: "user", Content: question}}, MaxTokens: ptr(2), IgnoreEOS: true}).ID)
	}
	head, err := r.opts.Template.PromptWith([]chat.Message{{Role: "system", Content: system.Content}}, chat.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(head)%128 == 0 {
		t.Fatal("the system prompt ends at a page edge: this shows nothing")
	}
	if got := last.Usage.CachedTokens; got != len(head) {
		t.Errorf("%d tokens of the second prompt were cached, the system prompt has %d (%+v)", got, len(head), last.Usage)
	}
}

func TestDetachAndResume(t *testing.T) {
	r := newRig(t)
	s := r.create(strings.Repeat("func main() { fmt.Println(1) }\n", 30))
	want := r.turn(s.ID, "", 20)
	ref := r.fork(s.ID, ForkRequest{}).Sessions[0]
	reference := r.turn(ref.ID, "", 15)
	for _, id := range []string{ref.ID} { // only s is to hold its line
		if err := r.Delete(t.Context(), local, id); err != nil {
			t.Fatal(err)
		}
	}

	d, err := r.Detach(t.Context(), local, s.ID, DetachRequest{})
	if err != nil || d.State != StateDetached {
		t.Fatalf("detach: %+v, %v", d, err)
	}
	if d.Residency.Host == 0 {
		t.Errorf("residency %+v, want something on the host", d.Residency)
	}
	if got := r.get(s.ID); got.Residency != d.Residency || got.State != StateDetached {
		t.Errorf("detached session reads %+v", got)
	}
	r.mu.Lock()
	_, live := r.live[liveKey{DefaultTenant, must(parseSession(s.ID))}]
	r.mu.Unlock()
	if live {
		t.Error("an idle detached session stays in memory")
	}
	if again, err := r.Detach(t.Context(), local, s.ID, DetachRequest{Tier: "host"}); err != nil || again.LastSeq != d.LastSeq {
		t.Errorf("second detach: %+v, %v", again, err)
	}

	back, err := r.Resume(t.Context(), local, s.ID)
	if err != nil || back.State != StateIdle {
		t.Fatalf("resume: %+v, %v", back, err)
	}
	if n := back.Restored; n.Device+n.Host+n.Disk+n.Recomputed != want.To-1 || n.Host == 0 || n.Recomputed > 0 {
		t.Errorf("restored %+v of a line of %d tokens", n, want.To)
	}
	got := r.turn(s.ID, "", 15)
	if diff := cmp.Diff(reference.Tokens, got.Tokens); diff != "" {
		t.Errorf("resumed session goes on otherwise:\n%s", diff)
	}
	if got, want := kinds(r.ledgerEvents(s.ID)), "session.created turn.started turn.delta turn.completed session.forked session.detached session.resumed turn.started turn.delta turn.completed"; got != want {
		t.Errorf("events %q\nwant   %q", got, want)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestTurnAndForkResumeADetachedSession(t *testing.T) {
	r := newRig(t)
	for _, use := range []func(id string){
		func(id string) { r.turn(id, "x", 3) },
		func(id string) { r.fork(id, ForkRequest{N: ptr(2)}) },
	} {
		s := r.create("package main\n")
		r.turn(s.ID, "", 5)
		if _, err := r.Detach(t.Context(), local, s.ID, DetachRequest{}); err != nil {
			t.Fatal(err)
		}
		use(s.ID)
		got := r.get(s.ID)
		if got.State != StateIdle || got.Residency.Host != 0 {
			t.Errorf("after use: %+v", got)
		}
		if k := kinds(r.ledgerEvents(s.ID)); !strings.Contains(k, "session.detached session.resumed") {
			t.Errorf("events %q", k)
		}
	}
}

func TestCloseAndDelete(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	r.turn(s.ID, "", 10)
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(100_000), IgnoreEOS: true})
	c, err := r.Close(t.Context(), local, s.ID)
	if err != nil || c.State != StateClosed {
		t.Fatalf("close: %+v, %v", c, err)
	}
	if got := r.wait(s.ID, turn.ID); got.State != TurnCancelled || *got.FinishReason != FinishCancelled {
		t.Errorf("turn of a closed session: %+v", got)
	}
	_, err = r.StartTurn(t.Context(), local, s.ID, TurnRequest{})
	wantCode(t, err, CodeSessionClosed, "")
	_, err = r.Fork(t.Context(), local, s.ID, ForkRequest{})
	wantCode(t, err, CodeSessionClosed, "")
	_, err = r.Detach(t.Context(), local, s.ID, DetachRequest{})
	wantCode(t, err, CodeSessionClosed, "")
	_, err = r.Resume(t.Context(), local, s.ID)
	wantCode(t, err, CodeSessionClosed, "")
	if again, err := r.Close(t.Context(), local, s.ID); err != nil || again.LastSeq != c.LastSeq {
		t.Errorf("second close: %+v, %v", again, err)
	}
	if len(r.line(s.ID)) != c.Length {
		t.Error("a closed session cannot be read")
	}

	log, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	waiting := make(chan bool)
	go func() {
		ok, err := log.Wait(t.Context(), c.LastSeq+1)
		waiting <- ok || err != nil
	}()
	if err := r.Delete(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
	if <-waiting {
		t.Error("a reader of a deleted session was told to go on")
	}
	_, err = r.Get(t.Context(), DefaultTenant, s.ID)
	wantCode(t, err, CodeNotFound, "")
	wantCode(t, r.Delete(t.Context(), local, s.ID), CodeNotFound, "")
	if n := r.count("SELECT count(*) FROM sessions"); n != 0 {
		t.Errorf("%d rows of a tree without life", n)
	}
}

func (r *rig) count(sql string, args ...any) (n int) {
	r.t.Helper()
	if err := r.pool.QueryRow(r.t.Context(), sql, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

func TestTwoHundredAncestors(t *testing.T) {
	r := newRig(t)
	s := r.create("0")
	id := s.ID
	want := r.line(id)
	for i := range 200 {
		at := len(want) - i%3
		id = r.fork(id, ForkRequest{At: &at}).Sessions[0].ID
		want = want[:at:at]
		if i%20 == 0 { // a token each would take its time
			r.turn(id, fmt.Sprint(i), 2)
			want = r.line(id)
		} else {
			want = r.append(id, want, int32(100+i))
		}
	}
	if diff := cmp.Diff(want, r.line(id)); diff != "" {
		t.Errorf("line over 200 ancestors:\n%s", diff)
	}
	tree := must(r.Tree(t.Context(), DefaultTenant, s.ID, nil))
	if len(tree.Nodes) != 201 || tree.Nodes[200].ID != id {
		t.Errorf("tree of %d nodes", len(tree.Nodes))
	}
	if got := must(r.Tree(t.Context(), DefaultTenant, s.ID, ptr(2))); len(got.Nodes) != 3 {
		t.Errorf("depth 2: %d nodes", len(got.Nodes))
	}
}

// append puts tokens at the end of a line as a turn would have.
func (r *rig) append(id string, line []int32, ids ...int32) []int32 {
	r.t.Helper()
	u := must(parseSession(id))
	_, err := r.pool.Exec(r.t.Context(), `WITH s AS (UPDATE sessions SET length = length + $3 WHERE id = $1 RETURNING tenant_id, id, length)
		INSERT INTO token_runs (tenant_id, session_id, tok_from, ids, first_seq, base_time, epoch)
		SELECT tenant_id, id, length - $3, $2, 1, now(), 1 FROM s`, u, ids, len(ids))
	if err != nil {
		r.t.Fatal(err)
	}
	live, err := r.acquire(r.t.Context(), DefaultTenant, u)
	if err != nil {
		r.t.Fatal(err)
	}
	r.forget(live)
	live.dropSeq()
	return append(line, ids...)
}

func TestIdempotency(t *testing.T) {
	r := newRig(t)
	call := func(route, key, body string) Call {
		return Call{Tenant: DefaultTenant, IdempotencyKey: key, Route: route, BodyHash: []byte(body)}
	}
	req := CreateRequest{Title: "once", Input: ptr("package a\n")}
	first, err := r.Create(t.Context(), call("POST /v1/sessions", "k", "b"), req)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.Create(t.Context(), call("POST /v1/sessions", "k", "b"), req)
	if err != nil || again.ID != first.ID {
		t.Errorf("repeated create: %s, %v, want %s", again.ID, err, first.ID)
	}
	_, err = r.Create(t.Context(), call("POST /v1/sessions", "k", "other"), req)
	wantCode(t, err, CodeIdempotencyMismatch, "Idempotency-Key")
	if n := r.count("SELECT count(*) FROM sessions"); n != 1 {
		t.Errorf("%d sessions", n)
	}

	route := "POST /v1/sessions/" + first.ID + "/turns"
	turn := TurnRequest{MaxTokens: ptr(5), IgnoreEOS: true}
	t1, err := r.StartTurn(t.Context(), call(route, "t", ""), first.ID, turn)
	if err != nil {
		t.Fatal(err)
	}
	r.wait(first.ID, t1.ID)
	t2, err := r.StartTurn(t.Context(), call(route, "t", ""), first.ID, turn)
	if err != nil || t2.ID != t1.ID {
		t.Errorf("repeated turn: %s, %v, want %s", t2.ID, err, t1.ID)
	}

	f1, err := r.Fork(t.Context(), call("fork", "f", ""), first.ID, ForkRequest{N: ptr(3)})
	if err != nil {
		t.Fatal(err)
	}
	f2, err := r.Fork(t.Context(), call("fork", "f", ""), first.ID, ForkRequest{N: ptr(3)})
	if diff := cmp.Diff(f1, f2); err != nil || diff != "" {
		t.Errorf("repeated fork: %v\n%s", err, diff)
	}

	// a cancellation that comes again must not hit the next turn
	long := TurnRequest{MaxTokens: ptr(100_000), IgnoreEOS: true}
	a := r.start(first.ID, long)
	c1, err := r.Cancel(t.Context(), call("cancel", "c", ""), first.ID)
	if err != nil || c1.ID != a.ID || c1.State != TurnCancelled {
		t.Fatalf("cancel: %+v, %v", c1, err)
	}
	b := r.start(first.ID, long)
	if c2, err := r.Cancel(t.Context(), call("cancel", "c", ""), first.ID); err != nil || c2.ID != a.ID {
		t.Errorf("repeated cancel: %+v, %v", c2, err)
	}
	if r.get(first.ID).State != StateRunning {
		t.Error("a repeated cancellation ended another turn")
	}
	if _, err := r.Cancel(t.Context(), local, first.ID); err != nil {
		t.Fatal(err)
	}
	r.wait(first.ID, b.ID)

	// a call under way
	leave, err := r.enterCall(t.Context(), call("x", "busy", ""))
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Create(t.Context(), call("x", "busy", ""), req)
	wantCode(t, err, CodeIdempotencyRunning, "")
	joined := make(chan error)
	go func() {
		c := call("x", "busy", "")
		c.Wait = true
		_, err := r.Create(t.Context(), c, req)
		joined <- err
	}()
	leave()
	if err := <-joined; err != nil {
		t.Errorf("call that waits: %v", err)
	}
	if err := r.Delete(t.Context(), call("delete", "d", ""), first.ID); err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), call("delete", "d", ""), first.ID); err != nil {
		t.Errorf("repeated delete: %v", err)
	}
}

func TestListAndPatch(t *testing.T) {
	r := newRig(t)
	var ids []string
	for i := range 7 {
		s, err := r.Create(t.Context(), local, CreateRequest{Title: fmt.Sprint(i), Labels: map[string]string{"n": fmt.Sprint(i % 2), "all": "x"}})
		if err != nil {
			t.Fatal(err)
		}
		ids = append([]string{s.ID}, ids...)
	}
	list := func(f ListFilter) (out []string) {
		t.Helper()
		for {
			p, err := r.List(t.Context(), DefaultTenant, f)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range p.Data {
				out = append(out, s.ID)
			}
			if p.HasMore != (p.Next != nil) {
				t.Errorf("has_more %v, next %v", p.HasMore, p.Next)
			}
			if !p.HasMore {
				return out
			}
			f.After = *p.Next
		}
	}
	for _, n := range []int{1, 2, 3, 7, 100} {
		if diff := cmp.Diff(ids, list(ListFilter{Limit: n})); diff != "" {
			t.Errorf("pages of %d:\n%s", n, diff)
		}
	}
	if got := list(ListFilter{Labels: map[string]string{"n": "1", "all": "x"}}); len(got) != 3 {
		t.Errorf("by label: %d", len(got))
	}
	if got := list(ListFilter{Labels: map[string]string{"n": "2"}}); len(got) != 0 {
		t.Errorf("by a label that none has: %d", len(got))
	}
	f := r.fork(ids[3], ForkRequest{Children: []ForkChild{{Title: ptr("one")}, {Labels: map[string]string{"kind": "b"}}}, Title: ptr("rest")})
	one, two := f.Sessions[0], f.Sessions[1]
	if one.Title != "one" || two.Title != "rest" || two.Labels["kind"] != "b" || len(two.Labels) != 1 || one.Labels["all"] != "x" {
		t.Errorf("children %+v, %+v", one, two)
	}
	if got := list(ListFilter{Parent: ids[3]}); len(got) != 2 {
		t.Errorf("by parent: %d", len(got))
	}
	if got := list(ListFilter{Root: ids[3]}); len(got) != 3 {
		t.Errorf("by root: %d", len(got))
	}
	if _, err := r.Close(t.Context(), local, ids[0]); err != nil {
		t.Fatal(err)
	}
	if got := list(ListFilter{State: StateClosed}); len(got) != 1 || got[0] != ids[0] {
		t.Errorf("closed: %v", got)
	}
	p, err := r.Patch(t.Context(), local, ids[1], PatchRequest{Title: ptr("new"), Labels: &map[string]string{}, TTLSeconds: ptr(3600), Pin: ptr(true)})
	if err != nil || p.Title != "new" || len(p.Labels) != 0 || !p.Pin || *p.TTLSeconds != 3600 || p.ExpiresAt == nil ||
		p.ExpiresAt.Sub(p.UpdatedAt) != time.Hour {
		t.Errorf("patch: %+v, %v", p, err)
	}
	p, err = r.Patch(t.Context(), local, ids[1], PatchRequest{TTLSeconds: ptr(0)})
	if err != nil || p.Title != "new" || p.TTLSeconds != nil || p.ExpiresAt != nil {
		t.Errorf("patch away the TTL: %+v, %v", p, err)
	}
	if got := r.get(ids[1]); cmp.Diff(got, p) != "" {
		t.Errorf("read after patch: %s", cmp.Diff(got, p))
	}
}

func TestTTLClosesIdleSessions(t *testing.T) {
	r := newRig(t)
	s, err := r.Create(t.Context(), local, CreateRequest{Input: ptr("a"), TTLSeconds: ptr(1)})
	if err != nil {
		t.Fatal(err)
	}
	keep := r.create("b")
	log, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := log.Wait(t.Context(), s.LastSeq+1); !ok || err != nil {
		t.Fatal(err)
	}
	got := r.get(s.ID)
	if got.State != StateClosed || got.UpdatedAt.Before(*s.ExpiresAt) {
		t.Errorf("closed %+v, expiry was %v", got, s.ExpiresAt)
	}
	if r.get(keep.ID).State != StateIdle {
		t.Error("a session without TTL was closed")
	}
}

func TestMessages(t *testing.T) {
	r := newRig(t)
	if r.opts.Template == nil {
		t.Skip("no chat template")
	}
	msgs := []Message{{Role: "user", Content: "hello <|user|>"}}
	s, err := r.Create(t.Context(), local, CreateRequest{Messages: msgs})
	if err != nil {
		t.Fatal(err)
	}
	tmpl := r.opts.Template
	want := must(tmpl.Prompt([]chat.Message{{Role: "user", Content: "hello <|user|>"}}, false))
	if diff := cmp.Diff(want, r.line(s.ID)); diff != "" {
		t.Errorf("created line:\n%s", diff)
	}
	for i := range 3 {
		before := r.line(s.ID)
		next := []Message{{Role: "user", Content: fmt.Sprint("go on ", i)}}
		turn := r.start(s.ID, TurnRequest{Messages: next, MaxTokens: ptr(4 + i)})
		end := r.wait(s.ID, turn.ID)
		want := must(tmpl.AppendTo(before, []chat.Message{{Role: "user", Content: fmt.Sprint("go on ", i)}}, chat.Options{AddGenerationPrompt: true}))
		after := r.line(s.ID)
		if diff := cmp.Diff(append(before, want...), after[:end.To-len(end.Tokens)]); diff != "" {
			t.Errorf("turn %d's prompt:\n%s", i, diff)
		}
	}
	_, err = r.StartTurn(t.Context(), local, s.ID, TurnRequest{Messages: []Message{{Role: "user", Content: "a"}, {Role: "nobody", Content: "b"}}})
	wantCode(t, err, CodeInvalid, "messages[1].role")
}
