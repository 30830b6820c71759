package sessions

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// age makes the events of a log up to seq old.
func (r *rig) age(id string, seq int64) {
	r.t.Helper()
	_, err := r.pool.Exec(r.t.Context(), "UPDATE events SET time = time - interval '2 hours' WHERE session_id = $1 AND seq <= $2",
		must(parseSession(id)), seq)
	if err != nil {
		r.t.Fatal(err)
	}
}

// unload takes a session out of memory, so that its log is the ledger's.
func (r *rig) unload(id string) {
	r.t.Helper()
	s, err := r.hold(r.t.Context(), DefaultTenant, id)
	if err != nil {
		r.t.Fatal(err)
	}
	defer s.ops.unlock()
	r.forget(s)
	s.dropSeq()
}

// keep drops what is older than an hour.
func (r *rig) keep() {
	r.t.Helper()
	r.opts.EventsRetention = time.Hour
	defer func() { r.opts.EventsRetention = 0 }()
	if err := r.dropEvents(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

func wantGone(t *testing.T, err error, first int64) {
	t.Helper()
	e, _ := err.(*Error)
	if e == nil || e.Code != CodeGone || e.FirstSeq != first {
		t.Errorf("error %v, want gone with first seq %d", err, first)
	}
}

// Old events go, whole turns at a time; what is left reads as before, and so do
// the line, the turns and the tree.
func TestRetention(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	first := r.turn(s.ID, "a", 5)
	r.turn(s.ID, "b", 5)
	child := r.fork(s.ID, ForkRequest{At: ptr(first.To)}).Sessions[0].ID
	last := r.get(s.ID).LastSeq
	r.unload(s.ID)
	before := r.events(s.ID, 1, last)
	line, turns := r.line(s.ID), must(r.Turns(t.Context(), DefaultTenant, s.ID, TurnFilter{}))
	childLine, childTurns := r.line(child), must(r.Turns(t.Context(), DefaultTenant, child, TurnFilter{}))
	log := must(r.Log(t.Context(), DefaultTenant, s.ID))
	kept := func(want int64) {
		t.Helper()
		got, _, err := keptEvents(t.Context(), r.pool, DefaultTenant, must(parseSession(s.ID)))
		if err != nil || got != want {
			t.Fatalf("the log begins at %d, want %d (%v)", got, want, err)
		}
		for from := int64(1); from < want; from++ {
			_, err := log.Read(t.Context(), from, 2)
			wantGone(t, err, want)
			_, err = log.Start(t.Context(), from, 0)
			wantGone(t, err, want)
		}
		if at, err := log.Start(t.Context(), want, 0); at != want || err != nil {
			t.Errorf("start at the first that is left: %d, %v", at, err)
		}
		if want <= last {
			if diff := cmp.Diff(before[want-1:], r.ledgerEvents(s.ID)[0:last-want+1], ignoreTimes); diff != "" {
				t.Errorf("what is left of the log:\n%s", diff)
			}
		}
		if diff := cmp.Diff(line, r.line(s.ID)); diff != "" {
			t.Errorf("line:\n%s", diff)
		}
		if diff := cmp.Diff(turns, must(r.Turns(t.Context(), DefaultTenant, s.ID, TurnFilter{}))); diff != "" {
			t.Errorf("turns:\n%s", diff)
		}
		if diff := cmp.Diff(childLine, r.line(child)); diff != "" {
			t.Errorf("child's line:\n%s", diff)
		}
		if diff := cmp.Diff(childTurns, must(r.Turns(t.Context(), DefaultTenant, child, TurnFilter{}))); diff != "" {
			t.Errorf("child's turns:\n%s", diff)
		}
		if err := r.Check(t.Context(), DefaultTenant); err != nil {
			t.Error(err)
		}
	}
	starts := []int64{}
	for _, e := range before {
		if e.Type == EventTurnStarted {
			starts = append(starts, e.Seq)
		}
	}
	r.keep()
	kept(1) // nothing is old
	r.age(s.ID, starts[0]+1)
	r.keep()
	kept(starts[0]) // the turn's end is young: it stays whole
	r.age(s.ID, starts[1]-1)
	r.keep()
	kept(starts[1])
	r.age(s.ID, last)
	r.keep()
	kept(last + 1)
	after := r.turn(s.ID, "c", 3) // the log goes on where it was
	if events := r.events(s.ID, last+1, last+2); events[0].Type != EventTurnStarted || events[0].TurnID != after.ID {
		t.Errorf("after all was gone: %+v", events)
	}
}

// A session with an open turn keeps its log.
func TestRetentionLeavesOpenTurns(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	r.start(s.ID, endless)
	r.events(s.ID, s.LastSeq+1, s.LastSeq+3)
	r.age(s.ID, 1)
	r.keep()
	if n := r.count("SELECT first_seq FROM sessions WHERE id = $1", must(parseSession(s.ID))); n != 1 {
		t.Errorf("the log of a running session begins at %d", n)
	}
	if _, err := r.Cancel(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
}

// Whoever saw an older epoch starts at the next one's first event while that is
// there, and is told when it is not.
func TestRetentionAndEpochs(t *testing.T) {
	r := newRig(t)
	s := r.create("func main() {")
	r.turn(s.ID, "a", 3)
	one := r.get(s.ID).LastSeq
	raise := func() {
		r.unload(s.ID)
		if _, err := r.pool.Exec(t.Context(), "UPDATE sessions SET epoch = epoch + 1, rev = rev + 1, owner_server = NULL"); err != nil {
			t.Fatal(err)
		}
	}
	raise()
	r.turn(s.ID, "b", 3)
	two := r.get(s.ID).LastSeq
	raise()
	r.turn(s.ID, "c", 3)
	three := r.get(s.ID).LastSeq
	r.unload(s.ID)
	r.age(s.ID, one)
	r.keep()
	log := must(r.Log(t.Context(), DefaultTenant, s.ID))
	start := func(from, epoch, want int64) {
		t.Helper()
		if got, err := log.Start(t.Context(), from, epoch); err != nil || got != want {
			t.Errorf("start at %d of epoch %d: %d, %v, want %d", from, epoch, got, err, want)
		}
	}
	start(one+1, 1, one+1)
	start(one+9, 1, one+1) // what never happened
	start(two+1, 2, two+1)
	start(three+1, 3, three+1)
	_, err := log.Start(t.Context(), 2, 1)
	wantGone(t, err, one+1)
	r.age(s.ID, two)
	r.keep()
	start(two+9, 2, two+1)
	for _, from := range []int64{one + 1, one + 9, two + 1, three} {
		_, err := log.Start(t.Context(), from, 1) // the start of epoch 2 is gone
		wantGone(t, err, two+1)
	}
}

var ignoreTimes = cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Time" }, cmp.Ignore())

// What retention dropped is served by nobody any more: not from the memory of
// the server that dropped it, nor, once it has looked, of another that has the
// session. What is young is in memory as before.
func TestRetentionInMemory(t *testing.T) {
	owner := newRig(t)
	other := openRig(t, owner.url)
	for _, c := range []struct {
		name string
		drop func()
	}{
		{"by its own server", owner.keep},
		{"by another server", func() {
			other.keep()
			if err := owner.trimLogs(t.Context()); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := owner.create("func main() {")
			owner.turn(s.ID, "a", 5)
			old := owner.get(s.ID).LastSeq
			owner.turn(s.ID, "b", 5)
			last := owner.get(s.ID).LastSeq
			log := must(owner.Log(t.Context(), DefaultTenant, s.ID))
			begun := log.Tail(1, func() {})
			defer begun.Close()
			if events, _, err := begun.Next(t.Context(), time.Minute, 1); err != nil || len(events) != 1 {
				t.Fatal(events, err)
			}
			young := must(log.Read(t.Context(), old+1, ReadMax))
			gone := func(first int64) {
				t.Helper()
				for from := int64(1); from < first; from++ {
					_, err := log.Start(t.Context(), from, 0)
					wantGone(t, err, first)
					_, err = log.Read(t.Context(), from, 1)
					wantGone(t, err, first)
					tail := log.Tail(from, func() {})
					_, _, err = tail.Next(t.Context(), time.Minute, 1)
					wantGone(t, err, first)
					tail.Close()
				}
			}
			owner.age(s.ID, old)
			c.drop()
			gone(old + 1)
			_, _, err := begun.Next(t.Context(), time.Minute, 1)
			wantGone(t, err, old+1)
			if at, err := log.Start(t.Context(), old+1, 0); at != old+1 || err != nil {
				t.Errorf("start at what is left: %d, %v", at, err)
			}
			if diff := cmp.Diff(young, must(log.Read(t.Context(), old+1, ReadMax))); diff != "" {
				t.Errorf("what is left:\n%s", diff)
			}
			owner.age(s.ID, last)
			c.drop()
			gone(last + 1)
			after := owner.turn(s.ID, "c", 3)
			if e := must(log.Read(t.Context(), last+1, 1)); len(e) != 1 || e[0].TurnID != after.ID {
				t.Errorf("after all was gone: %+v", e)
			}
		})
	}
}
