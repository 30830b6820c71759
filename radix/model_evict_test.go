package radix

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"pgregory.net/rapid"
)

func (p *modelPage) on(t Tier) bool { return t == Device && p.dev >= 0 || t != Device && p.low[t] != 0 }
func (s *modelSnap) on(t Tier) bool {
	return t == Device && s.slot >= 0 || t != Device && s.low[t] != 0
}

func (p *modelPage) stays(t Tier) bool { return p.on(t) && (p.flying == nil || p.flying.ev.From != t) }

// within says whether any tier in [from, to) has the entry.
func within(e interface{ on(Tier) bool }, from, to Tier) bool {
	for t := from; t < to; t++ {
		if e.on(t) {
			return true
		}
	}
	return false
}

// carries says whether something that an eviction of the page from the tier must
// not lose hangs on it.
func (x *machine) carries(n string, tier Tier) bool {
	for o, q := range x.mp {
		if o == n || !strings.HasPrefix(o, n) {
			continue
		}
		for t := Device; t <= tier; t++ {
			if q.stays(t) {
				return true
			}
		}
	}
	for o, s := range x.ms {
		if tier != Device && strings.HasPrefix(o, n) && nameLen(o) < nameLen(n)+PageTokens && s.flying == nil && within(s, Device, tier+1) {
			return true
		}
	}
	return false
}

// leads says whether something stays on the disk that a restart could not reach without the page.
func (x *machine) leads(n string) bool {
	for o, q := range x.mp {
		if o != n && strings.HasPrefix(o, n) && q.stays(Disk) {
			return true
		}
	}
	for o, s := range x.ms {
		if strings.HasPrefix(o, n) && nameLen(o) < nameLen(n)+PageTokens && s.on(Disk) && (s.flying == nil || s.flying.ev.From != Disk) {
			return true
		}
	}
	return false
}

// picked checks an eviction against the entry it names, and takes it in flight.
func (x *machine) picked(t *rapid.T, ev Eviction) string {
	fl := &modelFlight{ev: ev}
	if ev.Snapshot {
		for n, s := range x.ms {
			if s.at != ev.At || s.slot != ev.Slot || s.low[Host] != ev.Host || s.low[Disk] != ev.Disk || s.mtp != ev.MTPValidFrom || s.tail != ev.Page || s.flying != nil {
				continue
			}
			if x.snapLocked(n) && !within(s, Device, ev.From) {
				t.Fatalf("picked a locked snapshot at %d", ev.At)
			}
			s.flying, fl.name = fl, n
		}
	} else {
		for n, p := range x.mp {
			if nameLen(n) != ev.At || p.dev != ev.Page || p.low[Host] != ev.Host || p.low[Disk] != ev.Disk || p.flying != nil {
				continue
			}
			if x.pageLocked(n) && !within(p, Device, ev.From) {
				t.Fatalf("picked a locked page ending at %d", ev.At)
			}
			p.flying, fl.name = fl, n
		}
	}
	if fl.name == "" {
		t.Fatalf("picked an unknown entry %+v", ev)
	}
	if got := name(ev.Key(), ev.Line(nil)); got != fl.name {
		t.Fatalf("an eviction at %d names the line %q, want %q", ev.At, got, fl.name)
	}
	x.flights = append(x.flights, fl)
	return fl.name
}

// leaves lists the pages that may be picked from a tier now.
func (x *machine) leaves(tier Tier) []string {
	var out []string
	for n, p := range x.mp {
		switch {
		case !p.on(tier) || p.flying != nil || tier == Device && x.pages.Refs(p.dev) > 1:
		case within(p, Device, tier) && (tier != Disk || !x.leads(n)), !within(p, Device, tier) && !x.pageLocked(n) && !x.carries(n, tier):
			out = append(out, n)
		}
	}
	return out
}

func (x *machine) evictPages(t *rapid.T) {
	n := rapid.IntRange(1, 8).Draw(t, "n")
	first := x.leaves(Device)
	evs := x.f.EvictPages(n, x.tick())
	for i, ev := range evs {
		if ev.From != Device || ev.Page < 0 || x.pages.Refs(ev.Page) != 1 {
			t.Fatalf("EvictPages picked %+v", ev)
		}
		var could []string
		if i == 0 {
			could = first
		} else {
			could = x.leaves(Device)
		}
		if ev.Snapshot {
			if len(could) > 0 {
				t.Fatalf("EvictPages picked a tail before %d leaf pages", len(could))
			}
			x.picked(t, ev)
			continue
		}
		got := x.picked(t, ev)
		if !slices.Contains(could, got) {
			t.Fatalf("EvictPages picked a page ending at %d that is no leaf", ev.At)
		}
		for _, o := range could {
			if x.policy == LRU && x.mp[o].last < x.mp[got].last {
				t.Fatalf("EvictPages picked a page used at %d before one used at %d", x.mp[got].last, x.mp[o].last)
			}
		}
	}
	if len(evs) < n && len(x.leaves(Device)) > 0 {
		t.Fatalf("EvictPages picked %d of %d and left some", len(evs), n)
	}
}

