package radix

import (
	"errors"
	"slices"
	"testing"
)

// ---- why a line is cold

func TestCommonCountsIntoThePageWhereALineParts(t *testing.T) {
	r := newRig(t, 64, 32)
	for salt := range 9 { // many children, so that the nearest is searched for
		r.run("k", line(700, 10+salt, line(300+salt, 1)...))
	}
	for _, tt := range []struct {
		name string
		line []int32
		want int
		part bool
	}{
		{"nothing in common", line(500, 2), 0, true},
		{"inside the first page", line(500, 2, line(100, 1)...), 100, true},
		{"at a page edge", line(500, 2, line(256, 1)...), 256, true},
		{"inside a page with siblings", line(500, 2, line(290, 1)...), 290, true},
		{"after a sibling's own part", line(700, 2, line(305, 14, line(304, 1)...)...), 305, true},
		{"the whole line but its pending token", line(300, 1), 299, false},
		{"a known line that goes on", line(900, 10, line(300, 1)...), 699, false},
	} {
		if got := r.match("k", tt.line); got.Common != tt.want || got.Parts != tt.part {
			t.Errorf("%s: %d tokens in common, parts %v, want %d, %v", tt.name, got.Common, got.Parts, tt.want, tt.part)
		}
	}
}

func TestEvictedIsSaidOfWhatWasDroppedForRoom(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(600, 1)
	r.run("k", l)
	if r.match("k", l).Evicted || r.match("k", line(600, 2, l[:300]...)).Evicted {
		t.Error("evicted before anything was")
	}
	r.drop(r.f.EvictSlots(8, 9))
	if m := r.match("k", l); !m.Evicted || m.Found || m.Tokens != 512 {
		t.Errorf("after its snapshots went: %+v", m)
	}
	if r.match("k", line(600, 2, l[:400]...)).Evicted {
		t.Error("a line that parts before the dropped snapshots would not have used them")
	}
	r.drop(r.f.EvictPages(1, 9))
	if m := r.match("k", l); !m.Evicted || m.Tokens != 384 {
		t.Errorf("after its last page went: %+v", m)
	}
	r.drop(r.f.EvictPages(8, 9))
	if m := r.match("k", l); !m.Evicted || m.Tokens != 0 {
		t.Errorf("after all of it went: %+v", m)
	}
	if r.match("other", l).Evicted {
		t.Error("evicted under a key that never had it")
	}
}

func TestForgottenIsNotEvicted(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(600, 1)
	r.run("k", l)
	r.demote(r.f.EvictPath("k", l[:599], Device))
	r.f.ForgetStored("k", l)
	if m := r.match("k", l); m.Evicted {
		t.Error("bad bytes are not a lack of room")
	}
}

func TestOtherKeyIsSaidWhenOnlyTheKeyDiffers(t *testing.T) {
	r := newRig(t, 16, 8)
	r.run("a", line(300, 1))
	if !r.f.OtherKey("b", line(300, 1)) {
		t.Error("the line is known under another key")
	}
	if r.f.OtherKey("a", line(300, 1)) || r.f.OtherKey("b", line(300, 2)) || r.f.OtherKey("b", line(128, 1)) {
		t.Error("the line is known under its own key, or nowhere")
	}
	r.run("b", line(300, 1))
	if r.f.OtherKey("b", line(300, 1)) {
		t.Error("the line is known under both")
	}
}

// ---- pins

func TestPinsHoldHalfAtMost(t *testing.T) {
	r := newRig(t, 16, 8)
	var pins []Pin
	for salt := range 3 { // each four pages, a tail and two snapshots, the deeper of which is pinned
		l := line(400, salt)
		r.run("k", l)
		p, ok := r.f.Pin("k", l[:399])
		if want := salt < 2; ok != want {
			t.Fatalf("pin %d: %v, want %v", salt, ok, want)
		}
		if ok {
			pins = append(pins, p)
		}
		r.drop(r.f.EvictSlots(8, r.now))
		r.drop(r.f.EvictPages(16, r.now))
	}
	if s := r.f.Stats(); s.PinnedPages != 8 || s.PinnedSnapshots != 2 || r.pages.Used() != 8 || r.slots.Used() != 2 {
		t.Errorf("%+v, %d pages, %d slots used", s, r.pages.Used(), r.slots.Used())
	}
	r.wantStart("k", line(400, 0), 399)
	// Pinned lines fill their half, never the pool: another line of half the pool still finds room.
	if got := r.insert("k", line(8*PageTokens, 9)); len(got) != 8 {
		t.Errorf("%d pages", len(got))
	}
	for i := range pins {
		r.f.Unpin(&pins[i])
		r.f.Unpin(&pins[i])
	}
	r.drop(r.f.EvictSlots(8, r.now))
	r.drop(r.f.EvictPages(16, r.now))
	if s := r.f.Stats(); s.PinnedPages+s.PinnedSnapshots+r.pages.Used()+r.slots.Used() != 0 {
		t.Errorf("%+v, %d pages, %d slots used", s, r.pages.Used(), r.slots.Used())
	}
	if _, ok := r.f.Pin("k", line(400, 0)); ok {
		t.Error("pinned a line that is not there")
	}
}

