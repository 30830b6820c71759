package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"rocket/engine/tier"
	"rocket/radix"
)

// Open makes a timeline of line. It matches the tree on every tier, restores the deepest state, and
// says what it found; the rest, up to the pending token, is prefilled behind unless opts.Lazy. line may be empty.
// The Seq must be given back by Release or Detach. ErrQuota when the open turns of the namespace fill its limit.
func (e *Engine) Open(ctx context.Context, line []int32, opts OpenOptions) (*Seq, Restored, error) {
	if len(line) > e.opts.Model.ContextLimit() {
		return nil, Restored{}, fmt.Errorf("open a line of %d tokens, context %d: %w", len(line), e.opts.Model.ContextLimit(), ErrContextLimit)
	}
	if err := e.vocab(line); err != nil {
		return nil, Restored{}, err
	}
	var s *Seq
	if err := e.do(ctx, func() {
		if !opts.Fresh && e.quotaFull(opts.Namespace, nil) {
			return
		}
		s = e.newSeq(opts.Namespace, slices.Clone(line))
		s.fresh, s.lazy = opts.Fresh, opts.Lazy
		s.mark(opts.Mark)
	}); err != nil {
		return nil, Restored{}, err
	}
	if s == nil {
		return nil, Restored{}, fmt.Errorf("open a line of %d tokens: %w", len(line), ErrQuota)
	}
	if err := e.fetch(ctx, s); err != nil {
		e.Release(s)
		return nil, Restored{}, err
	}
	var got Restored
	err := e.do(ctx, func() {
		got = s.source(len(line))
		if !s.lazy {
			e.follow(s)
		}
	})
	if err != nil {
		e.Release(s)
		return nil, Restored{}, err
	}
	return s, got, nil
}

// Release gives s up. A run on it is cancelled. What the tree holds of its line stays there.
func (e *Engine) Release(s *Seq) {
	_ = e.do(context.Background(), func() { e.release(s) }) // closed: shutdown has let go of everything
}

func (e *Engine) release(s *Seq) {
	if s.dead {
		return
	}
	if s.run != nil {
		e.finish(s.run, FinishCancelled, nil)
	}
	e.unfollow(s)
	s.dead = true
	if s.moving {
		return // endRestore lets go of it
	}
	e.drop(s)
	e.forest.Unpin(&s.pin)
	delete(e.seqs, s)
}

// follow fills s behind, up to its pending token.
func (e *Engine) follow(s *Seq) {
	if len(s.line)-1 > s.consumed && !slices.Contains(e.behind, s) {
		e.behind = append(e.behind, s)
	}
}

// unfollow stops filling s behind.
func (e *Engine) unfollow(s *Seq) {
	e.behind = removeSeq(e.behind, s)
	if s.filled != nil {
		close(s.filled)
		s.filled = nil
	}
}

func (s *Seq) mark(at int) {
	if at > 0 {
		s.marks = append(s.marks[:0], at)
	}
}

// planCaptures chooses, before the prefill, where the scan is cut and the state kept.
func (e *Engine) planCaptures(s *Seq) {
	if s.fresh || s.dead {
		s.captures = nil
		return
	}
	e.forest.Match(s.ns, s.line, &e.match)
	points := radix.CapturePoints(s.consumed, len(s.line), e.match.Branch, s.marks, int64(e.layout.SlotStride), e.tokenBytes)
	s.captures = slices.DeleteFunc(points, func(p int) bool { return p <= s.consumed || p >= len(s.line) })
}

// restoring is a restore under way: references are held and device room is reserved on the loop, bytes are copied
// anywhere, and the loop finishes it.
type restoring struct {
	pages      []int32
	spare      []int32 // reserved for a blob's partial page that s does not use
	slot       int32
	at, have   int // state position, cached tokens
	host, disk int // tokens that come from there
	reason     string
	coldAt     int // where reason begins to hold
	lock       radix.Lock
	copies     []blobCopy
	adopt      bool  // some device copies are new to the tree
	tail       int32 // the state's partial page as the tree should know it, or radix.None
	err        error
}

// nothing is a restore that found nothing.
func nothing(reason string) *restoring {
	return &restoring{slot: radix.None, tail: radix.None, reason: reason}
}

// blob names stored bytes: a page's slab, or a state with its partial page.
type blob struct {
	tier   radix.Tier
	handle int64
}

// blobOf chooses the faster of an entry's copies.
func blobOf(host, disk int64) blob {
	if host != 0 {
		return blob{radix.Host, host}
	}
	return blob{radix.Disk, disk}
}

// blobCopy brings one blob to the device.
type blobCopy struct {
	blob
	page, slot int32 // radix.None: not part of it
}

// fetch restores a cold s, copying off the loop. It is a no-op for a warm or moving Seq.
func (e *Engine) fetch(ctx context.Context, s *Seq) error {
	var job *restoring
	if err := e.do(ctx, func() {
		if s.cold && !s.dead && !s.moving {
			job = e.beginRestore(s)
		}
	}); err != nil {
		return err
	}
	return e.endFetch(ctx, s, job)
}

// endFetch does the copies of a restore that was begun and hands it back to the loop.
func (e *Engine) endFetch(ctx context.Context, s *Seq, job *restoring) error {
	if job == nil {
		return nil
	}
	e.copyIn(job)
	return e.do(context.WithoutCancel(ctx), func() {
		e.endRestore(s, job)
		e.planCaptures(s)
	})
}

