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

// TestForkOfARunningSession: without an offset it forks at what is verified,
// the parent goes on undisturbed, and the child goes on as the parent does.
func TestForkOfARunningSession(t *testing.T) {
	w := start(t, worldOptions{})
	const n = 40 // tokens of the child
	parent := w.create("package main")
	p := w.dial(parent.ID, "")
	turn, err := w.api.StartTurn(w.ctx(), parent.ID, greedy(30_000), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	see := func(tokens int) {
		for seen < tokens {
			f, _ := p.until("turn.delta")
			seen += len(f["tokens"].([]any))
		}
	}
	see(50)
	forked, err := w.api.Fork(w.ctx(), parent.ID, client.ForkRequest{}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	at := forked.At - parent.Length
	if at < seen {
		t.Fatalf("fork at token %d of a turn of which %d were seen", at, seen)
	}
	child, err := w.api.RunTurn(w.ctx(), forked.Sessions[0].ID, greedy(n), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	see(at + n)
	if _, err := w.api.Cancel(w.ctx(), parent.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	whole, err := w.api.Turn(w.ctx(), parent.ID, turn.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(child.Tokens, whole.Tokens[at:at+n]) {
		t.Errorf("the child of token %d goes on differently", forked.At)
	}
}
