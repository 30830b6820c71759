package radix

import (
	"container/heap"
	"slices"
)

// Eviction is one entry that should leave a tier. Nothing has changed but that
// the entry will not be picked again, until Demoted, Dropped or Keep settles it,
// once, in any order.
type Eviction struct {
	From     Tier
	Snapshot bool  // a snapshot, not a page
	At       int   // consumed tokens: a page's end, a snapshot's position
	Page     int32 // device page id; of a snapshot, its tail page; or None
	Slot     int32 // a snapshot's device slot, or None
	Host     int64 // the handles, if the bytes are there: no copy needed
	Disk     int64
	Bytes    int64 // what leaves the tier

	MTPValidFrom int // of a snapshot

	ticket uint64
	node   *node // the page, or the one that the snapshot hangs on
	snap   *snap
}

// Key is the namespace key of the entry. Key and Line read only what never
// changes: they may be called off the loop while the eviction is in flight.
func (ev *Eviction) Key() string { return ev.node.tree.key }

// Line appends all tokens [0, At) of the entry.
func (ev *Eviction) Line(dst []int32) []int32 {
	from := len(dst)
	dst = slices.Grow(dst, ev.At)[:from+ev.At]
	for n := ev.node; n.parent != nil; n = n.parent {
		copy(dst[from+n.end()-PageTokens:], n.tokens[:])
	}
	if ev.snap != nil {
		copy(dst[from+ev.node.end():], ev.snap.TailTokens)
	}
	return dst
}

// orphan is what an eviction in flight still holds after its entry was dropped.
type orphan struct {
	tree       *tree
	bytes      int64 // of each copy on a lower tier
	page, slot int32
	low        [tiers]int64
}

// EvictPages picks up to n device pages that free memory when they go: unlocked,
// held by nobody but the tree, no device page below them; in the policy's order.
// When such pages run out it picks snapshots for their tail pages.
func (f *Forest) EvictPages(n int, now int64) []Eviction {
	return f.evictPages(f.picker(Device), n)
}

func (f *Forest) evictPages(p picker, n int) []Eviction {
	out := make([]Eviction, 0, min(n, p.pageQueue.Len()))
	for len(out) < n {
		top := p.page()
		if top == nil {
			break
		}
		out = append(out, f.pickPage(top, Device))
	}
	for len(out) < n {
		s := p.snap(func(s *snap) bool { return s.Tail >= 0 && f.pages.Refs(s.Tail) == 1 })
		if s == nil {
			break
		}
		out = append(out, f.pickSnap(s, Device))
	}
	p.done()
	return out
}

// EvictSlots picks up to n snapshots whose device slots free memory when they
// go: not locked, held by nobody but the tree; in the policy's order.
func (f *Forest) EvictSlots(n int, now int64) []Eviction {
	return f.evictSlots(f.picker(Device), n)
}

func (f *Forest) evictSlots(p picker, n int) []Eviction {
	out := make([]Eviction, 0, min(n, p.snapQueue.Len()))
	for len(out) < n {
		s := p.snap(nil)
		if s == nil {
			break
		}
		out = append(out, f.pickSnap(s, Device))
	}
	p.done()
	return out
}

// EvictDevice picks pages and snapshots of at least the given bytes, or what
// there is, for a device whose memory is not divided between the two.
func (f *Forest) EvictDevice(bytes int64, now int64) []Eviction {
	return f.evict(f.picker(Device), bytes)
}

// EvictHost picks host copies of at least the given bytes, or what there is:
// first copies that a faster tier has too, then in the policy's order. Settle the
// picks in order: a page may wait for the snapshot that hangs on it.
func (f *Forest) EvictHost(bytes int64, now int64) []Eviction { return f.evict(f.picker(Host), bytes) }

// EvictDisk does the same on the disk.
func (f *Forest) EvictDisk(bytes int64, now int64) []Eviction { return f.evict(f.picker(Disk), bytes) }

func (f *Forest) evict(p picker, bytes int64) []Eviction {
	var out []Eviction
	for got := int64(0); got < bytes; got += out[len(out)-1].Bytes {
		c := p.next()
		if !c.there() {
			break
		}
		out = append(out, f.pick1(c))
	}
	p.done()
	return out
}

// picker looks at what goes next from a tier. What may not go for a reason that
// the queues do not know is held aside until it is done.
type picker struct {
	f         *Forest
	t         Tier
	pageQueue *queue[*node]
	snapQueue *queue[*snap]
	pages     []*node
	snaps     []*snap
}

func (f *Forest) picker(t Tier) picker {
	return picker{f: f, t: t, pageQueue: &f.pageQueues[t], snapQueue: &f.snapQueues[t]}
}

// candidate is what a picker would pick next: a page or a snapshot, or nothing.
type candidate struct {
	page *node
	snap *snap
	from Tier
	life float64 // its rank, so that it can be compared with those of another tier
}

