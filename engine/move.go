package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"rocket/engine/tier"
	"rocket/kernels"
	"rocket/radix"
)

// What moves between the tiers. The loop picks entries and settles what became of them; the bytes are copied anywhere,
// because the tree holds the references of an entry on its way and nobody writes to them.

const (
	// copiesAtOnce is how many blobs of one restore, detach or spool are under way together: enough to keep a disk busy
	// with pages. The disk itself bounds how much it reads and writes at once.
	copiesAtOnce = 16

	// Above spoolHigh percent of the host's budget its oldest copies go to the disk, down to spoolLow: so that an
	// eviction from the device, which cannot wait for a disk, finds room on the host.
	spoolHigh, spoolLow = 75, 60
)

// Records on disk are named by chains of pages as long as the tree's.
var _ [radix.PageTokens]struct{} = [tier.PageTokens]struct{}{}

// outcome is what became of an eviction's bytes.
type outcome struct {
	to     radix.Tier
	handle int64
	err    error // nil: they are on `to`; tier.ErrFull: no room
}

// evict makes room on the device: victims go to the host while it has room, else they are dropped.
func (e *Engine) evict(victims []radix.Eviction) {
	e.hostRoom(victims)
	e.demote(victims)
	e.letGo()
	e.spool()
}

// demote moves victims from the device to the host as far as that has room, and drops the others.
func (e *Engine) demote(victims []radix.Eviction) {
	for _, v := range victims {
		if o := e.toHost(v); o.err != nil {
			e.forest.Dropped(v) // it can be recomputed
		} else {
			e.forest.Demoted(v, o.to, o.handle)
		}
		if v.Snapshot {
			e.stats.EvictedSnapshots++
		} else {
			e.stats.EvictedPages++
		}
	}
}

// hostRoom gives up host copies, in the tree's order, until the host has room for the victims that no lower tier has, or
// nothing is left to give up.
func (e *Engine) hostRoom(victims []radix.Eviction) {
	last := int64(0)
	for over := e.hostOver(victims); over > 0 && over != last; over = e.hostOver(victims) {
		last = over
		for _, v := range e.forest.EvictHost(over, e.now()) { // counted with the device's padding: once may be too few
			e.forest.Dropped(v)
		}
		e.letGo()
	}
}

// hostOver is how many bytes more than the host has room for the victims need that no lower tier has.
func (e *Engine) hostOver(victims []radix.Eviction) int64 {
	if e.host == nil {
		return 0
	}
	over := e.host.Bytes() - e.host.Max()
	for _, v := range victims {
		if v.Host == 0 && v.Disk == 0 {
			over += e.payload(v)
		}
	}
	return over
}

// payload is how many bytes an entry has below the device, where there is no padding.
func (e *Engine) payload(v radix.Eviction) int64 {
	switch {
	case !v.Snapshot:
		return int64(e.layout.SlabBytes)
	case v.At%radix.PageTokens == 0:
		return int64(e.layout.SlotBytes)
	}
	return int64(e.layout.SlotBytes + e.layout.SlabBytes)
}

// toHost copies an eviction from the device to the host, unless a lower tier has it already.
func (e *Engine) toHost(v radix.Eviction) outcome {
	switch {
	case v.Host != 0:
		return outcome{to: radix.Host, handle: v.Host}
	case v.Disk != 0:
		return outcome{to: radix.Disk, handle: v.Disk}
	case e.host == nil:
		return outcome{err: errNoHost}
	}
	parts, err := e.deviceBytes(v)
	if err != nil {
		return outcome{err: err}
	}
	handle, err := e.host.Put(parts...)
	return outcome{radix.Host, handle, err}
}

// toDisk copies an eviction from the device or the host to the disk, unless it is there already.
func (e *Engine) toDisk(ctx context.Context, v radix.Eviction, r tier.Record) outcome {
	if v.Disk != 0 {
		return outcome{to: radix.Disk, handle: v.Disk}
	}
	var parts [][]byte
	var err error
	if v.Host != 0 {
		parts, err = e.host.Get(v.Host)
	} else if parts = mapped(e.ranges(v.Slot, v.Page)); parts == nil {
		parts, err = e.deviceBytes(v)
	}
	if err != nil {
		return outcome{err: err}
	}
	if err = e.fault("write to disk"); err != nil {
		return outcome{err: err}
	}
	handle, err := e.disk.Put(ctx, r, parts...)
	return outcome{radix.Disk, handle, err}
}

var errNoHost = errors.New("no host tier")

// deviceBytes copies an eviction's bytes: a state, its partial page, a page.
func (e *Engine) deviceBytes(v radix.Eviction) ([][]byte, error) {
	if err := e.fault("copy out"); err != nil {
		return nil, err
	}
	var parts [][]byte
	for _, r := range e.ranges(v.Slot, v.Page) {
		b := make([]byte, r.n)
		if err := r.buf.Read(r.off, b); err != nil {
			return nil, fmt.Errorf("read from the device: %w", err)
		}
		parts = append(parts, b)
	}
	return parts, nil
}

