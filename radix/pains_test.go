package radix

import (
	"slices"
	"testing"
)

// ---- what other systems got wrong, in company and on lower tiers

// Several prefills run at once, cut into chunks in turn: each state is known at
// its own line's position only.
func TestSeveralPrefillsAtOnceKeepTheirOwnStates(t *testing.T) {
	r := newRig(t, 64, 32)
	shared := line(300, 1)
	var lines [][]int32
	var points [][]int
	var locks []Lock
	for i, n := range []int{500, 513, 640, 1000} {
		l := line(n, 2+i, shared...)
		m := r.match("k", l)
		lines = append(lines, l)
		locks = append(locks, r.f.Lock(m))
		points = append(points, CapturePoints(m.Start(), n, m.Branch, nil, 1280, 10))
	}
	slots := map[int]map[int]int32{0: {}, 1: {}, 2: {}, 3: {}}
	for k, left := 0, true; left; k++ {
		left = false
		for i := range lines {
			if k < len(points[i]) {
				at := points[i][k]
				r.insert("k", lines[i][:at])
				slots[i][at] = r.publish("k", lines[i][:at]).Slot
				left = true
			}
		}
	}
	for i, l := range lines {
		if len(points[i]) < 2 {
			t.Fatalf("line %d has points %v", i, points[i])
		}
		for at, slot := range slots[i] {
			m := r.match("k", line(at+1, 99, l[:at]...))
			if m.Start() != at || at > 300 && m.Snapshot.Slot != slot {
				t.Errorf("line %d restores slot %d at %d, want %d at %d", i, m.Snapshot.Slot, m.Start(), slot, at)
			}
		}
		r.f.Unlock(&locks[i])
	}
}

// An abort after a hit, at any point, leaves everything as it was.
func TestHitThenAbortLeavesNothingBehind(t *testing.T) {
	r := newRig(t, 32, 16)
	l := line(700, 1)
	r.run("k", l)
	r.demote(r.f.EvictSlots(1, r.now))
	r.demote(r.f.EvictPages(2, r.now))
	before, stats := r.f.Dump(), r.f.Stats()
	next := line(900, 2, l...)
	for step := range 4 {
		m := r.match("k", next)
		lock := r.f.Lock(m)
		if step > 0 { // pages were reserved for the restore
			id, _ := r.pages.Alloc()
			defer r.pages.Release(id)
		}
		if step > 1 {
			r.f.UnlockSnapshot(&lock)
		}
		if step > 2 { // and some of the line was there already
			r.f.Advance(&lock, "k", l[:699])
		}
		r.f.Unlock(&lock)
		r.f.Unlock(&lock)
	}
	if after := r.f.Dump(); after != before {
		t.Errorf("aborts changed the tree from\n%s\nto\n%s", before, after)
	}
	if got := r.f.Stats(); got.LockedBytes != 0 || got.Bytes != stats.Bytes || got.EvictableBytes != stats.EvictableBytes {
		t.Errorf("%+v, want %+v", got, stats)
	}
	r.wantStart("k", next, 699)
}

// While a restore reads copies from a lower tier, nobody takes them away.
func TestCopiesBeingRestoredStay(t *testing.T) {
	for _, tier := range []Tier{Host, Disk} {
		r := newRig(t, 32, 16)
		l := line(700, 1)
		r.run("k", l)
		for _, ev := range r.f.EvictPath("k", l[:699], Device) {
			r.handle++
			r.f.Demoted(ev, tier, r.handle)
		}
		lock := r.f.Lock(r.match("k", l))
		m := r.m
		evs := append(r.f.EvictHost(1<<30, 9), r.f.EvictDisk(1<<30, 9)...)
		for _, ev := range evs {
			if !ev.Snapshot || ev.At == 699 {
				t.Errorf("%s: picked %+v, which is being restored", tier, ev)
			}
		}
		r.drop(evs)
		r.f.ForgetStored("k", l)
		r.f.Unlock(&lock)
		if again := r.match("k", l); again.Start() != 699 || !slices.Equal(again.Pages, m.Pages) {
			t.Errorf("%s: %+v, want %+v", tier, again, m)
		}
	}
}

// Resume at lengths around a page finds the exact end, from every tier.
func TestLengthsAroundAPageResumeFromEveryTier(t *testing.T) {
	for _, tier := range []Tier{Device, Host, Disk} {
		for _, n := range []int{2, 127, 128, 129, 130, 255, 256, 257, 258} {
			r := newRig(t, 16, 8)
			l := line(n, 1)
			r.run("k", l)
			if tier != Device {
				for _, ev := range r.f.EvictPath("k", l[:n-1], Device) {
					r.handle++
					r.f.Demoted(ev, tier, r.handle)
				}
			}
			m := r.match("k", l)
			s := m.Snapshot
			if on := tierOf(s.Slot >= 0, s.Host); m.Start() != n-1 || on != tier || len(s.TailTokens) != (n-1)%PageTokens {
				t.Errorf("%d tokens on the %s: start %d, snapshot %+v", n, tier, m.Start(), s)
			}
			if m.Tokens != (n-1)/PageTokens*PageTokens || m.Tokens > 0 && (m.Device == m.Tokens) != (tier == Device) {
				t.Errorf("%d tokens on the %s: %d in pages, %d on the device", n, tier, m.Tokens, m.Device)
			}
			r.f.Touch(m, 100)
			if hits := r.f.Stats().HitTokens; hits[tier] != int64(n-1) {
				t.Errorf("%d tokens on the %s: reported %v", n, tier, hits)
			}
		}
	}
}

