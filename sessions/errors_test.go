package sessions

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBadInput(t *testing.T) {
	r := newRig(t)
	s := r.create("abc")
	ctx := t.Context()
	many := map[string]string{}
	for i := range LabelsMax + 1 {
		many[strings.Repeat("k", i+1)] = ""
	}
	create := func(req CreateRequest) error { _, err := r.Create(ctx, local, req); return err }
	turn := func(req TurnRequest) error { _, err := r.StartTurn(ctx, local, s.ID, req); return err }
	fork := func(req ForkRequest) error { _, err := r.Fork(ctx, local, s.ID, req); return err }
	list := func(f ListFilter) error { _, err := r.List(ctx, DefaultTenant, f); return err }
	tokens := func(from, to int) error { _, err := r.Tokens(ctx, DefaultTenant, s.ID, &from, &to); return err }
	msgs := []Message{{Role: "user", Content: "a"}}
	limit := r.info.Context
	for _, test := range []struct {
		name  string
		err   error
		code  Code
		field string
	}{
		{"unknown model", create(CreateRequest{Model: "gpt"}), CodeInvalid, "model"},
		{"title too long", create(CreateRequest{Title: strings.Repeat("x", TitleBytesMax+1)}), CodeInvalid, "title"},
		{"title not UTF-8", create(CreateRequest{Title: "\xff"}), CodeInvalid, "title"},
		{"title with NUL", create(CreateRequest{Title: "a\x00b"}), CodeInvalid, "title"},
		{"too many labels", create(CreateRequest{Labels: many}), CodeInvalid, "labels"},
		{"label without name", create(CreateRequest{Labels: map[string]string{"": "x"}}), CodeInvalid, "labels"},
		{"label too long", create(CreateRequest{Labels: map[string]string{"a": strings.Repeat("x", LabelValueBytesMax+1)}}), CodeInvalid, "labels.a"},
		{"negative TTL", create(CreateRequest{TTLSeconds: ptr(-1)}), CodeInvalid, "ttl_seconds"},
		{"messages and input", create(CreateRequest{Messages: msgs, Input: ptr("x")}), CodeInvalid, "input"},
		{"input not UTF-8", create(CreateRequest{Input: ptr("\xc3")}), CodeInvalid, "input"},
		{"message without role", create(CreateRequest{Messages: []Message{{Content: "x"}}}), CodeInvalid, "messages[0].role"},
		{"prompt over the context", create(CreateRequest{Input: ptr(strings.Repeat("func main ", limit))}), CodeContextLimit, "input"},
		{"turn over the context", turn(TurnRequest{Input: ptr(strings.Repeat("func main ", limit))}), CodeContextLimit, "input"},
		{"max_tokens 0", turn(TurnRequest{MaxTokens: ptr(0)}), CodeInvalid, "max_tokens"},
		{"max_tokens negative", turn(TurnRequest{MaxTokens: ptr(-5)}), CodeInvalid, "max_tokens"},
		{"temperature", turn(TurnRequest{Temperature: ptr(-0.1)}), CodeInvalid, "temperature"},
		{"temperature NaN", turn(TurnRequest{Temperature: ptr(math.NaN())}), CodeInvalid, "temperature"},
		{"top_p", turn(TurnRequest{TopP: ptr(1.5)}), CodeInvalid, "top_p"},
		{"top_p 0", turn(TurnRequest{TopP: ptr(0.0)}), CodeInvalid, "top_p"},
		{"top_k", turn(TurnRequest{TopK: ptr(-1)}), CodeInvalid, "top_k"},
		{"seed", turn(TurnRequest{Seed: ptr(int64(-1))}), CodeInvalid, "seed"},
		{"logprobs", turn(TurnRequest{Logprobs: ptr(LogprobsMax + 1)}), CodeInvalid, "logprobs"},
		{"mtp", turn(TurnRequest{MTP: &MTPRequest{ptr(8)}}), CodeInvalid, "mtp.max_depth"},
		{"stops", turn(TurnRequest{Stop: make([]string, StopMax+1)}), CodeInvalid, "stop"},
		{"empty stop", turn(TurnRequest{Stop: []string{"a", ""}}), CodeInvalid, "stop[1]"},
		{"long stop", turn(TurnRequest{Stop: []string{strings.Repeat("x", StopBytesMax+1)}}), CodeInvalid, "stop[0]"},
		{"fork past the end", fork(ForkRequest{At: ptr(s.Length + 1)}), CodeInvalid, "at"},
		{"fork before the start", fork(ForkRequest{At: ptr(-1)}), CodeInvalid, "at"},
		{"no children", fork(ForkRequest{N: ptr(0)}), CodeInvalid, "n"},
		{"too many children", fork(ForkRequest{N: ptr(ForkChildrenMax + 1)}), CodeInvalid, "n"},
		{"empty children", fork(ForkRequest{Children: []ForkChild{}}), CodeInvalid, "children"},
		{"n and children", fork(ForkRequest{N: ptr(1), Children: []ForkChild{{}}}), CodeInvalid, "n"},
		{"tier", func() error { _, err := r.Detach(ctx, local, s.ID, DetachRequest{Tier: "tape"}); return err }(), CodeInvalid, "tier"},
		{"disk tier", func() error { _, err := r.Detach(ctx, local, s.ID, DetachRequest{Tier: "disk"}); return err }(), CodeInvalid, "tier"},
		{"list state", list(ListFilter{State: "asleep"}), CodeInvalid, "state"},
		{"list limit", list(ListFilter{Limit: ListLimitMax + 1}), CodeInvalid, "limit"},
		{"list root", list(ListFilter{Root: "turn_1"}), CodeInvalid, "root"},
		{"list after", list(ListFilter{After: "x"}), CodeInvalid, "after"},
		{"tokens past the end", tokens(0, s.Length+1), CodeInvalid, "to"},
		{"tokens backwards", tokens(2, 1), CodeInvalid, "from"},
		{"depth", func() error { _, err := r.Tree(ctx, DefaultTenant, s.ID, ptr(-1)); return err }(), CodeInvalid, "depth"},
		{"long key", func() error {
			_, err := r.Create(ctx, Call{Tenant: DefaultTenant, IdempotencyKey: strings.Repeat("k", 256)}, CreateRequest{})
			return err
		}(), CodeInvalid, "Idempotency-Key"},
		{"empty line", func() error {
			_, err := r.StartTurn(ctx, local, r.create("").ID, TurnRequest{})
			return err
		}(), CodeInvalid, "input"},
	} {
		t.Run(test.name, func(t *testing.T) { wantCode(t, test.err, test.code, test.field) })
	}
	if got := r.get(s.ID); cmp.Diff(s, got) != "" && got.LastSeq != s.LastSeq {
		t.Errorf("refused calls changed the session:\n%s", cmp.Diff(s, got))
	}
}

