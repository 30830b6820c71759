package replay

import (
	"slices"

	"rocket/radix"
)

// This file does with accounts what the engine does with bytes, call for call: see engine's open.go, seq.go and
// loop.go. The namespace key is one, as on a server with one tenant.
const key = ""

// begin is Open and Start: match, lock, touch, take references, plan the captures.
func (w *walker) begin(s *seq) {
	if !s.cold { // the session kept its timeline: the line went on, or a sibling has computed more of it
		w.f.Match(key, s.line, &w.match)
		if w.match.Start() > s.consumed || s.consumed >= len(s.line) {
			w.drop(s)
		}
	}
	if s.cold {
		w.restore(s)
	}
	w.f.Match(key, s.line, &w.match)
	g := w.o.Geometry
	points := radix.CapturePoints(s.consumed, len(s.line), w.match.Branch, nil, g.SlotBytes, g.TokenBytes)
	s.captures = slices.DeleteFunc(points, func(p int) bool { return p <= s.consumed || p >= len(s.line) })
}

// restore takes what the tree has. Everything is on the device, so it takes no room.
func (w *walker) restore(s *seq) {
	m := &w.match
	w.f.Match(key, s.line, m)
	s.lock = w.f.Lock(m)
	w.f.Touch(m, w.now)
	for _, p := range m.Pages {
		w.pages.Retain(p.Device)
		s.pages = append(s.pages, p.Device)
	}
	if m.Found {
		w.slots.Retain(m.Snapshot.Slot)
		s.slot = m.Snapshot.Slot
		if m.Snapshot.At%radix.PageTokens != 0 && m.Snapshot.At > m.Tokens {
			w.pages.Retain(m.Snapshot.Tail)
			s.pages = append(s.pages, m.Snapshot.Tail)
		}
	}
	w.f.UnlockSnapshot(&s.lock)
	s.consumed = m.Start()
	s.have = max(m.Tokens, s.consumed)
	s.lastCapture = s.consumed
	s.cold = false
}

// advance consumes the line up to target in steps of at most step tokens, cut at the planned captures.
func (w *walker) advance(s *seq, target, step int) error {
	for s.consumed < target {
		rows := min(target-s.consumed, step)
		if step == 1 { // nothing happens between page edges
			rows = min(target-s.consumed, radix.PageTokens-s.consumed%radix.PageTokens)
		}
		for len(s.captures) > 0 && s.captures[0] <= s.consumed {
			s.captures = s.captures[1:]
		}
		if len(s.captures) > 0 {
			rows = min(rows, s.captures[0]-s.consumed)
		}
		if err := w.extend(s, rows); err != nil {
			return err
		}
		s.consumed += rows
		s.have = max(s.have, s.consumed)
		planned := len(s.captures) > 0 && s.captures[0] == s.consumed
		if planned || s.consumed%radix.PageTokens == 0 && s.consumed-s.lastCapture >= w.spacing {
			if err := w.publish(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// extend makes the next rows writable: a state slot of its own, a partial page of its own, new pages behind.
func (w *walker) extend(s *seq, rows int) error {
	if s.slot == radix.None || w.slots.Refs(s.slot) > 1 {
		id, err := w.allocSlot()
		if err != nil {
			return err
		}
		if s.slot != radix.None {
			w.slots.Release(s.slot)
			w.r.StateCopies++
		}
		s.slot = id
	}
	end := s.consumed + rows
	for i := max(s.have, s.consumed) / radix.PageTokens; i*radix.PageTokens < end && end > s.have; i++ {
		switch {
		case i == len(s.pages):
			id, err := w.allocPage()
			if err != nil {
				return err
			}
			s.pages = append(s.pages, id)
		case w.pages.Refs(s.pages[i]) > 1:
			if err := w.ownPage(s, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// ownPage replaces the shared partial page i by a copy.
func (w *walker) ownPage(s *seq, i int) error {
	id, err := w.allocPage()
	if err != nil {
		return err
	}
	w.pages.Release(s.pages[i])
	s.pages[i] = id
	w.r.CopyOnExtend++
	return nil
}

// publish puts the full pages and an exact snapshot into the tree.
func (w *walker) publish(s *seq) error {
	if s.consumed == 0 || s.cold || s.slot == radix.None {
		return nil
	}
	if err := w.insert(s); err != nil {
		return err
	}
	w.f.Match(key, s.line[:s.consumed+1], &w.match)
	if w.match.Start() != s.consumed {
		snap := radix.Snapshot{At: s.consumed, Slot: s.slot, Tail: radix.None}
		if i := s.consumed / radix.PageTokens; s.consumed%radix.PageTokens != 0 {
			if w.pages.Refs(s.pages[i]) > 1 {
				if w.ownPage(s, i) != nil {
					return nil // no room for a copy: it can be recomputed
				}
			}
			snap.Tail = s.pages[i]
		}
		if _, err := w.f.Publish(key, s.line[:s.consumed], snap, w.now); err != nil {
			return err
		}
		w.r.Snapshots++
	}
	s.lastCapture = s.consumed
	return nil
}

// insert puts the full pages into the tree and takes over the tree's own copies.
func (w *walker) insert(s *seq) error {
	full := s.have / radix.PageTokens
	tokens := full * radix.PageTokens
	canon, err := w.f.Insert(key, s.line[:tokens], 0, s.pages[:full], w.now, w.canon[:0])
	if err != nil {
		return err
	}
	w.canon = canon
	for i, id := range canon {
		if id != s.pages[i] {
			w.pages.Retain(id)
			w.pages.Release(s.pages[i])
			s.pages[i] = id
		}
	}
	w.f.Advance(&s.lock, key, s.line[:tokens])
	return nil
}

// park puts what s holds into the tree and lets go of it.
func (w *walker) park(s *seq) error {
	if s.cold {
		return nil
	}
	err := w.publish(s)
	w.drop(s)
	return err
}

// drop lets go of pages, slot and lock.
func (w *walker) drop(s *seq) {
	for _, id := range s.pages {
		w.pages.Release(id)
	}
	if s.slot != radix.None {
		w.slots.Release(s.slot)
	}
	w.f.Unlock(&s.lock)
	s.pages, s.slot, s.consumed, s.have, s.captures, s.lastCapture, s.cold = nil, radix.None, 0, 0, nil, 0, true
}

// close ends a timeline for good.
func (w *walker) close(s *seq) {
	w.drop(s)
	if s.base != radix.None {
		w.slots.Release(s.base)
		s.base = radix.None
	}
}