// Forks that have not diverged share one snapshot, whoever publishes it; its
// bytes count once, and it is in use until the last lets go.
func TestForksThatHaveNotDivergedShareOneState(t *testing.T) {
	r := newRig(t, 32, 16)
	l := line(300, 1)
	r.insert("k", l[:299])
	var locks []Lock
	for range 10 {
		slot, _ := r.slots.Alloc()
		tail, _ := r.pages.Alloc()
		kept, err := r.f.Publish("k", l[:299], Snapshot{At: 299, Slot: slot, Tail: tail}, 1)
		if err != nil || kept != (len(locks) == 0) {
			t.Fatalf("publish %d: kept %v, %v", len(locks), kept, err)
		}
		r.slots.Release(slot)
		r.pages.Release(tail)
		locks = append(locks, r.f.Lock(r.match("k", l)))
	}
	s := r.f.Stats()
	if s.Snapshots[Device] != 1 || s.Tails[Device] != 1 || s.Bytes[Device] != 3*10+100 || r.slots.Used() != 1 || r.pages.Used() != 3 {
		t.Errorf("%+v, %d slots, %d pages used", s, r.slots.Used(), r.pages.Used())
	}
	for i := range locks {
		if s := r.f.Stats(); s.LockedSnapshots != 1 || s.LockedPages != 2 {
			t.Errorf("with %d users: %+v", len(locks)-i, s)
		}
		r.f.Unlock(&locks[i])
	}
	if s := r.f.Stats(); s.LockedBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// ---- value

// turns runs a session: at each turn its line grows and its exact end is kept.
func (r *rig) turns(salt, n, step int) []int32 {
	l := line(n*step+1, salt)
	for i := 1; i <= n; i++ {
		r.run("k", l[:i*step+1])
	}
	return l
}

func TestNewerTurnSupersedesTheOlderState(t *testing.T) {
	r := newRig(t, 256, 64)
	idle := line(500, 9)
	r.run("k", idle) // older than everything that follows
	l := r.turns(1, 10, 300)
	for range 18 { // all but each line's end and what is below the busy one's
		r.drop(r.f.EvictSlots(1, r.now))
	}
	r.wantStart("k", idle, 499)
	r.wantStart("k", l, 3000)
}

func TestThinnedChainStaysGeometric(t *testing.T) {
	r := newRig(t, 512, 256)
	const step, n = 256, 128
	l := r.turns(1, n, step)
	for r.f.Stats().Snapshots[Device] > 10 {
		r.drop(r.f.EvictSlots(1, r.now))
	}
	// However far back a line parts, it replays no more than about as far again.
	for back := step; back < n*step/2; back *= 2 {
		at := n*step - back
		if start := r.match("k", line(at+500, 7, l[:at]...)).Start(); at-start > 2*back+step {
			t.Errorf("parting %d back from the end replays %d tokens", back, at-start)
		}
	}
}

func TestBranchEdgeOutlivesInnerStatesAndOldEnds(t *testing.T) {
	r := newRig(t, 256, 64)
	shared := line(1000, 1)
	for salt := range 5 {
		r.run("k", line(1300, 10+salt, shared...))
	}
	r.wantStart("k", line(1300, 99, shared...), 896)
	for r.f.Stats().Snapshots[Device] > 2 {
		r.drop(r.f.EvictSlots(1, r.now))
	}
	r.wantStart("k", line(1300, 99, shared...), 896)
}

// Under LRU what was used longest ago goes first, whatever it is worth.
func TestLRUKnowsAgeOnly(t *testing.T) {
	r := newRigBy(t, LRU, 256, 64)
	idle := line(500, 9)
	r.run("k", idle)
	r.turns(1, 10, 300)
	r.drop(r.f.EvictSlots(2, r.now))
	if m := r.match("k", idle); m.Found {
		t.Errorf("the oldest state is still there: %+v", m.Snapshot)
	}
}

func TestDeviceWithoutADivisionEvictsBoth(t *testing.T) {
	r := newRig(t, 256, 64)
	r.turns(1, 4, 300)
	r.turns(2, 4, 300)
	total := r.f.Stats().Bytes[Device]
	var pages, snaps int
	for _, ev := range r.f.EvictDevice(total-100, r.now) {
		if ev.Snapshot {
			snaps++
		} else {
			pages++
		}
		r.f.Dropped(ev)
	}
	if left := r.f.Stats().Bytes[Device]; left > 100 || pages == 0 || snaps == 0 {
		t.Errorf("%d pages and %d snapshots went, %d of %d bytes left", pages, snaps, left, total)
	}
}