func TestPinsOfOneRootCountItOnce(t *testing.T) {
	r := newRig(t, 32, 16)
	shared := line(8*PageTokens, 1)
	for salt := range 6 {
		l := line(9*PageTokens, 2+salt, shared...)
		r.insert("k", l)
		r.publish("k", l)
		if _, ok := r.f.Pin("k", l); !ok {
			t.Fatalf("pin %d refused at %+v", salt, r.f.Stats())
		}
	}
	if s := r.f.Stats(); s.PinnedPages != 14 || s.PinnedSnapshots != 6 {
		t.Errorf("%+v", s)
	}
}

// ---- the index after a restart

func TestRestoredIndexServesAsBefore(t *testing.T) {
	r := newRig(t, 32, 16)
	shared, l := line(300, 1), line(700, 2, line(300, 1)...)
	if err := r.f.Restore("k", l[:256], Disk, 1, 1); !errors.Is(err, ErrMissing) {
		t.Fatalf("restored a page without the one before it: %v", err)
	}
	if err := r.f.Restore("k", l[:200], Disk, 1, 1); err == nil || errors.Is(err, ErrMissing) {
		t.Fatalf("restored a part of a page: %v", err)
	}
	for i := range 5 {
		if err := r.f.Restore("k", l[:(i+1)*PageTokens], Disk, int64(i+1), 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.f.Publish("k", l[:699], Snapshot{At: 699, Slot: None, Tail: None, Disk: 9, MTPValidFrom: 3}, 1); err != nil {
		t.Fatal(err)
	}
	m := r.match("k", l)
	if m.Start() != 699 || m.Snapshot.Disk != 9 || m.Snapshot.MTPValidFrom != 3 || m.Device != 0 || m.Pages[4] != (Place{None, 0, 5}) {
		t.Errorf("%+v", m)
	}
	r.wantStart("k", line(700, 3, shared...), 0)
	if m.Tokens != 256 || m.Branch != 256 {
		t.Errorf("a sibling finds %d tokens, branch %d", m.Tokens, m.Branch)
	}
	if err := r.f.Restore("k", l[:128], Disk, 77, 2); err != nil || !slices.Equal(r.f.TakeFreed(Disk, nil), []int64{77}) {
		t.Errorf("a second record of one page is not let go of: %v", err)
	}
}

// ---- three tiers

func TestCopiesMoveDownAndKeepTheirHandles(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(300, 1)
	r.run("k", l)
	for _, ev := range r.f.EvictPath("k", l[:299], Device) {
		r.handle++
		r.f.Demoted(ev, Host, r.handle)
	}
	evs := r.f.EvictHost(1<<30, 9)
	if len(evs) != 4 { // two pages, the exact end and the snapshot at the last page edge
		t.Fatalf("picked %+v", evs)
	}
	for _, ev := range evs {
		if ev.From != Host || ev.Slot != None || ev.Page != None || ev.Host == 0 {
			t.Errorf("picked %+v", ev)
		}
		if !r.f.Demoted(ev, Disk, 1000+ev.Host) {
			t.Errorf("not released: %+v", ev)
		}
	}
	if s := r.f.Stats(); s.Bytes[Host] != 0 || s.Pages[Disk] != 2 || s.Snapshots[Disk] != 2 {
		t.Errorf("%+v", s)
	}
	if freed := r.f.TakeFreed(Host, nil); len(freed) != 4 {
		t.Errorf("freed %v", freed)
	}
	r.f.Touch(r.match("k", l), 10)
	if s := r.f.Stats(); s.HitTokens != [tiers]int64{Disk: 299} {
		t.Errorf("hits by tier %v", s.HitTokens)
	}
	r.drop(r.f.EvictDisk(1<<30, 11))
	if m := r.match("k", l); m.Tokens != 0 || m.Found || !m.Evicted {
		t.Errorf("left on the disk: %+v", m)
	}
}

func TestASecondCopyGoesFirstAndHidesNothing(t *testing.T) {
	r := newRig(t, 16, 8)
	l := line(300, 1)
	r.run("k", l)
	// A page that is in use on the device may lose its copy on the host; a page that
	// is in use on the host only may not.
	evs := r.f.EvictPages(1, 9)
	lock := r.f.Lock(r.match("k", l))
	if r.f.Demoted(evs[0], Host, 6) {
		t.Error("a page in use left the device")
	}
	evs = r.f.EvictHost(1<<30, 9)
	if len(evs) != 1 || evs[0].Host != 6 {
		t.Fatalf("picked %+v, want the second copy alone", evs)
	}
	if !r.f.Dropped(evs[0]) || r.match("k", l).Device != 256 {
		t.Errorf("the page itself was lost\n%s", r.f.Dump())
	}
	r.f.Unlock(&lock)
}
