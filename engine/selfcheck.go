package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"rocket/engine/model"
	"rocket/engine/tier"
	"rocket/radix"
)

// checkReplayMax is how many tokens one sample of CheckCache may recompute. A snapshot that lies further behind the
// nearest earlier one has its stored bytes checked only.
const checkReplayMax = 4096

// CacheCheck is what CheckCache found.
type CacheCheck struct {
	Snapshots  int      `json:"snapshots"`  // in the tree when the check began
	Sampled    int      `json:"sampled"`    // looked at
	Recomputed int      `json:"recomputed"` // computed again and compared bit for bit, with the pages since the state before
	Pages      int      `json:"pages"`      // pages compared that way
	Stored     int      `json:"stored"`     // copies on the host or on disk whose checksum was verified
	Skipped    int      `json:"skipped"`    // gone meanwhile, or too far behind the state before to be recomputed
	Mismatches []string `json:"mismatches"` // what differed; each was dropped from the cache
}

// CheckCache samples snapshots of the cache and proves them: the checksums of their copies on lower tiers, and the
// state itself, recomputed from the state before it and compared bit for bit, with the last page. What differs is
// dropped, so that the next line that would have used it is prefilled. It runs beside other work, at the priority of
// a prefill. sample is the share of snapshots in (0, 1]; at least one is looked at if there is any.
func (e *Engine) CheckCache(ctx context.Context, sample float64, seed uint64) (CacheCheck, error) {
	out := CacheCheck{Mismatches: []string{}}
	if !(sample > 0 && sample <= 1) {
		return out, fmt.Errorf("check cache with sample %v: want more than 0 and at most 1", sample)
	}
	type candidate struct {
		key  string
		line []int32
	}
	var picked []candidate
	if err := e.do(ctx, func() {
		r := rand.New(rand.NewPCG(seed, 1))
		out.Snapshots = e.forest.SnapshotCount()
		for i := range out.Snapshots {
			if r.Float64() < sample || len(picked) == 0 && i == out.Snapshots-1 {
				key, line := e.forest.SnapshotLine(i)
				picked = append(picked, candidate{key, line})
			}
		}
	}); err != nil {
		return out, err
	}
	for _, c := range picked {
		if err := e.checkSnapshot(ctx, c.key, c.line, &out); err != nil {
			return out, err
		}
	}
	return out, nil
}

// audit is one snapshot under examination.
type audit struct {
	key    string
	line   []int32 // its tokens; seq's line has one more, the pending one
	target radix.Snapshot
	places []radix.Place
	lock   radix.Lock // keeps target and places
	seq    *Seq       // nil: too far to recompute
	filled chan struct{}
	from   int // the state that the recomputation starts from
}

func (e *Engine) checkSnapshot(ctx context.Context, key string, line []int32, out *CacheCheck) error {
	a := &audit{key: key, line: line}
	var job *restoring
	found := false
	if err := e.do(ctx, func() {
		if found = e.beginAudit(a); found {
			job = e.beginAuditSeq(a)
		}
	}); err != nil {
		return err
	}
	if !found {
		out.Skipped++
		return nil
	}
	out.Sampled++
	faults, err := e.audit(ctx, a, job, out)
	if doErr := e.do(context.WithoutCancel(ctx), func() {
		e.endAudit(a)
		e.stats.CheckedSnapshots++
		if len(faults) > 0 {
			e.stats.CheckMismatches++
			e.forest.Forget(key, line)
			e.letGo()
		}
	}); doErr != nil {
		return doErr
	}
	for _, f := range faults {
		e.opts.Log.Error("cache check found a mismatch, dropped", "at", len(line), "what", f)
		out.Mismatches = append(out.Mismatches, fmt.Sprintf("snapshot at %d: %s", len(line), f))
	}
	return err
}

// beginAudit finds the snapshot and locks it.
func (e *Engine) beginAudit(a *audit) bool {
	pending := append(a.line[:len(a.line):len(a.line)], 0)
	m := &e.match
	e.forest.Match(a.key, pending, m)
	if m.Start() != len(a.line) {
		return false
	}
	a.target, a.places, a.lock = m.Snapshot, append(a.places, m.Pages...), e.forest.Lock(m)
	e.holding++
	return true
}

// endAudit lets go of everything.
func (e *Engine) endAudit(a *audit) {
	if a.seq != nil {
		a.seq.moving = false
		e.release(a.seq)
	}
	e.forest.Unlock(&a.lock)
	e.holding--
}

// beginAuditSeq makes a timeline of its own that starts from the state before, shares only full pages below that, and
// feeds nothing to the tree.
func (e *Engine) beginAuditSeq(a *audit) *restoring {
	m := &e.match
	e.forest.Match(a.key, a.line, m) // at most len-1: what lies before
	a.from = m.Start()
	if len(a.line)-a.from > checkReplayMax {
		return nil
	}
	lock := e.forest.Lock(m)
	m.Pages = m.Pages[:a.from/radix.PageTokens]
	m.Tokens = len(m.Pages) * radix.PageTokens
	job := e.reserve(m, lock, nil)
	if job == nil {
		return nil
	}
	a.seq = e.newSeq(a.key, append(a.line[:len(a.line):len(a.line)], 0))
	a.seq.fresh, a.seq.moving = true, true
	return job
}

