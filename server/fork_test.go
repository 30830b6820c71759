package server

import (
	"slices"
	"testing"

	"rocket/client"
)

// TestForksGoOnAsTheirParent: from every offset, greedy and sampled, a child
// makes the tokens that its parent made there; also when the parent was moved
// off the device in between; and no more is computed again than the fork said.
func TestForksGoOnAsTheirParent(t *testing.T) {
	w := start(t, worldOptions{})
	const n = 200
	for name, ask := range map[string]func(int) client.TurnRequest{
		"greedy": greedy,
		"sampled": func(n int) client.TurnRequest {
			return client.TurnRequest{MaxTokens: &n, Temperature: new(0.8), TopP: new(0.95), Seed: new(int64(5)), IgnoreEOS: true}
		},
	} {
		parent := w.create("func main() {\n\tfmt.Println(")
		if _, err := w.api.RunTurn(w.ctx(), parent.ID, ask(n), client.CallOptions{}); err != nil {
			t.Fatal(err)
		}
		line, err := w.api.Tokens(w.ctx(), parent.ID, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		end := len(line.Tokens)
		for i, at := range []int{end - 1, end - n, end - 128, 128, 129, end - 77, end - n + 1} {
			if i == 4 {
				if _, err := w.api.Detach(w.ctx(), parent.ID, client.DetachRequest{}, client.CallOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			forked, err := w.api.Fork(w.ctx(), parent.ID, client.ForkRequest{At: &at, N: new(2)}, client.CallOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if forked.At != at || forked.SharedTokens > at-1 || forked.ReplayTokens > at-1 {
				t.Errorf("%s, fork at %d: at %d, %d shared, %d to replay", name, at, forked.At, forked.SharedTokens, forked.ReplayTokens)
			}
			for _, child := range forked.Sessions {
				turn, err := w.api.RunTurn(w.ctx(), child.ID, ask(end-at), client.CallOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(turn.Tokens, line.Tokens[at:]) {
					t.Errorf("%s: child at %d goes on differently", name, at)
				}
				if u := turn.Usage; u.PromptTokens != at || u.CompletionTokens != end-at ||
					u.CachedTokens+u.BySource.Recomputed != at-1 || u.BySource.Recomputed > forked.ReplayTokens {
					t.Errorf("%s: child at %d, %d to replay: usage %+v", name, at, forked.ReplayTokens, *u)
				}
			}
		}
		tree, err := w.api.Tree(w.ctx(), parent.ID, -1)
		if err != nil || len(tree.Nodes) != 15 || tree.Nodes[0].ID != parent.ID {
			t.Errorf("%s: tree of %d nodes, %v", name, len(tree.Nodes), err)
		}
	}
}
