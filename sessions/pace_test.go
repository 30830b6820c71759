package sessions

import (
	"testing"
	"time"

	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// Deltas of a turn are at least deltaInterval apart, however fast the model is;
// its start, its first token, its end and a fork wait for nothing.
func TestDeltasAreGathered(t *testing.T) {
	eng, err := testEngine()
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	// longer than the test: whatever comes has not waited for it
	r := startRig(t, Options{DatabaseURL: pgtest.New(t), Engine: eng, Template: tmpl, DeltaInterval: time.Hour})
	s := r.create("func main() {\n")
	kinds := func(id string) (types []EventType, tokens []int) {
		for _, e := range r.events(id, 1, r.get(id).LastSeq) {
			if e.TurnID != "" {
				types = append(types, e.Type)
			}
			if e.Type == EventTurnDelta && len(e.Tokens) > 0 {
				tokens = append(tokens, len(e.Tokens))
			}
		}
		return types, tokens
	}
	r.turn(s.ID, "", 200)
	// That the first ones come before the end is shown below: where this turn's goroutine gets no time, all may have come
	// by then.
	_, tokens := kinds(s.ID)
	sum := 0
	for _, n := range tokens {
		sum += n
	}
	if len(tokens) > 2 || sum != 200 {
		t.Errorf("200 tokens came as deltas of %v, want the first ones at once and the others at the end", tokens)
	}

	before := r.get(s.ID).LastSeq
	turn := r.start(s.ID, TurnRequest{MaxTokens: ptr(1_000_000), IgnoreEOS: true})
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), before+2); err != nil || !ok {
		t.Fatal(err)
	}
	// A fork takes what is there: its children have it.
	f := r.fork(s.ID, ForkRequest{})
	if f.At <= turn.From {
		t.Errorf("a fork at %d of a turn from %d on", f.At, turn.From)
	}
	// A cancelled turn ends at once.
	if _, err := r.Cancel(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
	if got := r.wait(s.ID, turn.ID); got.State != TurnCancelled || len(got.Tokens) == 0 {
		t.Errorf("cancelled: %+v", got)
	}
	// A turn of one token has nothing to wait for.
	if got := r.turn(f.Sessions[0].ID, "", 1); got.State != TurnCompleted {
		t.Errorf("turn of one token: %+v", got)
	}
}
