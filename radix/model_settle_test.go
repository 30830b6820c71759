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
	case how <= 2 && fl.ev.From == Device:
		h := fl.ev.Host
		if h == 0 {
			h = x.newHandle()
		}
		x.demoted(t, fl, h, x.f.Demoted(fl.ev, h))
	default:
		x.dropped(t, fl, x.f.Dropped(fl.ev))
	}
}

func (x *machine) kept(fl *modelFlight) {
	switch {
	case fl.orphan:
		x.free(fl.host)
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

func (x *machine) demoted(t *rapid.T, fl *modelFlight, h int64, released bool) {
	if fl.orphan {
		x.free(fl.host)
		if h != fl.host {
			x.free(h)
		}
		return
	}
	var host *int64
	var locked bool
	if fl.ev.Snapshot {
		s := x.ms[fl.name]
		s.flying, host, locked = nil, &s.host, x.snapLocked(fl.name)
		if !locked {
			s.slot, s.tail = None, None
		}
	} else {
		p := x.mp[fl.name]
		p.flying, host, locked = nil, &p.host, x.pageLocked(fl.name)
		if !locked {
			p.dev = None
		}
	}
	if *host == 0 {
		*host = h
	} else if *host != h {
		x.free(h)
	}
	if released == locked {
		t.Fatalf("Demoted: released %v, locked %v", released, locked)
	}
}

func (x *machine) dropped(t *rapid.T, fl *modelFlight, released bool) {
	if fl.orphan {
		x.free(fl.host)
		return
	}
	want := true
	if fl.ev.Snapshot {
		s := x.ms[fl.name]
		s.flying = nil
		switch {
		case fl.ev.From == Host && s.slot >= 0:
			x.free(s.host)
			s.host = 0
		case x.snapLocked(fl.name):
			want = false
		case fl.ev.From == Device && s.host != 0:
			s.slot, s.tail = None, None
		default:
			x.loseSnap(fl.name)
		}
	} else {
		want = x.dropPage(fl)
	}
	if released != want {
		t.Fatalf("Dropped: released %v, want %v", released, want)
	}
}

func (x *machine) dropPage(fl *modelFlight) bool {
	p := x.mp[fl.name]
	p.flying = nil
	hangs, device := false, false
	for o, q := range x.mp {
		if o != fl.name && strings.HasPrefix(o, fl.name) {
			hangs = true
			device = device || q.stays(Device)
		}
	}
	for o := range x.ms {
		hangs = hangs || strings.HasPrefix(o, fl.name)
	}
	switch {
	case fl.ev.From == Host && p.dev >= 0:
		x.free(p.host)
		p.host = 0
		return true
	case x.pageLocked(fl.name):
		return false
	case fl.ev.From == Device && p.host != 0:
		p.dev = None
		return true
	case fl.ev.From == Host && hangs, fl.ev.From == Device && device:
		return false
	}
	for _, o := range slices.Collect(maps.Keys(x.ms)) {
		if strings.HasPrefix(o, fl.name) {
			x.loseSnap(o)
		}
	}
	for o, q := range x.mp {
		if !strings.HasPrefix(o, fl.name) {
			continue
		}
		if q.flying != nil {
			*q.flying = modelFlight{ev: q.flying.ev, orphan: true, page: q.dev, slot: None, host: q.host}
		} else {
			x.free(q.host)
		}
		delete(x.mp, o)
	}
	return true
}

func (x *machine) loseSnap(n string) {
	s := x.ms[n]
	if s.flying != nil {
		*s.flying = modelFlight{ev: s.flying.ev, orphan: true, page: s.tail, slot: s.slot, host: s.host}
	} else {
		x.free(s.host)
	}
	delete(x.ms, n)
}
