package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func jsonLen(t *testing.T, v any) int {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return len(data)
}

// Pages of turns end early where turns are large, and say so; each turn comes
// once, one that is larger than a page by itself.
func TestPagesOfTurnsAreBounded(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	const most = 256 << 10
	r.answers.page = most
	sizes := []int{1 << 16, 10, 1 << 16, most + 1<<16, 3 << 16, 1 << 15, 1 << 16, 5, 1 << 17, 1 << 16}
	var want []string
	for i, n := range sizes {
		turn := r.turn(s.ID, "x", 1)
		fill := "x"
		if i%2 == 0 {
			n, fill = n/6, "\x01" // six bytes of JSON
		}
		r.exec("UPDATE turns SET text = repeat($2, $3) WHERE id = $1", must(parseTurn(turn.ID)), fill, n)
		want = append([]string{turn.ID}, want...)
	}
	defer r.exec("UPDATE turns SET text = 'x'")
	for _, limit := range []int{ListLimitMax, len(sizes), 3, 1} {
		var got []string
		for f := (TurnFilter{Limit: limit}); ; {
			ctx, sent := CountAnswer(t.Context())
			page, err := r.Turns(ctx, DefaultTenant, s.ID, f)
			if err != nil || len(page.Data) == 0 || len(page.Data) > limit {
				t.Fatalf("%d turns, %v", len(page.Data), err)
			}
			size := jsonLen(t, page)
			if size > most && len(page.Data) > 1 {
				t.Errorf("a page of %d turns has %d bytes", len(page.Data), size)
			}
			if held := r.answers.all; size > 2*answerFree && (held < int64(size)/2 || held > int64(size)*2) {
				t.Errorf("%d bytes are counted for a page of %d", held, size)
			}
			sent()
			if r.answers.all != 0 {
				t.Fatalf("%d bytes are counted for a page that was sent", r.answers.all)
			}
			for _, turn := range page.Data {
				got = append(got, turn.ID)
			}
			if page.HasMore != (page.Next != nil) || page.HasMore != (len(got) < len(want)) {
				t.Fatalf("after %d of %d turns: has_more %v, next %v", len(got), len(want), page.HasMore, page.Next)
			}
			if !page.HasMore {
				break
			}
			f.After = *page.Next
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("pages of %d:\n%s", limit, diff)
		}
	}
}

// Lists of sessions have pages as well; a tree has none, and one that is too
// large is refused, with what to ask for instead.
func TestListsAndTreesAreBounded(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	r.answers.page, r.answers.tree = 256<<10, 1<<20
	middle := r.fork(s.ID, ForkRequest{N: ptr(9)}).Sessions[0].ID
	leaf := r.fork(middle, ForkRequest{N: ptr(6)}).Sessions[0].ID
	const nodes = 16
	r.exec("UPDATE sessions SET labels = jsonb_build_object('a', repeat('x', $1)) WHERE parent_id IS NOT NULL", 80<<10)
	seen := map[string]bool{}
	for f := (ListFilter{Root: s.ID, Limit: 10}); ; {
		page, err := r.List(t.Context(), DefaultTenant, f)
		if err != nil || len(page.Data) == 0 {
			t.Fatalf("%d sessions, %v", len(page.Data), err)
		}
		if size := jsonLen(t, page); int64(size) > r.answers.page {
			t.Errorf("a page of %d sessions has %d bytes", len(page.Data), size)
		}
		for _, x := range page.Data {
			seen[x.ID] = true
		}
		if !page.HasMore {
			break
		}
		f.After = *page.Next
	}
	if len(seen) != nodes {
		t.Errorf("%d sessions in all pages, want %d", len(seen), nodes)
	}
	_, err := r.Tree(t.Context(), DefaultTenant, s.ID, nil)
	wantCode(t, err, CodeInvalid, "depth")
	tree, err := r.Tree(t.Context(), DefaultTenant, s.ID, ptr(1))
	if err != nil || len(tree.Nodes) != 10 || jsonLen(t, tree) > 1<<20 {
		t.Errorf("fewer levels: %d nodes, %v", len(tree.Nodes), err)
	}
	r.exec("UPDATE sessions SET labels = jsonb_build_object('a', repeat('x', $1)) WHERE parent_id IS NOT NULL AND child_count > 0", 1<<20)
	_, err = r.Ancestors(t.Context(), DefaultTenant, leaf, nil)
	wantCode(t, err, CodeInvalid, "depth")
	_, err = r.Path(t.Context(), DefaultTenant, leaf, s.ID)
	wantCode(t, err, CodeInvalid, "to")
	r.exec("UPDATE sessions SET labels = '{}'")
}

