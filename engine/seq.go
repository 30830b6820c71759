package engine

import (
	"fmt"
	"sync/atomic"
	"time"

	"rocket/kernels"
	"rocket/radix"
)

// Seq is one inference timeline: a line of tokens, caches of the first `have` of them, and the state after the first
// `consumed`. A cold Seq holds only its line; it is restored from the tree before it goes on.
//
//	line    [0 ........................ n-1] n: the last token is pending
//	state   [0 ........ consumed)
//	caches  [0 ............. have)           rows below have are not written again (replay after a hit)
//	pages   one id a 128 tokens, covering [0, have) and what the next step writes
type Seq struct {
	ns          string // cache namespace
	fresh, lazy bool

	// Only the loop.
	line           []int32
	consumed, have int
	pages          []int32
	slot           int32 // radix.None when nothing is consumed
	cold           bool
	moving         bool // bytes are copied in off the loop; not scheduled meanwhile
	dead           bool
	run            *Run
	marks          []int // where the owner expects other lines to part
	captures       []int // consumed counts at which the scan is cut and the state published, ascending
	lastCapture    int
	snapshots      int // published or found on this line
	inserted       int // tokens of the line whose pages are in the tree
	lock           radix.Lock
	fromHost       int // tokens that came from the host tier and no Run has reported yet
	fromDisk       int // likewise from the disk
	coldReason     string
	coldAt         int
	preempted      bool
	used           int64 // order of its latest run: the idle timeline used longest ago is parked first
	pin            radix.Pin
	wantPin        bool          // the owner asked for a pin
	pinned         bool          // and it holds
	filled         chan struct{} // closed when the filling behind ends; nil: nobody waits for that

	residency atomic.Pointer[Residency]
}

// Residency says where the consumed tokens are, as of the last step.
func (s *Seq) Residency() Residency { return *s.residency.Load() }

// report publishes the residency for readers off the loop.
func (s *Seq) report() {
	r := Residency{Device: s.consumed, Snapshots: s.snapshots}
	if old := s.residency.Load(); old != nil && *old == r {
		return
	}
	s.residency.Store(&r)
}

func (e *Engine) newSeq(ns string, line []int32) *Seq {
	s := &Seq{ns: ns, line: line, slot: radix.None, cold: true}
	s.report()
	e.seqs[s] = struct{}{}
	return s
}

// source tells where the consumed part of a line of n tokens came from, and how much of it is still to be computed.
func (s *Seq) source(n int) Restored {
	host, disk := min(s.fromHost, s.consumed), min(s.fromDisk, s.consumed)
	r := Restored{Device: s.consumed - host - disk, Host: host, Disk: disk, Recomputed: max(0, n-1-s.consumed)}
	if r.Recomputed > 0 {
		r.ColdReason, r.ColdAt = s.coldReason, max(s.coldAt, s.consumed) // more may have been computed since
	}
	return r
}

// nextCapture is the next planned cut at or after consumed, 0 when none.
func (s *Seq) nextCapture() int {
	for len(s.captures) > 0 && s.captures[0] < s.consumed {
		s.captures = s.captures[1:]
	}
	if len(s.captures) == 0 {
		return 0
	}
	return s.captures[0]
}

