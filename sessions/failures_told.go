package sessions

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// What operators are told of failed authentications: how many there were, and
// which addresses had the most of them. One row of audit_events and one line of
// the log hold all of the time since the last, so that guessing fills no disk;
// both are bounded, however many addresses guess.
const (
	failureEvery    = 10 * time.Second
	failuresNamed   = 8    // addresses that are named; the others are counted
	failuresKnown   = 1024 // addresses that are counted apart; one more takes the place of one that has the fewest failures of a few
	failuresUnknown = "unknown address"
)

// failures counts failed authentications between two rows.
type failures struct {
	mu    sync.Mutex
	count int                  // guarded by mu; not written yet
	by    map[netip.Prefix]int // guarded by mu; of them, by address as addressOf has it; the zero prefix is for what is none
	gone  bool                 // guarded by mu; addresses were given up since the last row: there are more than by knows
	last  time.Time            // guarded by mu; of the last row
}

// failuresTold is what is written of some failures.
type failuresTold struct {
	count int
	from  string // the addresses with the most and their counts, then those of the others
}

func (f *failures) add(from netip.Addr) {
	p, _ := addressOf(from)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
	if f.by == nil {
		f.by = map[netip.Prefix]int{}
	}
	if _, known := f.by[p]; !known && len(f.by) >= failuresKnown {
		f.makeRoomLocked()
	}
	f.by[p]++
}

// makeRoomLocked gives up an address with few failures, which stay in count.
// Who guesses much is hardly ever the one with the fewest of those looked at.
func (f *failures) makeRoomLocked() {
	var victim netip.Prefix
	fewest, seen := 0, 0
	for p, n := range f.by { // in no order, which is good enough
		if seen == 0 || n < fewest {
			victim, fewest = p, n
		}
		if seen++; seen >= authEvictLook {
			break
		}
	}
	delete(f.by, victim)
	f.gone = true
}

// due takes what was counted when it is time for a row, or with force.
func (f *failures) due(now time.Time, force bool) failuresTold {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count == 0 || !force && now.Sub(f.last) < failureEvery {
		return failuresTold{}
	}
	t := failuresTold{f.count, f.textLocked()}
	f.count, f.by, f.gone, f.last = 0, nil, false, now
	return t
}

// textLocked is, as an example, "192.0.2.1 37, 2001:db8:1:2::/64 4, 20 others 25",
// with "20 or more others" when not all were counted apart.
func (f *failures) textLocked() string {
	type one struct {
		p netip.Prefix
		n int
	}
	all := make([]one, 0, len(f.by))
	for p, n := range f.by {
		all = append(all, one{p, n})
	}
	slices.SortFunc(all, func(a, b one) int { return cmp.Or(cmp.Compare(b.n, a.n), a.p.Compare(b.p)) })
	var parts []string
	left := f.count
	for _, a := range all[:min(len(all), failuresNamed)] {
		left -= a.n
		name := failuresUnknown
		switch {
		case a.p.IsSingleIP():
			name = a.p.Addr().String()
		case a.p.IsValid():
			name = a.p.String()
		}
		parts = append(parts, fmt.Sprintf("%s %d", name, a.n))
	}
	if left > 0 {
		more := ""
		if f.gone {
			more = " or more"
		}
		parts = append(parts, fmt.Sprintf("%d%s others %d", len(all)-failuresNamed, more, left))
	}
	return strings.Join(parts, ", ")
}
