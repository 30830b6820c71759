package replay

import "rocket/radix"

// One budget of bytes holds pages and states: the two Pools have as many ids as would fit if there were nothing else,
// and an id is taken only when the bytes of all taken ones stay within the budget.

func (w *walker) used() int64 {
	return int64(w.pages.Used())*w.o.Geometry.PageBytes + int64(w.slots.Used())*w.o.Geometry.SlotBytes
}

func (w *walker) allocPage() (int32, error) { return w.alloc(w.pages, w.o.Geometry.PageBytes) }
func (w *walker) allocSlot() (int32, error) { return w.alloc(w.slots, w.o.Geometry.SlotBytes) }

func (w *walker) alloc(p *radix.Pool, bytes int64) (int32, error) {
	for w.used()+bytes > w.budget {
		if !w.makeRoom(bytes) && !w.shedIdle() && !w.parkIdle() {
			return radix.None, errStarved
		}
	}
	id, ok := p.Alloc()
	if !ok {
		return radix.None, errStarved
	}
	w.r.PeakBytes = max(w.r.PeakBytes, w.used())
	w.r.PeakPages, w.r.PeakStates = max(w.r.PeakPages, w.pages.Used()), max(w.r.PeakStates, w.slots.Used())
	return id, nil
}

// makeRoom evicts pages and states of at least the given bytes, in the policy's one order of both, and says whether
// anything went. So the split between the two moves with what is worth keeping.
func (w *walker) makeRoom(bytes int64) bool {
	evs := w.f.EvictDevice(max(bytes, pageBatch*w.o.Geometry.PageBytes), w.now)
	for _, ev := range evs {
		w.f.Dropped(ev)
		if ev.Snapshot {
			w.r.EvictedSnapshots++
		} else {
			w.r.EvictedPages++
		}
	}
	return len(evs) > 0
}

// shedIdle makes the fork that was used longest ago step back to the state at its branch point, which its siblings
// share; the tree's snapshot of its end may be evicted then. Its pages stay.
func (w *walker) shedIdle() bool {
	s, session := w.oldestIdle(func(s *seq) bool { return s.base != radix.None && s.slot != s.base && s.consumed > s.baseAt })
	if s == nil {
		return false
	}
	w.resident.stuck()
	w.slots.Release(s.slot)
	w.slots.Retain(s.base)
	s.slot, s.consumed = s.base, s.baseAt
	w.resident.shed(session, s.slot)
	w.r.Shed++
	return true
}

// oldestIdle finds the timeline of that kind that a session keeps and used longest ago.
func (w *walker) oldestIdle(want func(*seq) bool) (oldest *seq, session int32) {
	for n, s := range w.idle {
		if !s.busy && !s.cold && want(s) && (oldest == nil || s.used < oldest.used || s.used == oldest.used && n < session) {
			oldest, session = s, n
		}
	}
	return oldest, session
}

// parkIdle moves the timeline that a session keeps and used longest ago to the tree.
func (w *walker) parkIdle() bool {
	oldest, session := w.oldestIdle(func(*seq) bool { return true })
	if oldest == nil {
		return false
	}
	w.resident.stuck()
	w.resident.release(session)
	w.r.Parked++
	w.close(oldest) // its end is published already
	return true
}
