package server

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rocket/client"
	"rocket/engine"
)

// TestDescriptionsAreTrue: what descriptions say that depends on the server, or
// on what is not built, is what happens.
func TestDescriptionsAreTrue(t *testing.T) {
	with := start(t, worldOptions{engine: engine.Options{DiskDir: t.TempDir(), DiskBytes: 64 << 20}})
	without := start(t, worldOptions{})
	said := func(schema, property, want string) {
		t.Helper()
		p := with.server.api.OpenAPI().Components.Schemas.Map()[schema].Properties[property]
		if !strings.Contains(p.Description, want) {
			t.Errorf("%s.%s: %q does not say %q", schema, property, p.Description, want)
		}
	}
	said("DetachRequest", "tier", "a server without a disk tier refuses disk")
	said("DetachFrame", "tier", "a server without a disk tier refuses disk")
	for w, status := range map[*world]int{with: http.StatusOK, without: http.StatusUnprocessableEntity} {
		s := w.create("func main() {")
		if got := w.do("POST", pathSessions+"/"+s.ID+"/detach", `{"tier":"disk"}`); got.status != status {
			t.Errorf("detach to disk: %d %s, want %d", got.status, got.body, status)
		}
	}
	said("TurnRequest", "mtp", "it is taken and has no effect")
	var plain client.Turn
	for i, mtp := range []string{"", `,"mtp":{"max_depth":3}`} {
		s := without.create("func main() {")
		var turn client.Turn
		without.do("POST", pathSessions+"/"+s.ID+"/turns?wait=true", `{"max_tokens":6,"seed":7`+mtp+`}`).into(t, http.StatusOK, &turn)
		if i == 0 {
			plain = turn
		} else if !cmp.Equal(plain.Tokens, turn.Tokens) || turn.Usage.MTP.Drafted != 0 {
			t.Errorf("with mtp: %v, %+v; without: %v", turn.Tokens, turn.Usage.MTP, plain.Tokens)
		}
	}
}

// TestSessionsElsewhere: lists and trees say of which sessions they do not know
// where the bytes are; the session's own answer knows, whichever server is
// called.
func TestSessionsElsewhere(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	root := a.create("func main() {")
	a.turn(root.ID, 4)
	forked, err := a.api.Fork(a.ctx(), root.ID, client.ForkRequest{}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	child := forked.Sessions[0].ID
	if _, err := a.api.Release(a.ctx(), child, client.ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	if turn, err := b.api.RunTurn(b.ctx(), child, greedy(2), client.CallOptions{}); err != nil || len(turn.Tokens) == 0 {
		t.Fatal(turn, err)
	}
	want := func(what string, s client.Session, elsewhere bool) {
		t.Helper()
		if s.Elsewhere != elsewhere || (s.Residency.Device > 0) == elsewhere {
			t.Errorf("%s: elsewhere %v, %d tokens on the device; want elsewhere %v", what, s.Elsewhere, s.Residency.Device, elsewhere)
		}
	}
	for name, w := range map[string]*world{"the root's server": a, "the child's server": b} {
		page, err := w.api.List(w.ctx(), client.ListOptions{})
		if err != nil || len(page.Data) != 2 {
			t.Fatal(page, err)
		}
		for _, s := range page.Data {
			want(name+" lists "+s.ID, s, (s.ID == root.ID) != (w == a))
		}
		tree, err := w.api.Tree(w.ctx(), root.ID, -1) // the root's server answers
		if err != nil || len(tree.Nodes) != 2 {
			t.Fatal(tree, err)
		}
		for _, n := range tree.Nodes {
			want("tree at "+name, n.Session, n.ID != root.ID)
		}
		for _, id := range []string{root.ID, child} {
			s, err := w.api.Get(w.ctx(), id)
			if err != nil {
				t.Fatal(err)
			}
			want("session at "+name, s, false)
		}
	}
}
