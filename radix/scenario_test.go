package radix

import (
	"errors"
	"slices"
	"testing"
)

// rig is a small forest that is checked when the test ends.
type rig struct {
	*testing.T
	f            *Forest
	pages, slots *Pool
	now          int64
	handle       int64
	m            Match
}

func newRig(t *testing.T, pages, slots int) *rig { return newRigBy(t, ByValue, pages, slots) }

func newRigBy(t *testing.T, policy Policy, pages, slots int) *rig {
	r := &rig{T: t, pages: NewPool("page", pages), slots: NewPool("slot", slots)}
	r.f = NewForest(r.pages, r.slots, Options{PageBytes: 10, SlotBytes: 100, Policy: policy})
	t.Cleanup(func() {
		if err := r.f.Check(); err != nil {
			t.Errorf("%v\n%s", err, r.f.Dump())
		}
	})
	return r
}

// line returns n tokens that begin with the given ones and go on counting from
// salt, so lines of different salts part at once.
func line(n, salt int, begin ...int32) []int32 {
	out := slices.Clone(begin)
	for i := len(out); i < n; i++ {
		out = append(out, int32(salt*1_000_000+i))
	}
	return out
}

func (r *rig) match(key string, line []int32) *Match {
	r.f.Match(key, line, &r.m)
	return &r.m
}

// insert puts all full pages of consumed tokens into the tree and keeps no
// reference of its own.
func (r *rig) insert(key string, tokens []int32) []int32 {
	r.Helper()
	r.now++
	ids := make([]int32, len(tokens)/PageTokens)
	for i := range ids {
		id, ok := r.pages.Alloc()
		if !ok {
			r.Fatal("no page left")
		}
		ids[i] = id
	}
	canon, err := r.f.Insert(key, tokens, 0, ids, r.now, nil)
	if err != nil {
		r.Fatal(err)
	}
	for _, id := range ids {
		r.pages.Release(id)
	}
	return canon
}

func (r *rig) publish(key string, tokens []int32) Snapshot {
	r.Helper()
	r.now++
	s := Snapshot{At: len(tokens), Tail: None}
	var ok bool
	if s.Slot, ok = r.slots.Alloc(); !ok {
		r.Fatal("no slot left")
	}
	if s.At%PageTokens != 0 {
		if s.Tail, ok = r.pages.Alloc(); !ok {
			r.Fatal("no page left")
		}
		defer r.pages.Release(s.Tail)
	}
	if _, err := r.f.Publish(key, tokens, s, r.now); err != nil {
		r.Fatal(err)
	}
	r.slots.Release(s.Slot)
	return s
}

// run computes a line as the engine does: match, lock, capture at the planned
// points, put the line and its exact end into the tree, unlock. It returns where
// it could start.
func (r *rig) run(key string, line []int32) int {
	r.Helper()
	m := r.match(key, line)
	start := m.Start()
	lock := r.f.Lock(m)
	r.now++
	r.f.Touch(m, r.now)
	points := CapturePoints(start, len(line), m.Branch, nil, 1<<40, 1)
	consumed := line[:len(line)-1]
	r.insert(key, consumed)
	for _, p := range points {
		r.publish(key, line[:p])
	}
	if len(consumed) > start {
		r.publish(key, consumed)
	}
	r.f.Advance(&lock, key, consumed)
	r.f.Unlock(&lock)
	return start
}

func (r *rig) demote(evs []Eviction) {
	for _, ev := range evs {
		h := ev.Host
		if h == 0 {
			r.handle++
			h = r.handle
		}
		r.f.Demoted(ev, Host, h)
	}
}

func (r *rig) drop(evs []Eviction) {
	for _, ev := range evs {
		r.f.Dropped(ev)
	}
}

func (r *rig) wantStart(key string, line []int32, want int) {
	r.Helper()
	if got := r.match(key, line).Start(); got != want {
		r.Fatalf("start at %d, want %d\n%s", got, want, r.f.Dump())
	}
}

func mustPanic(t *testing.T, want string, fn func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if got := recover(); got != want {
			t.Errorf("panic %q, want %q", got, want)
		}
	}()
	fn()
}

// ---- what other systems got wrong

