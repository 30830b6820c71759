package radix

import (
	"maps"
	"slices"
	"strings"

	"pgregory.net/rapid"
)

func (x *machine) settle(t *rapid.T) {
	if len(x.flights) == 0 {
		t.Skip("nothing in flight")
	}
	i := rapid.IntRange(0, len(x.flights)-1).Draw(t, "flight")
	fl := x.flights[i]
	x.flights = slices.Delete(x.flights, i, i+1)
	how := rapid.IntRange(0, 4).Draw(t, "how")
	switch {
	case how == 0:
		x.f.Keep(fl.ev)
		x.kept(fl)
	case how <= 2 && fl.ev.From < Disk:
		to := Tier(rapid.IntRange(int(fl.ev.From)+1, int(Disk)).Draw(t, "to"))
		h := fl.ev.Host
		if to == Disk {
			h = fl.ev.Disk
		}
		if h == 0 {
			h = x.newHandle()
		}
		x.demoted(t, fl, to, h, x.f.Demoted(fl.ev, to, h))
	default:
		x.dropped(t, fl, x.f.Dropped(fl.ev))
	}
}

func (x *machine) kept(fl *modelFlight) {
	switch {
	case fl.orphan:
		x.freeAll(fl.low)
	case fl.ev.Snapshot:
		x.ms[fl.name].flying = nil
	default:
		x.mp[fl.name].flying = nil
	}
}

func (x *machine) free(h int64) {
	if h != 0 {
		x.freed[h]++
	}
}

func (x *machine) freeAll(low [tiers]int64) {
	for _, h := range low {
		x.free(h)
	}
}

func (x *machine) demoted(t *rapid.T, fl *modelFlight, to Tier, h int64, released bool) {
	if fl.orphan {
		x.freeAll(fl.low)
		if h != fl.low[to] {
			x.free(h)
		}
		return
	}
	from := fl.ev.From
	var low *[tiers]int64
	var want bool
	if fl.ev.Snapshot {
		s := x.ms[fl.name]
		s.flying, low, want = nil, &s.low, !x.snapLocked(fl.name) || within(s, Device, from)
		if want && from == Device {
			s.slot, s.tail = None, None
		}
	} else {
		p := x.mp[fl.name]
		p.flying, low, want = nil, &p.low, !x.pageLocked(fl.name) || within(p, Device, from)
		if want && from == Device {
			p.dev = None
		}
	}
	if low[to] == 0 {
		low[to] = h
	} else if low[to] != h {
		x.free(h)
	}
	if want && from != Device {
		x.free(low[from])
		low[from] = 0
	}
	if released != want {
		t.Fatalf("Demoted: released %v, want %v", released, want)
	}
}

func (x *machine) dropped(t *rapid.T, fl *modelFlight, released bool) {
	if fl.orphan {
		x.freeAll(fl.low)
		return
	}
	from, want := fl.ev.From, true
	if fl.ev.Snapshot {
		s := x.ms[fl.name]
		s.flying = nil
		switch {
		case x.snapLocked(fl.name) && !within(s, Device, from):
			want = false
		case !within(s, Device, from) && !within(s, from+1, tiers):
			x.loseSnap(fl.name)
		case from == Device:
			s.slot, s.tail = None, None
		default:
			x.free(s.low[from])
			s.low[from] = 0
		}
	} else {
		p := x.mp[fl.name]
		p.flying = nil
		switch {
		case x.pageLocked(fl.name) && !within(p, Device, from):
			want = false
		case !within(p, Device, from) && !within(p, from+1, tiers):
			if want = !x.carries(fl.name, from); want {
				x.losePages(fl.name)
			}
		case from == Device:
			p.dev = None
		default:
			x.free(p.low[from])
			p.low[from] = 0
		}
	}
	if released != want {
		t.Fatalf("Dropped: released %v, want %v", released, want)
	}
}

// losePages drops a page and all that hangs on it.
func (x *machine) losePages(top string) {
	for _, o := range slices.Collect(maps.Keys(x.ms)) {
		if strings.HasPrefix(o, top) {
			x.loseSnap(o)
		}
	}
	for o, q := range x.mp {
		if !strings.HasPrefix(o, top) {
			continue
		}
		if q.flying != nil {
			*q.flying = modelFlight{ev: q.flying.ev, name: o, orphan: true, page: q.dev, slot: None, low: q.low}
		} else {
			x.freeAll(q.low)
		}
		x.lost[o] = true
		delete(x.mp, o)
	}
}

func (x *machine) loseSnap(n string) {
	s := x.ms[n]
	if s.flying != nil {
		*s.flying = modelFlight{ev: s.flying.ev, name: n, orphan: true, page: s.tail, slot: s.slot, low: s.low}
	} else {
		x.freeAll(s.low)
	}
	x.lost[n+"+"] = true
	delete(x.ms, n)
}
