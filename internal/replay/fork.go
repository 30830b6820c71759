package replay

import "rocket/radix"

// fork attaches a child to its parent, as Mark and Fork do: it shares the parent's pages and the deepest state at or
// below the fork, and copies nothing. A cold parent leaves a cold child, which its first turn restores.
func (w *walker) fork(child int32) error {
	c := &w.t.Sessions[child]
	s := newSeq()
	w.idle[child] = s
	p := w.idle[c.Parent]
	if p == nil || p.cold {
		return nil
	}
	want := c.ForkAt - 1
	state, slot := 0, radix.None
	if p.consumed <= want {
		state, slot = p.consumed, p.slot
	}
	if state < want {
		r := &w.t.Requests[p.last]
		line := cut(append(append([]Seg{}, r.Prompt...), r.Output...), 0, c.ForkAt)
		w.f.Match(key, appendTokens(nil, line, w.o.Low, w.o.Vocab), &w.match)
		if m := &w.match; m.Found && m.Snapshot.At > state && m.Snapshot.At <= p.have {
			state, slot = m.Snapshot.At, m.Snapshot.Slot
		}
	}
	s.have = min(p.have, want)
	s.pages = append(s.pages, p.pages[:(s.have+radix.PageTokens-1)/radix.PageTokens]...)
	for _, id := range s.pages {
		w.pages.Retain(id)
	}
	if slot != radix.None {
		w.slots.Retain(slot)
	}
	if slot != radix.None && w.o.ShedStates {
		w.slots.Retain(slot)
		s.base, s.baseAt = slot, state
	}
	s.slot, s.consumed, s.lastCapture, s.cold, s.used = slot, state, state, false, w.now
	w.r.Forks++
	w.resident.hold(child, s, c.ForkAt)
	return nil
}
