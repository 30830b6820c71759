package radix

import (
	"fmt"
	"slices"
	"testing"
)

func (r *rig) account(key string, want Account) {
	r.Helper()
	if got := r.f.Account(key); got != want {
		r.Errorf("account of %s: %+v, want %+v\n%s", key, got, want, r.f.Dump())
	}
}

func (r *rig) toDisk(evs []Eviction) {
	for _, ev := range evs {
		r.handle++
		r.f.Demoted(ev, Disk, r.handle)
	}
}

// What several hold counts once, for whom it was allocated, until the last one
// lets go; and a key of which nothing is left is forgotten.
func TestAccountCountsWhatIsSharedOnce(t *testing.T) {
	r := newRig(t, 8, 4)
	l := line(256, 1)
	var ids []int32
	for range 2 {
		id, _ := r.f.AllocPage("a")
		ids = append(ids, id)
	}
	slot, _ := r.f.AllocSlot("a")
	r.account("a", Account{Device: 120, Limit: NoLimit})
	if _, err := r.f.Insert("a", l, 0, ids, 1, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.f.Publish("a", l, Snapshot{At: 256, Slot: slot, Tail: None}, 1); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids { // a second sequence
		r.pages.Retain(id)
	}
	r.account("a", Account{Device: 120, Limit: NoLimit})
	r.account("b", Account{Limit: NoLimit})
	r.slots.Release(slot)
	r.demote(r.f.EvictSlots(1, 2))
	r.account("a", Account{Device: 20, Host: 100, Limit: NoLimit})
	r.toDisk(r.f.EvictHost(100, 3))
	r.account("a", Account{Device: 20, Disk: 100, Limit: NoLimit})
	for range 2 {
		for _, id := range ids {
			r.pages.Release(id)
		}
	}
	r.account("a", Account{Device: 20, Disk: 100, Limit: NoLimit})
	r.toDisk(r.f.EvictDevice(1000, 4))
	r.account("a", Account{Disk: 120, Limit: NoLimit})
	r.drop(r.f.EvictDisk(1000, 5))
	for key, a := range r.f.Accounts {
		t.Errorf("%s has %+v", key, a)
	}
}

// A page of one key in the tree of another would be read by both.
func TestInsertOfAnotherKeysPagePanics(t *testing.T) {
	f := NewForest(NewPool("page", 8), NewPool("slot", 4), Options{})
	id, _ := f.AllocPage("a")
	mustPanic(t, "radix: page 0 is another key's", func() { _, _ = f.Insert("b", line(128, 1), 0, []int32{id}, 1, nil) })
}

func TestAccountsDoNotPileUp(t *testing.T) {
	r := newRig(t, 8, 4)
	for i := range 10 * accountsMin {
		id, _ := r.f.AllocPage(fmt.Sprint(i))
		r.pages.Release(id)
	}
	if n := len(r.f.trees); n > accountsMin {
		t.Errorf("%d accounts of nothing", n)
	}
}

// What a key gives up first costs it least: a host copy that the device has too,
// then what is nearest to going in its own tier. Other keys are left alone.
func TestEvictOwnInOrder(t *testing.T) {
	r := newRig(t, 16, 8)
	r.f.SetLimit("a", 0)
	r.run("b", line(300, 9))
	old, copied, recent := line(129, 1), line(129, 2), line(129, 3)
	r.insert("a", old[:128])
	r.insert("a", copied[:128])
	for _, ev := range r.f.EvictOwnPages("a", 2, r.now) {
		r.handle++
		r.f.Demoted(ev, Host, r.handle)
	}
	r.insert("a", copied[:128]) // on both now
	r.insert("a", recent[:128])
	r.account("a", Account{Device: 20, Host: 20, Limit: 0})
	if got, want := r.f.Over(nil), []string{"a"}; !slices.Equal(got, want) {
		t.Errorf("over: %v", got)
	}
	var order []string
	for {
		evs := r.f.EvictOwn("a", 1, r.now)
		if len(evs) == 0 {
			break
		}
		var l []int32
		l = evs[0].Line(l)
		order = append(order, fmt.Sprint(evs[0].From, " ", l[0]/1_000_000))
		r.f.Dropped(evs[0])
	}
	if want := []string{"host 2", "host 1", "device 2", "device 3"}; !slices.Equal(order, want) {
		t.Errorf("went %q, want %q", order, want)
	}
	r.account("a", Account{Limit: 0})
	if r.f.Account("b").Device == 0 || len(r.f.Over(nil)) > 0 {
		t.Error("b gave way, or a is over still")
	}
}

// Pins of a key hold half of its limit at most.
func TestPinWithinTheLimit(t *testing.T) {
	r := newRig(t, 64, 16)
	first, second := line(300, 1), line(300, 2)
	r.run("a", first)
	r.run("a", second)
	r.f.SetLimit("a", 2*130) // one line of two pages with its end: a state and a tail
	p, ok := r.f.Pin("a", first[:299])
	if !ok || r.f.Account("a").Pinned != 130 {
		t.Errorf("pinned: %v, %+v", ok, r.f.Account("a"))
	}
	if _, ok := r.f.Pin("a", second[:299]); ok {
		t.Error("a second pin passes half of the limit")
	}
	q, ok := r.f.Pin("a", first[:200]) // what is pinned already
	if !ok {
		t.Error("a pin of the same line's beginning was refused")
	}
	r.f.Unpin(&p)
	r.f.Unpin(&q)
	if got := r.f.Account("a").Pinned; got != 0 {
		t.Errorf("%d bytes pinned", got)
	}
}
