package engine

import (
	"context"
	"fmt"

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
	} else if err = e.stowOnDisk(ctx, ns, consumed, radix.Device); err == nil {
		err = e.stowOnDisk(ctx, ns, consumed, radix.Host)
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
		e.detaching++
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
		e.detaching--
		_ = e.settle(job, outcomes) // what was not copied stays
		e.spool()
	})
}

func (e *Engine) stowOnDisk(ctx context.Context, ns string, consumed []int32, from radix.Tier) error {
	job := &copying{}
	if err := e.do(ctx, func() {
		e.detaching++
		job.victims = e.forest.EvictPath(ns, consumed, from)
		job.freed = e.diskRoom(job.victims)
	}); err != nil {
		return err
	}
	var c chains
	c.follow(ns, consumed)
	for _, v := range job.victims {
		job.records = append(job.records, c.record(consumed[:v.At], v))
	}
	outcomes := e.copyToDisk(ctx, job)
	return e.do(context.WithoutCancel(ctx), func() {
		e.detaching--
		_ = e.settle(job, outcomes) // what was not copied stays
	})
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
