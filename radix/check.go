package radix

import (
	"fmt"
	"slices"
)

// audit is what a full walk of the forest finds.
type audit struct {
	f           *Forest
	pages       map[int32]int // references the forest holds, by page
	slots       map[int32]int
	handles     [tiers]map[int64]bool
	queued      [tiers]int
	queuedSnaps [tiers]int
	snaps       int
	stats       Stats
	trees       map[*tree]*treeAudit
}

// treeAudit is what a walk finds of one tree.
type treeAudit struct {
	low          [tiers]int64
	pinned       int64
	pages, snaps [tiers]int // evictable
}

// Check walks everything and returns the first broken invariant. Tests call it
// after every step, the engine when it is idle; its cost is one pass.
func (f *Forest) Check() error {
	a := &audit{f: f, pages: map[int32]int{}, slots: map[int32]int{}, handles: [tiers]map[int64]bool{Host: {}, Disk: {}}, trees: map[*tree]*treeAudit{}}
	for key, root := range f.roots {
		a.trees[root.tree] = &treeAudit{}
		if root.tree.key != key || root.parent != nil || root.depth != 0 || root.dev >= 0 || root.elsewhere(Device) {
			return fmt.Errorf("radix: root %q is no root", key)
		}
		if len(root.kids) == 0 && len(root.snaps) == 0 && root.locks == 0 {
			return fmt.Errorf("radix: root %q holds nothing", key)
		}
		todo := []*node{root}
		for len(todo) > 0 {
			n := todo[len(todo)-1]
			todo = append(todo[:len(todo)-1], n.kids...)
			if err := a.node(n); err != nil {
				return fmt.Errorf("radix: %q page ending at %d: %w", key, n.end(), err)
			}
		}
	}
	for _, o := range f.orphans {
		if err := a.hold(o.page, o.slot, o.low); err != nil {
			return fmt.Errorf("radix: eviction in flight: %w", err)
		}
	}
	for t := Host; t < tiers; t++ {
		for _, h := range f.freed[t] {
			if a.handles[t][h] {
				return fmt.Errorf("radix: %s handle %d is freed and in use", t, h)
			}
			a.handles[t][h] = true
		}
	}
	return a.totals()
}

func (a *audit) hold(page, slot int32, low [tiers]int64) error {
	if page >= 0 {
		a.pages[page]++
	}
	if slot >= 0 {
		a.slots[slot]++
	}
	for t := Host; t < tiers; t++ {
		if h := low[t]; h != 0 {
			if a.handles[t][h] {
				return fmt.Errorf("%s handle %d is named twice", t, h)
			}
			a.handles[t][h] = true
		}
	}
	return nil
}

func (a *audit) node(n *node) error {
	f := a.f
	var below [tiers]int32
	locked := int32(0)
	for i, k := range n.kids {
		switch {
		case k.parent != n || k.depth != n.depth+1 || k.gone || k.tree != n.tree:
			return fmt.Errorf("child %d is not linked right", i)
		case i > 0 && slices.Compare(n.kids[i-1].tokens[:], k.tokens[:]) >= 0:
			return fmt.Errorf("children %d and %d do not differ or are out of order", i-1, i)
		case k.dev < 0 && !k.elsewhere(Device):
			return fmt.Errorf("child %d is on no tier", i)
		}
		if k.locks > 0 {
			locked++
		}
		for t := range tiers {
			if counts := k.stays(t) || k.below[t] > 0; counts != k.counts[t] {
				return fmt.Errorf("child %d counts as on %s: %v", i, t, k.counts[t])
			} else if counts {
				below[t]++
			}
		}
	}
	if n.locks < locked {
		return fmt.Errorf("%d locks, but %d locked children", n.locks, locked)
	}
	if n.below != below {
		return fmt.Errorf("children by tier: %v, found %v", n.below, below)
	}
	for t := range tiers {
		own := n.tree.own
		if in := f.pageQueues[t].holds(n); in != n.evictable(t) || own != nil && in != own.pages[t].holds(n) || own == nil && n.places[t].at[ofKey] != 0 {
			return fmt.Errorf("in the %s queue: %v, at %v, evictable: %v", t, in, n.places[t].at, n.evictable(t))
		} else if key := f.pageKey(n, t); in && n.places[t].key != key {
			return fmt.Errorf("ranked %v on the %s, want %v", n.places[t].key, t, key)
		} else if in {
			a.queued[t]++
			a.trees[n.tree].pages[t]++
		}
	}
	if n.dev >= 0 {
		a.stats.Pages[Device]++
		if n.locks > 0 {
			a.stats.LockedPages++
		}
		if f.owner[n.dev] != n || f.pages.charged[n.dev] != &n.tree.pages {
			return fmt.Errorf("device page %d has another owner", n.dev)
		}
	}
	for t := Host; t < tiers; t++ {
		if n.on(t) {
			a.stats.Pages[t]++
			a.trees[n.tree].low[t] += f.opts.PageBytes
		}
	}
	if n.pins > 0 && n.parent != nil {
		a.stats.PinnedPages++
		a.trees[n.tree].pinned += f.opts.PageBytes
	}
	if err := n.checkPins(); err != nil {
		return err
	}
	for i, s := range n.snaps {
		if err := a.snap(n, s); err != nil {
			return fmt.Errorf("snapshot at %d: %w", s.At, err)
		}
		if i > 0 && compareSnaps(n.snaps[i-1], s.TailTokens) >= 0 {
			return fmt.Errorf("snapshots %d and %d do not differ or are out of order", i-1, i)
		}
	}
	return a.hold(n.dev, None, n.low)
}