// A tenant reaches nothing of another's, by any call.
func TestUnknownSessions(t *testing.T) {
	r := newRig(t)
	s := r.create("abc")
	turn := r.turn(s.ID, "", 2)
	if _, err := r.pool.Exec(t.Context(), "INSERT INTO tenants (id) VALUES ('other')"); err != nil {
		t.Fatal(err)
	}
	never := "ses_01890000-0000-7000-8000-000000000000"
	for _, who := range []struct{ tenant, id string }{
		{"other", s.ID}, {DefaultTenant, never}, {DefaultTenant, ""}, {DefaultTenant, s.ID + "0"}, {DefaultTenant, strings.ToUpper(s.ID)},
		{DefaultTenant, strings.TrimPrefix(s.ID, sessionPrefix)}, {DefaultTenant, "ses_'; DROP TABLE sessions; --"},
	} {
		call := Call{Tenant: who.tenant}
		ctx := t.Context()
		for name, f := range map[string]func() error{
			"get":     func() error { _, err := r.Get(ctx, who.tenant, who.id); return err },
			"patch":   func() error { _, err := r.Patch(ctx, call, who.id, PatchRequest{}); return err },
			"delete":  func() error { return r.Delete(ctx, call, who.id) },
			"close":   func() error { _, err := r.Close(ctx, call, who.id); return err },
			"tree":    func() error { _, err := r.Tree(ctx, who.tenant, who.id, nil); return err },
			"start":   func() error { _, err := r.StartTurn(ctx, call, who.id, TurnRequest{}); return err },
			"wait":    func() error { _, err := r.WaitTurn(ctx, who.tenant, who.id, turn.ID); return err },
			"turn":    func() error { _, err := r.Turn(ctx, who.tenant, who.id, turn.ID); return err },
			"turns":   func() error { _, err := r.Turns(ctx, who.tenant, who.id, TurnFilter{}); return err },
			"cancel":  func() error { _, err := r.Cancel(ctx, call, who.id); return err },
			"fork":    func() error { _, err := r.Fork(ctx, call, who.id, ForkRequest{}); return err },
			"detach":  func() error { _, err := r.Detach(ctx, call, who.id, DetachRequest{}); return err },
			"resume":  func() error { _, err := r.Resume(ctx, call, who.id); return err },
			"tokens":  func() error { _, err := r.Tokens(ctx, who.tenant, who.id, nil, nil); return err },
			"log":     func() error { _, err := r.Log(ctx, who.tenant, who.id); return err },
			"no turn": func() error { _, err := r.Turn(ctx, DefaultTenant, s.ID, "turn_x"); return err },
		} {
			t.Run(name, func(t *testing.T) { wantCode(t, f(), CodeNotFound, "") })
		}
	}
	if p := must(r.List(t.Context(), "other", ListFilter{})); len(p.Data) != 0 {
		t.Errorf("another tenant lists %v", p.Data)
	}
	// an unknown session is not kept in memory
	r.mu.Lock()
	n := len(r.live)
	r.mu.Unlock()
	if n != 1 {
		t.Errorf("%d live sessions, want 1", n)
	}
}

