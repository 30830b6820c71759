package engine

import (
	"context"
	"fmt"

	"rocket/radix"
)

// Check verifies the invariants of the loop's structures: the tree's own, the pools' counts against every holder's
// references, and each timeline's lengths. It runs between steps.
func (e *Engine) Check() error {
	var err error
	if doErr := e.do(context.Background(), func() { err = e.check() }); doErr != nil {
		return doErr
	}
	return err
}

func (e *Engine) check() error {
	if err := e.forest.Check(); err != nil {
		return err
	}
	pages, slots := 0, 0
	for s := range e.seqs {
		if err := s.check(); err != nil {
			return err
		}
		if err := e.checkPaid(s); err != nil {
			return err
		}
		pages += len(s.pages)
		if s.slot != radix.None {
			slots++
		}
	}
	for m := range e.marks {
		pages += len(m.pages)
		if m.slot != radix.None {
			slots++
		}
	}
	st := e.forest.Stats()
	moving := false
	for s := range e.seqs {
		moving = moving || s.moving
	}
	if !moving && st.InFlight == 0 { // a restore or detach under way holds references of its own
		if got, want := references(e.pageIDs), pages+st.Pages[radix.Device]+st.Tails[radix.Device]; got != want {
			return fmt.Errorf("engine: pages have %d references, holders have %d", got, want)
		}
		if got, want := references(e.slotIDs), slots+st.Snapshots[radix.Device]; got != want {
			return fmt.Errorf("engine: state slots have %d references, holders have %d", got, want)
		}
	}
	if e.host != nil {
		if err := e.host.Check(); err != nil {
			return err
		}
	}
	return e.checkQuotas()
}

// references sums a pool's counts.
func references(p *radix.Pool) int {
	n := 0
	for id := range p.Size() {
		n += p.Refs(int32(id))
	}
	return n
}

// check verifies one timeline.
func (s *Seq) check() error {
	switch {
	case s.cold && !s.moving && (s.consumed != 0 || len(s.pages) != 0 || s.slot != radix.None):
		return fmt.Errorf("engine: a cold timeline holds %d pages and slot %d", len(s.pages), s.slot)
	case s.consumed > 0 && s.consumed >= len(s.line):
		return fmt.Errorf("engine: %d of %d tokens consumed, none is pending", s.consumed, len(s.line))
	case s.have < s.consumed:
		return fmt.Errorf("engine: state at %d, caches to %d", s.consumed, s.have)
	case len(s.pages)*radix.PageTokens < s.have:
		return fmt.Errorf("engine: %d pages hold no %d tokens", len(s.pages), s.have)
	case s.consumed > 0 && s.slot == radix.None:
		return fmt.Errorf("engine: state at %d has no slot", s.consumed)
	}
	return nil
}
