package radix

import (
	"slices"
	"testing"
)

// ---- eviction order

func TestParentInheritsAge(t *testing.T) {
	r := newRig(t, 16, 4)
	a, b := line(256, 1), line(128, 2)
	r.insert("k", a[:128])
	r.insert("k", b)
	lock := r.f.Lock(r.match("k", line(200, 1)))
	r.insert("k", a)
	r.demote(r.f.EvictPath("k", a, Device))
	r.f.Unlock(&lock)
	if evs := r.f.EvictPages(1, 9); len(evs) != 1 || evs[0].Page != r.f.walk("k", b, 1).dev {
		t.Errorf("picked the end of a line used last: %+v\n%s", evs, r.f.Dump())
	}
}

func TestTouchReachesTheDeviceAboveHostPages(t *testing.T) {
	r := newRig(t, 16, 4)
	a, b := line(300, 1), line(128, 2)
	r.insert("k", a)
	r.demote(r.f.EvictPages(1, 9))
	r.insert("k", b)
	r.f.Touch(r.match("k", a), 50)
	if evs := r.f.EvictPages(1, 60); len(evs) != 1 || evs[0].Page != r.f.walk("k", b, 1).dev {
		t.Errorf("picked %+v\n%s", evs, r.f.Dump())
	}
}

func TestDeviceCountStopsAtAGap(t *testing.T) {
	r := newRig(t, 16, 4)
	l := line(400, 1)
	r.insert("k", l[:256])
	r.demote(r.f.EvictPages(1, 9))
	id, _ := r.pages.Alloc()
	if _, err := r.f.Insert("k", l, 2, []int32{id}, 9, nil); err != nil {
		t.Fatal(err)
	}
	r.pages.Release(id)
	if m := r.match("k", l); m.Tokens != 384 || m.Device != 128 || m.Pages[2].Device != id {
		t.Errorf("%d tokens, %d on the device, %+v", m.Tokens, m.Device, m.Pages)
	}
	if evs := r.f.EvictHost(1, 9); len(evs) != 0 {
		t.Errorf("picked %+v, which device pages hang on", evs)
	}
}

func TestChainIsThinnedBeforeABranchIsDropped(t *testing.T) {
	r := newRig(t, 64, 16)
	l := line(1300, 1)
	r.insert("k", l)
	for _, p := range []int{128, 256, 512, 1024, 1280} {
		r.publish("k", l[:p])
	}
	old := line(256, 2)
	r.insert("k", old)
	r.publish("k", old)
	r.f.Touch(r.match("k", l), 1000) // the chain's last one is in fresh use, the other line is old
	var got []int
	for range 6 {
		ev := r.f.EvictSlots(1, 1000)[0]
		got = append(got, ev.At)
		r.f.Dropped(ev)
	}
	// The inner ones go first, the nearer to the next the sooner. The old line's
	// only one outlives them and goes before the last of the line in fresh use.
	if want := []int{128, 256, 512, 1024, 256, 1280}; !slices.Equal(got, want) {
		t.Errorf("went in order %v, want %v", got, want)
	}
}

func TestBranchPointIsNotThinned(t *testing.T) {
	r := newRig(t, 64, 16)
	shared := line(256, 1)
	a, b := line(512, 2, shared...), line(512, 3, shared...)
	r.insert("k", a)
	r.insert("k", b)
	r.publish("k", a[:256])
	r.publish("k", a[:384])
	r.publish("k", a)
	r.publish("k", b)
	if evs := r.f.EvictSlots(1, 9); len(evs) != 1 || evs[0].At != 384 {
		t.Errorf("picked %+v", evs)
	}
}

func TestInnerSnapshotEndsWhereTheNextIs(t *testing.T) {
	// The tree branches at the second snapshot, not before it.
	r := newRig(t, 16, 8)
	shared := line(128, 1)
	r.insert("k", line(256, 2, shared...))
	r.insert("k", line(256, 3, shared...))
	r.publish("k", shared)
	r.publish("k", shared[:5])
	if evs := r.f.EvictSlots(1, 9); len(evs) != 1 || evs[0].At != 5 {
		t.Errorf("picked %+v", evs)
	}
}

