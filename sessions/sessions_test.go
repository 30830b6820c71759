package sessions

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTurnThenForkContinuesAlike(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {\n")
	if s.State != StateIdle || s.Length == 0 || s.LastSeq != 1 || s.RootID != s.ID {
		t.Fatalf("created %+v", s)
	}
	turn := r.turn(s.ID, "", 40)
	if turn.State != TurnCompleted || len(turn.Tokens) != 40 || turn.From != s.Length || turn.To != s.Length+40 || turn.Usage == nil {
		t.Fatalf("turn %+v", turn)
	}
	line := r.line(s.ID)
	at := s.Length + 17
	f := r.fork(s.ID, ForkRequest{At: &at, N: ptr(3)})
	if len(f.Sessions) != 3 || f.At != at {
		t.Fatalf("fork %+v", f)
	}
	for _, c := range f.Sessions {
		got := r.turn(c.ID, "", 23)
		if diff := cmp.Diff(line[at:], got.Tokens); diff != "" {
			t.Errorf("child does not continue as its parent did:\n%s", diff)
		}
		if diff := cmp.Diff(line, r.line(c.ID)); diff != "" {
			t.Errorf("child's line:\n%s", diff)
		}
	}
	if got := r.get(s.ID); got.ChildCount != 3 || got.State != StateIdle || got.TurnCount != 1 {
		t.Errorf("parent %+v", got)
	}
}
