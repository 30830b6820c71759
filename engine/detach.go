package engine

import (
	"context"
	"errors"
	"fmt"

	"rocket/engine/tier"
	"rocket/radix"
)

// Detach puts s away: its pages and an exact snapshot of its end go to the tree, s lets go of them, and what no other
// timeline holds is copied to the tier, off the loop. s is dead afterwards; Open of the same line resumes it. What
// does not fit into the tier stays where it is until something else needs the room. ErrBusy while a turn runs.
func (e *Engine) Detach(ctx context.Context, s *Seq, to Tier) (Residency, error) {
	if err := e.checkTier(to); err != nil {
		return Residency{}, err
	}
	var ns string
	var line []int32
	var err error
	if doErr := e.do(ctx, func() {
		switch {
		case s.dead:
			err = ErrClosed
			return
		case s.run != nil || s.moving:
			err = ErrBusy
			return
		}
		ns, line = s.ns, s.line
		if s.fresh {
			line = nil
		}
		e.park(s)
		e.release(s)
	}); doErr != nil {
		return Residency{}, doErr
	}
	if err != nil {
		return Residency{}, err
	}
	return e.stow(ctx, ns, line, to)
}

// Stow is Detach of a line that no timeline of its own holds any more: what the tree has of it alone goes down to the
// tier. It reports where the line's tokens are then.
func (e *Engine) Stow(ctx context.Context, line []int32, namespace string, to Tier) (Residency, error) {
	if err := e.checkTier(to); err != nil {
		return Residency{}, err
	}
	return e.stow(ctx, namespace, line, to)
}

// HasDisk reports whether there is a disk tier.
func (e *Engine) HasDisk() bool { return e.disk != nil }

func (e *Engine) checkTier(to Tier) error {
	switch {
	case to == TierHost:
		return nil
	case to != TierDisk:
		return fmt.Errorf("tier %q: want host or disk", to)
	case e.disk == nil:
		return ErrNoDisk
	}
	return nil
}

func (e *Engine) stow(ctx context.Context, ns string, line []int32, to Tier) (res Residency, err error) {
	if len(line) == 0 {
		return Residency{}, nil
	}
	consumed := line[:len(line)-1]
	if to == TierHost {
		err = e.stowOnHost(ctx, ns, consumed)
	} else {
		var all, rest bool
		if all, err = e.stowOnDisk(ctx, ns, consumed, radix.Device); err == nil {
			rest, err = e.stowOnDisk(ctx, ns, consumed, radix.Host)
		}
		if err == nil && all && rest { // else there is no room for more
			err = e.keepOnDisk(ctx, ns, line)
		}
	}
	if err != nil {
		return Residency{}, err
	}
	err = e.do(context.WithoutCancel(ctx), func() { res = e.residencyOf(ns, line) })
	return res, err
}

func (e *Engine) stowOnHost(ctx context.Context, ns string, consumed []int32) error {
	job := &copying{}
	var room *copying // what goes from the host to the disk first
	if err := e.do(ctx, func() {
		e.holding++
		job.victims = e.forest.EvictPath(ns, consumed, radix.Device)
		if over := e.hostOver(job.victims); over > 0 && e.disk != nil {
			room = e.beginCopying(e.forest.EvictHost(over, e.now()))
		} else {
			e.hostRoom(job.victims)
		}
	}); err != nil {
		return err
	}
	if room != nil {
		moved := e.copyToDisk(ctx, room)
		if err := e.do(context.WithoutCancel(ctx), func() { _ = e.settle(room, moved) }); err != nil { // a failure is logged there
			return err
		}
	}
	outcomes := make([]outcome, len(job.victims))
	parallel(len(outcomes), func(i int) { outcomes[i] = e.toHost(job.victims[i]) })
	return e.do(context.WithoutCancel(ctx), func() {
		e.holding--
		_ = e.settle(job, outcomes) // what was not copied stays
		e.spool()
	})
}

