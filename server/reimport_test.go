package server

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rocket/client"
)

// followed reads n events live, each way.
func (w *world) followed(id string, n int) (socket, sse []client.Event) {
	w.t.Helper()
	for _, way := range []struct {
		sse  bool
		into *[]client.Event
	}{{false, &socket}, {true, &sse}} {
		for e, err := range w.api.Follow(w.ctx(), id, client.Position{From: 1}, client.FollowOptions{SSE: way.sse}) {
			if err != nil {
				w.t.Fatal(err)
			}
			if *way.into = append(*way.into, e); len(*way.into) == n {
				break
			}
		}
	}
	return socket, sse
}

// TestImportedUnderOldIDs: a session that was deleted and comes back under its
// id may have another log under the same numbers. Its readers get that one,
// whichever server the deletion and the import went through.
func TestImportedUnderOldIDs(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	for name, through := range map[string]*world{"the same server": a, "another server": b} {
		t.Run(name, func(t *testing.T) {
			s := a.create("func main() {")
			var bundle bytes.Buffer
			if err := a.api.Export(a.ctx(), s.ID, &bundle); err != nil {
				t.Fatal(err)
			}
			turn := func(text string) {
				t.Helper()
				req := greedy(4)
				req.Input = &text
				if _, err := a.api.RunTurn(a.ctx(), s.ID, req, client.CallOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			check := func() []client.Event {
				t.Helper()
				page := a.page(s.ID, 100)
				socket, sse := a.followed(s.ID, len(page))
				if diff := cmp.Diff(page, socket); diff != "" {
					t.Errorf("over the WebSocket:\n%s", diff)
				}
				if diff := cmp.Diff(page, sse); diff != "" {
					t.Errorf("server-sent events:\n%s", diff)
				}
				return page
			}
			turn("one")
			before := check()
			if through == b { // another server has it by the time that it is deleted
				if _, err := a.api.Release(a.ctx(), s.ID, client.ReleaseRequest{}); err != nil {
					t.Fatal(err)
				}
				if _, err := b.api.Patch(b.ctx(), s.ID, client.PatchRequest{Title: new("theirs")}, client.CallOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := through.api.Delete(a.ctx(), s.ID, client.CallOptions{}); err != nil {
				t.Fatal(err)
			}
			got, err := through.api.Import(a.ctx(), &bundle, client.CallOptions{})
			if err != nil || got.NewIDs {
				t.Fatalf("import %+v, %v", got, err)
			}
			turn("two")
			after := check()
			if cmp.Equal(before, after) {
				t.Error("the second log is the first")
			}
		})
	}
}