func TestOfOneAgeTheDeepestGoesFirst(t *testing.T) {
	r := newRigBy(t, LRU, 16, 8)
	r.insert("k", line(128, 1))
	r.now--
	r.insert("k", line(256, 2))
	r.now--
	r.insert("k", line(128, 3))
	if evs := r.f.EvictPages(1, 9); evs[0].At != 256 {
		t.Errorf("picked %+v", evs)
	}
}

func TestTailsGoWhenPagesRunOut(t *testing.T) {
	r := newRig(t, 4, 4)
	r.run("k", line(100, 1))
	r.run("k", line(100, 2))
	evs := r.f.EvictPages(1, 9)
	if len(evs) != 1 || !evs[0].Snapshot || evs[0].Bytes != 110 {
		t.Fatalf("picked %+v", evs)
	}
	r.drop(evs)
	if r.pages.Used() != 1 || r.slots.Used() != 1 {
		t.Errorf("%d pages, %d slots", r.pages.Used(), r.slots.Used())
	}
}

func TestPutAwayTwice(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(600, 1)
	r.insert("k", l)
	first := r.f.EvictPath("k", l, Device)
	if len(first) != 4 {
		t.Fatalf("picked %+v", first)
	}
	r.f.Keep(first[3])
	r.f.Demoted(first[2], Host, 7)
	if again := r.f.EvictPath("k", l, Device); len(again) != 1 || again[0].At != 128 {
		t.Errorf("picked %+v past what has left and what is leaving", again)
	}
}

// ---- evictions in flight

func TestEvictionInFlightSurvivesEverything(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(400, 1)
	r.insert("k", l)
	r.publish("k", l[:384])
	evs := r.f.EvictPages(3, 9)
	state := r.f.EvictSlots(1, 9)
	if len(evs) != 3 || len(state) != 1 {
		t.Fatalf("picked %d, %d", len(evs), len(state))
	}
	if m := r.match("k", l); m.Start() != 384 || m.Device != 384 {
		t.Errorf("pages are lost before they have left: %+v", m)
	}
	r.f.Dropped(evs[2]) // the first page of the line: all below goes
	if r.f.Dump() != "" {
		t.Errorf("left\n%s", r.f.Dump())
	}
	if r.pages.Used() != 2 || r.slots.Used() != 1 {
		t.Errorf("%d pages, %d slots are held while copies may read them", r.pages.Used(), r.slots.Used())
	}
	r.f.Demoted(evs[0], Host, 70)
	r.f.Keep(evs[1])
	r.f.Demoted(state[0], Host, 71)
	if r.pages.Used() != 0 || r.slots.Used() != 0 {
		t.Errorf("%d pages, %d slots left", r.pages.Used(), r.slots.Used())
	}
	if got := r.f.TakeFreed(Host, nil); !slices.Equal(got, []int64{70, 71}) {
		t.Errorf("freed %v", got)
	}
}

func TestHandleOfADroppedPageIsFreedOnce(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(256, 1)
	r.insert("k", l)
	lock := r.f.Lock(r.match("k", line(300, 2, l...)))
	r.f.Unlock(&lock)
	evs := r.f.EvictPages(1, 9)
	lock = r.f.Lock(r.match("k", line(300, 2, l...)))
	r.f.Demoted(evs[0], Host, 5) // stays on both tiers
	r.f.Unlock(&lock)
	evs = r.f.EvictPages(2, 9)
	r.f.Dropped(evs[1])
	if got := r.f.TakeFreed(Host, nil); len(got) != 0 || evs[0].Host != 5 {
		t.Errorf("freed %v in mid-flight of %+v", got, evs[0])
	}
	r.f.Demoted(evs[0], Host, 5)
	if got := r.f.TakeFreed(Host, nil); !slices.Equal(got, []int64{5}) {
		t.Errorf("freed %v", got)
	}
}

func TestLockWhileLeavingKeepsTheDeviceCopy(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(300, 1)
	r.insert("k", l)
	evs := r.f.EvictPages(2, 9)
	lock := r.f.Lock(r.match("k", l))
	if r.f.Demoted(evs[0], Host, 5) || r.f.Dropped(evs[1]) {
		t.Error("a page in use was given away")
	}
	if m := r.match("k", l); m.Device != 256 || m.Pages[1].Host != 5 {
		t.Errorf("%+v", m.Pages)
	}
	r.f.Unlock(&lock)
}

