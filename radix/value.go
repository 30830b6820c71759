package radix

import (
	"math"
	"slices"
)

// Policy says what goes first when room is needed.
type Policy uint8

const (
	ByValue Policy = iota
	LRU            // least recently used, to compare with
)

// Rank by value. An entry's rank is the tier's clock at its last use plus a
// bonus, valueTurnovers times the square root of its value: prefill tokens that
// it is expected to save for each token's room that it takes. (The root, because
// what is worth much and yet unused is the less likely to be used; and because it
// did better on recorded traces.) The clock counts turnovers: it moves on by one
// when as many bytes as the tier holds have come in. So without values the order
// is least recently used; an entry that saves as many tokens as it takes room for
// stays valueTurnovers longer than one that saves nothing; and nothing stays for
// ever unused.
//
// What a snapshot saves is the distance to the one before it on its path. Its
// chance of use, against one that a line goes on from its end:
const (
	valueTurnovers = 4.0
	// A line parts from its own past at a distance from the end that is spread
	// evenly over the logarithm: this is the chance for each e-fold. So what is
	// kept of a chain thins out geometrically.
	rewindChance = 0.1
	// The first e-folds are not told apart: a page.
	rewindMin = PageTokens
	// Where two lines have parted another may, and each one that started there is as
	// good a witness as a line's own end, also when the others are gone; so many of
	// them count at most.
	branchHitsMax = 8
	// A page that no snapshot needs saves nothing by itself, but it shows where
	// lines part.
	pageBonus = 1.25
	// Runs that begin at a branch, of those that are valued anew when a snapshot at
	// the branch appears. Further ones keep a value that is too high until a
	// snapshot on them comes or goes.
	branchRuns = 8
)

// enter moves a tier's clock on: one turnover is as many bytes as it has had at
// once, the larger of the device's pools at least.
func (f *Forest) enter(t Tier, bytes int64) {
	held := int64(f.stats.Pages[t]+f.stats.Tails[t])*f.opts.PageBytes + int64(f.stats.Snapshots[t])*f.opts.SlotBytes
	f.turnover[t] = max(f.turnover[t], float64(held))
	f.clock[t] += float64(bytes) / f.turnover[t]
}

// duplicate sets apart the copies that a faster tier has too: they save one copy,
// no prefill, and go before everything else.
const duplicate = -1e12

// touched is when an entry was used last, by the caller's time and by the tiers'
// clocks.
type touched struct {
	last int64
	base [tiers]float64
}

func (u *touched) used() int64 { return u.last }

func (f *Forest) use(u *touched, now int64) {
	u.last, u.base = max(u.last, now), f.clock
}

// inherit takes over the later use of two.
func (u *touched) inherit(o *touched) {
	u.last = max(u.last, o.last)
	for t := range tiers {
		u.base[t] = max(u.base[t], o.base[t])
	}
}

// placePage puts a page right in every tier's queue.
func (f *Forest) placePage(n *node) {
	for t := range tiers {
		want := n.evictable(t)
		if want || n.places[t].at != [2]int32{} {
			key := f.pageKey(n, t)
			f.pageQueues[t].set(n, want, key)
			if own := n.tree.own; own != nil {
				own.pages[t].set(n, want, key)
			}
		}
	}
}

func (f *Forest) pageKey(n *node, t Tier) float64 {
	key := n.base[t] + pageBonus
	if f.opts.Policy == LRU {
		key = float64(n.last)
	}
	if n.faster(t) {
		return key + duplicate
	}
	for _, s := range n.snaps { // it goes after the snapshots that need it
		if s.stays(t) && !s.faster(t) {
			key = max(key, s.places[t].key)
		}
	}
	return key
}

// placeSnap puts a snapshot right in every tier's queue, and its page with it.
func (f *Forest) placeSnap(s *snap) {
	for t := range tiers {
		key := f.snapKey(s, t)
		if want := s.evictable(t); want || s.places[t].at != [2]int32{} {
			f.snapQueues[t].set(s, want, key)
			if own := s.node.tree.own; own != nil {
				own.snaps[t].set(s, want, key)
			}
		} else {
			s.places[t].key = key
		}
	}
}

func (f *Forest) snapKey(s *snap, t Tier) float64 {
	key := float64(s.last)
	if f.opts.Policy == ByValue {
		key = s.base[t] + s.bonus[t]
	}
	if s.faster(t) {
		key += duplicate
	}
	return key
}

