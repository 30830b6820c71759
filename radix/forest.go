package radix

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
)

// PageTokens is the length of a page. Everything that is shared is shared in
// whole pages; only an exact tail ends inside one.
const PageTokens = 128

// Tier is where bytes are.
type Tier uint8

const (
	Device Tier = iota
	Host
	tiers
)

func (t Tier) String() string {
	if t == Device {
		return "device"
	}
	return "host"
}

// ErrMissing says that pages which a call builds on are not in the tree (any
// more): the caller inserts from page 0, or does without.
var ErrMissing = errors.New("radix: pages before this position are not in the tree")

// Options are the sizes that byte counts are made of.
type Options struct {
	PageBytes int64 // one page's slab, padding included
	SlotBytes int64 // one state slot
}

// Forest is the trees of all namespace keys over one pool of pages and one of
// state slots, so that budgets and recency are global.
type Forest struct {
	opts    Options
	pages   *Pool
	slots   *Pool
	roots   map[string]*node
	keys    map[*node]string // the roots' keys
	owner   []*node          // by device page id: the node that names it
	queues  [tiers]queue     // pages that may be evicted from a tier, first to go on top
	snaps   []*snap
	orphans map[uint64]orphan // evictions in flight whose entry has been dropped
	ticket  uint64            // of the latest eviction
	version uint64            // rises when a place that a Match has reported may be gone
	freed   []int64
	stats   Stats
}

// NewForest returns an empty forest over the two pools.
func NewForest(pages, slots *Pool, opts Options) *Forest {
	return &Forest{
		opts: opts, pages: pages, slots: slots,
		roots:   map[string]*node{},
		keys:    map[*node]string{},
		owner:   make([]*node, pages.Size()),
		queues:  [tiers]queue{{tier: Device}, {tier: Host}},
		orphans: map[uint64]orphan{},
	}
}

// node is one full page, or a root (depth 0, no page).
type node struct {
	parent *node
	kids   []*node            // ascending by tokens
	tokens *[PageTokens]int32 // nil at a root
	snaps  []*snap            // whose last full page this is; ascending by At, then tail
	host   int64              // handle, 0 none
	last   int64              // last use; a parent inherits it when a child leaves a tier
	depth  int32              // pages from the start up to this one's end
	dev    int32              // device page id, or None
	locks  int32              // handles on this node plus locked children
	below  [tiers]int32       // children with a page on the tier, at or below them
	pos    [tiers]int32       // place in the tier's queue, -1 none
	counts [tiers]bool        // counted in the parent's below
	gone   bool
	flight
}

// flight marks an entry that an eviction has picked and not yet settled.
type flight struct {
	ticket uint64 // 0 none
	from   Tier
}

func (fl flight) leaving(t Tier) bool { return fl.ticket != 0 && fl.from == t }

func (n *node) end() int { return int(n.depth) * PageTokens }

func (n *node) on(t Tier) bool {
	if t == Device {
		return n.dev >= 0
	}
	return n.host != 0
}

// stays says whether the page is on the tier and not about to leave it.
func (n *node) stays(t Tier) bool { return n.on(t) && !n.leaving(t) }

// evictable says whether the page may be picked from the tier: nothing below it
// is there, nobody uses it. A host copy may go where a device copy remains, or
// where nothing hangs below.
func (n *node) evictable(t Tier) bool {
	if !n.on(t) || n.below[t] > 0 || n.locks > 0 || n.ticket != 0 || n.gone {
		return false
	}
	if t == Device || n.dev >= 0 {
		return true
	}
	return len(n.kids) == 0 && !slices.ContainsFunc(n.snaps, func(s *snap) bool { return s.ticket == 0 })
}

// child returns the child with exactly these tokens, nil if there is none.
func (n *node) child(page *[PageTokens]int32) *node {
	switch len(n.kids) {
	case 0:
		return nil
	case 1:
		if *n.kids[0].tokens == *page {
			return n.kids[0]
		}
		return nil
	}
	if i, ok := n.search(page); ok {
		return n.kids[i]
	}
	return nil
}

