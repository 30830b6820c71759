package engine

import (
	"context"
	"fmt"

	"rocket/radix"
)

// A namespace may have a limit of resident bytes: what its lines take on the device and on the host together, pages
// and states, padded as on the device, shared ones once; what its open turns hold is among them. What is on the disk
// is counted and not limited.
//
//   - At the limit a namespace gives up what is its own and inactive, before it takes more: in the order of radix's
//     EvictOwn, to the disk if there is one, else for good. When that is not enough its idle timelines are parked.
//   - A turn that has begun goes on to its end, over the limit if it must. What it leaves behind gives way then.
//   - Only while the namespace's open turns alone fill the limit are further ones refused (ErrQuota).
//   - Others lose nothing by it. If the pool is full and a namespace is over its limit by several turns, the younger
//     ones wait for the oldest; only a single turn that is larger than the limit takes room as any other does.
//
// It holds after every command and every step (checkQuotas).

// quotaSlack is the part of a limit that goes to the disk at once beyond what is needed, so that the next rows find
// room without dropping anything.
const quotaSlack = 16

// SetNamespaceLimit bounds the resident bytes of a namespace; < 0: no limit. One that has more gives way at once,
// pins that hold more than their part of it too.
func (e *Engine) SetNamespaceLimit(ctx context.Context, ns string, bytes int64) error {
	return e.do(ctx, func() {
		e.forest.SetLimit(ns, max(bytes, radix.NoLimit))
		e.unpinOver(ns)
	})
}

// NamespaceBytes is what a namespace's lines take.
type NamespaceBytes struct {
	Device, Host int64 // these are resident
	Disk         int64
	Limit        int64 // of the resident ones; < 0: none
}

// Namespaces tells what every namespace takes that takes something or has a limit; nil after Close.
func (e *Engine) Namespaces() map[string]NamespaceBytes {
	var out map[string]NamespaceBytes
	_ = e.do(context.Background(), func() { // closed: nil
		out = map[string]NamespaceBytes{}
		for ns, a := range e.forest.Accounts {
			out[ns] = NamespaceBytes{Device: a.Device, Host: a.Host, Disk: a.Disk, Limit: a.Limit}
		}
	})
	return out
}

func (e *Engine) quotaStats(st *Stats) {
	for _, a := range e.forest.Accounts {
		if a.Limit != radix.NoLimit {
			st.NamespacesLimited++
			if a.Resident()+e.pageKind.bytes > a.Limit {
				st.NamespacesFull++
			}
		}
	}
}

// pays says whether s's pages and slots count for its namespace.
func (s *Seq) pays() bool { return s != nil && !s.fresh }

// excess is how many bytes s's namespace is over its limit with so many more; what is on its way out has left.
func (e *Engine) excess(s *Seq, more int64) int64 {
	if !s.pays() {
		return 0
	}
	return e.excessOf(s.ns, more)
}

func (e *Engine) excessOf(ns string, more int64) int64 {
	over := e.forest.Excess(ns, more)
	if over > 0 {
		over -= e.leaving[ns]
	}
	return over
}

// yields says whether s must not take others' room: its namespace is over its limit, and another turn of it is in the
// batch that can give way, or be waited for.
func (e *Engine) yields(s *Seq) bool {
	if e.excess(s, e.pageKind.bytes) <= 0 {
		return false
	}
	for _, r := range e.running {
		if r.seq != s && r.seq.ns == s.ns && !r.seq.cold {
			return true
		}
	}
	return false
}

// giveUp makes room under a namespace's limit for so many bytes more, as far as it has something inactive.
func (e *Engine) giveUp(ns string, more int64) {
	for last := int64(0); ; {
		over := e.excessOf(ns, more)
		if over <= 0 || over == last {
			return
		}
		last = over
		toDisk := e.disk != nil && e.leaving[ns] == 0 // else the disk is slower than the namespace
		want := over
		if toDisk {
			want += e.forest.Account(ns).Limit / quotaSlack
		}
		victims := e.forest.EvictOwn(ns, want, e.now())
		e.stats.QuotaEvicted += int64(len(victims))
		if toDisk && len(victims) > 0 {
			e.spoolOwn(ns, victims)
			continue
		}
		for _, v := range victims {
			if v.Disk != 0 {
				e.forest.Demoted(v, radix.Disk, v.Disk)
			} else {
				e.forest.Dropped(v)
			}
		}
		e.letGo()
	}
}

// spoolOwn copies what a namespace gives up to the disk, off the loop. Room for it is what is free there and what the
// namespace has there itself; what finds none is dropped.
func (e *Engine) spoolOwn(ns string, victims []radix.Eviction) {
	job := &copying{victims: victims, leave: true}
	job.freed = e.diskRoom(victims, func(bytes, now int64) []radix.Eviction { return e.forest.EvictOwnDisk(ns, bytes, now) })
	e.describe(job)
	for _, v := range victims {
		e.leaving[ns] += v.Bytes
	}
	e.io.Go(func() {
		outcomes := e.copyToDisk(context.Background(), job)
		_ = e.do(context.Background(), func() { // closed: nobody needs the accounts any more
			delete(e.leaving, ns)
			_ = e.settle(job, outcomes) // a failure is logged there
		})
	})
}

