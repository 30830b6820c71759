package radix

import "pgregory.net/rapid"

// ---- what must hold after every step

func (x *machine) check(t *rapid.T) {
	if err := x.f.Check(); err != nil {
		t.Fatalf("%v\n%s", err, x.f.Dump())
	}
	pages, slots := make([]int, modelPages), make([]int, modelSlots)
	hold := func(in []int, id int32) {
		if id >= 0 {
			in[id]++
		}
	}
	x.checkAccounts(t)
	var want Stats
	for n, p := range x.mp {
		hold(pages, p.dev)
		if p.dev >= 0 {
			want.Pages[Device]++
			if x.pageLocked(n) {
				want.LockedPages++
			}
		}
		for tier := Host; tier < tiers; tier++ {
			if p.on(tier) {
				want.Pages[tier]++
			}
		}
	}
	for n, s := range x.ms {
		hold(pages, s.tail)
		hold(slots, s.slot)
		if s.slot >= 0 {
			want.Snapshots[Device]++
			if x.snapLocked(n) {
				want.LockedSnapshots++
			}
		}
		for tier := Host; tier < tiers; tier++ {
			if s.on(tier) {
				want.Snapshots[tier]++
			}
		}
	}
	for _, fl := range x.flights {
		if fl.orphan {
			hold(pages, fl.page)
			hold(slots, fl.slot)
			want.InFlight++
		}
	}
	for _, s := range x.seqs {
		for _, p := range s.pages {
			hold(pages, p)
		}
	}
	for id, n := range pages {
		if got := x.pages.Refs(int32(id)); got != n {
			t.Fatalf("page %d has %d references, want %d\n%s", id, got, n, x.f.Dump())
		}
	}
	for id, n := range slots {
		if got := x.slots.Refs(int32(id)); got != n {
			t.Fatalf("slot %d has %d references, want %d", id, got, n)
		}
	}
	want.PinnedPages, want.PinnedSnapshots = x.pinCounts()
	got := x.f.Stats()
	if got.Pages != want.Pages || got.Snapshots != want.Snapshots || got.LockedPages != want.LockedPages ||
		got.LockedSnapshots != want.LockedSnapshots || got.InFlight != want.InFlight ||
		got.PinnedPages != want.PinnedPages || got.PinnedSnapshots != want.PinnedSnapshots {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
	for _, h := range append(x.f.TakeFreed(Host, nil), x.f.TakeFreed(Disk, nil)...) {
		if x.freed[h]--; x.freed[h] < 0 {
			t.Fatalf("handle %d freed", h)
		}
	}
	for h, n := range x.freed {
		if n != 0 {
			t.Fatalf("handle %d not freed", h)
		}
	}
	clear(x.freed)
}

// drain ends everything; no reference may be left.
func (x *machine) drain(t *rapid.T) {
	for len(x.flights) > 0 {
		fl := x.flights[0]
		x.flights = x.flights[1:]
		x.f.Keep(fl.ev)
		x.kept(fl)
	}
	for _, s := range x.seqs {
		x.f.Unlock(&s.lock)
		for _, p := range s.pages {
			x.pages.Release(p)
		}
	}
	x.seqs = nil
	for _, p := range x.pins {
		x.f.Unpin(&p.pin)
	}
	x.pins = nil
	for key := range x.limits {
		x.f.SetLimit(key, NoLimit)
	}
	for {
		evs := append(x.f.EvictSlots(modelSlots, x.tick()), x.f.EvictPages(modelPages, x.now)...)
		evs = append(evs, x.f.EvictHost(1<<40, x.now)...)
		evs = append(evs, x.f.EvictDisk(1<<40, x.now)...)
		if len(evs) == 0 {
			break
		}
		for _, ev := range evs {
			x.f.Dropped(ev)
		}
	}
	if err := x.f.Check(); err != nil {
		t.Fatal(err)
	}
	if d := x.f.Dump(); d != "" || x.pages.Used() != 0 || x.slots.Used() != 0 {
		t.Fatalf("after everything was dropped: %d pages, %d slots\n%s", x.pages.Used(), x.slots.Used(), d)
	}
}