func TestSamePromptAgainHits(t *testing.T) {
	for _, n := range []int{2, 127, 128, 129, 130, 256, 257, 1000} {
		r := newRig(t, 16, 8)
		r.run("k", line(n, 1))
		r.wantStart("k", line(n, 1), n-1)
		// Without the exact end, the page edge strictly below the prompt's end.
		r = newRig(t, 16, 8)
		r.insert("k", line(n-1, 1))
		for _, p := range CapturePoints(0, n, 0, nil, 1<<40, 1) {
			r.publish("k", line(p, 1))
		}
		r.wantStart("k", line(n, 1), (n-1)/PageTokens*PageTokens)
	}
}

func TestPromptHitsAfterAnotherPrompt(t *testing.T) {
	r := newRig(t, 32, 16)
	a, b := line(600, 1), line(600, 2, line(300, 1)...)
	r.run("k", a)
	if got := r.run("k", b); got != 0 {
		t.Errorf("b starts at %d", got)
	}
	r.wantStart("k", a, 599)
	r.wantStart("k", b, 599)
}

func TestThirdBranchHitsAtTheBranchEdge(t *testing.T) {
	r := newRig(t, 32, 16)
	shared := line(300, 1)
	r.run("k", line(600, 2, shared...))
	m := r.match("k", line(600, 3, shared...))
	if m.Branch != 256 || m.Tokens != 256 || m.Found {
		t.Fatalf("branch %d, tokens %d, found %v", m.Branch, m.Tokens, m.Found)
	}
	r.run("k", line(600, 3, shared...))
	r.wantStart("k", line(600, 4, shared...), 256)
}

func TestEveryTurnStartsAtTheEndOfTheLast(t *testing.T) {
	r := newRig(t, 64, 32)
	for n := 100; n < 1000; n += 77 {
		if start := r.run("k", line(n, 1)); n > 100 && start != n-77-1 {
			t.Errorf("turn of %d tokens starts at %d", n, start)
		}
	}
}

func TestKeysShareNothing(t *testing.T) {
	r := newRig(t, 32, 16)
	r.run("tenant a", line(400, 1))
	r.wantStart("tenant b", line(400, 1), 0)
	if m := r.match("tenant b", line(400, 1)); m.Tokens != 0 {
		t.Errorf("%d tokens of another key", m.Tokens)
	}
	r.wantStart("tenant a", line(400, 1), 399)
}

func TestFinishedLineIsNotRestoredIntoAnother(t *testing.T) {
	r := newRig(t, 32, 16)
	r.run("k", line(400, 1))
	r.wantStart("k", line(400, 2), 0)
	r.wantStart("k", line(400, 2, line(390, 1)...), 384) // its exact end differs, its page edge does not
	r.wantStart("k", line(399, 1), 384)                  // the snapshot at 399 is past this line's end
}

func TestSiblingsMayShareAllButTheLastToken(t *testing.T) {
	r := newRig(t, 8, 4)
	a, b := line(129, 1), line(129, 1)
	b[127]++
	pa, pb := r.insert("k", a[:128]), r.insert("k", b[:128])
	if pa[0] == pb[0] {
		t.Fatal("different pages share a device page")
	}
	if m := r.match("k", b); m.Tokens != 128 || m.Pages[0].Device != pb[0] {
		t.Errorf("matched %+v", m.Pages)
	}
}

func TestSnapshotStatesItsPosition(t *testing.T) {
	r := newRig(t, 8, 4)
	r.insert("k", line(256, 1))
	slot, _ := r.slots.Alloc()
	tail, _ := r.pages.Alloc()
	defer r.slots.Release(slot)
	for _, s := range []Snapshot{
		{At: 255, Slot: slot, Tail: tail}, // taken one token late
		{At: 256, Slot: slot, Tail: tail}, // a tail at a page edge
		{At: 256, Slot: None, Tail: None}, // its state was never written
		{At: 256, Slot: None, Tail: tail, Host: 1},
		{At: 0, Slot: slot, Tail: None},
	} {
		if _, err := r.f.Publish("k", line(256, 1), s, 1); err == nil || errors.Is(err, ErrMissing) {
			t.Errorf("published %+v: %v", s, err)
		}
	}
	if _, err := r.f.Publish("k", line(200, 1), Snapshot{At: 200, Slot: slot, Tail: None}, 1); err == nil {
		t.Error("published a partial page without its bytes")
	}
	if _, err := r.f.Publish("k", line(384, 1), Snapshot{At: 384, Slot: slot, Tail: None}, 1); !errors.Is(err, ErrMissing) {
		t.Errorf("published where no match could find it: %v", err)
	}
	r.wantStart("k", line(400, 1), 0)
	r.pages.Release(tail)
}