func (a *audit) snap(n *node, s *snap) error {
	switch {
	case s.node != n || s.gone || s.index >= len(a.f.snaps) || a.f.snaps[s.index] != s:
		return fmt.Errorf("not linked right")
	case s.At < 1 || s.At/PageTokens != int(n.depth) || len(s.TailTokens) != s.At%PageTokens:
		return fmt.Errorf("hangs at page edge %d with a tail of %d", n.end(), len(s.TailTokens))
	case s.Slot < 0 && !s.elsewhere(Device):
		return fmt.Errorf("is on no tier")
	case (s.Tail >= 0) != (s.Slot >= 0 && len(s.TailTokens) > 0):
		return fmt.Errorf("slot %d, tail page %d", s.Slot, s.Tail)
	case s.locks < 0 || s.locks > 0 && n.locks == 0:
		return fmt.Errorf("%d locks on a page with %d", s.locks, n.locks)
	}
	a.snaps++
	if s.pins > 0 {
		a.stats.PinnedSnapshots++
		a.trees[n.tree].pinned += a.f.snapBytes(s)
		if len(s.TailTokens) > 0 {
			a.stats.PinnedPages++
		}
	}
	for t := range tiers {
		own := n.tree.own
		if in := a.f.snapQueues[t].holds(s); in != s.evictable(t) || own != nil && in != own.snaps[t].holds(s) || own == nil && s.places[t].at[ofKey] != 0 {
			return fmt.Errorf("in the %s queue: %v, at %v, evictable: %v", t, in, s.places[t].at, s.evictable(t))
		} else if key := a.f.snapKey(s, t); in && s.places[t].key != key {
			return fmt.Errorf("ranked %v on the %s, want %v", s.places[t].key, t, key)
		} else if in {
			a.queuedSnaps[t]++
			a.trees[n.tree].snaps[t]++
		}
		if !s.on(t) {
			continue
		}
		a.stats.Snapshots[t]++
		if len(s.TailTokens) > 0 {
			a.stats.Tails[t]++
		}
		if t != Device {
			a.trees[n.tree].low[t] += a.f.snapBytes(s)
		}
	}
	if s.Slot >= 0 && s.locks > 0 {
		a.stats.LockedSnapshots++
	}
	if s.Slot >= 0 && a.f.slots.charged[s.Slot] != &n.tree.slots || s.Tail >= 0 && a.f.pages.charged[s.Tail] != &n.tree.pages {
		return fmt.Errorf("slot %d or tail page %d is another key's", s.Slot, s.Tail)
	}
	return a.hold(s.Tail, s.Slot, [tiers]int64{Host: s.Host, Disk: s.Disk})
}

