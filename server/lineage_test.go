package server

import (
	"net/http"
	"slices"
	"testing"

	"rocket/client"
)

// TestLineage: ancestors, the common ancestor and the path, over HTTP and
// through the client.
func TestLineage(t *testing.T) {
	w := start(t, worldOptions{})
	root := w.create("func main() {")
	kids, err := w.api.Fork(w.ctx(), root.ID, client.ForkRequest{N: new(2)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := kids.Sessions[0].ID, kids.Sessions[1].ID
	w.turn(a, 3)
	deep, err := w.api.Fork(w.ctx(), a, client.ForkRequest{At: new(2)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := deep.Sessions[0].ID
	ids := func(nodes []client.Node) (out []string) {
		for _, n := range nodes {
			out = append(out, n.ID)
		}
		return out
	}
	up, err := w.api.Ancestors(w.ctx(), c, -1)
	if err != nil || !slices.Equal(ids(up.Nodes), []string{root.ID, a}) {
		t.Errorf("ancestors %+v, %v", up, err)
	}
	if up, err = w.api.Ancestors(w.ctx(), c, 1); err != nil || !slices.Equal(ids(up.Nodes), []string{a}) {
		t.Errorf("one level of ancestors %+v, %v", up, err)
	}
	common, err := w.api.Common(w.ctx(), b, c)
	if err != nil || common.Ancestor == nil || common.Ancestor.ID != root.ID || common.At != 2 {
		t.Errorf("common %+v, %v", common, err)
	}
	path, err := w.api.Path(w.ctx(), b, c)
	if err != nil || !slices.Equal(ids(path.Nodes), []string{b, root.ID, a, c}) || *path.Ancestor != root.ID || path.At != 2 {
		t.Errorf("path %+v, %v", path, err)
	}
	other := w.create("x")
	if common, err = w.api.Common(w.ctx(), b, other.ID); err != nil || common.Ancestor != nil || common.At != 0 {
		t.Errorf("common of two trees %+v, %v", common, err)
	}
	if path, err = w.api.Path(w.ctx(), b, other.ID); err != nil || path.Ancestor != nil || len(path.Nodes) != 0 {
		t.Errorf("path between two trees %+v, %v", path, err)
	}
	unknown := "ses_01a22a7e-0000-7000-8000-000000000000"
	for _, bad := range []struct {
		path, field string
		status      int
		code        string
	}{
		{"/common", "with", http.StatusUnprocessableEntity, "invalid"},
		{"/path", "to", http.StatusUnprocessableEntity, "invalid"},
		{"/common?with=" + unknown, "with", http.StatusNotFound, "not_found"},
		{"/path?to=nonsense", "to", http.StatusNotFound, "not_found"},
		{"/ancestors?depth=-1", "depth", http.StatusUnprocessableEntity, "invalid"},
	} {
		got := w.do("GET", pathSessions+"/"+root.ID+bad.path, "")
		wantProblem(t, got.header, got.body, bad.status, bad.code, bad.field)
	}
}

// TestPrune: a subtree goes by one call, and what is beside it stays.
func TestPrune(t *testing.T) {
	w := start(t, worldOptions{})
	root := w.create("func main() {")
	kids, err := w.api.Fork(w.ctx(), root.ID, client.ForkRequest{N: new(2)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := kids.Sessions[0].ID, kids.Sessions[1].ID
	below, err := w.api.Fork(w.ctx(), a, client.ForkRequest{}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.api.StartTurn(w.ctx(), below.Sessions[0].ID, greedy(20_000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	key := client.CallOptions{IdempotencyKey: "prune"}
	if err := w.api.Prune(w.ctx(), a, key); err != nil {
		t.Fatal(err)
	}
	if err := w.api.Prune(w.ctx(), a, key); err != nil {
		t.Errorf("repeated: %v", err)
	}
	if err := w.api.Delete(w.ctx(), a, key); client.CodeOf(err) != "idempotency_mismatch" {
		t.Errorf("the key of a prune for a deletion: %v", err)
	}
	for _, id := range []string{a, below.Sessions[0].ID} {
		if _, err := w.api.Get(w.ctx(), id); client.CodeOf(err) != "not_found" {
			t.Errorf("pruned session: %v", err)
		}
	}
	if got, err := w.api.Get(w.ctx(), b); err != nil || got.Length != root.Length {
		t.Errorf("sibling %+v, %v", got, err)
	}
}
