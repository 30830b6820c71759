package radix

import (
	"maps"
	"slices"

	"pgregory.net/rapid"
)

// ---- accounts by key, and limits

const modelPageBytes, modelSlotBytes = 10, 100 // as newMachine has them

func keyOf(name string) string { return name[:1] }

// size is what one copy of a snapshot takes.
func (s *modelSnap) size() int64 {
	if s.at%PageTokens != 0 {
		return modelSlotBytes + modelPageBytes
	}
	return modelSlotBytes
}

// account looks at everything that holds bytes of the key.
func (x *machine) account(key string) Account {
	pages, slots := map[int32]bool{}, map[int32]bool{}
	a := Account{Limit: NoLimit, Pinned: x.pinnedBytes(key)}
	if limit, ok := x.limits[key]; ok {
		a.Limit = limit
	}
	hold := func(page, slot int32, low [tiers]int64, bytes int64) {
		if page >= 0 {
			pages[page] = true
		}
		if slot >= 0 {
			slots[slot] = true
		}
		if low[Host] != 0 {
			a.Host += bytes
		}
		if low[Disk] != 0 {
			a.Disk += bytes
		}
	}
	for n, p := range x.mp {
		if keyOf(n) == key {
			hold(p.dev, None, p.low, modelPageBytes)
		}
	}
	for n, s := range x.ms {
		if keyOf(n) == key {
			hold(s.tail, s.slot, s.low, s.size())
		}
	}
	for _, fl := range x.flights {
		if fl.orphan && keyOf(fl.name) == key {
			hold(fl.page, fl.slot, fl.low, fl.ev.Bytes)
		}
	}
	for _, s := range x.seqs {
		for _, id := range s.pages {
			if s.key == key {
				pages[id] = true
			}
		}
	}
	a.Device = int64(len(pages))*modelPageBytes + int64(len(slots))*modelSlotBytes
	return a
}

func (x *machine) pinnedBytes(key string) (n int64) {
	for o := range x.mp {
		if keyOf(o) == key && x.pinned(o) {
			n += modelPageBytes
		}
	}
	for o, s := range x.ms {
		if keyOf(o) == key && x.snapPinned(o) {
			n += s.size()
		}
	}
	return n
}

func (x *machine) checkAccounts(t *rapid.T) {
	listed := map[string]Account{}
	for key, a := range x.f.Accounts {
		listed[key] = a
	}
	var over []string
	for _, key := range []string{"a", "b"} {
		want := x.account(key)
		if got := x.f.Account(key); got != want {
			t.Fatalf("account of %s: %+v, want %+v\n%s", key, got, want, x.f.Dump())
		}
		if a, ok := listed[key]; ok && a != want || !ok && want != (Account{Limit: NoLimit}) {
			t.Fatalf("listed account of %s: %+v, want %+v", key, a, want)
		}
		delete(listed, key)
		if want.Limit == NoLimit {
			continue
		}
		if got := x.f.Excess(key, 7); got != max(0, want.Resident()+7-want.Limit) {
			t.Fatalf("excess of %s: %d with %+v", key, got, want)
		}
		if want.Resident() > want.Limit {
			over = append(over, key)
		}
	}
	if got := x.f.Over(nil); len(listed) > 0 || !slices.Equal(slices.Sorted(slices.Values(got)), over) {
		t.Fatalf("over their limits: %v, want %v; accounts of others: %v", got, over, listed)
	}
	for _, s := range x.seqs {
		for _, id := range s.pages {
			if !x.f.HasPage(s.key, id) {
				t.Fatalf("page %d of a sequence of %s is not charged to it", id, s.key)
			}
		}
	}
}

func (x *machine) limit(t *rapid.T) {
	key := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "key")
	limit := rapid.SampledFrom([]int64{NoLimit, 0, 50, 100, 200, 400}).Draw(t, "limit")
	x.f.SetLimit(key, limit)
	if x.limits[key] = limit; limit == NoLimit {
		delete(x.limits, key)
	}
}

// own are the entries that the key could give up on a tier now.
func (x *machine) own(key string, tier Tier) (pages, snaps []string) {
	for _, n := range x.leaves(tier) {
		if keyOf(n) == key {
			pages = append(pages, n)
		}
	}
	for n, s := range x.ms {
		if keyOf(n) == key && s.on(tier) && s.flying == nil && (!x.snapLocked(n) || within(s, Device, tier)) && (tier != Device || x.slots.Refs(s.slot) == 1) {
			snaps = append(snaps, n)
		}
	}
	return pages, snaps
}

func (x *machine) limited(t *rapid.T) string {
	if len(x.limits) == 0 {
		t.Skip("no limit")
	}
	return rapid.SampledFrom(slices.Sorted(maps.Keys(x.limits))).Draw(t, "key")
}

// evictOwn asks a key to give up bytes, wherever it has them in memory.
func (x *machine) evictOwn(t *rapid.T) {
	key := x.limited(t)
	want := int64(rapid.IntRange(1, 300).Draw(t, "bytes"))
	var could []int64 // last uses
	for _, tier := range []Tier{Device, Host} {
		pages, snaps := x.own(key, tier)
		for _, n := range pages {
			could = append(could, x.mp[n].last)
		}
		for _, n := range snaps {
			could = append(could, x.ms[n].last)
		}
	}
	got := int64(0)
	for i, ev := range x.f.EvictOwn(key, want, x.tick()) {
		if got >= want || ev.From == Disk {
			t.Fatalf("an eviction of %d bytes of %s has %d, and picked %+v", want, key, got, ev)
		}
		n := x.picked(t, ev)
		if keyOf(n) != key {
			t.Fatalf("picked %q of another key", n)
		}
		at := int64(0)
		if ev.Snapshot {
			at = x.ms[n].last
		} else {
			at = x.mp[n].last
		}
		if copied := ev.From == Host && (ev.Page >= 0 || ev.Slot >= 0); i == 0 && x.policy == LRU && !copied && slices.Min(could) < at {
			t.Fatalf("picked what was used at %d before what was used at %d", at, slices.Min(could))
		}
		got += ev.Bytes
	}
	for _, tier := range []Tier{Device, Host} {
		if pages, snaps := x.own(key, tier); got < want && len(pages)+len(snaps) > 0 {
			t.Fatalf("an eviction of %d bytes of %s found %d and left %d pages and %d snapshots on the %s", want, key, got, len(pages), len(snaps), tier)
		}
	}
}

// evictOwnKind asks a key for pages, slots or room on the disk.
func (x *machine) evictOwnKind(t *rapid.T) {
	key := x.limited(t)
	n := rapid.IntRange(1, 3).Draw(t, "n")
	tier, evs, want := Device, []Eviction(nil), 0
	switch pages, snaps := x.own(key, Device); rapid.IntRange(0, 2).Draw(t, "kind") {
	case 0:
		want, evs = min(n, len(pages)), x.f.EvictOwnPages(key, n, x.tick())
	case 1:
		want, evs = min(n, len(snaps)), x.f.EvictOwnSlots(key, n, x.tick())
	default:
		tier = Disk
		pages, snaps = x.own(key, Disk)
		want, evs = min(1, len(pages)+len(snaps)), x.f.EvictOwnDisk(key, 1, x.tick())
	}
	for _, ev := range evs {
		if got := x.picked(t, ev); keyOf(got) != key || ev.From != tier {
			t.Fatalf("picked %q from the %s for %s", got, ev.From, key)
		}
	}
	if len(evs) < want {
		t.Fatalf("picked %d of %d", len(evs), want)
	}
}