func (x *machine) slotVictims() (out []string) {
	for n, s := range x.ms {
		if s.slot >= 0 && s.flying == nil && !x.snapLocked(n) && x.slots.Refs(s.slot) == 1 {
			out = append(out, n)
		}
	}
	return out
}

func (x *machine) evictSlots(t *rapid.T) {
	n := rapid.IntRange(1, 3).Draw(t, "n")
	could := x.slotVictims()
	evs := x.f.EvictSlots(n, x.tick())
	if want := min(n, len(could)); len(evs) != want {
		t.Fatalf("EvictSlots(%d) picked %d of %d", n, len(evs), len(could))
	}
	for i, ev := range evs {
		if !ev.Snapshot || ev.From != Device || ev.Slot < 0 {
			t.Fatalf("EvictSlots picked %+v", ev)
		}
		got := x.picked(t, ev)
		for _, o := range could {
			if i == 0 && x.policy == LRU && x.ms[o].last < x.ms[got].last {
				t.Fatalf("EvictSlots picked one used at %d before one used at %d", x.ms[got].last, x.ms[o].last)
			}
		}
	}
}

func (x *machine) evictLow(tier Tier) func(*rapid.T) {
	return func(t *rapid.T) {
		evict := [tiers]func(int64, int64) []Eviction{x.f.EvictDevice, x.f.EvictHost, x.f.EvictDisk}[tier]
		want := int64(rapid.IntRange(1, 300).Draw(t, "bytes"))
		got := int64(0)
		for _, ev := range evict(want, x.tick()) {
			if got >= want {
				t.Fatalf("an eviction of %d bytes from the %s went on after them", want, tier)
			}
			if ev.From != tier || tier == Host && ev.Host == 0 || tier == Disk && ev.Disk == 0 || tier == Device && max(ev.Page, ev.Slot) < 0 {
				t.Fatalf("picked %+v from the %s", ev, tier)
			}
			could := x.leaves(tier)
			if n := x.picked(t, ev); !ev.Snapshot && !slices.Contains(could, n) {
				t.Fatalf("picked a page ending at %d from the %s that is no leaf", ev.At, tier)
			}
			got += ev.Bytes
		}
		if got >= want {
			return
		}
		if left := x.leaves(tier); len(left) > 0 {
			t.Fatalf("an eviction of %d bytes from the %s found %d and left %d pages", want, tier, got, len(left))
		}
		for n, s := range x.ms {
			if s.on(tier) && s.flying == nil && (!x.snapLocked(n) || within(s, Device, tier)) && (tier != Device || x.slots.Refs(s.slot) == 1) {
				t.Fatalf("an eviction of %d bytes from the %s found %d and left a snapshot", want, tier, got)
			}
		}
	}
}

// restore says that a page of some line is on a lower tier, as a start does.
func (x *machine) restore(t *rapid.T) {
	key, line := x.drawLine(t)
	depth := rapid.IntRange(0, len(line)/PageTokens).Draw(t, "depth")
	tier := rapid.SampledFrom([]Tier{Host, Disk}).Draw(t, "tier")
	tokens, h := line[:depth*PageTokens], x.newHandle()
	err := x.f.Restore(key, tokens, tier, h, x.tick())
	switch {
	case depth == 0:
		if err == nil {
			t.Fatal("restored no page")
		}
		return
	case nameLen(x.deepest(key, tokens)) < (depth-1)*PageTokens:
		if !errors.Is(err, ErrMissing) {
			t.Fatalf("Restore of page %d without those before: %v", depth-1, err)
		}
		return
	case err != nil:
		t.Fatalf("Restore of page %d: %v", depth-1, err)
	}
	n := name(key, tokens)
	p := x.mp[n]
	if p == nil {
		p = &modelPage{dev: None}
		x.mp[n] = p
	}
	if p.low[tier] != 0 {
		x.free(h)
		return
	}
	p.low[tier] = h
	x.use(n, x.now)
}

// forget gives up what a line has on the lower tiers only.
func (x *machine) forget(t *rapid.T) {
	key, line := x.drawLine(t)
	x.f.ForgetStored(key, line)
	before := maps.Clone(x.lost)
	defer func() { x.lost = before }() // not for room
	for at := 1; at <= len(line); at++ {
		n := name(key, line[:at])
		if p := x.mp[n]; at%PageTokens == 0 && (p == nil || p.dev < 0) {
			if p != nil && p.flying == nil && !x.pageLocked(n) {
				x.losePages(n)
			}
			return
		}
		if s := x.ms[n]; s != nil && s.slot < 0 && s.flying == nil && !x.snapLocked(n) {
			x.loseSnap(n)
		}
	}
}