// revalue works the values out again on the unbranched run of pages around s,
// from its last snapshot on the tier up to the branch above it. s need not be on
// the tier any more. Snapshots past a branch that fell back to s are put right
// when they come up for eviction.
func (f *Forest) revalue(s *snap, t Tier) {
	if f.opts.Policy == LRU {
		return
	}
	last := s
	next, branch := last.next(t)
	for ; next != nil; next, branch = last.next(t) {
		last = next
	}
	if !last.stays(t) {
		if last, _ = s.before(t); last == nil {
			return
		}
		_, branch = last.next(t)
	}
	end := last.At
	for cur := last; ; branch = false {
		before, branchAt := cur.before(t)
		f.setValue(cur, t, next, branch, end, before, branchAt)
		if before == nil {
			return
		}
		if n, _ := before.next(t); n != cur {
			return // another line has parted between them: its value is a branch's
		}
		next, cur = cur, before
	}
}

// revalueBelow does so for the runs that begin at a branch below s, which have a
// nearer snapshot to fall back to now; for the first few of them.
func (f *Forest) revalueBelow(s *snap, t Tier) {
	if f.opts.Policy == LRU {
		return
	}
	if _, branch := s.next(t); !branch {
		return
	}
	n := s.node
	for len(n.kids) == 1 {
		n = n.kids[0]
	}
	for _, k := range n.kids[:min(len(n.kids), branchRuns)] {
		for {
			if i := slices.IndexFunc(k.snaps, func(x *snap) bool { return x.stays(t) }); i >= 0 {
				f.revalue(k.snaps[i], t)
				break
			}
			if len(k.kids) != 1 {
				break
			}
			k = k.kids[0]
		}
	}
}

// setValue works out one value: next is the following snapshot on the unbranched
// run, which ends at end; branch says that the tree branches before any follows;
// before the one that its users fall back to; branchAt
// the page edge at or above s where the tree branches last.
func (f *Forest) setValue(s *snap, t Tier, next *snap, branch bool, end int, before *snap, branchAt int) {
	from := 0
	if before != nil {
		from = before.At
	}
	room := max(float64(f.snapBytes(s))*PageTokens/float64(max(f.opts.PageBytes, 1)), 1)
	s.end[t] = next == nil && !branch
	chance := 1.0
	switch {
	case branch:
	case next != nil:
		chance = rewindChance * math.Log(float64(end-s.At+rewindMin)/float64(end-next.At+rewindMin))
	default: // its pages, back to the snapshot or the branch before, are worth nothing without it
		room += float64(s.At - max(from, branchAt))
	}
	chance += float64(min(s.hits, branchHitsMax))
	value := float64(s.At-from) * chance
	s.bonus[t] = valueTurnovers * math.Sqrt(value/room)
	f.placeSnap(s)
	f.placePage(s.node)
}

// fresh says whether the snapshot that goes next is ranked right; if what it
// falls back to has changed since, its rank is set anew.
func (f *Forest) fresh(s *snap, t Tier) bool {
	old := s.places[t].key
	f.revalue(s, t)
	return s.places[t].key <= old
}

// next finds the snapshot that follows s on the tier, if the tree does not branch
// before it; branch says that it does.
func (s *snap) next(t Tier) (next *snap, branch bool) {
	n, tail := s.node, s.TailTokens
	for {
		var first *snap // of those that go on from the tail; shorter ones come first
		longer, _ := slices.BinarySearchFunc(n.snaps, len(tail), func(x *snap, length int) int { return len(x.TailTokens) - length })
		for _, x := range n.snaps[longer:] {
			switch {
			case x == s || !x.stays(t) || !hasPrefix(x.TailTokens, tail):
			case first == nil:
				first = x
			case !hasPrefix(x.TailTokens, first.TailTokens):
				return nil, true
			}
		}
		var kid *node
		for _, k := range n.kids {
			switch {
			case !hasPrefix(k.tokens[:], tail):
			case first != nil && !hasPrefix(k.tokens[:], first.TailTokens), first == nil && kid != nil:
				return nil, true
			default:
				kid = k
			}
		}
		if first != nil {
			return first, false
		}
		if kid == nil {
			return nil, false
		}
		n, tail = kid, nil
	}
}

// before returns the nearest snapshot on the tier that a match would fall back to
// without s, and the page edge where the tree branches last above s and below it.
func (s *snap) before(t Tier) (before *snap, branchAt int) {
	tail := s.TailTokens
	for n := s.node; n != nil; n = n.parent {
		if n == s.node && len(tail) > 0 {
			tail = tail[:len(tail)-1]
		} else if n == s.node {
			tail = nil
		}
		if x := n.longest(tail, t, t+1); x != nil && x != s {
			return x, branchAt
		}
		if branchAt == 0 && n != s.node && len(n.kids) > 1 {
			branchAt = n.end()
		}
		if n.parent != nil {
			tail = n.tokens[:]
		}
	}
	return nil, branchAt
}

func hasPrefix(tokens, prefix []int32) bool {
	return len(tokens) >= len(prefix) && slices.Equal(tokens[:len(prefix)], prefix)
}
