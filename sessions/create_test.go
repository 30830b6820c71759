package sessions

import (
	"context"
	"testing"
	"time"
)

// Whoever finds a new session in the ledger before its maker has the commit's
// answer gets the maker's session, not one of its own: what two had would be
// two timelines, one of which nobody could release, and the log of one would
// not be told.
func TestANewSessionIsInMemoryOnce(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	watch := r.Watch(DefaultTenant, WatchOptions{})
	const n = 40
	var made []string
	for range n {
		x := r.newRow(DefaultTenant, 0)
		found := make(chan *session, 1)
		s, err := r.createRoot(ctx, x, nil, func(*work, any) error { // in the transaction
			go func() {
				for ctx.Err() == nil {
					if s, err := r.acquire(ctx, x.tenant, x.id); err == nil {
						found <- s
						return
					}
				}
			}()
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		s.ops.unlock()
		select {
		case got := <-found:
			if got != s {
				t.Error("the session is in memory twice")
			}
		case <-ctx.Done():
			t.Fatal("nobody found it")
		}
		made = append(made, sessionID(x.id))
	}
	told := map[string]bool{}
	for len(told) < n {
		events, lost, err := watch.Next(ctx)
		if err != nil || lost > 0 {
			t.Fatalf("told of %d of %d, lost %d, %v", len(told), n, lost, err)
		}
		for _, e := range events {
			told[e.SessionID] = true
		}
	}
	for _, id := range made {
		if !told[id] {
			t.Errorf("nobody was told of %s", id)
		}
	}
}

// Whatever message of a creation is lost, and whatever answer: the session is
// there and told of, or nowhere.
func TestACreationHappensOrNot(t *testing.T) {
	l := newLossy(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	there := func() []string {
		page, err := l.List(ctx, DefaultTenant, ListFilter{Limit: ListLimitMax})
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, s := range page.Data {
			ids = append(ids, s.ID)
		}
		return ids
	}
	watch := l.Watch(DefaultTenant, WatchOptions{})
	for name, set := range map[string]func(int) <-chan struct{}{"message": l.p.LoseAt, "answer to message": l.p.LoseAnswerAt} {
		for i := 1; i < messagesMax; i++ {
			before := len(there())
			hit := set(i)
			_, err := l.Create(ctx, local, CreateRequest{Input: ptr("func main() {\n")})
			l.p.Unset()
			ids := there()
			if err == nil && len(ids) != before+1 {
				t.Errorf("%s %d lost: created, and %d sessions after %d", name, i, len(ids), before)
			}
			waitFor(t, func() bool { // a commit without an answer is settled behind
				l.mu.Lock()
				defer l.mu.Unlock()
				return len(l.live) == len(ids)
			})
			if !done(hit) {
				break
			}
		}
	}
	told := map[string]bool{}
	for want := len(there()); len(told) < want; {
		events, lost, err := watch.Next(ctx)
		if err != nil || lost > 0 {
			t.Fatalf("told of %d of %d, lost %d, %v", len(told), want, lost, err)
		}
		for _, e := range events {
			told[e.SessionID] = true
		}
	}
}