// keepQuotas makes namespaces that are over their limits give way, after a command or a step.
func (e *Engine) keepQuotas() {
	e.over = e.forest.Over(e.over[:0])
	for _, ns := range e.over {
		e.giveUp(ns, 0)
		for e.excessOf(ns, 0) > 0 && e.barren[ns] != e.idled+1 {
			if e.parkIdle(idleOf(ns)) {
				e.giveUp(ns, 0)
			} else {
				e.barren[ns] = e.idled + 1 // no need to look through all timelines again before another one is idle
			}
		}
	}
}

func idleOf(ns string) func(*Seq) bool {
	return func(s *Seq) bool { return s.ns == ns && !s.fresh }
}

// quotaFull reports whether the open turns of a namespace, but for one on except, fill its limit; who asks refuses
// then, and it is counted.
func (e *Engine) quotaFull(ns string, except *Seq) bool {
	limit := e.forest.Account(ns).Limit
	if limit == radix.NoLimit || e.activeBytes(ns, except, limit) < limit {
		return false
	}
	e.stats.QuotaRefused++
	return true
}

// activeBytes is what the open turns of a namespace take: what they hold, and what their lines will need that have no
// pages yet, so that many turns that begin at once do not all find room. Below enough the answer may be too high.
func (e *Engine) activeBytes(ns string, except *Seq, enough int64) int64 {
	var active []*Seq
	most := int64(0)
	for _, list := range [][]*Run{e.running, e.queue} {
		for _, r := range list {
			if s := r.seq; s.ns == ns && s != except && s.pays() {
				active = append(active, s)
				most += int64(pagesOf(s))*e.pageKind.bytes + e.slotKind.bytes
			}
		}
	}
	if most < enough {
		return most
	}
	pages, slots := map[int32]bool{}, map[int32]bool{}
	more, without := 0, 0 // pages, slots
	for _, s := range active {
		have := 0
		hold := func(id int32) {
			if id != radix.None {
				pages[id] = true
				have++
			}
		}
		if s.cold {
			e.forest.Match(s.ns, s.line, &e.match)
			for _, p := range e.match.Pages {
				hold(p.Device)
			}
		}
		for _, id := range s.pages {
			hold(id)
		}
		more += max(0, pagesOf(s)-have)
		if s.slot != radix.None {
			slots[s.slot] = true
		} else {
			without++
		}
	}
	return int64(len(pages)+more)*e.pageKind.bytes + int64(len(slots)+without)*e.slotKind.bytes
}

// pagesOf is how many pages s's line takes.
func pagesOf(s *Seq) int { return (len(s.line) + radix.PageTokens - 1) / radix.PageTokens }

// unpinOver lets go of pins that a lowered limit does not allow, those of timelines used longest ago first.
func (e *Engine) unpinOver(ns string) {
	for {
		a := e.forest.Account(ns)
		if a.Limit == radix.NoLimit || a.Pinned <= a.Limit/radix.PinShare {
			return
		}
		var oldest *Seq
		for s := range e.seqs {
			if s.ns == ns && s.pinned && (oldest == nil || s.used < oldest.used) {
				oldest = s
			}
		}
		if oldest == nil {
			return
		}
		e.forest.Unpin(&oldest.pin)
		oldest.pinned = false
	}
}

// checkPaid verifies that what s holds is its namespace's.
func (e *Engine) checkPaid(s *Seq) error {
	if !s.pays() {
		return nil
	}
	for _, id := range s.pages {
		if !e.forest.HasPage(s.ns, id) {
			return fmt.Errorf("engine: page %d of a timeline is not charged to its namespace", id)
		}
	}
	if s.slot != radix.None && !e.forest.HasSlot(s.ns, s.slot) {
		return fmt.Errorf("engine: slot %d of a timeline is not charged to its namespace", s.slot)
	}
	return nil
}

// checkQuotas verifies that a namespace over its limit has nothing more to give.
func (e *Engine) checkQuotas() error {
	for _, ns := range e.forest.Over(nil) {
		if e.excessOf(ns, 0) <= 0 {
			continue
		}
		could := e.forest.EvictOwn(ns, 1, e.now())
		for _, v := range could {
			e.forest.Keep(v)
		}
		if len(could) > 0 {
			return fmt.Errorf("engine: a namespace is %d bytes over its limit and could give up %d", e.excessOf(ns, 0), could[0].Bytes)
		}
		for s := range e.seqs {
			if idleOf(ns)(s) && s.run == nil && !s.cold && !s.moving {
				return fmt.Errorf("engine: a namespace is %d bytes over its limit and has an idle timeline of %d pages", e.excessOf(ns, 0), len(s.pages))
			}
		}
	}
	return nil
}