func TestMisusePanics(t *testing.T) {
	r := newRig(t, 8, 4)
	id, _ := r.pages.Alloc()
	r.pages.Release(id)
	mustPanic(t, "radix: release of page 0, which is free", func() { r.pages.Release(id) })
	mustPanic(t, "radix: retain of page 9: the pool has ids 0..7", func() { r.pages.Retain(9) })
	r.insert("k", line(128, 1))
	mustPanic(t, "radix: insert of page 0, which the tree has elsewhere", func() {
		r.f.Insert("k", line(128, 2), 0, []int32{0}, 1, nil)
	})
	r.match("k", line(200, 1))
	ev := r.f.EvictPages(1, 1)[0]
	mustPanic(t, "radix: Demoted takes a slower tier and a handle there", func() { r.f.Demoted(ev, Host, 0) })
	r.f.Demoted(ev, Host, 1)
	mustPanic(t, "radix: lock of a match that is out of date: lock before anything is evicted", func() { r.f.Lock(&r.m) })
	mustPanic(t, "radix: an eviction is settled twice", func() { r.f.Dropped(ev) })
	lock := r.f.Lock(r.match("k", line(200, 1)))
	mustPanic(t, "radix: advance of a lock to another line", func() { r.f.Advance(&lock, "k", line(200, 3)) })
	r.f.Unlock(&lock)
}

func TestLongLine(t *testing.T) {
	const tokens = 1 << 20
	r := newRig(t, tokens/PageTokens, 4)
	l := line(tokens+1, 1)
	r.insert("k", l)
	lock := r.f.Lock(r.match("k", l))
	if r.m.Tokens != tokens || r.f.Stats().LockedPages != tokens/PageTokens {
		t.Fatalf("%d tokens", r.m.Tokens)
	}
	r.f.Unlock(&lock)
	evs := r.f.EvictPages(tokens, 1)
	if len(evs) != tokens/PageTokens {
		t.Fatalf("picked %d", len(evs))
	}
	r.f.Dropped(evs[len(evs)-1]) // the first page, all others below it
	for _, ev := range evs[:len(evs)-1] {
		r.f.Keep(ev)
	}
	if r.pages.Used() != 0 {
		t.Errorf("%d pages left", r.pages.Used())
	}
}

func TestDump(t *testing.T) {
	r := newRig(t, 16, 8)
	shared := line(256, 1)
	a, b := line(384, 2, shared...), line(600, 3, shared...)
	r.insert("k", a)
	r.publish("k", line(300, 2, shared...))
	r.insert("k", b)
	r.publish("k", shared)
	r.demote(r.f.EvictPath("k", b, Device))
	lock := r.f.Lock(r.match("k", line(300, 4, shared...)))
	evs := r.f.EvictPages(1, 9)
	want := `k
  [0,256) 0* 1* last 4
    @256 slot 1* last 4
    @300 slot 0 tail 3 last 2
    [256,384) 2! last 1
    [256,512) h2 h1 last 3
`
	if got := r.f.Dump(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	r.f.Keep(evs[0])
	r.f.Unlock(&lock)
}

func TestForgetStoredGivesUpBadCopies(t *testing.T) {
	r := newRig(t, 32, 16)
	shared := line(300, 1)
	l, sibling := line(700, 2, shared...), line(650, 3, shared...)
	r.run("k", sibling)
	r.run("k", l)
	r.demote(r.f.EvictPath("k", l[:699], Device))
	lock := r.f.Lock(r.match("k", l))
	r.f.ForgetStored("k", l)
	if m := r.match("k", l); m.Tokens != 640 {
		t.Errorf("a locked page was forgotten: %d tokens left", m.Tokens)
	}
	r.f.Unlock(&lock)
	r.f.ForgetStored("k", l)
	if m := r.match("k", l); m.Tokens != 256 || m.Found && m.Snapshot.Slot == None {
		t.Errorf("%d tokens and snapshot %+v left, want the shared 256 and nothing from the host", m.Tokens, m.Snapshot)
	}
	r.wantStart("k", sibling, 649)
	if freed := r.f.TakeFreed(Host, nil); len(freed) < 4 {
		t.Errorf("handles %v freed, want those of three pages and a snapshot at least", freed)
	}
	r.f.ForgetStored("k", l)
	r.f.ForgetStored("none", l)
}
