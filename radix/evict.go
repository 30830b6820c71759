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
	Host     int64 // the handle, if the bytes are on the host already: no copy needed
	Bytes    int64 // what leaves the tier

	ticket uint64
	node   *node
	snap   *snap
}

// orphan is what an eviction in flight still holds after its entry was dropped.
type orphan struct {
	page, slot int32
	host       int64
}

// EvictPages picks up to n device pages that free memory when they go: unlocked,
// held by nobody but the tree, no device page below them; least recently used
// first. When such pages run out it picks snapshots for their tail pages.
func (f *Forest) EvictPages(n int, now int64) []Eviction {
	var out []Eviction
	var held []*node
	q := &f.queues[Device]
	for len(out) < n && q.Len() > 0 {
		top := q.nodes[0]
		if f.pages.Refs(top.dev) > 1 {
			held = append(held, heap.Pop(q).(*node))
			continue
		}
		out = append(out, f.pickPage(top, Device))
	}
	for _, h := range held {
		q.place(h)
	}
	if len(out) == n {
		return out
	}
	tails := f.rankSnaps(Device, now, func(s *snap) bool {
		return s.Tail >= 0 && f.pages.Refs(s.Tail) == 1
	})
	for len(out) < n {
		s := tails.next()
		if s == nil {
			break
		}
		out = append(out, f.pickSnap(s, Device))
	}
	return out
}

// EvictSlots picks up to n snapshots whose device slots free memory when they
// go: not locked, held by nobody but the tree. See rank for the order.
func (f *Forest) EvictSlots(n int, now int64) []Eviction {
	var out []Eviction
	order := f.rankSnaps(Device, now, func(s *snap) bool { return f.slots.Refs(s.Slot) == 1 })
	for len(out) < n {
		s := order.next()
		if s == nil {
			break
		}
		out = append(out, f.pickSnap(s, Device))
	}
	return out
}

// EvictHost picks host copies of at least the given bytes, or what there is:
// pages leaf first and snapshots by rank, whichever was used longer ago. Settle
// the picks in order: a page may wait for the snapshot that hangs on it.
func (f *Forest) EvictHost(bytes int64, now int64) []Eviction {
	var out []Eviction
	q := &f.queues[Host]
	order := f.rankSnaps(Host, now, func(s *snap) bool { return s.locks == 0 || s.Slot >= 0 })
	s := order.next()
	for got := int64(0); got < bytes; got += out[len(out)-1].Bytes {
		switch {
		case s != nil && (q.Len() == 0 || s.last <= q.nodes[0].last):
			out = append(out, f.pickSnap(s, Host))
			s = order.next()
		case q.Len() > 0:
			out = append(out, f.pickPage(q.nodes[0], Host))
		default:
			return out
		}
	}
	return out
}

// EvictPath picks what only this line has on the device, for a session that is
// put away: from the end of the given consumed tokens up to the first page that
// is locked or held, or has device pages or device snapshots of others on it. Unlock the line and
// release its own references first.
func (f *Forest) EvictPath(key string, tokens []int32) []Eviction {
	var out []Eviction
	depth := len(tokens) / PageTokens
	n := f.walk(key, tokens, depth)
	for ; n != nil && n.locks == 0 && n.below[Device] == 0; n = n.parent {
		for _, s := range n.snaps {
			if s.At <= len(tokens) && s.extendsTo(tokens) && f.free(s) {
				out = append(out, f.pickSnap(s, Device))
			}
		}
		if slices.ContainsFunc(n.snaps, func(s *snap) bool { return s.stays(Device) }) {
			break
		}
		if n.dev < 0 || n.leaving(Device) {
			continue
		}
		if !n.evictable(Device) || f.pages.Refs(n.dev) > 1 {
			break
		}
		out = append(out, f.pickPage(n, Device))
	}
	return out
}

func (f *Forest) free(s *snap) bool {
	return s.Slot >= 0 && s.ticket == 0 && s.locks == 0 && f.slots.Refs(s.Slot) == 1
}

func (f *Forest) pick(fl *flight, t Tier) uint64 {
	f.ticket++
	fl.ticket, fl.from = f.ticket, t
	return f.ticket
}

func (f *Forest) pickPage(n *node, t Tier) Eviction {
	ev := Eviction{
		From: t, At: n.end(), Page: n.dev, Slot: None, Host: n.host, Bytes: f.opts.PageBytes,
		node: n, ticket: f.pick(&n.flight, t),
	}
	f.refresh(n)
	return ev
}

func (f *Forest) pickSnap(s *snap, t Tier) Eviction {
	ev := Eviction{
		From: t, Snapshot: true, At: s.At, Page: s.Tail, Slot: s.Slot, Host: s.Host, Bytes: f.snapBytes(s),
		snap: s, ticket: f.pick(&s.flight, t),
	}
	f.refresh(s.node)
	return ev
}

