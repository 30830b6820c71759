package engine

import (
	"context"

	"rocket/radix"
)

// Detach puts s away: its pages and an exact snapshot of its end go to the tree, s lets go of them, and what no other
// timeline holds is copied to the tier, off the loop. s is dead afterwards; Open of the same line resumes it. What
// does not fit into the tier stays on the device until something else needs the room. ErrBusy while a turn runs.
func (e *Engine) Detach(ctx context.Context, s *Seq, _ Tier) (Residency, error) {
	var job detaching
	var err error
	if doErr := e.do(ctx, func() { err = e.beginDetach(s, &job) }); doErr != nil {
		return Residency{}, doErr
	}
	if err != nil {
		return Residency{}, err
	}
	outcomes := make([]outcome, len(job.victims))
	for i, v := range job.victims {
		outcomes[i] = e.copyOut(v)
	}
	var res Residency
	err = e.do(context.WithoutCancel(ctx), func() {
		e.detaching--
		for i, v := range job.victims {
			if outcomes[i].err != nil {
				e.forest.Keep(v)
			} else {
				e.forest.Demoted(v, radix.Host, outcomes[i].handle)
			}
		}
		e.freeHost()
		res = e.residencyOf(job.ns, job.line)
	})
	return res, err
}

// detaching is what Detach carries from the loop to the copies and back.
type detaching struct {
	ns      string
	line    []int32
	victims []radix.Eviction
}

func (e *Engine) beginDetach(s *Seq, job *detaching) error {
	switch {
	case s.dead:
		return ErrClosed
	case s.run != nil || s.moving:
		return ErrBusy
	}
	job.ns, job.line = s.ns, s.line
	e.detaching++
	e.park(s)
	e.release(s)
	if s.fresh || e.host == nil || len(job.line) == 0 {
		return nil
	}
	job.victims = e.forest.EvictPath(job.ns, job.line[:len(job.line)-1], radix.Device)
	e.hostRoom(job.victims)
	return nil
}

// residencyOf counts where a line's consumed tokens are now.
func (e *Engine) residencyOf(ns string, line []int32) Residency {
	m := &e.match
	e.forest.Match(ns, line, m)
	r := Residency{Snapshots: e.forest.Snapshots(ns, line)}
	for _, p := range m.Pages {
		if p.Device != radix.None {
			r.Device += radix.PageTokens
		} else {
			r.Host += radix.PageTokens
		}
	}
	if tail := m.Start() - m.Tokens; tail > 0 { // an exact tail past the last full page
		if m.Snapshot.Slot != radix.None {
			r.Device += tail
		} else {
			r.Host += tail
		}
	}
	return r
}