// stowOnDisk says whether everything that only this line had on the tier went.
func (e *Engine) stowOnDisk(ctx context.Context, ns string, consumed []int32, from radix.Tier) (all bool, err error) {
	job := &copying{}
	if err := e.do(ctx, func() {
		e.holding++
		job.victims = e.forest.EvictPath(ns, consumed, from)
		shallowFirst(job.victims)
		job.freed = e.diskRoom(job.victims, e.forest.EvictDisk)
	}); err != nil {
		return false, err
	}
	var c chains
	c.follow(ns, consumed)
	for _, v := range job.victims {
		job.records = append(job.records, c.record(consumed[:v.At], v))
	}
	outcomes := e.copyToDisk(ctx, job)
	err = e.do(context.WithoutCancel(ctx), func() {
		e.holding--
		all = e.settle(job, outcomes) == nil // what was not copied stays
	})
	return all, err
}

// keepOnDisk gives what the line shares with others, and so stays where it is, a copy on disk: without it what is there
// of the line alone could not be reached after a restart.
func (e *Engine) keepOnDisk(ctx context.Context, ns string, line []int32) error {
	k := &keeping{}
	if err := e.do(ctx, func() { e.beginKeeping(k, ns, line) }); err != nil {
		return err
	}
	outcomes := e.copyToDisk(ctx, &k.copying)
	errs := make([]error, len(outcomes))
	return e.do(context.WithoutCancel(ctx), func() {
		e.holding--
		for i, o := range outcomes {
			r := k.records[i]
			if errs[i] = o.err; o.err == nil {
				if errs[i] = e.restore(&tier.Stored{Record: r, Handle: o.handle}, line[:r.At]); errs[i] != nil {
					k.unused = append(k.unused, o.handle)
				}
			}
		}
		if err := errors.Join(errs...); err != nil && !errors.Is(err, tier.ErrFull) && ctx.Err() == nil {
			e.opts.Log.Error("keep shared caches on disk failed", "error", err)
		}
		e.forest.Unlock(&k.lock)
		e.letGo()
		if len(k.unused) > 0 {
			e.io.Go(func() { e.dropOnDisk(k.unused) })
		}
	})
}

// keeping is a copy of shared entries to the disk under way. Nothing leaves its tier, so no eviction is picked; the
// lock keeps the entries where they are.
type keeping struct {
	copying // its victims are places of bytes only
	lock    radix.Lock
	unused  []int64
}

func (e *Engine) beginKeeping(k *keeping, ns string, line []int32) {
	e.holding++
	m := &e.match
	e.forest.Match(ns, line, m)
	k.lock = e.forest.Lock(m)
	e.chains.follow(ns, line[:len(line)-1])
	add := func(at int, v radix.Eviction) {
		if v.Page != radix.None || v.Slot != radix.None {
			v.Host = 0 // the lock keeps the device's copy, and lets the host's go
		}
		k.victims = append(k.victims, v)
		k.records = append(k.records, e.chains.record(line[:at], v))
	}
	for i, p := range m.Pages {
		if p.Disk == 0 {
			add((i+1)*radix.PageTokens, radix.Eviction{Page: p.Device, Slot: radix.None, Host: p.Host})
		}
	}
	if s := m.Snapshot; m.Found && s.Disk == 0 {
		add(s.At, radix.Eviction{Snapshot: true, At: s.At, Slot: s.Slot, Page: s.Tail, Host: s.Host, MTPValidFrom: s.MTPValidFrom})
	}
	k.freed = e.diskRoom(k.victims, e.forest.EvictDisk)
}

// residencyOf counts where a line's consumed tokens are now.
func (e *Engine) residencyOf(ns string, line []int32) Residency {
	m := &e.match
	e.forest.Match(ns, line, m)
	r := Residency{Snapshots: e.forest.Snapshots(ns, line)}
	add := func(device, host bool, n int) {
		switch {
		case device:
			r.Device += n
		case host:
			r.Host += n
		default:
			r.Disk += n
		}
	}
	for _, p := range m.Pages {
		add(p.Device != radix.None, p.Host != 0, radix.PageTokens)
	}
	if tail := m.Start() - m.Tokens; tail > 0 { // an exact tail past the last full page
		add(m.Snapshot.Slot != radix.None, m.Snapshot.Host != 0, tail)
	}
	return r
}
