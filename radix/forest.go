package radix

import (
	"errors"
	"fmt"
	"slices"
)

// PageTokens is the length of a page. Everything that is shared is shared in
// whole pages; only an exact tail ends inside one.
const PageTokens = 128

// Tier is where bytes are.
type Tier uint8

// The tiers, fastest first.
const (
	Device Tier = iota
	Host
	Disk
	tiers
)

func (t Tier) String() string { return [tiers]string{"device", "host", "disk"}[t] }

// ErrMissing says that pages which a call builds on are not in the tree (any
// more): the caller inserts from page 0, or does without.
var ErrMissing = errors.New("radix: pages before this position are not in the tree")

// Options are the sizes that byte counts are made of.
type Options struct {
	PageBytes int64 // one page's slab, padding included
	SlotBytes int64 // one state slot
	Policy    Policy
}

// Forest is the trees of all namespace keys over one pool of pages and one of
// state slots, so that budgets and recency are global.
type Forest struct {
	opts       Options
	pages      *Pool
	slots      *Pool
	roots      map[string]*node
	trees      map[string]*tree    // of the roots, and of keys that have something else
	sweepAt    int                 // so many trees are looked through for empty ones
	over       []*tree             // those over their limits, and some that were
	owner      []*node             // by device page id: the node that names it
	pageQueues [tiers]queue[*node] // what may be evicted from a tier, first to go on top
	snapQueues [tiers]queue[*snap]
	clock      [tiers]float64 // turnovers of a tier
	turnover   [tiers]float64 // bytes of one
	snaps      []*snap
	orphans    map[uint64]orphan // evictions in flight whose entry has been dropped
	ticket     uint64            // of the latest eviction
	version    uint64            // rises when a place that a Match has reported may be gone
	lost       lost
	spare      []node         // of the latest block
	freed      [tiers][]int64 // handles let go of since the last TakeFreed
	stats      Stats
}

// NewForest returns an empty forest over the two pools.
func NewForest(pages, slots *Pool, opts Options) *Forest {
	f := &Forest{
		opts: opts, pages: pages, slots: slots,
		roots:   map[string]*node{},
		trees:   map[string]*tree{},
		sweepAt: accountsMin,
		owner:   make([]*node, pages.Size()),
		orphans: map[uint64]orphan{},
		lost:    make(lost, lostEntries),
	}
	for t := range tiers {
		f.pageQueues[t].tier, f.snapQueues[t].tier = t, t
		f.turnover[t] = float64(max(int64(pages.Size())*opts.PageBytes, int64(slots.Size())*opts.SlotBytes, 1))
	}
	return f
}

// node is one full page, or a root (depth 0, no page).
type node struct {
	tree   *tree
	parent *node
	kids   []*node      // ascending by tokens
	snaps  []*snap      // whose last full page this is; ascending by At, then tail
	low    [tiers]int64 // handles on the lower tiers, 0 none
	hash   uint64       // of all tokens up to the page's end
	depth  int32        // pages from the start up to this one's end
	dev    int32        // device page id, or None
	locks  int32        // handles on this node plus locked children
	pins   int32        // pins on this node plus pinned children
	below  [tiers]int32 // children with a page on the tier, at or below them
	places [tiers]place
	counts [tiers]bool // counted in the parent's below
	gone   bool

	lostSnaps bool // a snapshot on it was dropped
	touched        // a parent inherits it when a child leaves a tier
	flight

	only   [1]*node          // room for kids as long as there is one
	tokens [PageTokens]int32 // last, so that the collector need not look at them
}

func (n *node) place(t Tier) *place { return &n.places[t] }
func (n *node) deep() int           { return int(n.depth) }

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
	return n.low[t] != 0
}

// faster says whether a faster tier has the page too.
func (n *node) faster(t Tier) bool {
	return t > Device && n.dev >= 0 || t > Host && n.low[Host] != 0
}

// elsewhere says whether another tier has the page too.
func (n *node) elsewhere(t Tier) bool {
	return n.faster(t) || t < Disk && n.low[Disk] != 0 || t < Host && n.low[Host] != 0
}

// stays says whether the page is on the tier and not about to leave it.
func (n *node) stays(t Tier) bool { return n.on(t) && !n.leaving(t) }

// evictable says whether the page may be picked from the tier: a faster tier has
// it too, or nobody uses it and nothing that is on this tier or a faster one
// hangs on it. (Device snapshots do not keep their page: it can go to the host
// without them.) What has hanging on it on the disk stays there in any case: after
// a restart nothing else leads to it.
func (n *node) evictable(t Tier) bool {
	switch {
	case !n.on(t) || n.ticket != 0 || n.gone:
		return false
	case n.faster(t):
		return t != Disk || !n.leads()
	case n.locks > 0:
		return false
	}
	return !n.carries(t)
}

// leads says whether a page below, or a snapshot on the page, stays on the disk.
func (n *node) leads() bool {
	return n.below[Disk] > 0 || slices.ContainsFunc(n.snaps, func(s *snap) bool { return s.stays(Disk) })
}

