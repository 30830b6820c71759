package engine

import (
	"context"
	"fmt"
	"slices"

	"rocket/engine/tier"
	"rocket/radix"
)

// openDisk opens the disk tier and puts what an earlier process left there into the tree. Bytes load when a line first
// needs them. It runs before the loop starts.
func (e *Engine) openDisk() error {
	if e.opts.DiskDir == "" {
		return nil
	}
	disk, stored, err := tier.OpenDisk(tier.DiskOptions{
		Dir: e.opts.DiskDir, MaxBytes: e.opts.DiskBytes,
		Identity: tier.Identity{
			Model: e.opts.Model.Digest, Arithmetic: e.opts.Device.Arithmetic(), Class: e.opts.Model.Class.String(),
			PageBytes: e.layout.SlabBytes, StateBytes: e.layout.SlotBytes,
		},
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDiskTier, err)
	}
	e.disk = disk
	pages, states := e.restock(stored)
	e.opts.Log.Info("disk tier opened", "dir", e.opts.DiskDir, "pages", pages, "states", states,
		"bytes", disk.Bytes(), "max", disk.Max(), "direct", disk.Direct())
	return nil
}

// restock builds the tree of the stored records from the roots up. A record whose beginning is not there could never
// be reached; it is dropped.
func (e *Engine) restock(stored []tier.Stored) (pages, states int) {
	type place struct {
		key    string
		parent [16]byte
	}
	below := map[place][]*tier.Stored{}
	roots := map[string]bool{}
	for i := range stored {
		r := &stored[i]
		below[place{r.Key, r.Parent}] = append(below[place{r.Key, r.Parent}], r)
		roots[r.Key] = true
	}
	reached := make(map[int64]bool, len(stored))
	var line []int32
	for key := range roots {
		todo := []*tier.Stored{{Record: tier.Record{Key: key, Chain: tier.Chain(key, nil)}}}
		for len(todo) > 0 {
			page := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			line = append(line[:page.At-len(page.Tokens)], page.Tokens...)
			for _, r := range below[place{key, page.Chain}] {
				if reached[r.Handle] || r.At != page.At+len(r.Tokens) || e.restore(r, append(line, r.Tokens...)) != nil {
					continue
				}
				reached[r.Handle] = true
				if r.Kind == tier.State {
					states++
				} else {
					pages++
					todo = append(todo, r)
				}
			}
		}
	}
	for i := range stored {
		if !reached[stored[i].Handle] {
			e.dropOnDisk([]int64{stored[i].Handle})
		}
	}
	e.letGo()
	return pages, states
}

// restore puts one record into the tree; line are the tokens up to its end.
func (e *Engine) restore(r *tier.Stored, line []int32) error {
	if r.Kind == tier.Page {
		return e.forest.Restore(r.Key, line, radix.Disk, r.Handle, e.now())
	}
	_, err := e.forest.Publish(r.Key, line, radix.Snapshot{At: r.At, Slot: radix.None, Tail: radix.None, Disk: r.Handle,
		MTPValidFrom: r.MTPValidFrom}, e.now())
	return err
}

// Save copies what is cached on the device and on the host to the disk, for the next start: beginnings that many lines
// share first, then deeper ones, until ctx ends. Nothing may run meanwhile. It returns how many entries the disk took.
func (e *Engine) Save(ctx context.Context) (int, error) {
	if e.disk == nil {
		return 0, nil
	}
	var victims []radix.Eviction
	if err := e.do(ctx, func() {
		for {
			n := len(victims)
			victims = append(victims, e.forest.EvictSlots(saveBatch, e.now())...)
			victims = append(victims, e.forest.EvictPages(saveBatch, e.now())...)
			victims = append(victims, e.forest.EvictHost(1<<62, e.now())...)
			if len(victims) == n {
				break
			}
		}
	}); err != nil {
		return 0, err
	}
	shallowFirst(victims)
	saved := 0
	var failed error
	for batch := range slices.Chunk(victims, saveBatch) {
		var job *copying
		if err := e.do(context.WithoutCancel(ctx), func() { job = e.beginCopying(batch) }); err != nil {
			return saved, err
		}
		outcomes := e.copyToDisk(ctx, job)
		if err := e.do(context.WithoutCancel(ctx), func() {
			if err := e.settle(job, outcomes); failed == nil {
				failed = err
			}
		}); err != nil {
			return saved, err
		}
		for _, o := range outcomes {
			if o.err == nil {
				saved++
			}
		}
	}
	return saved, failed
}

// shallowFirst orders what goes to the disk so that, should room or time run out, what got there can be reached after a
// restart: what lies further up a line first.
func shallowFirst(victims []radix.Eviction) {
	slices.SortStableFunc(victims, func(a, b radix.Eviction) int {
		if a.At == b.At && a.Snapshot != b.Snapshot { // a state hangs on the page that ends there
			if a.Snapshot {
				return 1
			}
			return -1
		}
		return a.At - b.At
	})
}

// saveBatch is how many entries are handed to the disk at once.
const saveBatch = 256
