package engine

import (
	"context"
	"fmt"
	"slices"

	"rocket/radix"
)

// Mark is an immutable point on a timeline, pinned so that children can be attached to it: references to the shared
// pages and to the state, no copies. Drop it when all children are attached or the fork failed.
type Mark struct {
	At     int     // the children's line is Line, of At tokens
	Line   []int32 // must not be changed
	Shared int     // tokens whose caches the children share with the parent
	Replay int     // consumed tokens between the nearest state and At-1, recomputed when a child goes on

	e           *Engine
	ns          string
	fresh       bool
	pages       []int32
	slot        int32
	state, have int
	cold        bool // nothing pinned: children restore from the tree by themselves
	dropped     bool
}

// Mark pins s at offset at. at < 0 means the default: everything verified while decoding, the prompt's end while
// prefilling, the end of the line when idle: in each case the end of s's line. ErrRange when at is past it.
func (e *Engine) Mark(ctx context.Context, s *Seq, at int) (*Mark, error) {
	var m *Mark
	var err error
	if doErr := e.do(ctx, func() { m, err = e.mark(s, at) }); doErr != nil {
		return nil, doErr
	}
	return m, err
}

// mark runs on the loop.
func (e *Engine) mark(s *Seq, at int) (*Mark, error) {
	if s.dead {
		return nil, ErrClosed
	}
	if at < 0 {
		at = len(s.line)
	}
	if at > len(s.line) {
		return nil, fmt.Errorf("fork at %d of a line of %d tokens: %w", at, len(s.line), ErrRange)
	}
	// Lines share their memory: tokens are never changed, and the bound makes the first append copy.
	m := &Mark{At: at, Line: s.line[:at:at], e: e, ns: s.ns, fresh: s.fresh, slot: radix.None, cold: true}
	want := max(0, at-1)
	e.pinState(m, s, want)
	if m.cold {
		e.forest.Match(s.ns, m.Line, &e.match)
		m.Shared, m.Replay = min(e.match.Tokens, want), want
		m.Shared = max(m.Shared, e.match.Start())
		m.Replay = want - e.match.Start()
	}
	e.marks[m] = struct{}{}
	e.stats.Forks++
	return m, nil
}

// pinState takes the deepest state at or below want that is on the device, and s's pages below it. It leaves m cold
// when s is, or when the tree has a deeper state that only another tier holds.
func (e *Engine) pinState(m *Mark, s *Seq, want int) {
	if s.cold || s.moving {
		return
	}
	state, slot := 0, radix.None
	if s.consumed <= want {
		state, slot = s.consumed, s.slot
	}
	if state < want && !s.fresh {
		e.forest.Match(s.ns, m.Line, &e.match)
		if snap := e.match.Snapshot; e.match.Found && snap.At > state {
			if snap.Slot == radix.None || snap.At > s.have {
				return
			}
			state, slot = snap.At, snap.Slot
		}
	}
	have := min(s.have, want)
	m.pages = slices.Clone(s.pages[:(have+radix.PageTokens-1)/radix.PageTokens])
	for _, id := range m.pages {
		e.pageIDs.Retain(id)
	}
	if slot != radix.None {
		e.slotIDs.Retain(slot)
	}
	m.slot, m.state, m.have, m.cold = slot, state, have, false
	m.Shared, m.Replay = have, want-state
}

// Fork attaches one child to m: a new Seq on m's line that shares pages and state. The first of parent and children
// to go on copies the partial page and the slot.
func (e *Engine) Fork(ctx context.Context, m *Mark) (*Seq, error) {
	var s *Seq
	var err error
	if doErr := e.do(ctx, func() { s, err = e.attach(m) }); doErr != nil {
		return nil, doErr
	}
	return s, err
}

// attach runs on the loop.
func (e *Engine) attach(m *Mark) (*Seq, error) {
	if m.dropped {
		return nil, fmt.Errorf("fork from a mark that was dropped: %w", ErrClosed)
	}
	s := e.newSeq(m.ns, m.Line)
	s.fresh, s.lazy = m.fresh, true
	if m.cold {
		return s, nil
	}
	s.pages = slices.Clone(m.pages)
	for _, id := range s.pages {
		e.pageIDs.Retain(id)
	}
	if s.slot = m.slot; s.slot != radix.None {
		e.slotIDs.Retain(s.slot)
	}
	s.consumed, s.have, s.cold = m.state, m.have, false
	e.idled++
	s.report()
	return s, nil
}

// Drop lets go of what m pins. It may be called twice.
func (m *Mark) Drop() {
	_ = m.e.do(context.Background(), func() { m.e.dropMark(m) }) // closed: shutdown has let go of everything
}

func (e *Engine) dropMark(m *Mark) {
	if m.dropped {
		return
	}
	m.dropped = true
	delete(e.marks, m)
	for _, id := range m.pages {
		e.pageIDs.Release(id)
	}
	if m.slot != radix.None {
		e.slotIDs.Release(m.slot)
	}
}
