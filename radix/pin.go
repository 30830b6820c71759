package radix

import "fmt"

// PinShare bounds pins: they hold at most one part in PinShare of the page pool and
// of the slot pool, all pins together, and of their key's limit, all the key's
// together; one that would pass it is refused. So whoever is not pinned always finds room.
const PinShare = 2

// Pin keeps a line's pages and its deepest snapshot from leaving the tier where
// they are, longer than a user's Lock. The zero Pin holds nothing.
type Pin struct {
	lock Lock
}

// Pin pins the pages that the tree has of these consumed tokens and the deepest
// snapshot at or below their end. It is false, and nothing is pinned, if there is
// nothing to pin or all pins together would pass their share of a pool or of the
// key's limit. Pages that come later need a new one.
func (f *Forest) Pin(key string, tokens []int32) (Pin, bool) {
	n := f.walk(key, tokens, len(tokens)/PageTokens)
	if n == nil {
		return Pin{}, false
	}
	var l Lock
	l.node = n
	pages, slots := 0, 0
	for m := n; m.parent != nil && m.pins == 0; m = m.parent {
		pages++
	}
	for m := n; m != nil && l.snap == nil; m = m.parent {
		for _, s := range m.snaps {
			if s.At <= len(tokens) && s.extendsTo(tokens) {
				l.snap = s
			}
		}
	}
	if l.snap == nil && n.parent == nil {
		return Pin{}, false
	}
	if s := l.snap; s != nil && s.pins == 0 {
		slots++
		if len(s.TailTokens) > 0 {
			pages++
		}
	}
	if f.stats.PinnedPages+pages > f.pages.Size()/PinShare || f.stats.PinnedSnapshots+slots > f.slots.Size()/PinShare {
		return Pin{}, false
	}
	if t := n.tree; t.limit != NoLimit && t.pinned+f.pinBytes(pages, slots) > t.limit/PinShare {
		return Pin{}, false
	}
	f.pinned(n.tree, pages, slots)
	for m := n; m != nil; m = m.parent {
		m.pins++
		if m.pins > 1 {
			break
		}
	}
	f.lockNode(n)
	if l.snap != nil {
		l.snap.pins++
		f.lockSnap(l.snap)
	}
	return Pin{l}, true
}

// Unpin lets go of a pin; doing it again does nothing.
func (f *Forest) Unpin(p *Pin) {
	n, s := p.lock.node, p.lock.snap
	if s != nil {
		s.pins--
		if s.pins == 0 {
			tails := 0
			if len(s.TailTokens) > 0 {
				tails++
			}
			f.pinned(n.tree, -tails, -1)
		}
	}
	for ; n != nil; n = n.parent {
		n.pins--
		if n.pins > 0 {
			break
		}
		if n.parent != nil {
			f.pinned(n.tree, -1, 0)
		}
	}
	f.Unlock(&p.lock)
}

// pinned counts pages and slots that pins name now, or no more.
func (f *Forest) pinned(t *tree, pages, slots int) {
	f.stats.PinnedPages += pages
	f.stats.PinnedSnapshots += slots
	t.pinned += f.pinBytes(pages, slots)
}

func (f *Forest) pinBytes(pages, slots int) int64 {
	return int64(pages)*f.opts.PageBytes + int64(slots)*f.opts.SlotBytes
}

// checkPins verifies a node's pins against its children's and its own use.
func (n *node) checkPins() error {
	pinned := int32(0)
	for _, k := range n.kids {
		if k.pins > 0 {
			pinned++
		}
	}
	if n.pins < pinned || n.pins > 0 && n.locks == 0 {
		return fmt.Errorf("%d pins with %d pinned children and %d locks", n.pins, pinned, n.locks)
	}
	for _, s := range n.snaps {
		if s.pins < 0 || s.pins > 0 && (s.locks == 0 || n.pins == 0) {
			return fmt.Errorf("snapshot at %d: %d pins with %d locks", s.At, s.pins, s.locks)
		}
	}
	return nil
}