// Demoted settles an eviction from the device: handle holds a copy on the host
// and is the tree's now (ev.Host if there was one already). released is false if
// the entry has been locked meanwhile: then it is on both tiers.
func (f *Forest) Demoted(ev Eviction, handle int64) (released bool) {
	if ev.From != Device || handle == 0 {
		panic("radix: Demoted takes an eviction from the device and a host handle")
	}
	if f.settleOrphan(ev, handle) {
		return true
	}
	if ev.Snapshot {
		return f.demoteSnap(ev.snap, handle)
	}
	n := ev.node
	if n.host == 0 {
		f.setHost(n, handle)
	} else if n.host != handle {
		f.freed = append(f.freed, handle)
	}
	if released = n.locks == 0; released {
		f.pages.Release(f.clearDevice(n))
		f.stats.Demoted.Pages++
	}
	f.refresh(n)
	return released
}

func (f *Forest) demoteSnap(s *snap, handle int64) (released bool) {
	if s.Host == 0 {
		f.setSnapHost(s, handle)
	} else if s.Host != handle {
		f.freed = append(f.freed, handle)
	}
	if released = s.locks == 0; released {
		f.releaseSlot(f.clearSlot(s))
		f.stats.Demoted.Snapshots++
	}
	f.refresh(s.node)
	return released
}

// Dropped settles an eviction by giving up the tier's copy. What has no other
// copy is gone, and with a page all that hangs on it: its snapshots, and host
// pages below with theirs. released is false, and nothing is given up, if the entry has come into
// use meanwhile: locked, or with new pages on it.
func (f *Forest) Dropped(ev Eviction) (released bool) {
	if f.settleOrphan(ev, 0) {
		return true
	}
	if ev.Snapshot {
		return f.dropSnap(ev.snap, ev.From)
	}
	n := ev.node
	defer func() {
		if !n.gone {
			f.refresh(n)
		}
	}()
	other := n.host != 0
	if ev.From == Host {
		other = n.dev >= 0
	}
	switch {
	case n.locks > 0 && !(ev.From == Host && other):
		return false
	case other && ev.From == Device:
		f.pages.Release(f.clearDevice(n))
	case other:
		f.freed = append(f.freed, f.clearHost(n))
	case ev.From == Device && n.below[Device] > 0, ev.From == Host && len(n.kids)+len(n.snaps) > 0:
		return false
	default:
		f.remove(n)
	}
	f.stats.Dropped.Pages++
	return true
}

func (f *Forest) dropSnap(s *snap, from Tier) (released bool) {
	other := s.Host != 0
	if from == Host {
		other = s.Slot >= 0
	}
	switch {
	case s.locks > 0 && !(from == Host && other):
		f.refresh(s.node)
		return false
	case !other:
		f.removeSnap(s)
	case from == Device:
		f.releaseSlot(f.clearSlot(s))
	default:
		f.freed = append(f.freed, f.clearSnapHost(s))
	}
	f.stats.Dropped.Snapshots++
	if !s.gone {
		f.refresh(s.node)
	}
	return true
}

// Keep settles an eviction by leaving everything as it was.
func (f *Forest) Keep(ev Eviction) {
	if f.settleOrphan(ev, 0) {
		return
	}
	if ev.Snapshot {
		f.refresh(ev.snap.node)
	} else {
		f.refresh(ev.node)
	}
}

// settleOrphan ends the flight. If the entry was dropped meanwhile it lets go of
// what the eviction still held, the new copy included, and says so.
func (f *Forest) settleOrphan(ev Eviction, handle int64) bool {
	if o, ok := f.orphans[ev.ticket]; ok {
		delete(f.orphans, ev.ticket)
		f.letGo(flight{}, o)
		if handle != 0 && handle != o.host {
			f.freed = append(f.freed, handle)
		}
		return true
	}
	var fl *flight
	switch {
	case ev.snap != nil:
		fl = &ev.snap.flight
	case ev.node != nil:
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
	if o.host != 0 {
		f.freed = append(f.freed, o.host)
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

// TakeFreed appends the host handles that the tree has let go of since the last
// call; their bytes are the caller's to free.
func (f *Forest) TakeFreed(out []int64) []int64 {
	out = append(out, f.freed...)
	f.freed = f.freed[:0]
	return out
}

// ForgetHost gives up what a line has on the host only, because the bytes there proved to be bad: the first page
// without a device copy goes with all that hangs below it, and so do the line's snapshots without a slot. What is
// locked or on its way out stays.
func (f *Forest) ForgetHost(key string, line []int32) {
	n := f.roots[key]
	for n != nil {
		for i := len(n.snaps) - 1; i >= 0; i-- {
			if s := n.snaps[i]; s.Slot < 0 && s.ticket == 0 && s.locks == 0 && s.At <= len(line) && s.extendsTo(line) {
				f.removeSnap(s)
				f.stats.Dropped.Snapshots++
			}
		}
		if n.gone || n.end()+PageTokens > len(line) {
			return
		}
		k := n.child(pageOf(line, int(n.depth)))
		if k != nil && k.dev < 0 {
			if k.locks == 0 && k.ticket == 0 {
				f.remove(k)
				f.stats.Dropped.Pages++
			}
			return
		}
		n = k
	}
}
