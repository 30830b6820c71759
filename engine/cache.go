package engine

import (
	"fmt"
	"slices"

	"rocket/radix"
)

// reservePages takes references to the matched pages for s, or for nobody; for those that only a lower tier has, it reserves device pages
// and notes the copies.
func (e *Engine) reservePages(j *restoring, m *radix.Match, s *Seq) error {
	for i, place := range m.Pages {
		if place.Device != radix.None {
			e.pageIDs.Retain(place.Device)
			j.pages = append(j.pages, place.Device)
			continue
		}
		id, err := e.allocPage(s)
		if err != nil {
			return fmt.Errorf("restore page %d of %d: %w", i, len(m.Pages), err)
		}
		j.pages = append(j.pages, id)
		j.copies = append(j.copies, blobCopy{blob: blobOf(place.Host, place.Disk), page: id, slot: radix.None})
		j.adopt = true
	}
	j.have = m.Tokens
	return nil
}

// reserveState takes a reference to the matched snapshot's slot and partial page, or reserves both for a copy.
func (e *Engine) reserveState(j *restoring, m *radix.Match, s *Seq) error {
	if !m.Found {
		return nil
	}
	snap := m.Snapshot
	j.tail, j.at = snap.Tail, snap.At
	partial := snap.At%radix.PageTokens != 0 && snap.At > m.Tokens // else a full page of the match holds those rows
	if snap.Slot != radix.None {
		e.slotIDs.Retain(snap.Slot)
		j.slot = snap.Slot
		if partial {
			e.pageIDs.Retain(snap.Tail)
			j.pages = append(j.pages, snap.Tail)
		}
	} else {
		c := blobCopy{blob: blobOf(snap.Host, snap.Disk), page: radix.None}
		var err error
		if c.slot, err = e.allocSlot(s); err != nil {
			return fmt.Errorf("restore state at %d: %w", snap.At, err)
		}
		j.slot = c.slot
		if snap.At%radix.PageTokens != 0 { // the blob has the partial page, wanted or not
			if c.page, err = e.allocPage(s); err != nil {
				return fmt.Errorf("restore partial page at %d: %w", snap.At, err)
			}
			if partial {
				j.pages = append(j.pages, c.page)
			} else {
				j.spare = append(j.spare, c.page)
			}
		}
		j.copies = append(j.copies, c)
		j.adopt = true
		j.tail = c.page
	}
	j.have = max(j.have, j.at)
	j.host, j.disk = storedTokens(m)
	return nil
}

// storedTokens is how many of the restored tokens need bytes from the host and from the disk: those of pages below the
// state that the device lacks, and those since the last page edge when the state itself is there.
func storedTokens(m *radix.Match) (host, disk int) {
	add := func(b blob, n int) {
		if b.tier == radix.Host {
			host += n
		} else {
			disk += n
		}
	}
	for _, place := range m.Pages[:min(len(m.Pages), m.Snapshot.At/radix.PageTokens)] {
		if place.Device == radix.None {
			add(blobOf(place.Host, place.Disk), radix.PageTokens)
		}
	}
	if snap := m.Snapshot; snap.Slot == radix.None {
		add(blobOf(snap.Host, snap.Disk), snap.At%radix.PageTokens)
	}
	return host, disk
}

// abandon lets go of what a restore that will not happen had taken.
func (e *Engine) abandon(j *restoring) {
	for _, id := range append(j.pages, j.spare...) {
		e.pageIDs.Release(id)
	}
	if j.slot != radix.None {
		e.slotIDs.Release(j.slot)
	}
	e.forest.Unlock(&j.lock)
	*j = *nothing("")
}

// adopt tells the tree about device copies that the restore made, so that others find them.
func (e *Engine) adopt(s *Seq, j *restoring) {
	full := j.have / radix.PageTokens
	canon, err := e.forest.Insert(s.ns, s.line[:full*radix.PageTokens], 0, j.pages[:full], e.now(), e.canon[:0])
	if err == nil {
		e.canon = canon
		if j.at > 0 {
			_, err = e.forest.Publish(s.ns, s.line[:j.at], radix.Snapshot{At: j.at, Slot: j.slot, Tail: j.tail}, e.now())
		}
	}
	if err != nil {
		e.opts.Log.Error("adopt restored pages failed", "error", err)
	}
	for _, id := range j.spare {
		e.pageIDs.Release(id)
	}
}

// starved handles a timeline that found no room. The youngest other run is preempted: its pages go to the tree, from
// where this step's next tries may evict them, and it replays later. Idle timelines are parked before that. A run
// that is alone and still finds no room ends with ErrPoolFull.
//
// Where s's namespace yields (quota.go), only others of the namespace give way.
func (e *Engine) starved(s *Seq, r *Run) {
	yields := e.yields(s)
	theirs := func(other *Seq) bool { return other != s && (!yields || other.ns == s.ns) }
	if e.parkIdle(theirs) {
		e.retry = true
		return
	}
	if r == nil {
		e.unfollow(s) // somebody else's turn; a Run of its own will try again
		return
	}
	for i := len(e.running) - 1; i >= 0; i-- {
		victim := e.running[i]
		if !theirs(victim.seq) || victim.order < r.order || victim.seq.cold || victim.seq.moving || e.batch.has(victim.seq) {
			continue
		}
		e.preempt(victim.seq)
		e.retry = true
		return
	}
	if e.alone(r) {
		e.finish(r, FinishError, fmt.Errorf("turn of %d tokens: %w", len(s.line), ErrPoolFull))
		return
	}
	oldest := e.running[slices.IndexFunc(e.running, func(other *Run) bool { return other == r || theirs(other.seq) })]
	if !s.cold && r.order != oldest.order { // wait for the older ones
		e.preempt(s)
		e.retry = true
	}
}

func (e *Engine) preempt(s *Seq) {
	e.park(s)
	s.preempted = true
	e.stats.Preemptions++
}

// alone reports whether nobody else holds anything that could be freed by waiting: no other run, no detach, restore or
// fork under way. The command that ends one of those wakes the loop.
func (e *Engine) alone(r *Run) bool {
	if e.holding > 0 || len(e.marks) > 0 {
		return false
	}
	for s := range e.seqs {
		if s.moving {
			return false
		}
	}
	for _, other := range e.running {
		if other != r && !other.seq.cold {
			return false
		}
	}
	return len(e.batch.Segs) == 0
}

// parkIdle moves, of those that may go, the idle timeline that was used longest ago to the tree, if one holds device memory.
// Pinned ones come last: the tree keeps what their pins name, but they hold more than that.
func (e *Engine) parkIdle(may func(*Seq) bool) bool {
	var oldest *Seq
	for other := range e.seqs {
		if !may(other) || other.run != nil || other.cold || other.moving || e.batch.has(other) {
			continue
		}
		if oldest == nil || other.pinned != oldest.pinned && oldest.pinned || other.pinned == oldest.pinned && other.used < oldest.used {
			oldest = other
		}
	}
	if oldest == nil {
		return false
	}
	e.unfollow(oldest)
	e.park(oldest)
	return true
}