func (c candidate) there() bool { return c.page != nil || c.snap != nil }

// next returns what goes next, a snapshot or a page.
func (p *picker) next() candidate {
	s, n := p.snap(nil), p.page()
	switch {
	case s != nil && (n == nil || s.places[p.t].key <= n.places[p.t].key):
		return candidate{snap: s, from: p.t, life: p.f.life(s.places[p.t].key, p.t)}
	case n != nil:
		return candidate{page: n, from: p.t, life: p.f.life(n.places[p.t].key, p.t)}
	}
	return candidate{}
}

func (f *Forest) pick1(c candidate) Eviction {
	if c.snap != nil {
		return f.pickSnap(c.snap, c.from)
	}
	return f.pickPage(c.page, c.from)
}

// page returns the page that goes next and leaves it in its queue.
func (p *picker) page() *node {
	q := p.pageQueue
	for {
		n, ok := q.top()
		if !ok {
			return nil
		}
		if p.t != Device || p.f.pages.Refs(n.dev) == 1 {
			return n
		}
		p.pages = append(p.pages, heap.Pop(q).(*node))
	}
}

// snap returns the wanted snapshot that goes next and leaves it in its queue.
func (p *picker) snap(want func(*snap) bool) *snap {
	q := p.snapQueue
	for {
		s, ok := q.top()
		switch {
		case !ok:
			return nil
		case p.t == Device && p.f.slots.Refs(s.Slot) > 1 || want != nil && !want(s):
			p.snaps = append(p.snaps, heap.Pop(q).(*snap))
		case p.f.fresh(s, p.t):
			return s
		}
	}
}

func (p *picker) done() {
	for _, n := range p.pages {
		p.f.placePage(n)
	}
	for _, s := range p.snaps {
		p.f.placeSnap(s)
	}
}

// EvictPath picks what only this line has on a tier, the device or the host, for
// a session that is put away: from the end of the given consumed tokens up to the
// first page that is locked or held, or carries pages or snapshots of others.
// Unlock the line and release its own references first.
func (f *Forest) EvictPath(key string, tokens []int32, from Tier) []Eviction {
	var out []Eviction
	n := f.walk(key, tokens, len(tokens)/PageTokens)
	for ; n != nil && n.locks == 0 && n.below[Device] == 0 && n.below[from] == 0; n = n.parent {
		for _, s := range n.snaps {
			if s.At <= len(tokens) && s.extendsTo(tokens) && s.evictable(from) && (from != Device || f.slots.Refs(s.Slot) == 1) {
				out = append(out, f.pickSnap(s, from))
			}
		}
		if slices.ContainsFunc(n.snaps, func(s *snap) bool { return s.stays(from) }) {
			break
		}
		if !n.stays(from) {
			continue
		}
		if !n.evictable(from) || from == Device && f.pages.Refs(n.dev) > 1 {
			break
		}
		out = append(out, f.pickPage(n, from))
	}
	return out
}

func (f *Forest) pick(fl *flight, t Tier) uint64 {
	f.ticket++
	fl.ticket, fl.from = f.ticket, t
	return f.ticket
}

func (f *Forest) pickPage(n *node, t Tier) Eviction {
	ev := Eviction{
		From: t, At: n.end(), Page: n.dev, Slot: None, Host: n.low[Host], Disk: n.low[Disk],
		Bytes: f.opts.PageBytes, node: n, ticket: f.pick(&n.flight, t),
	}
	f.refresh(n)
	return ev
}

func (f *Forest) pickSnap(s *snap, t Tier) Eviction {
	ev := Eviction{
		From: t, Snapshot: true, At: s.At, Page: s.Tail, Slot: s.Slot, Host: s.Host, Disk: s.Disk,
		Bytes: f.snapBytes(s), MTPValidFrom: s.MTPValidFrom,
		node: s.node, snap: s, ticket: f.pick(&s.flight, t),
	}
	f.changed(s, t)
	return ev
}

// Demoted settles an eviction to a slower tier: handle holds a copy there and is
// the tree's now (ev.Host or ev.Disk if there was one already). released is false
// if the entry has been locked meanwhile and no faster tier has it: then it stays
// on both.
func (f *Forest) Demoted(ev Eviction, to Tier, handle int64) (released bool) {
	if to <= ev.From || to >= tiers || handle == 0 {
		panic("radix: Demoted takes a slower tier and a handle there")
	}
	if f.settleOrphan(ev, to, handle) {
		return true
	}
	if ev.Snapshot {
		s := ev.snap
		f.addSnapLow(s, to, handle)
		if released = s.locks == 0 || s.faster(ev.From); released {
			f.giveUpSnap(s, ev.From)
			f.stats.Demoted.Snapshots++
		}
		f.changed(s, ev.From)
		f.changed(s, to)
		return released
	}
	n := ev.node
	if n.low[to] == 0 {
		f.setLow(n, to, handle)
	} else if n.low[to] != handle {
		f.free(to, handle)
	}
	if released = n.locks == 0 || n.faster(ev.From); released {
		f.giveUpPage(n, ev.From)
		f.stats.Demoted.Pages++
	}
	f.refresh(n)
	return released
}