// carries says whether something below the page, or a snapshot on it if the tier
// is a lower one, stays on the tier or a faster one.
func (n *node) carries(t Tier) bool {
	for x := Device; x <= t; x++ {
		if n.below[x] > 0 {
			return true
		}
	}
	return t != Device && slices.ContainsFunc(n.snaps, func(s *snap) bool {
		return s.ticket == 0 && (s.on(t) || s.faster(t))
	})
}

// child returns the child with exactly these tokens, nil if there is none.
func (n *node) child(page *[PageTokens]int32) *node {
	switch len(n.kids) {
	case 0:
		return nil
	case 1:
		if n.kids[0].tokens == *page {
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
		n = f.newNode(nil, f.account(key))
		n.hash = keyHash(key)
		f.roots[key] = n
	}
	return n
}

// pruneRoot forgets a root that holds nothing, so that salts do not pile up.
func (f *Forest) pruneRoot(n *node) {
	if n != nil && n.parent == nil && !n.gone && len(n.kids) == 0 && len(n.snaps) == 0 && n.locks == 0 {
		delete(f.roots, n.tree.key)
		n.gone = true
		f.version++
		f.pruneAccount(n.tree)
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
		if f.pages.mustHold("insert", id); f.owner[id] != nil && f.owner[id] != k {
			panic(fmt.Sprintf("radix: insert of page %d, which the tree has elsewhere", id))
		}
		if k == nil {
			k = f.grow(n, page)
		}
		if k.dev < 0 {
			f.setDevice(k, id)
			f.refresh(k)
		}
		canon = append(canon, k.dev)
		n = k
	}
	f.touch(n, now)
	return canon, nil
}

// nodeBlock is how many nodes are allocated at once: new pages cost no allocation
// each. A block is freed when all its nodes are unused.
const nodeBlock = 32

func (f *Forest) newNode(parent *node, t *tree) *node {
	if len(f.spare) == 0 {
		f.spare = make([]node, nodeBlock)
	}
	n := &f.spare[0]
	f.spare = f.spare[1:]
	n.tree, n.parent, n.dev = t, parent, None
	n.kids = n.only[:0]
	if parent != nil {
		n.depth = parent.depth + 1
	}
	return n
}

// grow adds a child page that is on no tier yet; the caller puts it on one.
func (f *Forest) grow(n *node, page *[PageTokens]int32) *node {
	k := f.newNode(n, n.tree)
	k.tokens, k.hash = *page, chain(n.hash, page[:])
	i, _ := n.search(page)
	n.kids = slices.Insert(n.kids, i, k)
	return k
}

func (f *Forest) setDevice(n *node, id int32) {
	f.pages.Retain(id)
	f.chargePage(n.tree, id)
	f.owner[id], n.dev = n, id
	f.stats.Pages[Device]++
	f.enter(Device, f.opts.PageBytes)
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

func (f *Forest) setLow(n *node, t Tier, handle int64) {
	n.low[t] = handle
	f.stored(n.tree, t, f.opts.PageBytes)
	f.stats.Pages[t]++
	f.enter(t, f.opts.PageBytes)
}

// clearLow takes a lower tier's handle out of the node; it is the caller's now,
// and stays in the tree's account until then.
func (f *Forest) clearLow(n *node, t Tier) int64 {
	h := n.low[t]
	n.low[t] = 0
	f.stats.Pages[t]--
	f.version++
	return h
}

func (f *Forest) free(t Tier, handle int64) {
	if handle != 0 {
		f.freed[t] = append(f.freed[t], handle)
	}
}

// refresh puts the node's queue places and its parent's counts right after any
// change of it, and carries on upwards as far as something changes. A parent
// that a child leaves inherits the child's last use: whoever used the child used
// the parent, and only now does the parent's own age matter.
func (f *Forest) refresh(n *node) {
	for t := range tiers {
		for m := n; ; m = m.parent {
			f.placePage(m)
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
				m.parent.inherit(&m.touched)
			}
		}
	}
}

// touch marks the node as used. Its ancestors need no mark while it is on the
// device with them; past a gap the deepest ones on the device do. A page that has
// been marked has had them marked.
func (f *Forest) touch(n *node, now int64) {
	for n != nil && n.last < now {
		f.use(&n.touched, now)
		f.placePage(n)
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
		o := orphan{tree: n.tree, bytes: f.opts.PageBytes, page: None, slot: None}
		if n.dev >= 0 {
			o.page = f.clearDevice(n)
		}
		for t := Host; t < tiers; t++ {
			if n.low[t] != 0 {
				o.low[t] = f.clearLow(n, t)
			}
		}
		f.letGo(n.flight, o)
		n.gone = true
		n.flight = flight{}
		f.refresh(n)
	}
	p := top.parent
	i, _ := p.search(&top.tokens)
	p.kids = slices.Delete(p.kids, i, i+1)
	f.refresh(p)
	f.pruneRoot(p)
}