func TestStopStringsAndLogprobs(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {\n")
	free := r.turn(r.fork(s.ID, ForkRequest{}).Sessions[0].ID, "", 40)
	if len(free.Text) < 12 {
		t.Skipf("the model says too little: %q", free.Text)
	}
	stop := free.Text[6:10]
	want := free.Text[:strings.Index(free.Text, stop)]
	end := r.wait(s.ID, r.start(s.ID, TurnRequest{MaxTokens: ptr(40), IgnoreEOS: true, Stop: []string{stop}, Logprobs: ptr(2)}).ID)
	if end.Text != want || *end.FinishReason != FinishStopString {
		t.Errorf("text %q, finish %s, want %q before %q", end.Text, *end.FinishReason, want, stop)
	}
	if diff := cmp.Diff(free.Tokens[:len(end.Tokens)], end.Tokens); diff != "" {
		t.Errorf("tokens:\n%s", diff)
	}
	if full := r.tok.Decode(end.Tokens); !strings.Contains(full, stop) {
		t.Errorf("the tokens of the stop string are not on the line: %q", full)
	}
	if len(end.Logprobs) != len(end.Tokens) || len(end.Logprobs[0].Top) != 2 || end.Logprobs[0].Token != end.Tokens[0] || end.Logprobs[0].Logprob >= 0 {
		t.Errorf("logprobs %+v", end.Logprobs)
	}
	var text strings.Builder
	for _, e := range r.ledgerEvents(s.ID) {
		if e.Type == EventTurnDelta {
			text.WriteString(*e.Text)
		}
	}
	if text.String() != want {
		t.Errorf("deltas give %q, want %q", text.String(), want)
	}
	if end.Usage.CompletionTokens != len(end.Tokens) || end.Usage.PromptTokens != s.Length {
		t.Errorf("usage %+v", end.Usage)
	}
}

func TestSeeds(t *testing.T) {
	r := newRig(t)
	s := r.create("package main\n\nfunc ")
	hot := TurnRequest{MaxTokens: ptr(12), IgnoreEOS: true, Temperature: ptr(1.0), TopK: ptr(20), TopP: ptr(0.9)}
	run := func(id string, req TurnRequest) Turn { return r.wait(id, r.start(id, req).ID) }
	kids := r.fork(s.ID, ForkRequest{N: ptr(3)}).Sessions
	a := run(kids[0].ID, hot)
	again := hot
	again.Seed = &a.Seed
	if b := run(kids[1].ID, again); cmp.Diff(a.Tokens, b.Tokens) != "" || b.Seed != a.Seed {
		t.Errorf("the same seed gives %v and %v", a.Tokens, b.Tokens)
	}
	if c := run(kids[2].ID, hot); c.Seed == a.Seed {
		t.Error("a seed was drawn twice")
	}
}

func TestGiveUpWaiting(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(1 << 20), IgnoreEOS: true})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.WaitTurn(ctx, DefaultTenant, s.ID, turn.ID); err != context.Canceled {
		t.Errorf("wait: %v", err)
	}
	if got := r.get(s.ID); got.State != StateRunning {
		t.Error("a reader that left ended the turn")
	}
	if got, err := r.Cancel(t.Context(), local, s.ID); err != nil || got.State != TurnCancelled {
		t.Errorf("cancel: %+v, %v", got, err)
	}
}