// restoreInLoop restores s for a step. It returns false when s cannot go on in this step: there is no room now, or its
// bytes are being copied in.
func (e *Engine) restoreInLoop(s *Seq, r *Run) bool {
	// Make room for the others' next tokens too, or the youngest is restored only to be preempted again.
	if s.preempted && !e.yields(s) && (e.pageIDs.Free() < len(e.running) || e.slotIDs.Free() < 1) {
		e.evict(e.forest.EvictPages(len(e.running), e.now()))
		e.evict(e.forest.EvictSlots(1, e.now()))
	}
	job := e.beginRestore(s)
	if job == nil {
		e.starved(s, r)
		return false
	}
	end := func() {
		e.endRestore(s, job)
		if s.preempted {
			e.stats.TokensPreempted += int64(max(0, len(s.line)-1-s.consumed))
			s.preempted = false
		}
		e.planCaptures(s)
	}
	if len(job.copies) == 0 {
		end()
		return true
	}
	e.io.Go(func() {
		e.copyIn(job)
		_ = e.do(context.Background(), end) // closed: shutdown has let go of everything
	})
	return false
}

// beginRestore matches s's line and takes references to everything that will be used. It returns nil when there is no
// room for what has to come from another tier.
func (e *Engine) beginRestore(s *Seq) *restoring {
	if s.fresh || len(s.line) < 2 {
		s.moving = true
		return nothing("")
	}
	m := &e.match
	e.forest.Match(s.ns, s.line, m)
	lock := e.forest.Lock(m)
	e.forest.Touch(m, e.now())
	j := e.reserve(m, lock, s)
	if j != nil {
		j.reason, j.coldAt = e.coldReason(j, m, s)
		s.moving = true
	}
	return j
}

// reserve takes references to what m found, and room for what has to be copied, for s or, if that is nil, for nobody.
// The lock is the restore's from now on.
func (e *Engine) reserve(m *radix.Match, lock radix.Lock, s *Seq) *restoring {
	j := nothing("")
	j.lock = lock
	err := e.reservePages(j, m, s)
	if err == nil {
		err = e.reserveState(j, m, s)
	}
	if err != nil {
		e.abandon(j)
		return nil
	}
	return j
}

// coldReason says why the tokens from j.at on have to be computed, and from which one on that holds.
func (e *Engine) coldReason(j *restoring, m *radix.Match, s *Seq) (reason string, at int) {
	switch {
	case j.at >= len(s.line)-1:
		return "", 0
	case m.Evicted:
		return ColdEvicted, j.at
	case j.have > j.at, m.Common >= len(s.line)-1:
		return ColdNoSnapshot, j.at
	case m.Parts && m.Common > 0:
		return ColdDiverged, m.Common
	}
	if m.Tokens == 0 && e.forest.OtherKey(s.ns, s.line) {
		e.stats.ColdSalted++
	}
	return ColdNew, j.at
}

// copyIn moves the bytes. It needs no ownership: the targets are reserved for this restore alone.
func (e *Engine) copyIn(j *restoring) {
	errs := make([]error, len(j.copies))
	parallel(len(errs), func(i int) { errs[i] = e.copyBlob(j.copies[i]) })
	for _, err := range errs { // the gravest: what left its tier meanwhile says nothing about the rest
		if err != nil && (j.err == nil || errors.Is(j.err, tier.ErrUnknown)) {
			j.err = err
		}
	}
}

func (e *Engine) copyBlob(c blobCopy) error {
	if c.tier == radix.Disk {
		return e.fromDisk(c)
	}
	return e.copyThrough(c)
}

// endRestore makes s warm. A blob that could not be read costs a cold start, never a wrong state.
func (e *Engine) endRestore(s *Seq, j *restoring) {
	s.moving = false
	e.idled++
	if j.err != nil {
		reason := ColdEvicted // the blob left its tier meanwhile
		if !errors.Is(j.err, tier.ErrUnknown) {
			reason = ColdCorrupt
			e.opts.Log.Warn("restore failed, recomputing", "error", j.err)
			e.stats.RestoresFailed++
		}
		e.abandon(j)
		e.forest.ForgetStored(s.ns, s.line)
		e.letGo()
		j = nothing(reason)
	}
	if s.dead {
		e.abandon(j)
		e.forest.Unpin(&s.pin)
		delete(e.seqs, s)
		return
	}
	s.pages, s.slot, s.consumed, s.have = j.pages, j.slot, j.at, j.have
	s.lock = j.lock
	e.forest.UnlockSnapshot(&s.lock) // s holds a reference of its own
	s.cold, s.coldReason, s.coldAt, s.fromHost, s.fromDisk = false, j.reason, j.coldAt, j.host, j.disk
	s.inserted = j.have / radix.PageTokens * radix.PageTokens
	s.lastCapture = j.at
	if !s.fresh {
		s.snapshots = e.forest.Snapshots(s.ns, s.line)
	}
	e.stats.TokensHost += int64(j.host)
	e.stats.TokensDisk += int64(j.disk)
	e.stats.TokensDevice += int64(j.at - j.host - j.disk)
	if j.adopt {
		e.adopt(s, j)
	}
	e.repin(s)
	s.report()
}
