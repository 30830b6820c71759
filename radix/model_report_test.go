package radix

import (
	"slices"
	"strings"

	"pgregory.net/rapid"
)

// ---- pins, and why a line is cold

type modelPin struct {
	pin        Pin
	page, snap string // names of the deepest page or root, and of the snapshot
}

func (x *machine) pinned(name string) bool {
	return slices.ContainsFunc(x.pins, func(p *modelPin) bool { return strings.HasPrefix(p.page, name) })
}

func (x *machine) snapPinned(name string) bool {
	return slices.ContainsFunc(x.pins, func(p *modelPin) bool { return p.snap == name })
}

func (x *machine) pinCounts() (pages, snaps int) {
	for n := range x.mp {
		if x.pinned(n) {
			pages++
		}
	}
	for n := range x.ms {
		if x.snapPinned(n) {
			snaps++
			if nameLen(n)%PageTokens != 0 {
				pages++
			}
		}
	}
	return pages, snaps
}

func (x *machine) pin(t *rapid.T) {
	if len(x.pins) == 3 {
		t.Skip("enough pins")
	}
	key, line := x.drawLine(t)
	p := &modelPin{page: x.deepest(key, line)}
	for at := 1; at <= len(line) && at < nameLen(p.page)+PageTokens; at++ {
		if n := name(key, line[:at]); x.ms[n] != nil {
			p.snap = n
		}
	}
	want := p.snap != "" || nameLen(p.page) > 0
	if want {
		x.pins = append(x.pins, p)
		pages, snaps := x.pinCounts()
		want = pages <= modelPages/PinShare && snaps <= modelSlots/PinShare
		if limit, ok := x.limits[key]; ok {
			want = want && x.pinnedBytes(key) <= limit/PinShare
		}
		if !want {
			x.pins = x.pins[:len(x.pins)-1]
		}
	}
	var ok bool
	if p.pin, ok = x.f.Pin(key, line); ok != want {
		t.Fatalf("Pin of %d tokens: %v, want %v", len(line), ok, want)
	}
}

func (x *machine) unpin(t *rapid.T) {
	if len(x.pins) == 0 {
		t.Skip("no pin")
	}
	i := rapid.IntRange(0, len(x.pins)-1).Draw(t, "pin")
	x.f.Unpin(&x.pins[i].pin)
	x.f.Unpin(&x.pins[i].pin)
	x.pins = slices.Delete(x.pins, i, i+1)
}

func (x *machine) common(line string) int {
	best := 0
	share := func(o string) {
		i := 0
		for i < len(o) && i < len(line) && o[i] == line[i] {
			i++
		}
		best = max(best, i-2)
	}
	for o := range x.mp {
		share(o)
	}
	for o := range x.ms {
		share(o)
	}
	return best
}

// evicted looks the line up in what was dropped, as far as the forest's bounded
// memory still has it. A page that is computed anew starts without memories of
// snapshots on it.
func (x *machine) evicted(key string, line []int32, tokens, start int) bool {
	hash := keyHash(key)
	if next := tokens + PageTokens; next <= len(line) && x.lost[name(key, line[:next])] && x.f.lost.has(chain(hash, line[:next])) {
		return true
	}
	for at := start + 1; at <= len(line) && at < tokens+PageTokens; at++ {
		if x.lost[name(key, line[:at])+"+"] && x.f.lost.has(chain(hash, line[:at])^lostSnap) && x.remembers(key, line[:at]) {
			return true
		}
	}
	return false
}

func (x *machine) remembers(key string, tokens []int32) bool {
	n := x.f.walk(key, tokens, len(tokens)/PageTokens)
	return n != nil && n.lostSnaps
}