func TestDroppedInnerSnapshotHidesNothing(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(700, 1)
	r.insert("k", l[:640])
	for _, p := range []int{128, 384, 640} {
		r.publish("k", l[:p])
	}
	lock := r.f.Lock(r.match("k", l)) // so that the inner ones go
	r.drop(r.f.EvictSlots(2, 9))
	r.wantStart("k", l, 640)
	r.wantStart("k", l[:600], 0)
	if m := r.match("k", l[:600]); m.Tokens != 512 || m.Branch != 512 {
		t.Errorf("pages without a snapshot are lost: %d, branch %d", m.Tokens, m.Branch)
	}
	r.f.Unlock(&lock)
}

func TestEvictedStateIsDemotedNotPruned(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(300, 1)
	r.run("k", l)
	used := r.slots.Used()
	r.demote(r.f.EvictSlots(8, 9))
	r.demote(r.f.EvictPages(16, 9))
	if used == 0 || r.slots.Used() != 0 || r.pages.Used() != 0 {
		t.Errorf("%d slots, %d pages on the device", r.slots.Used(), r.pages.Used())
	}
	m := r.match("k", l)
	if m.Start() != 299 || m.Snapshot.Host == 0 || m.Snapshot.Slot != None || m.Snapshot.Tail != None {
		t.Errorf("snapshot %+v", m.Snapshot)
	}
	if m.Tokens != 256 || m.Device != 0 {
		t.Errorf("%d tokens, %d on the device", m.Tokens, m.Device)
	}
	for i, p := range m.Pages {
		if p.Device != None || p.Host == 0 {
			t.Errorf("page %d at %+v", i, p)
		}
	}
}

func TestResumeReusesAllThatDetachPutAway(t *testing.T) {
	r := newRig(t, 32, 16)
	shared, l := line(300, 1), line(700, 2, line(300, 1)...)
	r.run("k", line(650, 3, shared...))
	r.run("k", l)
	r.demote(r.f.EvictPath("k", l[:699], Device))
	m := r.match("k", l)
	if m.Start() != 699 || m.Device != 256 || m.Tokens != 640 || m.Snapshot.Host == 0 {
		t.Errorf("start %d, %d tokens, %d on the device, snapshot %+v", m.Start(), m.Tokens, m.Device, m.Snapshot)
	}
	if m := r.match("k", line(650, 3, shared...)); m.Device != 640 || m.Snapshot.Slot == None {
		t.Errorf("the sibling lost its place: %d tokens on the device, snapshot %+v", m.Device, m.Snapshot)
	}
	// Restored pages are adopted where the tree had them on the host only.
	lock := r.f.Lock(m)
	r.insert("k", l[:640])
	if m := r.match("k", l); m.Device != 640 || m.Pages[4].Host == 0 {
		t.Errorf("after the restore %d tokens on the device, page %+v", m.Device, m.Pages[4])
	}
	r.f.Unlock(&lock)
	if evs := r.f.EvictPath("k", l[:640], Device); len(evs) != 3 || evs[0].Host == 0 {
		t.Errorf("pages with a host copy ask for a new one: %+v", evs)
	}
}

func TestDraftCacheValidityTravelsWithTheSnapshot(t *testing.T) {
	r := newRig(t, 8, 4)
	r.insert("k", line(128, 1))
	slot, _ := r.slots.Alloc()
	s := Snapshot{At: 128, Slot: slot, Tail: None, MTPValidFrom: 100}
	if kept, err := r.f.Publish("k", line(128, 1), s, 1); !kept || err != nil {
		t.Fatal(kept, err)
	}
	r.slots.Release(slot)
	r.demote(r.f.EvictSlots(1, 2))
	if m := r.match("k", line(200, 1)); !m.Found || m.Snapshot.MTPValidFrom != 100 {
		t.Errorf("%+v", m.Snapshot)
	}
}

