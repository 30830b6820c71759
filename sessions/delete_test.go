package sessions

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// root -> a(10) -> b(15), root -> c(12): what stays of a deleted session is
// what a living descendant reads.
func TestDeletePurgesWhatNobodyInherits(t *testing.T) {
	r := newRig(t)
	root := r.create("ab")
	r.turn(root.ID, "", 28)
	base := root.Length
	grow := func(parent string, at int) string {
		id := r.fork(parent, ForkRequest{At: ptr(at)}).Sessions[0].ID
		r.turn(id, "x", 20)
		return id
	}
	a := grow(root.ID, base+10)
	b := grow(a, base+15)
	c := grow(root.ID, base+12)
	lines := map[string][]int32{}
	for _, id := range []string{a, b, c} {
		lines[id] = r.line(id)
	}
	own := func(id string) int {
		return r.count("SELECT coalesce(sum(cardinality(ids)), 0)::int FROM token_runs WHERE session_id = $1", must(parseSession(id)))
	}
	tree := func() string {
		t.Helper()
		out, err := r.Tree(t.Context(), DefaultTenant, root.ID, nil)
		if err != nil {
			return string(ErrorCode(err))
		}
		names := map[string]string{root.ID: "root", a: "a", b: "b", c: "c"}
		s := ""
		for _, n := range out.Nodes {
			data, _ := json.Marshal(n)
			if n.Deleted != strings.Contains(string(data), `"deleted":true`) {
				t.Errorf("node %s", data)
			}
			s += names[n.ID]
			if n.Deleted {
				s += "-"
			}
			s += " "
		}
		return s
	}
	if got := tree(); got != "root a c b " {
		t.Fatalf("tree %q", got)
	}
	remove := func(id string) {
		t.Helper()
		if err := r.Delete(t.Context(), local, id); err != nil {
			t.Fatal(err)
		}
		delete(lines, id)
		for id, want := range lines {
			if diff := cmp.Diff(want, r.line(id)); diff != "" {
				t.Errorf("a survivor's line changed:\n%s", diff)
			}
			for _, turn := range must(r.Turns(t.Context(), DefaultTenant, id, TurnFilter{})).Data {
				full := must(r.Turn(t.Context(), DefaultTenant, id, turn.ID))
				if diff := cmp.Diff(want[turn.To-len(full.Tokens):turn.To], full.Tokens); diff != "" {
					t.Errorf("turn of a survivor:\n%s", diff)
				}
				if len(full.Tokens) > 0 && full.Text == "" {
					t.Errorf("turn of a survivor without text: %+v", full)
				}
			}
		}
	}
	remove(a)
	if got := tree(); got != "root a- c b " {
		t.Errorf("tree %q", got)
	}
	if got := own(a); got != 5 {
		t.Errorf("%d own tokens of a left, want the 5 that b inherits", got)
	}
	if n := r.count("SELECT count(*) FROM events WHERE session_id = $1", must(parseSession(a))); n != 0 {
		t.Errorf("%d events of a deleted session", n)
	}
	_, err := r.Tree(t.Context(), DefaultTenant, a, nil)
	wantCode(t, err, CodeNotFound, "")
	if n := r.get(root.ID).ChildCount; n != 1 {
		t.Errorf("child_count %d, want 1", n)
	}
	remove(b) // the last reader of a: a keeps nothing
	if got := own(a); got != 0 {
		t.Errorf("%d own tokens of a left, want none", got)
	}
	remove(root.ID)
	if got := own(root.ID); got != base+12 {
		t.Errorf("%d own tokens of the root left, want %d", got, base+12)
	}
	d := r.fork(c, ForkRequest{At: ptr(base + 3)}).Sessions[0].ID
	lines[d] = r.line(d)
	remove(c)
	if got := own(root.ID); got != base+3 {
		t.Errorf("%d own tokens of the root left, want the %d that the grandchild inherits", got, base+3)
	}
	remove(d)
	if n := r.count("SELECT count(*) FROM sessions") + r.count("SELECT count(*) FROM token_runs"); n != 0 {
		t.Errorf("%d rows of a tree without life", n)
	}
}

// Deletions all over a tree at once: no deadlock, nothing left.
func TestDeleteATreeAtOnce(t *testing.T) {
	r := newRig(t)
	ids := []string{r.create("abc").ID}
	for i := range 15 {
		for _, c := range r.fork(ids[i/2], ForkRequest{N: ptr(2)}).Sessions {
			ids = append(ids, c.ID)
		}
	}
	errs := make(chan error)
	for _, id := range ids {
		go func() { errs <- r.Delete(t.Context(), local, id) }()
	}
	for range ids {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := r.count("SELECT count(*) FROM sessions"); n != 0 {
		t.Errorf("%d rows left", n)
	}
}
