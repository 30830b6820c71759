package radix

import (
	"container/heap"
	"slices"
)

// rank says how late a snapshot goes. First the inner ones of chains: where
// another snapshot follows with no branch between, losing one costs some replay
// and no branch its last restore point. Among them the one whose loss costs
// least: tokens it saves times the span of offsets it saves them for, over its
// age. Then a branch's last snapshots, oldest first; those on a path in use
// last of all, for its user has a state of its own further down.
type rank struct {
	class int     // 0 inner of a chain, 1 last of its branch, 2 that on a locked path
	value float64 // class 0: tokens^2 / age; otherwise the last use
}

func (a rank) less(b rank) bool {
	if a.class != b.class {
		return a.class < b.class
	}
	return a.value < b.value
}

func rankOf(s *snap, t Tier, now int64) rank {
	if next, ok := s.next(t); ok {
		saved, span := float64(s.At-s.before(t)), float64(next-s.At)
		return rank{0, saved * span / float64(max(now-s.last, 0)+1)}
	}
	if s.node.locks > 0 {
		return rank{2, float64(s.last)}
	}
	return rank{1, float64(s.last)}
}

// ranking yields snapshots in order of rank while they are being picked. A pick
// makes its neighbours more worth keeping, so the one on top is looked at again
// before it is yielded. (A pick that ends a branch makes the snapshot above it
// an inner one, worth less; that is noticed with the next ranking.)
type ranking struct {
	tier  Tier
	now   int64
	snaps []*snap
	ranks []rank
}

func (f *Forest) rankSnaps(t Tier, now int64, want func(*snap) bool) *ranking {
	r := &ranking{tier: t, now: now}
	for _, s := range f.snaps {
		if s.evictable(t) && want(s) {
			r.snaps = append(r.snaps, s)
			r.ranks = append(r.ranks, rankOf(s, t, now))
		}
	}
	heap.Init(r)
	return r
}

func (r *ranking) next() *snap {
	for len(r.snaps) > 0 {
		now := rankOf(r.snaps[0], r.tier, r.now)
		if r.ranks[0] == now {
			return heap.Pop(r).(*snap)
		}
		r.ranks[0] = now
		heap.Fix(r, 0)
	}
	return nil
}

func (r *ranking) Len() int           { return len(r.snaps) }
func (r *ranking) Less(i, j int) bool { return r.ranks[i].less(r.ranks[j]) }
func (r *ranking) Swap(i, j int) {
	r.snaps[i], r.snaps[j] = r.snaps[j], r.snaps[i]
	r.ranks[i], r.ranks[j] = r.ranks[j], r.ranks[i]
}
func (r *ranking) Push(any) { panic("radix: a ranking only shrinks") }
func (r *ranking) Pop() any {
	i := len(r.snaps) - 1
	s := r.snaps[i]
	r.snaps, r.ranks = r.snaps[:i], r.ranks[:i]
	return s
}

// next finds the snapshot that follows s on the tier, if the tree does not
// branch before it.
func (s *snap) next(t Tier) (at int, ok bool) {
	n, tail := s.node, s.TailTokens
	for {
		var first *snap // of those that go on from the tail; shorter ones come first
		for _, x := range n.snaps {
			switch {
			case x == s || !x.stays(t) || !hasPrefix(x.TailTokens, tail):
			case first == nil:
				first = x
			case !hasPrefix(x.TailTokens, first.TailTokens):
				return 0, false
			}
		}
		var kid *node
		for _, k := range n.kids {
			switch {
			case !hasPrefix(k.tokens[:], tail):
			case first != nil && !hasPrefix(k.tokens[:], first.TailTokens):
				return 0, false
			case first == nil && kid != nil:
				return 0, false
			default:
				kid = k
			}
		}
		if first != nil {
			return first.At, true
		}
		if kid == nil {
			return 0, false
		}
		n, tail = kid, nil
	}
}

// before returns the position of the nearest snapshot on the tier that a match
// would fall back to without s; 0 if there is none.
func (s *snap) before(t Tier) int {
	tail := s.TailTokens
	for n := s.node; n != nil; n = n.parent {
		for _, x := range slices.Backward(n.snaps) {
			if x.At < s.At && x.stays(t) && hasPrefix(tail, x.TailTokens) {
				return x.At
			}
		}
		if n.parent != nil {
			tail = n.tokens[:]
		}
	}
	return 0
}

func hasPrefix(tokens, prefix []int32) bool {
	return len(tokens) >= len(prefix) && slices.Equal(tokens[:len(prefix)], prefix)
}