func TestInsertKeepsWhatItHas(t *testing.T) {
	r := newRig(t, 8, 4)
	first := r.insert("k", line(256, 1))
	used := r.pages.Used()
	again := r.insert("k", line(256, 1))
	if !slices.Equal(first, again) || r.pages.Used() != used {
		t.Errorf("canonical %v then %v, %d pages used", first, again, r.pages.Used())
	}
}

func TestInsertPastMissingPagesIsRefused(t *testing.T) {
	r := newRig(t, 8, 4)
	id, _ := r.pages.Alloc()
	if _, err := r.f.Insert("k", line(256, 1), 1, []int32{id}, 1, nil); !errors.Is(err, ErrMissing) {
		t.Errorf("inserted a page that no match could reach: %v", err)
	}
	if _, err := r.f.Insert("k", line(255, 1), 1, []int32{id}, 1, nil); err == nil {
		t.Error("inserted a partial page")
	}
	if r.pages.Refs(id) != 1 || r.f.Dump() != "" {
		t.Errorf("a refused insert left %d references\n%s", r.pages.Refs(id), r.f.Dump())
	}
}

func TestUseAloneProtects(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(600, 1)
	r.run("k", l)
	lock := r.f.Lock(r.match("k", l))
	if s := r.f.Stats(); s.LockedPages != 4 || s.LockedSnapshots != 1 {
		t.Errorf("%+v", s)
	}
	if evs := r.f.EvictPages(16, 9); len(evs) != 0 {
		t.Errorf("picked %+v from a path in use", evs)
	}
	evs := r.f.EvictSlots(8, 9) // the path's other snapshot is not what its user started from
	if len(evs) != 1 || evs[0].At != 512 {
		t.Errorf("picked %+v", evs)
	}
	r.f.Keep(evs[0])
	r.f.UnlockSnapshot(&lock)
	r.f.Unlock(&lock)
	if s := r.f.Stats(); s.LockedBytes != 0 || s.EvictableBytes != s.Bytes[Device] || s.Bytes[Device] != 5*10+2*100 {
		t.Errorf("closing must make bytes evictable and keep them: %+v", s)
	}
	r.drop(r.f.EvictSlots(8, 9))
	r.drop(r.f.EvictPages(16, 9))
	if r.pages.Used() != 0 || r.slots.Used() != 0 {
		t.Errorf("%d pages, %d slots left", r.pages.Used(), r.slots.Used())
	}
}

func TestBytesStayBounded(t *testing.T) {
	r := newRig(t, 20, 6)
	for i := range 300 {
		for r.pages.Free() < 6 {
			r.demote(r.f.EvictPages(6-r.pages.Free(), r.now))
		}
		for r.slots.Free() < 3 {
			r.demote(r.f.EvictSlots(3-r.slots.Free(), r.now))
		}
		if over := r.f.Stats().Bytes[Host] - 500; over > 0 {
			r.drop(r.f.EvictHost(over, r.now))
		}
		r.run([]string{"a", "b", "c"}[i%3], line(450, i))
		if s := r.f.Stats(); s.Bytes[Host] > 500 || s.Keys > 3 {
			t.Fatalf("step %d: %+v", i, s)
		}
		if err := r.f.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if d := r.f.Stats(); d.Demoted.Pages == 0 || d.Dropped.Pages == 0 || d.Dropped.Snapshots == 0 {
		t.Errorf("%+v", d)
	}
}

func TestOneTimeKeysLeaveNothing(t *testing.T) {
	r := newRig(t, 8, 4)
	for i := range 50 {
		key := string(rune('a' + i))
		r.run(key, line(200, 1))
		r.drop(r.f.EvictSlots(4, r.now))
		r.drop(r.f.EvictPages(8, r.now))
	}
	if s := r.f.Stats(); s.Keys != 0 || s.Bytes != [tiers]int64{} {
		t.Errorf("%+v", s)
	}
}