func (n *node) search(page *[PageTokens]int32) (int, bool) {
	return slices.BinarySearchFunc(n.kids, page, func(k *node, page *[PageTokens]int32) int {
		return slices.Compare(k.tokens[:], page[:])
	})
}

func pageOf(tokens []int32, i int) *[PageTokens]int32 {
	return (*[PageTokens]int32)(tokens[i*PageTokens : (i+1)*PageTokens])
}

// walk follows tokens for up to `pages` pages and returns the deepest node; nil
// if the key has no tree. It is the one way in: Match, Insert, Publish, Advance
// and EvictPath agree because they all walk here or compare as it does.
func (f *Forest) walk(key string, tokens []int32, pages int) *node {
	n := f.roots[key]
	if n == nil {
		return nil
	}
	for i := range pages {
		k := n.child(pageOf(tokens, i))
		if k == nil {
			break
		}
		n = k
	}
	return n
}

func (f *Forest) root(key string) *node {
	n := f.roots[key]
	if n == nil {
		n = &node{dev: None, pos: [tiers]int32{-1, -1}}
		f.roots[key], f.keys[n] = n, key
	}
	return n
}

// pruneRoot forgets a root that holds nothing, so that salts do not pile up.
func (f *Forest) pruneRoot(n *node) {
	if n != nil && n.parent == nil && !n.gone && len(n.kids) == 0 && len(n.snaps) == 0 && n.locks == 0 {
		delete(f.roots, f.keys[n])
		delete(f.keys, n)
		n.gone = true
		f.version++
	}
}

// Insert adds full pages of consumed tokens: pages[i] is the device page that
// holds tokens [(from+i)*128, (from+i+1)*128). Where the tree has a page for the
// same tokens on the device, that one stays; where it has it on the host only,
// the given one is adopted. It appends to canon which device id the tree names
// for each page: a caller that gets another id than its own may retain that one
// and release its own. The tree holds a reference of its own for what it keeps.
//
// ErrMissing: pages [0, from) are not all present; nothing has changed.
func (f *Forest) Insert(key string, tokens []int32, from int, pages []int32, now int64, canon []int32) ([]int32, error) {
	if from < 0 || (from+len(pages))*PageTokens > len(tokens) {
		return canon, fmt.Errorf("radix: insert pages [%d,%d) of %d tokens", from, from+len(pages), len(tokens))
	}
	if len(pages) == 0 {
		return canon, nil
	}
	n := f.walk(key, tokens, from)
	if from > 0 && (n == nil || int(n.depth) < from) {
		return canon, fmt.Errorf("insert from page %d: %w", from, ErrMissing)
	}
	if n == nil {
		n = f.root(key)
	}
	for i, id := range pages {
		page := pageOf(tokens, from+i)
		k := n.child(page)
		if k == nil {
			k = f.grow(n, page, id)
		} else if k.dev < 0 {
			f.setDevice(k, id)
			f.refresh(k)
		} else if id != k.dev && f.owner[id] != nil {
			panic(fmt.Sprintf("radix: insert of page %d, which the tree has elsewhere", id))
		}
		canon = append(canon, k.dev)
		n = k
	}
	f.touch(n, now)
	return canon, nil
}

// grow adds a child page; nothing below exists, so it is a leaf on every tier.
func (f *Forest) grow(n *node, page *[PageTokens]int32, dev int32) *node {
	tokens := *page
	k := &node{parent: n, tokens: &tokens, dev: None, depth: n.depth + 1, pos: [tiers]int32{-1, -1}}
	f.setDevice(k, dev)
	i, _ := n.search(page)
	n.kids = slices.Insert(n.kids, i, k)
	f.refresh(k)
	f.queues[Host].place(n) // with a child, a host-only page is no candidate
	return k
}

func (f *Forest) setDevice(n *node, id int32) {
	if f.pages.mustHold("insert", id); f.owner[id] != nil {
		panic(fmt.Sprintf("radix: insert of page %d, which the tree has elsewhere", id))
	}
	f.pages.Retain(id)
	f.owner[id], n.dev = n, id
	f.stats.Pages[Device]++
	if n.locks > 0 {
		f.stats.LockedPages++
	}
}

