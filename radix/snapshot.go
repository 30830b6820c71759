package radix

import (
	"fmt"
	"slices"
)

// Snapshot names the state after At consumed tokens and where its bytes are. It
// is the one list of what a state is made of; the recurrent states, raw conv
// rows and the final hidden row are the slot's bytes, the caches' part that no
// full page holds is the tail page's.
type Snapshot struct {
	At           int     // consumed tokens
	Slot         int32   // device state slot, or None
	Tail         int32   // device page holding [At-At%128, At); None at a page edge or off the device
	TailTokens   []int32 // the At%128 tokens of the tail; the tree fills it in, do not change it
	Host, Disk   int64   // handles of slot and tail bytes together on the lower tiers, 0 none
	MTPValidFrom int     // the draft layer's cache rows are valid from this token on
}

// snap is a Snapshot in the tree.
type snap struct {
	Snapshot
	node  *node
	locks int32
	pins  int32
	index int // in Forest.snaps
	gone  bool
	hits  int32 // uses while a line went on from it already

	places [tiers]place
	bonus  [tiers]float64 // of its value
	end    [tiers]bool    // no snapshot follows it on the tier, and no branch
	touched
	flight
}

func (s *snap) place(t Tier) *place { return &s.places[t] }
func (s *snap) deep() int           { return s.At }

func (s *snap) on(t Tier) bool {
	if t == Device {
		return s.Slot >= 0
	}
	return *s.low(t) != 0
}

// low is the handle on a lower tier.
func (s *snap) low(t Tier) *int64 {
	if t == Host {
		return &s.Host
	}
	return &s.Disk
}

// faster says whether a faster tier has the snapshot too, elsewhere whether any
// other tier has.
func (s *snap) faster(t Tier) bool {
	return t > Device && s.Slot >= 0 || t > Host && s.Host != 0
}

func (s *snap) elsewhere(t Tier) bool {
	return s.faster(t) || t < Disk && s.Disk != 0 || t < Host && s.Host != 0
}

// evictable says whether the snapshot may be picked from the tier: it is in no
// use there.
func (s *snap) evictable(t Tier) bool {
	return s.on(t) && s.ticket == 0 && !s.gone && (s.locks == 0 || s.faster(t))
}

func (s *snap) stays(t Tier) bool { return s.on(t) && !s.leaving(t) }

func compareSnaps(a *snap, tail []int32) int {
	if d := len(a.TailTokens) - len(tail); d != 0 {
		return d
	}
	return slices.Compare(a.TailTokens, tail)
}

// longest finds the snapshot on a page with the longest tail that the rest of a
// line begins with, on any tier from one to below another. A page may have very
// many (forks that parted in it), so it asks by length, not one by one.
func (n *node) longest(rest []int32, from, to Tier) *snap {
	for left := n.snaps; len(left) > 0; {
		length := len(left[len(left)-1].TailTokens)
		if length <= len(rest) {
			i, ok := slices.BinarySearchFunc(left, rest[:length], compareSnaps)
			for t := from; ok && t < to; t++ {
				if left[i].stays(t) || to-from == tiers {
					return left[i]
				}
			}
		}
		i, _ := slices.BinarySearchFunc(left, length, func(s *snap, length int) int { return len(s.TailTokens) - length })
		left = left[:i]
	}
	return nil
}

// Publish hangs a snapshot of the state after the given consumed tokens into the
// tree, s.At of them. All full pages below must be there (ErrMissing otherwise):
// a snapshot that no match could reach would only hold memory. It must be whole
// on a tier. If there is one for the same tokens it stays, and takes over only
// what it lacks: the slot and tail, the handles. The tree retains the slot and the
// tail page that it keeps, and owns s.Host and s.Disk in every case but an error.
// kept says whether the given slot is now the tree's.
func (f *Forest) Publish(key string, tokens []int32, s Snapshot, now int64) (kept bool, err error) {
	if err := s.valid(len(tokens)); err != nil {
		return false, err
	}
	depth := s.At / PageTokens
	n := f.walk(key, tokens, depth)
	if n == nil && depth == 0 {
		n = f.root(key)
	}
	if n == nil || int(n.depth) < depth {
		return false, fmt.Errorf("publish a snapshot at %d: %w", s.At, ErrMissing)
	}
	tail := tokens[depth*PageTokens:]
	i, found := slices.BinarySearchFunc(n.snaps, tail, compareSnaps)
	if !found {
		s.TailTokens = slices.Clone(tail)
		e := &snap{node: n, index: len(f.snaps)}
		e.At, e.TailTokens, e.Slot, e.Tail = s.At, s.TailTokens, None, None
		f.snaps = append(f.snaps, e)
		n.snaps = slices.Insert(n.snaps, i, e)
	}
	e := n.snaps[i]
	if s.Slot >= 0 && e.Slot < 0 {
		f.setSlot(e, s.Slot, s.Tail)
		kept = true
	}
	f.addSnapLow(e, Host, s.Host)
	f.addSnapLow(e, Disk, s.Disk)
	// Two copies of one state may differ in how much of the draft cache was
	// filled; the narrower claim holds for both.
	e.MTPValidFrom = max(e.MTPValidFrom, s.MTPValidFrom)
	f.use(&e.touched, now)
	for t := range tiers {
		if e.on(t) {
			f.revalue(e, t)
			f.revalueBelow(e, t)
		}
	}
	f.placeSnap(e)
	f.refresh(n)
	f.touch(n, now)
	return kept, nil
}