// A log is read in parts that are bounded, from memory and from the ledger, and
// the parts are the whole.
func TestReadsOfLogsAreBounded(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	for _, text := range []string{"a", "b"} {
		r.turn(s.ID, text, 12)
	}
	last := r.get(s.ID).LastSeq
	log := must(r.Log(t.Context(), DefaultTenant, s.ID))
	for _, where := range []string{"memory", "the ledger"} {
		whole := must(log.Page(t.Context(), 1, ReadMax))
		if int64(len(whole)) != last {
			t.Fatalf("%d events of %d", len(whole), last)
		}
		for _, bound := range []int64{1, 600, 2000, 1 << 20} {
			var got []Event
			for int64(len(got)) < last {
				events, cut, err := log.read(t.Context(), int64(len(got))+1, 20, bound)
				if err != nil || len(events) == 0 {
					t.Fatal(len(got), err)
				}
				size := int64(0)
				for i := range events {
					size += events[i].bytes()
				}
				if size > bound && len(events) > 1 {
					t.Errorf("%d events of %d bytes, bound %d", len(events), size, bound)
				}
				if short := len(events) < 20 && int64(len(got)+len(events)) < last; cut != short {
					t.Errorf("%d events after %d: cut %v", len(events), len(got), cut)
				}
				got = append(got, events...)
			}
			if diff := cmp.Diff(whole, got); diff != "" {
				t.Errorf("from %s, %d bytes at a time:\n%s", where, bound, diff)
			}
		}
		r.unload(s.ID)
	}
	text := "x"
	e := Event{Type: EventTurnDelta, EventData: EventData{Text: &text, Tokens: []int32{1_000_000}}}
	if n := fitting([]Event{e, e, e}, 2*e.bytes()); n != 2 {
		t.Errorf("%d events fit in the room of two", n)
	}
	if n := fitting([]Event{e, e, e}, 1); n != 1 {
		t.Errorf("%d events without room, want one", n)
	}
}

// Answers that are under way hold a bounded number of bytes, of which a tenant
// has its share; who has some already does not wait for itself.
func TestAnswersShareRoom(t *testing.T) {
	m := &Manager{}
	bg := context.Background()
	var open []func()
	ask := func(ctx context.Context, tenant string, n int64) error {
		ctx, sent := CountAnswer(ctx)
		open = append(open, sent)
		return m.holdAnswer(ctx, tenant, n)
	}
	given, cancel := context.WithCancel(bg)
	cancel()
	for i := range 4 {
		tenant := fmt.Sprint(i)
		if err := ask(bg, tenant, answersTenantMax/2); err != nil {
			t.Fatal(err)
		}
		if err := ask(bg, tenant, answersTenantMax/2); err != nil {
			t.Fatal(err)
		}
		if err := ask(given, tenant, answerFree+1); !errors.Is(err, context.Canceled) {
			t.Fatalf("more than a tenant's share: %v", err)
		}
	}
	if err := ask(given, "another", answerFree+1); !errors.Is(err, context.Canceled) {
		t.Errorf("more than all tenants' share: %v", err)
	}
	if err := ask(given, "another", answerFree); err != nil {
		t.Errorf("a small answer waits: %v", err)
	}
	if err := m.holdAnswer(given, "another", 1<<30); err != nil {
		t.Errorf("a read that is nobody's answer waits: %v", err)
	}
	reply, replied := CountAnswer(bg)
	if err := m.HoldAnswer(reply, "another", 1, false); ErrorCode(err) != CodeOverloaded {
		t.Errorf("a reply that does not wait, without room: %v", err)
	}
	open[len(open)-1]()
	ctx, sent := CountAnswer(bg)
	open[len(open)-1] = sent
	all := m.answers.all
	open[0]()
	for _, n := range []int64{1000, 10, answerFree + 1, answerFree + 1} { // at first there is room, and then it has some
		if err := m.HoldAnswer(ctx, "another", n, false); err != nil || m.answers.tenants["another"] != n {
			t.Errorf("%d bytes are held for a reply of %d, %v", m.answers.tenants["another"], n, err)
		}
	}
	if m.answers.all != all-answersTenantMax/2+answerFree+1 {
		t.Errorf("%d bytes are held", m.answers.all)
	}
	replied()
	done := make(chan error)
	go func() {
		ctx, sent := CountAnswer(bg)
		err := m.holdAnswer(ctx, "another", answersTenantMax*2) // all of its share
		if err == nil {
			err = m.holdAnswer(ctx, "another", answerFree+1) // more for the same call
		}
		sent()
		done <- err
	}()
	for _, sent := range open {
		sent()
		sent() // counts once
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if a := &m.answers; a.all != 0 || len(a.tenants) != 0 || a.most > answersBytesMax+answerFree+1 {
		t.Errorf("%d bytes are held, of %d tenants, and there were %d", a.all, len(a.tenants), a.most)
	}
}