// deviceRange is where a state or a page lies.
type deviceRange struct {
	buf    *kernels.Buffer
	off, n int
}

// ranges gives the state's place and the page's, those that there are.
func (e *Engine) ranges(slot, page int32) (out []deviceRange) {
	if slot != radix.None {
		out = append(out, deviceRange{e.slots, int(slot) * e.layout.SlotStride, e.layout.SlotBytes})
	}
	if page != radix.None {
		out = append(out, deviceRange{e.pages, int(page) * e.layout.PageStride, e.layout.SlabBytes})
	}
	return out
}

// mapped gives the ranges' own bytes, nil if the device's memory cannot be addressed.
func mapped(ranges []deviceRange) (parts [][]byte) {
	for _, r := range ranges {
		b := r.buf.Map(r.off, r.n)
		if b == nil {
			return nil
		}
		parts = append(parts, b)
	}
	return parts
}

// fromDisk reads a record straight into the device's memory where that can be addressed.
func (e *Engine) fromDisk(c blobCopy) error {
	parts := mapped(e.ranges(c.slot, c.page))
	if parts == nil {
		return e.copyThrough(c)
	}
	if err := e.fault("copy in"); err != nil {
		return err
	}
	if err := e.disk.Get(c.handle, parts...); err != nil {
		return fmt.Errorf("read from the disk: %w", err)
	}
	return nil
}

// copyThrough copies a blob to the device through memory of its own.
func (e *Engine) copyThrough(c blobCopy) error {
	parts, err := e.storedBytes(c.blob, c.slot != radix.None, c.page != radix.None)
	if err != nil {
		return err
	}
	for i, r := range e.ranges(c.slot, c.page) {
		if err := r.buf.Write(r.off, parts[i]); err != nil {
			return fmt.Errorf("write to the device: %w", err)
		}
	}
	return nil
}

// storedBytes reads a blob: a state's bytes, a page's, or both in that order.
func (e *Engine) storedBytes(b blob, state, page bool) ([][]byte, error) {
	if err := e.fault("copy in"); err != nil {
		return nil, err
	}
	var sizes []int
	if state {
		sizes = append(sizes, e.layout.SlotBytes)
	}
	if page {
		sizes = append(sizes, e.layout.SlabBytes)
	}
	var parts [][]byte
	var err error
	if b.tier == radix.Host {
		parts, err = e.host.Get(b.handle)
	} else {
		for _, n := range sizes {
			parts = append(parts, make([]byte, n))
		}
		err = e.disk.Get(b.handle, parts...)
	}
	if err != nil {
		return nil, fmt.Errorf("read from the %s: %w", b.tier, err)
	}
	if !slices.EqualFunc(parts, sizes, func(p []byte, n int) bool { return len(p) == n }) {
		return nil, fmt.Errorf("blob %d of the %s does not have the sizes %v", b.handle, b.tier, sizes)
	}
	return parts, nil
}

// letGo drops the blobs that the tree no longer names: those of the host here, those of the disk behind.
func (e *Engine) letGo() {
	if e.host != nil {
		for _, h := range e.forest.TakeFreed(radix.Host, nil) {
			if err := e.host.Drop(h); err != nil {
				e.opts.Log.Error("drop host blob failed", "error", err)
			}
		}
	}
	if freed := e.freedOnDisk(); len(freed) > 0 {
		e.io.Go(func() { e.dropOnDisk(freed) })
	}
}

func (e *Engine) freedOnDisk() []int64 {
	if e.disk == nil {
		return nil
	}
	return e.forest.TakeFreed(radix.Disk, nil)
}

func (e *Engine) dropOnDisk(handles []int64) {
	for _, h := range handles {
		if err := e.disk.Drop(h); err != nil {
			e.opts.Log.Error("drop disk record failed", "error", err)
		}
	}
}

// diskRoom gives up disk copies that pick names, in the tree's order, until the disk has room for the victims. The
// records are dropped where the copies are made, before them.
func (e *Engine) diskRoom(victims []radix.Eviction, pick func(bytes, now int64) []radix.Eviction) (freed []int64) {
	if e.disk == nil {
		return nil
	}
	over := e.disk.Bytes() - e.disk.Max()
	for _, v := range victims {
		if v.Disk == 0 {
			over += e.diskCost(v)
		}
	}
	for last := int64(0); over > 0 && over != last; {
		last = over
		for _, v := range pick(over, e.now()) { // counted with the device's padding: once may be too few
			if e.forest.Dropped(v) {
				over -= e.diskCost(v)
			}
		}
	}
	return e.freedOnDisk()
}

// diskCost is what an entry takes of the disk.
func (e *Engine) diskCost(v radix.Eviction) int64 { return e.disk.Cost(e.payload(v)) }

