package sessions

import (
	"context"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A subtree goes as a whole, with its running turns; what is beside and above
// it keeps its lines, its counts and its readers.
func TestPrune(t *testing.T) {
	r := newRig(t)
	root := r.create("func main() {")
	r.turn(root.ID, "", 8)
	kids := r.fork(root.ID, ForkRequest{N: ptr(2)}).Sessions
	top, sibling := kids[0].ID, kids[1].ID
	r.turn(top, "x", 6)
	below := r.fork(top, ForkRequest{N: ptr(3)}).Sessions
	deep := r.fork(below[0].ID, ForkRequest{At: ptr(3)}).Sessions[0].ID
	if err := r.Delete(t.Context(), local, below[0].ID); err != nil { // a gap in between
		t.Fatal(err)
	}
	if _, err := r.Detach(t.Context(), local, below[1].ID, DetachRequest{}); err != nil { // not in memory
		t.Fatal(err)
	}
	running := r.start(below[2].ID, endless)
	log := must(r.Log(t.Context(), DefaultTenant, deep))
	last := r.get(deep).LastSeq
	told := make(chan bool)
	go func() {
		ok, _ := log.Wait(t.Context(), last+1)
		told <- ok
	}()
	want := map[string][]int32{root.ID: r.line(root.ID), sibling: r.line(sibling)}

	wantCode(t, r.Prune(t.Context(), Call{Tenant: "other"}, top), CodeNotFound, "")
	key := Call{Tenant: DefaultTenant, IdempotencyKey: "p", Route: "prune"}
	if err := r.Prune(t.Context(), key, top); err != nil {
		t.Fatal(err)
	}
	if err := r.Prune(t.Context(), key, top); err != nil {
		t.Errorf("repeated prune: %v", err)
	}
	wantCode(t, r.Prune(t.Context(), local, top), CodeNotFound, "")
	if <-told {
		t.Error("a reader of a pruned session was told to go on")
	}
	for _, id := range []string{top, below[0].ID, below[1].ID, below[2].ID, deep} {
		_, err := r.Get(t.Context(), DefaultTenant, id)
		wantCode(t, err, CodeNotFound, "")
		u := must(parseSession(id))
		for _, table := range []string{"token_runs", "turns", "events", "residency"} {
			if n := r.count("SELECT count(*) FROM "+table+" WHERE session_id = $1", u); n != 0 {
				t.Errorf("%d rows of a pruned session in %s", n, table)
			}
		}
	}
	_, err := r.WaitTurn(t.Context(), DefaultTenant, below[2].ID, running.ID)
	wantCode(t, err, CodeNotFound, "")
	for id, line := range want {
		if diff := cmp.Diff(line, r.line(id)); diff != "" {
			t.Errorf("line beside the subtree:\n%s", diff)
		}
	}
	if got := r.get(root.ID); got.ChildCount != 1 {
		t.Errorf("%d children left, want 1", got.ChildCount)
	}
	tree := must(r.Tree(t.Context(), DefaultTenant, root.ID, nil))
	alive := 0
	for _, n := range tree.Nodes {
		if !n.Deleted {
			alive++
		}
	}
	if len(tree.Nodes) != 7 || alive != 2 {
		t.Errorf("tree of %d nodes, %d alive", len(tree.Nodes), alive)
	}
	if err := r.Prune(t.Context(), local, root.ID); err != nil {
		t.Fatal(err)
	}
	if n := r.count("SELECT count(*) FROM sessions"); n != 0 {
		t.Errorf("%d rows of a tree without life", n)
	}
}

// What a deleted ancestor kept for the subtree goes with it.
func TestPruneBelowADeletedAncestor(t *testing.T) {
	r := newRig(t)
	root := r.create("func main() {\n\treturn\n}\n")
	keep := r.fork(root.ID, ForkRequest{At: ptr(2)}).Sessions[0].ID
	mid := r.fork(root.ID, ForkRequest{At: ptr(root.Length - 1)}).Sessions[0].ID
	r.turn(mid, "y", 3)
	r.fork(mid, ForkRequest{N: ptr(2)})
	if err := r.Delete(t.Context(), local, root.ID); err != nil {
		t.Fatal(err)
	}
	own := func() int {
		return r.count("SELECT coalesce(sum(cardinality(ids)), 0)::int FROM token_runs WHERE session_id = $1", must(parseSession(root.ID)))
	}
	if got := own(); got != root.Length-1 {
		t.Fatalf("the deleted root keeps %d tokens", got)
	}
	line := r.line(keep)
	if err := r.Prune(t.Context(), local, mid); err != nil {
		t.Fatal(err)
	}
	if got := own(); got != 2 {
		t.Errorf("the deleted root keeps %d tokens, want the 2 of the other child", got)
	}
	if diff := cmp.Diff(line, r.line(keep)); diff != "" {
		t.Errorf("line of the other child:\n%s", diff)
	}
}

// Forks, turns and deletions all over a subtree while it is pruned: it is gone
// as a whole, and no child is born below it unseen.
func TestPruneWhileItGrows(t *testing.T) {
	r := newRig(t)
	root := r.create("func f() {")
	top := r.fork(root.ID, ForkRequest{}).Sessions[0].ID
	var mu sync.Mutex
	ids := []string{top}
	pick := func(i int) string {
		mu.Lock()
		defer mu.Unlock()
		return ids[i%len(ids)]
	}
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	grown := make(chan struct{}, 1)
	for w := range 4 {
		all.Go(func() {
			for i := w; ctx.Err() == nil; i++ {
				mu.Lock()
				many := len(ids) > 60
				mu.Unlock()
				switch i % 4 {
				case 0, 1:
					if many {
						continue
					}
					f, err := r.Fork(ctx, local, pick(i), ForkRequest{N: ptr(2)})
					if err == nil {
						mu.Lock()
						for _, s := range f.Sessions {
							ids = append(ids, s.ID)
						}
						if len(ids) > 20 {
							select {
							case grown <- struct{}{}:
							default:
							}
						}
						mu.Unlock()
					}
				case 2:
					_, _ = r.StartTurn(ctx, local, pick(i), TurnRequest{Input: ptr("a"), MaxTokens: ptr(8), IgnoreEOS: true})
				default:
					_, _ = r.Detach(ctx, local, pick(i), DetachRequest{})
				}
			}
		})
	}
	<-grown
	for { // the four make it change all the time
		err := r.Prune(t.Context(), local, top)
		if err == nil {
			break
		}
		if ErrorCode(err) != CodeOverloaded {
			t.Fatal(err)
		}
	}
	stop()
	all.Wait()
	if n := r.count("SELECT count(*) FROM sessions WHERE deleted_at IS NULL"); n != 1 {
		t.Errorf("%d sessions alive, want the root", n)
	}
	if got := r.get(root.ID); got.ChildCount != 0 {
		t.Errorf("%d children left", got.ChildCount)
	}
}

// Subtrees of one tree pruned at once, parents and children of each other.
func TestPruneAtOnce(t *testing.T) {
	r := newRig(t)
	ids := []string{r.create("abc").ID}
	for i := range 15 {
		for _, c := range r.fork(ids[i/2], ForkRequest{N: ptr(2)}).Sessions {
			ids = append(ids, c.ID)
		}
	}
	errs := make(chan error)
	for _, id := range ids[1:] {
		go func() { errs <- r.Prune(t.Context(), local, id) }()
	}
	for range ids[1:] {
		if err := <-errs; err != nil && ErrorCode(err) != CodeNotFound && ErrorCode(err) != CodeOverloaded {
			t.Error(err)
		}
	}
	if err := r.Prune(t.Context(), local, ids[0]); err != nil {
		t.Fatal(err)
	}
	if n := r.count("SELECT count(*) FROM sessions"); n != 0 {
		t.Errorf("%d rows left", n)
	}
}

// A session that is resumed while its subtree is pruned, after the prune has
// looked at what is in memory, leaves nothing on the device.
func TestResumeRacingAPrune(t *testing.T) {
	r := newRig(t)
	root := r.create("func main() {\n").ID
	top := r.fork(root, ForkRequest{}).Sessions[0].ID
	child := r.fork(top, ForkRequest{}).Sessions[0].ID
	must(r.Detach(t.Context(), local, child, DetachRequest{})) // and is not in memory any more
	seqs := r.Stats().Engine.Seqs                              // the root's and the top's
	waiting := func(n int) {
		t.Helper()
		waitFor(t, func() bool {
			return r.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") == n
		})
	}
	first, second := holdRow(t, r.url, root), holdRow(t, r.url, child)
	pruned, resumed := make(chan error), make(chan error)
	go func() { pruned <- r.Prune(t.Context(), local, top) }()
	waiting(1) // it has held what is in memory
	first()
	waitFor(t, func() bool { // and stands in line for the child's row
		return r.count(`SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE a.datname = current_database() AND NOT l.granted AND l.locktype = 'transactionid'`) == 1 &&
			r.count("SELECT count(*) FROM pg_locks WHERE locktype = 'tuple' AND granted") == 1
	})
	go func() {
		_, err := r.Resume(t.Context(), local, child)
		resumed <- err
	}()
	waiting(2) // for the same row, behind it, with a timeline
	if n := r.Stats().Engine.Seqs; n != seqs+1 {
		t.Errorf("%d timelines, want %d", n, seqs+1)
	}
	second()
	if err := <-pruned; err != nil {
		t.Error(err)
	}
	wantCode(t, <-resumed, CodeNotFound, "")
	waitFor(t, func() bool { return r.Stats().Engine.Seqs == seqs-1 })
}