func (s *Snapshot) valid(tokens int) error {
	partial := s.At%PageTokens != 0
	switch {
	case s.At < 1 || s.At != tokens:
		return fmt.Errorf("radix: publish a snapshot at %d with %d tokens", s.At, tokens)
	case s.Slot < 0 && s.Host == 0 && s.Disk == 0:
		return fmt.Errorf("radix: publish a snapshot at %d that is on no tier", s.At)
	case s.Slot >= 0 && partial != (s.Tail >= 0):
		return fmt.Errorf("radix: publish a snapshot at %d with slot %d and tail page %d", s.At, s.Slot, s.Tail)
	case s.Slot < 0 && s.Tail >= 0:
		return fmt.Errorf("radix: publish a snapshot at %d with a tail page and no slot", s.At)
	}
	return nil
}

func (f *Forest) setSlot(s *snap, slot, tail int32) {
	f.slots.Retain(slot)
	f.chargeSlot(s.node.tree, slot)
	s.Slot = slot
	f.stats.Snapshots[Device]++
	f.enter(Device, f.snapBytes(s))
	if tail >= 0 {
		f.pages.Retain(tail)
		f.chargePage(s.node.tree, tail)
		s.Tail = tail
		f.stats.Tails[Device]++
	}
	if s.locks > 0 {
		f.stats.LockedSnapshots++
	}
}

// clearSlot takes slot and tail out; their references are the caller's now.
func (f *Forest) clearSlot(s *snap) (slot, tail int32) {
	slot, tail = s.Slot, s.Tail
	s.Slot, s.Tail = None, None
	f.stats.Snapshots[Device]--
	if tail >= 0 {
		f.stats.Tails[Device]--
	}
	if s.locks > 0 {
		f.stats.LockedSnapshots--
	}
	f.version++
	return slot, tail
}

// addSnapLow gives the snapshot a copy on a lower tier; one too many is let go.
func (f *Forest) addSnapLow(s *snap, t Tier, handle int64) {
	h := s.low(t)
	switch {
	case handle == 0 || handle == *h:
		return
	case *h != 0:
		f.free(t, handle)
		return
	}
	*h = handle
	f.stored(s.node.tree, t, f.snapBytes(s))
	f.stats.Snapshots[t]++
	f.enter(t, f.snapBytes(s))
	if len(s.TailTokens) > 0 {
		f.stats.Tails[t]++
	}
}

// clearSnapLow takes a lower tier's handle out; it is the caller's now.
func (f *Forest) clearSnapLow(s *snap, t Tier) int64 {
	h := *s.low(t)
	*s.low(t) = 0
	f.stats.Snapshots[t]--
	if len(s.TailTokens) > 0 {
		f.stats.Tails[t]--
	}
	f.version++
	return h
}

func (f *Forest) snapBytes(s *snap) int64 {
	if len(s.TailTokens) > 0 {
		return f.opts.SlotBytes + f.opts.PageBytes
	}
	return f.opts.SlotBytes
}

// removeSnap takes an unlocked snapshot out of the tree with its references.
func (f *Forest) removeSnap(s *snap) {
	o := orphan{tree: s.node.tree, bytes: f.snapBytes(s), page: None, slot: None}
	if s.Slot >= 0 {
		o.slot, o.page = f.clearSlot(s)
	}
	for t := Host; t < tiers; t++ {
		if s.on(t) {
			o.low[t] = f.clearSnapLow(s, t)
		}
	}
	f.letGo(s.flight, o)
	s.gone = true
	s.flight = flight{}
	f.placeSnap(s)
	n := s.node
	n.snaps = slices.Delete(n.snaps, slices.Index(n.snaps, s), slices.Index(n.snaps, s)+1)
	end := f.snaps[len(f.snaps)-1]
	f.snaps[s.index], end.index = end, s.index
	f.snaps[len(f.snaps)-1] = nil
	f.snaps = f.snaps[:len(f.snaps)-1]
	if !n.gone {
		f.refresh(n)
		f.pruneRoot(n)
	}
}
