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