// fill lets the loop compute what lies between the two states; filled is closed when it has, or has given up.
func (e *Engine) fill(a *audit) {
	a.filled = make(chan struct{})
	a.seq.filled = a.filled
	if e.follow(a.seq); !slices.Contains(e.behind, a.seq) {
		e.unfollow(a.seq)
	}
}

// beginComparing says what to compare, and whether all of it is there. It keeps the timeline from being parked until
// endAudit: its bytes are read off the loop.
func (e *Engine) beginComparing(a *audit) (slot int32, pages []int32, full bool) {
	a.seq.moving = true
	return a.seq.slot, a.seq.pages, a.seq.consumed == len(a.line)
}

// audit verifies the stored copies, recomputes, and compares. It returns what differs.
func (e *Engine) audit(ctx context.Context, a *audit, job *restoring, out *CacheCheck) (faults []string, err error) {
	faults = e.auditStored(a, out)
	if job == nil {
		out.Skipped++
		return faults, nil
	}
	e.copyIn(job)
	if err := e.do(context.WithoutCancel(ctx), func() {
		e.endRestore(a.seq, job)
		e.fill(a)
	}); err != nil {
		return faults, err
	}
	select {
	case <-a.filled:
	case <-ctx.Done():
		return faults, ctx.Err()
	case <-e.stopped:
		return faults, ErrClosed
	}
	var slot int32
	var pages []int32
	full := false
	if err := e.do(ctx, func() {
		slot, pages, full = e.beginComparing(a)
	}); err != nil {
		return faults, err
	}
	if !full { // memory was short, or the start could not be restored
		out.Skipped++
		return faults, nil
	}
	out.Recomputed++
	differ, err := e.auditState(a, slot)
	if err != nil {
		return faults, err
	}
	faults = append(faults, differ...)
	for i := a.from / radix.PageTokens; i < len(a.line)/radix.PageTokens; i++ {
		out.Pages++
		differ, err := e.auditPage(a, i, pages[i])
		if err != nil {
			return faults, err
		}
		faults = append(faults, differ...)
	}
	return faults, nil
}

// auditStored verifies the checksums of the snapshot's copies below the device.
func (e *Engine) auditStored(a *audit, out *CacheCheck) (faults []string) {
	for _, b := range []blob{{radix.Host, a.target.Host}, {radix.Disk, a.target.Disk}} {
		if b.handle == 0 {
			continue
		}
		_, err := e.storedBytes(b, true, len(a.line)%radix.PageTokens != 0)
		if errors.Is(err, tier.ErrUnknown) {
			continue // it has just left, since a faster tier has the state too
		}
		out.Stored++
		if err != nil {
			faults = append(faults, err.Error())
		}
	}
	return faults
}

// auditState compares the recomputed state with the cached one.
func (e *Engine) auditState(a *audit, slot int32) ([]string, error) {
	mine := make([]byte, e.layout.SlotBytes)
	if err := e.slots.Read(int(slot)*e.layout.SlotStride, mine); err != nil {
		return nil, fmt.Errorf("read recomputed state: %w", err)
	}
	var cached []byte
	switch {
	case a.target.Slot != radix.None:
		cached = make([]byte, e.layout.SlotBytes)
		if err := e.slots.Read(int(a.target.Slot)*e.layout.SlotStride, cached); err != nil {
			return nil, fmt.Errorf("read cached state: %w", err)
		}
	default:
		parts, err := e.storedBytes(blobOf(a.target.Host, a.target.Disk), true, len(a.line)%radix.PageTokens != 0)
		if err != nil {
			return nil, nil // auditStored has said so
		}
		cached = parts[0]
	}
	var faults []string
	for _, p := range e.layout.Slot {
		if !bytes.Equal(mine[p.Off:p.Off+p.Bytes], cached[p.Off:p.Off+p.Bytes]) {
			faults = append(faults, "state of "+p.Name)
		}
	}
	return faults, nil
}

// auditPage compares a recomputed full page with the cached one, wherever that is.
func (e *Engine) auditPage(a *audit, i int, page int32) ([]string, error) {
	mine, cached := make([]byte, e.layout.SlabBytes), make([]byte, e.layout.SlabBytes)
	if err := e.pages.Read(int(page)*e.layout.PageStride, mine); err != nil {
		return nil, fmt.Errorf("read recomputed page: %w", err)
	}
	where := fmt.Sprintf("page [%d,%d)", i*radix.PageTokens, (i+1)*radix.PageTokens)
	switch place := a.places[i]; {
	case place.Device != radix.None:
		if err := e.pages.Read(int(place.Device)*e.layout.PageStride, cached); err != nil {
			return nil, fmt.Errorf("read cached page: %w", err)
		}
	default:
		parts, err := e.storedBytes(blobOf(place.Host, place.Disk), false, true)
		if errors.Is(err, tier.ErrUnknown) {
			return nil, nil // it has just left
		}
		if err != nil {
			return []string{fmt.Sprintf("%s: %v", where, err)}, nil
		}
		cached = parts[0]
	}
	var faults []string
	for _, p := range e.layout.Page {
		if p.Name != model.DraftLayer && !bytes.Equal(mine[p.Off:p.Off+p.Bytes], cached[p.Off:p.Off+p.Bytes]) {
			faults = append(faults, where+" of "+p.Name)
		}
	}
	return faults, nil
}