func (a *audit) totals() error {
	f := a.f
	if a.snaps != len(f.snaps) {
		return fmt.Errorf("radix: %d snapshots on nodes, %d listed", a.snaps, len(f.snaps))
	}
	for t := range tiers {
		if err := f.pageQueues[t].check(a.queued[t]); err != nil {
			return fmt.Errorf("radix: pages: %w", err)
		}
		if err := f.snapQueues[t].check(a.queuedSnaps[t]); err != nil {
			return fmt.Errorf("radix: snapshots: %w", err)
		}
	}
	if err := a.accounts(); err != nil {
		return err
	}
	got, want := f.stats, a.stats
	if got.Pages != want.Pages || got.Snapshots != want.Snapshots || got.Tails != want.Tails ||
		got.PinnedPages != want.PinnedPages || got.PinnedSnapshots != want.PinnedSnapshots ||
		got.LockedPages != want.LockedPages || got.LockedSnapshots != want.LockedSnapshots {
		return fmt.Errorf("radix: accounts %+v, found %+v", got, want)
	}
	owned := 0
	for _, n := range f.owner {
		if n != nil {
			owned++
		}
	}
	if owned != want.Pages[Device] {
		return fmt.Errorf("radix: %d device pages have owners, %d are in trees", owned, want.Pages[Device])
	}
	for _, p := range []struct {
		pool  *Pool
		holds map[int32]int
	}{{f.pages, a.pages}, {f.slots, a.slots}} {
		if err := p.pool.Check(); err != nil {
			return fmt.Errorf("radix: %w", err)
		}
		for id, n := range p.holds {
			if n > 1 || p.pool.Refs(id) < n {
				return fmt.Errorf("radix: %s %d: the forest holds it %d times, the pool counts %d", p.pool.name, id, n, p.pool.Refs(id))
			}
		}
	}
	return nil
}

// accounts verifies every key's account against the walk, the pools and the
// evictions in flight.
func (a *audit) accounts() error {
	f := a.f
	for key, root := range f.roots {
		if f.trees[key] != root.tree {
			return fmt.Errorf("radix: the tree %q has no account", key)
		}
	}
	pages, slots := f.pages.tallied(), f.slots.tallied()
	for key, t := range f.trees {
		want := a.trees[t]
		if want == nil {
			want = &treeAudit{}
		}
		for _, o := range f.orphans {
			for on := Host; o.tree == t && on < tiers; on++ {
				if o.low[on] != 0 {
					want.low[on] += o.bytes
				}
			}
		}
		switch {
		case t.key != key:
			return fmt.Errorf("radix: account %q is of %q", key, t.key)
		case t.low != want.low || t.pinned != want.pinned:
			return fmt.Errorf("radix: account %q has %v bytes on the lower tiers, %d pinned; found %v, %d", key, t.low, t.pinned, want.low, want.pinned)
		case t.pages.n != pages[&t.pages] || t.slots.n != slots[&t.slots]:
			return fmt.Errorf("radix: account %q has %d pages and %d slots; found %d and %d", key, t.pages.n, t.slots.n, pages[&t.pages], slots[&t.slots])
		case t.limit != NoLimit && f.resident(t) > t.limit && !t.over:
			return fmt.Errorf("radix: account %q is over its limit of %d with %d, and not listed", key, t.limit, f.resident(t))
		}
		if err := t.checkOwn(want); err != nil {
			return fmt.Errorf("radix: account %q: %w", key, err)
		}
		delete(pages, &t.pages)
		delete(slots, &t.slots)
	}
	if len(pages)+len(slots) > 0 {
		return fmt.Errorf("radix: %d accounts of pages and slots are of no key", len(pages)+len(slots))
	}
	return nil
}

// checkOwn verifies the queues of a key with a limit.
func (t *tree) checkOwn(want *treeAudit) error {
	if (t.own != nil) != (t.limit != NoLimit) {
		return fmt.Errorf("limit %d, queues of its own: %v", t.limit, t.own != nil)
	}
	for on := range tiers {
		if t.own == nil {
			break
		}
		if err := t.own.pages[on].check(want.pages[on]); err != nil {
			return fmt.Errorf("pages: %w", err)
		}
		if err := t.own.snaps[on].check(want.snaps[on]); err != nil {
			return fmt.Errorf("snapshots: %w", err)
		}
	}
	return nil
}