// clearDevice takes the device page out of the node and returns it; its
// reference is the caller's now.
func (f *Forest) clearDevice(n *node) int32 {
	id := n.dev
	f.owner[id], n.dev = nil, None
	f.stats.Pages[Device]--
	if n.locks > 0 {
		f.stats.LockedPages--
	}
	f.version++
	return id
}

func (f *Forest) setHost(n *node, handle int64) {
	n.host = handle
	f.stats.Pages[Host]++
}

func (f *Forest) clearHost(n *node) int64 {
	h := n.host
	n.host = 0
	f.stats.Pages[Host]--
	f.version++
	return h
}

// refresh puts the node's queue places and its parent's counts right after any
// change of it, and carries on upwards as far as something changes. A parent
// that a child leaves inherits the child's last use: whoever used the child used
// the parent, and only now does the parent's own age matter.
func (f *Forest) refresh(n *node) {
	for t := range tiers {
		for m := n; ; m = m.parent {
			f.queues[t].place(m)
			if m.parent == nil {
				break
			}
			counts := m.stays(t) || m.below[t] > 0
			if counts == m.counts[t] {
				break
			}
			m.counts[t] = counts
			if counts {
				m.parent.below[t]++
			} else {
				m.parent.below[t]--
				m.parent.last = max(m.parent.last, m.last)
			}
		}
	}
}

// touch marks the node as used. Its ancestors need no mark while it is on the
// device with them; past a gap the deepest ones on the device do.
func (f *Forest) touch(n *node, now int64) {
	for n != nil {
		n.last = max(n.last, now)
		f.queues[Device].place(n)
		f.queues[Host].place(n)
		if n.dev >= 0 {
			return
		}
		n = n.parent
	}
}

// remove drops an unlocked node with everything below it. Entries whose eviction
// is in flight leave their references behind as orphans, because a copy may be
// reading those bytes.
func (f *Forest) remove(top *node) {
	all := []*node{top}
	for i := 0; i < len(all); i++ {
		all = append(all, all[i].kids...)
	}
	for _, n := range slices.Backward(all) {
		for len(n.snaps) > 0 {
			f.removeSnap(n.snaps[len(n.snaps)-1])
		}
		o := orphan{page: None, slot: None}
		if n.dev >= 0 {
			o.page = f.clearDevice(n)
		}
		if n.host != 0 {
			o.host = f.clearHost(n)
		}
		f.letGo(n.flight, o)
		n.gone = true
		n.flight = flight{}
		f.refresh(n)
	}
	p := top.parent
	i, _ := p.search(top.tokens)
	p.kids = slices.Delete(p.kids, i, i+1)
	f.refresh(p)
	f.pruneRoot(p)
}

// queue orders the pages that may leave a tier: least recently used first, and
// of one age the deepest first.
type queue struct {
	tier  Tier
	nodes []*node
}

func (q *queue) Len() int { return len(q.nodes) }
func (q *queue) Less(i, j int) bool {
	a, b := q.nodes[i], q.nodes[j]
	if a.last != b.last {
		return a.last < b.last
	}
	return a.depth > b.depth
}
func (q *queue) Swap(i, j int) {
	q.nodes[i], q.nodes[j] = q.nodes[j], q.nodes[i]
	q.nodes[i].pos[q.tier], q.nodes[j].pos[q.tier] = int32(i), int32(j)
}
func (q *queue) Push(x any) {
	n := x.(*node)
	n.pos[q.tier] = int32(len(q.nodes))
	q.nodes = append(q.nodes, n)
}
func (q *queue) Pop() any {
	n := q.nodes[len(q.nodes)-1]
	q.nodes[len(q.nodes)-1] = nil
	q.nodes = q.nodes[:len(q.nodes)-1]
	n.pos[q.tier] = -1
	return n
}

// place puts the node in or out of the queue, or moves it to its new age.
func (q *queue) place(n *node) {
	in, want := n.pos[q.tier] >= 0, n.evictable(q.tier)
	switch {
	case in && want:
		heap.Fix(q, int(n.pos[q.tier]))
	case in:
		heap.Remove(q, int(n.pos[q.tier]))
	case want:
		heap.Push(q, n)
	}
}