// extend makes the next rows of s writable: a state slot of its own, a partial page of its own, new pages behind.
func (e *Engine) extend(s *Seq, rows int) error {
	if err := e.ownSlot(s); err != nil {
		return err
	}
	end := s.consumed + rows
	for i := max(s.have, s.consumed) / radix.PageTokens; i*radix.PageTokens < end; i++ {
		switch {
		case end <= s.have:
			return nil
		case i == len(s.pages):
			id, err := e.allocPage(s)
			if err != nil {
				return err
			}
			s.pages = append(s.pages, id)
		case e.pageIDs.Refs(s.pages[i]) > 1:
			if err := e.ownPage(s, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// ownSlot gives s a slot that nobody else references, with the same state.
func (e *Engine) ownSlot(s *Seq) error {
	if s.slot != radix.None && e.slotIDs.Refs(s.slot) == 1 {
		return nil
	}
	id, err := e.allocSlot(s)
	if err != nil {
		return err
	}
	if s.slot != radix.None { // at consumed 0 the kernels ignore what the slot holds
		stride := e.layout.SlotStride
		if err := kernels.Copy(e.slots, int(id)*stride, e.slots, int(s.slot)*stride, e.layout.SlotBytes); err != nil {
			e.slotIDs.Release(id)
			return fmt.Errorf("copy state slot: %w", err)
		}
		e.slotIDs.Release(s.slot)
	}
	s.slot = id
	return nil
}

// ownPage replaces the shared partial page i by a copy.
func (e *Engine) ownPage(s *Seq, i int) error {
	id, err := e.allocPage(s)
	if err != nil {
		return err
	}
	stride := e.layout.PageStride
	if err := kernels.Copy(e.pages, int(id)*stride, e.pages, int(s.pages[i])*stride, e.layout.SlabBytes); err != nil {
		e.pageIDs.Release(id)
		return fmt.Errorf("copy page on extend: %w", err)
	}
	e.pageIDs.Release(s.pages[i])
	s.pages[i] = id
	e.stats.CopyOnExtend++
	return nil
}

// allocPage takes a page for s, which its namespace pays for; s may be nil, or fresh: nobody pays.
func (e *Engine) allocPage(s *Seq) (int32, error) {
	if err := e.fault("allocate page"); err != nil {
		return radix.None, err
	}
	if id, ok := e.alloc(&e.pageKind, s); ok {
		return id, nil
	}
	return radix.None, fmt.Errorf("page of %d tokens: %w", radix.PageTokens, ErrPoolFull)
}

// allocSlot takes a state slot likewise.
func (e *Engine) allocSlot(s *Seq) (int32, error) {
	if err := e.fault("allocate slot"); err != nil {
		return radix.None, err
	}
	if id, ok := e.alloc(&e.slotKind, s); ok {
		return id, nil
	}
	return radix.None, fmt.Errorf("state slot: %w", ErrPoolFull)
}

// resource is pages or slots.
type resource struct {
	pool     *radix.Pool
	bytes    int64 // of one
	alloc    func(ns string) (int32, bool)
	evict    func(n int, now int64) []radix.Eviction
	evictOwn func(ns string, n int, now int64) []radix.Eviction
}

// alloc takes one for s. A namespace at its limit gives up something of its own for it; others' things only go where
// the pool is full and no other turn of the namespace could give way.
func (e *Engine) alloc(k *resource, s *Seq) (int32, bool) {
	if e.excess(s, k.bytes) > 0 {
		e.giveUp(s.ns, k.bytes)
		if k.pool.Free() == 0 {
			e.demote(k.evictOwn(s.ns, evictBatch, e.now()))
			e.letGo()
		}
	}
	if id, ok := e.take(k, s); ok {
		return id, true
	}
	if e.yields(s) {
		return radix.None, false
	}
	e.evict(k.evict(evictBatch, e.now()))
	return e.take(k, s)
}

func (e *Engine) take(k *resource, s *Seq) (int32, bool) {
	if s.pays() {
		return k.alloc(s.ns)
	}
	return k.pool.Alloc()
}

// evictBatch is how many pages or slots one shortage makes room for, so that the next allocations find some free.
const evictBatch = 8

// publish puts s's full pages and an exact snapshot of its state into the tree. The slot and the partial page are
// shared, not copied: s copies them when it goes on.
func (e *Engine) publish(s *Seq) {
	if s.consumed == 0 || s.cold || s.fresh || s.slot == radix.None || !e.insert(s) {
		return
	}
	if !e.hasSnapshot(s) {
		snap := radix.Snapshot{At: s.consumed, Slot: s.slot, Tail: radix.None}
		if s.consumed%radix.PageTokens != 0 {
			tail, err := e.ownTail(s)
			if err != nil {
				return // no room for a copy: it can be recomputed
			}
			snap.Tail = tail
		}
		if _, err := e.forest.Publish(s.ns, s.line[:s.consumed], snap, e.now()); err != nil {
			e.opts.Log.Error("publish snapshot failed", "at", s.consumed, "error", err)
			return
		}
		e.stats.Snapshots++
		s.snapshots++
	}
	s.lastCapture = s.consumed
}

// hasSnapshot reports whether the tree has s's very state on the device.
func (e *Engine) hasSnapshot(s *Seq) bool {
	m := &e.match
	e.forest.Match(s.ns, s.line[:s.consumed+1], m)
	return m.Start() == s.consumed && m.Snapshot.Slot != radix.None
}

// ownTail returns s's partial page for a snapshot. A page that somebody else holds may be in the tree already, as a
// full page or as another snapshot's tail; one page under two names could not be evicted, so it is copied then.
func (e *Engine) ownTail(s *Seq) (int32, error) {
	i := s.consumed / radix.PageTokens
	if e.pageIDs.Refs(s.pages[i]) > 1 {
		if err := e.ownPage(s, i); err != nil {
			return radix.None, err
		}
	}
	return s.pages[i], nil
}

// insert puts s's full pages into the tree and takes over the tree's own copy of pages that it has already.
func (e *Engine) insert(s *Seq) bool {
	full := s.have / radix.PageTokens // caches may be ahead of the state after a hit
	tokens := full * radix.PageTokens
	canon, err := e.forest.Insert(s.ns, s.line[:tokens], 0, s.pages[:full], e.now(), e.canon[:0])
	if err != nil {
		e.opts.Log.Error("insert pages failed", "tokens", tokens, "error", err)
		return false
	}
	e.canon = canon
	for i, id := range canon {
		if id != s.pages[i] {
			e.pageIDs.Retain(id)
			e.pageIDs.Release(s.pages[i])
			s.pages[i] = id
		}
	}
	s.inserted = tokens
	e.forest.Advance(&s.lock, s.ns, s.line[:tokens]) // active pages are not evicted
	return true
}

// park puts what s holds into the tree and lets go of it. The line stays; s is cold.
func (e *Engine) park(s *Seq) {
	if s.cold {
		return
	}
	e.publish(s)
	e.drop(s)
	s.report()
}

// drop lets go of s's pages, slot and lock, without publishing. s is cold.
func (e *Engine) drop(s *Seq) {
	for _, id := range s.pages {
		e.pageIDs.Release(id)
	}
	if s.slot != radix.None {
		e.slotIDs.Release(s.slot)
	}
	e.forest.Unlock(&s.lock)
	s.pages, s.slot, s.consumed, s.have, s.captures = nil, radix.None, 0, 0, nil
	s.lastCapture, s.inserted, s.cold = 0, 0, true
}

// now is the tree's clock: milliseconds since the engine started would do, nanoseconds are as cheap.
func (e *Engine) now() int64 { return time.Now().UnixNano() }