// giveUpPage lets go of one tier's copy.
func (f *Forest) giveUpPage(n *node, t Tier) {
	if t == Device {
		f.pages.Release(f.clearDevice(n))
	} else {
		f.letGoLow(n.tree, t, f.clearLow(n, t), f.opts.PageBytes)
	}
}

func (f *Forest) giveUpSnap(s *snap, t Tier) {
	if t == Device {
		f.releaseSlot(f.clearSlot(s))
	} else {
		f.letGoLow(s.node.tree, t, f.clearSnapLow(s, t), f.snapBytes(s))
	}
}

// Dropped settles an eviction by giving up the tier's copy. What has no other
// copy is gone, and with a page all that hangs on it: its snapshots, and pages
// below that only slower tiers have, with theirs. released is false, and nothing
// is given up, if the entry has come into use meanwhile: locked, or with pages or
// snapshots on it that an eviction from this tier must not lose.
func (f *Forest) Dropped(ev Eviction) (released bool) {
	if f.settleOrphan(ev, ev.From, 0) {
		return true
	}
	if ev.Snapshot {
		return f.dropSnap(ev.snap, ev.From)
	}
	n := ev.node
	switch {
	case n.locks > 0 && !n.faster(ev.From):
	case n.elsewhere(ev.From):
		f.giveUpPage(n, ev.From)
		released = true
	case !n.carries(ev.From):
		f.loseBelow(n)
		f.remove(n)
		released = true
	}
	if released {
		f.stats.Dropped.Pages++
	}
	if !n.gone {
		f.refresh(n)
	}
	return released
}

func (f *Forest) dropSnap(s *snap, from Tier) (released bool) {
	switch {
	case s.locks > 0 && !s.faster(from):
	case s.elsewhere(from):
		f.giveUpSnap(s, from)
		released = true
	default:
		f.lose(s)
		f.removeSnap(s)
		released = true
	}
	if released {
		f.stats.Dropped.Snapshots++
	}
	if !s.gone {
		f.changed(s, from)
	}
	return released
}

// changed puts everything right that depends on whether a snapshot stays on a
// tier.
func (f *Forest) changed(s *snap, t Tier) {
	f.revalue(s, t)
	f.placeSnap(s)
	f.refresh(s.node)
}

// Keep settles an eviction by leaving everything as it was.
func (f *Forest) Keep(ev Eviction) {
	if f.settleOrphan(ev, ev.From, 0) {
		return
	}
	if ev.Snapshot {
		f.changed(ev.snap, ev.From)
		return
	}
	f.refresh(ev.node)
}

// settleOrphan ends the flight. If the entry was dropped meanwhile it lets go of
// what the eviction still held, the new copy included, and says so.
func (f *Forest) settleOrphan(ev Eviction, to Tier, handle int64) bool {
	if o, ok := f.orphans[ev.ticket]; ok {
		delete(f.orphans, ev.ticket)
		f.letGo(flight{}, o)
		if handle != o.low[to] {
			f.free(to, handle)
		}
		return true
	}
	var fl *flight
	switch {
	case ev.snap != nil:
		fl = &ev.snap.flight
	case !ev.Snapshot && ev.node != nil:
		fl = &ev.node.flight
	}
	if fl == nil || fl.ticket != ev.ticket {
		panic("radix: an eviction is settled twice")
	}
	*fl = flight{}
	return false
}

// letGo releases what a dropped entry held, or, while its eviction is in
// flight, keeps it for that eviction's settlement.
func (f *Forest) letGo(fl flight, o orphan) {
	if fl.ticket != 0 {
		f.orphans[fl.ticket] = o
		return
	}
	f.releaseSlot(o.slot, o.page)
	for t := Host; t < tiers; t++ {
		f.letGoLow(o.tree, t, o.low[t], o.bytes)
	}
}

// letGoLow frees a copy on a lower tier that was in a tree's account.
func (f *Forest) letGoLow(of *tree, t Tier, handle, bytes int64) {
	if handle != 0 {
		f.stored(of, t, -bytes)
		f.free(t, handle)
	}
}

func (f *Forest) releaseSlot(slot, page int32) {
	if slot >= 0 {
		f.slots.Release(slot)
	}
	if page >= 0 {
		f.pages.Release(page)
	}
}

// TakeFreed appends the handles on a lower tier that the tree has let go of
// since the last call; their bytes are the caller's to free.
func (f *Forest) TakeFreed(t Tier, out []int64) []int64 {
	out = append(out, f.freed[t]...)
	f.freed[t] = f.freed[t][:0]
	return out
}