// spool moves the host's oldest copies to the disk when the host fills up.
func (e *Engine) spool() {
	if e.disk == nil || e.host == nil || e.spooling {
		return
	}
	used, most := e.host.Bytes(), e.host.Max()
	if used <= most/100*spoolHigh {
		return
	}
	victims := e.forest.EvictHost(used-most/100*spoolLow, e.now())
	if len(victims) == 0 {
		return
	}
	e.spooling = true
	job := e.beginCopying(victims)
	e.io.Go(func() {
		outcomes := e.copyToDisk(context.Background(), job)
		_ = e.do(context.Background(), func() { // closed: nobody needs the accounts any more
			e.spooling = false
			if e.settle(job, outcomes) == nil {
				e.spool()
			}
		})
	})
}

// copying is a copy of evictions to a lower tier under way.
type copying struct {
	victims []radix.Eviction
	records []tier.Record
	freed   []int64 // to be dropped first, for room
	leave   bool    // what cannot be copied is dropped, else it stays where it is
}

// beginCopying makes a copy to the disk, on the loop.
func (e *Engine) beginCopying(victims []radix.Eviction) *copying {
	j := &copying{victims: victims, freed: e.diskRoom(victims, e.forest.EvictDisk)}
	e.describe(j)
	return j
}

// describe makes the records of what is copied.
func (e *Engine) describe(j *copying) {
	j.records = make([]tier.Record, len(j.victims))
	for i, v := range j.victims {
		if v.Disk == 0 {
			e.line = v.Line(e.line[:0])
			e.chains.follow(v.Key(), e.line)
			j.records[i] = e.chains.record(e.line, v)
		}
	}
}

// copyToDisk copies, anywhere, as many as there is room for from the first on.
func (e *Engine) copyToDisk(ctx context.Context, j *copying) []outcome {
	e.dropOnDisk(j.freed)
	outcomes := make([]outcome, len(j.victims))
	room, tried := e.disk.Max()-e.disk.Bytes(), false
	for i, v := range j.victims {
		if v.Disk != 0 {
			continue
		}
		if room -= e.diskCost(v); room < 0 && tried {
			outcomes[i].err = tier.ErrFull
		}
		tried = true // one at least: a file system that was full may have room again
	}
	parallel(len(outcomes), func(i int) {
		if outcomes[i].err == nil {
			outcomes[i] = e.toDisk(ctx, j.victims[i], j.records[i])
		}
	})
	return outcomes
}

// settle tells the tree, on the loop. What could not be copied stays where it is, unless it has to leave. It returns
// the first failure.
func (e *Engine) settle(j *copying, outcomes []outcome) error {
	var first error
	for i, v := range j.victims {
		if err := outcomes[i].err; err != nil {
			if j.leave {
				e.forest.Dropped(v)
			} else {
				e.forest.Keep(v)
			}
			if first == nil {
				first = err
			}
			continue
		}
		e.forest.Demoted(v, outcomes[i].to, outcomes[i].handle)
	}
	if first != nil && !errors.Is(first, tier.ErrFull) && !errors.Is(first, context.Canceled) && !errors.Is(first, context.DeadlineExceeded) {
		e.opts.Log.Error("copy to disk failed", "error", first)
	}
	e.letGo()
	return first
}

// parallel runs work for 0..n-1, copiesAtOnce at a time, in order of their start.
func parallel(n int, work func(i int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(n, copiesAtOnce) {
		wg.Go(func() {
			for i := range next {
				work(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// chains makes disk records of entries. Entries that follow each other are mostly of one line, so it keeps the last
// one's hashes at page edges.
type chains struct {
	key   string
	line  []int32
	edges [][16]byte // edges[i] is the hash of the first i pages
}

// record describes an entry of the key and line that follow was last given, or of a beginning of that line; line ends
// where the entry does.
func (c *chains) record(line []int32, v radix.Eviction) tier.Record {
	full := len(line) / radix.PageTokens
	r := tier.Record{Kind: tier.Page, Key: c.key, At: len(line), MTPValidFrom: v.MTPValidFrom}
	if v.Snapshot {
		r.Kind, r.Parent = tier.State, c.edges[full]
		r.Tokens = slices.Clone(line[full*radix.PageTokens:])
		r.Chain = tier.ChainNext(r.Parent, r.Tokens)
		return r
	}
	r.Parent, r.Chain = c.edges[full-1], c.edges[full]
	r.Tokens = slices.Clone(line[len(line)-radix.PageTokens:])
	return r
}

// follow makes edges those of line's full pages.
func (c *chains) follow(key string, line []int32) {
	same := 0
	if key == c.key && len(c.edges) > 0 {
		for same < min(len(line), len(c.line)) && line[same] == c.line[same] {
			same++
		}
		c.edges = c.edges[:min(same/radix.PageTokens+1, len(c.edges))]
	} else {
		c.key, c.edges = key, append(c.edges[:0], tier.Chain(key, nil))
	}
	for i := len(c.edges); i*radix.PageTokens <= len(line); i++ {
		c.edges = append(c.edges, tier.ChainNext(c.edges[i-1], line[(i-1)*radix.PageTokens:i*radix.PageTokens]))
	}
	c.line = append(c.line[:0], line...)
}
