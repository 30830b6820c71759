package server

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"rocket/client"
)

// TestExportImport: a subtree goes from one server to another through the
// client; what is no bundle is refused with its line.
func TestExportImport(t *testing.T) {
	a, b := start(t, worldOptions{}), start(t, worldOptions{})
	root := a.create("func main() {")
	turn := a.turn(root.ID, 6)
	kids, err := a.api.Fork(a.ctx(), root.ID, client.ForkRequest{N: new(2), At: new(turn.From + 3)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kid := kids.Sessions[0].ID
	a.turn(kid, 4)
	var bundle bytes.Buffer
	if err := a.api.Export(a.ctx(), kid, &bundle); err != nil {
		t.Fatal(err)
	}
	key := client.CallOptions{IdempotencyKey: "import"}
	got, err := b.api.Import(b.ctx(), bytes.NewReader(bundle.Bytes()), key)
	if err != nil || got.Session.ID != kid || got.NewIDs || got.Sessions != 2 || *got.Session.ParentID != root.ID {
		t.Fatalf("import %+v, %v", got, err)
	}
	if again, err := b.api.Import(b.ctx(), bytes.NewReader(bundle.Bytes()), key); err != nil || again.Session.ID != kid {
		t.Errorf("repeated import %+v, %v", again, err)
	}
	for _, w := range []*world{a, b} { // both go on alike
		w.turn(kid, 5)
	}
	x, err := a.api.Tokens(a.ctx(), kid, 0, -1)
	y, err2 := b.api.Tokens(b.ctx(), kid, 0, -1)
	if err != nil || err2 != nil || !slices.Equal(x.Tokens, y.Tokens) {
		t.Errorf("lines %v and %v, %v, %v", x.Tokens, y.Tokens, err, err2)
	}
	up, err := b.api.Ancestors(b.ctx(), kid, -1)
	if err != nil || len(up.Nodes) != 1 || !up.Nodes[0].Deleted || up.Nodes[0].ID != root.ID {
		t.Errorf("ancestors of what was imported: %+v, %v", up, err)
	}
	if _, err := b.api.Get(b.ctx(), root.ID); client.CodeOf(err) != "not_found" {
		t.Errorf("the cut ancestor: %v", err)
	}

	lines := bytes.SplitAfter(bundle.Bytes(), []byte("\n"))
	_, err = b.api.Import(b.ctx(), bytes.NewReader(bytes.Join(lines[:4], nil)), client.CallOptions{})
	if client.CodeOf(err) != "invalid" || !strings.Contains(err.Error(), "line 5: the bundle ends early") {
		t.Errorf("cut bundle: %v", err)
	}
	for _, c := range []struct {
		method, path, kind, body string
		status                   int
		code, field              string
	}{
		{"POST", pathImport, "application/json", "{}", 415, "unsupported_media_type", "Content-Type"},
		{"POST", pathImport, bundleType, "{}\n", 422, "invalid", "bundle"},
		{"POST", pathImport, bundleType, "", 422, "invalid", "bundle"},
		{"POST", pathImport + "?x=1", bundleType, "", 422, "invalid", "x"},
		{"GET", pathSessions + "/nonsense/export", "", "", 404, "not_found", "session_id"},
		{"GET", pathSessions + "/" + kid + "/export?x=1", "", "", 422, "invalid", "x"},
	} {
		got := b.do(c.method, c.path, c.body, "Content-Type", c.kind)
		wantProblem(t, got.header, got.body, c.status, c.code, c.field)
	}
	if _, err := a.api.StartTurn(a.ctx(), kid, greedy(20_000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := a.api.Export(a.ctx(), kid, &bundle); client.CodeOf(err) != "turn_in_progress" {
		t.Errorf("export of a running session: %v", err)
	}
}

// endless is a body without a line end.
type endless struct{ left int }

func (r *endless) Read(p []byte) (int, error) {
	n := min(len(p), r.left)
	for i := range p[:n] {
		p[i] = ' '
	}
	r.left -= n
	if n == 0 {
		return 0, fmt.Errorf("the server read all of it")
	}
	return n, nil
}

// TestImportBounds: a line that never ends is refused long before memory is.
func TestImportBounds(t *testing.T) {
	w := start(t, worldOptions{})
	_, err := w.api.Import(w.ctx(), &endless{bundleBytesMax}, client.CallOptions{})
	if e, ok := err.(*client.Error); ok && (e.Status != http.StatusUnprocessableEntity || !strings.Contains(e.Detail, "line 1: it has more than")) {
		t.Errorf("an endless line: %v", err)
	}
	if err == nil {
		t.Error("an endless line was taken")
	}
}
