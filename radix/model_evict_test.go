package radix

import (
	"slices"
	"strings"

	"pgregory.net/rapid"
)

func (p *modelPage) stays(t Tier) bool {
	return (t == Device && p.dev >= 0 || t == Host && p.host != 0) && (p.flying == nil || p.flying.ev.From != t)
}

func (s *modelSnap) stays(t Tier) bool {
	return (t == Device && s.slot >= 0 || t == Host && s.host != 0) && (s.flying == nil || s.flying.ev.From != t)
}

// picked checks an eviction against the entry it names, and takes it in flight.
func (x *machine) picked(t *rapid.T, ev Eviction) string {
	fl := &modelFlight{ev: ev}
	if ev.Snapshot {
		for n, s := range x.ms {
			if s.at != ev.At || s.slot != ev.Slot || s.host != ev.Host || s.tail != ev.Page || s.flying != nil {
				continue
			}
			if x.snapLocked(n) && (ev.From == Device || s.slot < 0) {
				t.Fatalf("picked a locked snapshot at %d", ev.At)
			}
			s.flying, fl.name = fl, n
		}
	} else {
		for n, p := range x.mp {
			if nameLen(n) != ev.At || p.dev != ev.Page || p.host != ev.Host || p.flying != nil {
				continue
			}
			if x.pageLocked(n) {
				t.Fatalf("picked a locked page ending at %d", ev.At)
			}
			p.flying, fl.name = fl, n
		}
	}
	if fl.name == "" {
		t.Fatalf("picked an unknown entry %+v", ev)
	}
	x.flights = append(x.flights, fl)
	return fl.name
}

// leaves lists the pages that may be picked from a tier now.
func (x *machine) leaves(tier Tier) []string {
	var out []string
next:
	for n, p := range x.mp {
		if p.flying != nil || !p.stays(tier) || x.pageLocked(n) || tier == Device && x.pages.Refs(p.dev) > 1 {
			continue
		}
		for o, q := range x.mp {
			if o != n && strings.HasPrefix(o, n) && (q.stays(tier) || tier == Host && p.dev < 0) {
				continue next
			}
		}
		if tier == Host && p.dev < 0 {
			for o, s := range x.ms {
				if strings.HasPrefix(o, n) && nameLen(o) < nameLen(n)+PageTokens && s.flying == nil {
					continue next
				}
			}
		}
		out = append(out, n)
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
			if x.mp[o].last < x.mp[got].last {
				t.Fatalf("EvictPages picked a page used at %d before one used at %d", x.mp[got].last, x.mp[o].last)
			}
		}
	}
	if len(evs) < n && len(x.leaves(Device)) > 0 {
		t.Fatalf("EvictPages picked %d of %d and left some", len(evs), n)
	}
}

// inner says whether a device snapshot is followed by another with no branch
// between them.
func (x *machine) inner(n string) bool {
	next := ""
	for o, s := range x.ms {
		if o != n && strings.HasPrefix(o, n) && s.stays(Device) && (next == "" || len(o) < len(next)) {
			next = o
		}
	}
	if next == "" {
		return false
	}
	apart := func(o string) bool {
		return strings.HasPrefix(o, n) && !strings.HasPrefix(o, next) && !strings.HasPrefix(next, o)
	}
	for o := range x.mp {
		if apart(o) {
			return false
		}
	}
	for o, s := range x.ms {
		if s.stays(Device) && apart(o) {
			return false
		}
	}
	return true
}

func (x *machine) slotVictims() (out []string) {
	for n, s := range x.ms {
		if s.slot >= 0 && s.flying == nil && !x.snapLocked(n) && x.slots.Refs(s.slot) == 1 {
			out = append(out, n)
		}
	}
	return out
}

func (x *machine) class(n string) int {
	if x.inner(n) {
		return 0
	}
	if x.pageLocked(n[:2+nameLen(n)/PageTokens*PageTokens]) {
		return 2
	}
	return 1
}

func (x *machine) evictSlots(t *rapid.T) {
	n := rapid.IntRange(1, 3).Draw(t, "n")
	could := x.slotVictims()
	classes := map[string]int{}
	for _, o := range could {
		classes[o] = x.class(o)
	}
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
			if i > 0 {
				break
			}
			if classes[o] < classes[got] {
				t.Fatalf("EvictSlots picked class %d at %d before class %d at %d\n%s", classes[got], ev.At, classes[o], x.ms[o].at, x.f.Dump())
			}
			if classes[o] == classes[got] && classes[o] > 0 && x.ms[o].last < x.ms[got].last {
				t.Fatalf("EvictSlots picked one used at %d before one used at %d", x.ms[got].last, x.ms[o].last)
			}
		}
	}
}

func (x *machine) evictHost(t *rapid.T) {
	want := int64(rapid.IntRange(1, 300).Draw(t, "bytes"))
	got := int64(0)
	for _, ev := range x.f.EvictHost(want, x.tick()) {
		if got >= want {
			t.Fatalf("EvictHost(%d) went on after %d bytes", want, got)
		}
		if ev.From != Host || ev.Host == 0 {
			t.Fatalf("EvictHost picked %+v", ev)
		}
		could := x.leaves(Host)
		if n := x.picked(t, ev); !ev.Snapshot && !slices.Contains(could, n) {
			t.Fatalf("EvictHost picked a page ending at %d that is no leaf", ev.At)
		}
		got += ev.Bytes
	}
	if got >= want {
		return
	}
	if left := x.leaves(Host); len(left) > 0 {
		t.Fatalf("EvictHost(%d) found %d and left %d pages", want, got, len(left))
	}
	for n, s := range x.ms {
		if s.host != 0 && s.flying == nil && (!x.snapLocked(n) || s.slot >= 0) {
			t.Fatalf("EvictHost(%d) found %d and left a snapshot", want, got)
		}
	}
}
