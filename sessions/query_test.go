package sessions

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestEndedTurnHasAllItsTokens: a reader whose look at the session came before
// the turn's end, and at the turn after it, gets all of the turn.
func TestEndedTurnHasAllItsTokens(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	want := r.turn(s.ID, " x", 9)
	session, err := parseSession(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	id, err := parseTurn(want.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, length := range []int{want.From, want.From + 1, want.To - 3} { // of the line at the first look
		x, err := selectTurn(t.Context(), r.pool, DefaultTenant, session, length, id)
		if err != nil {
			t.Fatal(err)
		}
		got, ids, err := r.readTurn(t.Context(), session, &x)
		got.Tokens = ids
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("with %d tokens at first: %v\n%s", length, err, diff)
		}
	}
}

// TestCancelRepeatedAfterACrash: a cancellation whose server died between
// naming the turn and ending it is done when it is repeated with its key, and
// ends that turn and no other.
func TestCancelRepeatedAfterACrash(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	call := Call{Tenant: DefaultTenant, Route: "POST /v1/sessions/" + s.ID + "/cancel", IdempotencyKey: "c"}
	open := r.start(s.ID, TurnRequest{MaxTokens: ptr(2000), IgnoreEOS: true})
	_, err := once(t.Context(), r.Manager, call, func(save save) (Turn, error) {
		named := Turn{ID: open.ID}
		err, _ := r.transact(t.Context(), func(*work) {}, func(w *work) error { return save(w, named) })
		return named, err
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.Cancel(t.Context(), call, s.ID)
	if err != nil || got.ID != open.ID || got.State != TurnCancelled {
		t.Fatalf("%+v, %v", got, err)
	}
	next := r.start(s.ID, TurnRequest{MaxTokens: ptr(20), IgnoreEOS: true})
	if got, err := r.Cancel(t.Context(), call, s.ID); err != nil || got.ID != open.ID {
		t.Errorf("once more: %+v, %v", got, err)
	}
	if got := r.wait(s.ID, next.ID); got.State != TurnCompleted {
		t.Errorf("the next turn is %s", got.State)
	}
}
