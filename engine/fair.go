package engine

import (
	"cmp"
	"slices"
)

// A namespace is a tenant here: what one of them floods the engine with must
// leave the others their share. Three things are shared out: places in the
// queue, places in the batch, and rows of prefill. A place in the batch is not
// kept to a run's end: that may be an hour away.

// turnsKept is how many namespaces a turns remembers; at one more it forgets
// all, and a round begins anew.
const turnsKept = 4096

// turns remembers when each namespace last had its turn; one that is not in it
// had none for long.
type turns struct {
	at  map[string]int64
	now int64
}

func (t *turns) took(ns string) {
	if t.at == nil || len(t.at) >= turnsKept {
		t.at = map[string]int64{}
	}
	t.now++
	t.at[ns] = t.now
}

// byNamespace counts runs.
func byNamespace(list []*Run) map[string]int {
	n := map[string]int{}
	for _, r := range list {
		n[r.seq.ns]++
	}
	return n
}

// queueFull reports whether no run of a namespace may wait any more: when the
// queue is full and the namespace has its share of it. So a flood cannot keep
// others out; at most twice QueueLen runs wait.
func (e *Engine) queueFull(ns string) bool {
	if len(e.queue) < e.opts.QueueLen {
		return false
	}
	waiting := byNamespace(e.queue)
	waiting[ns] += 0 // it shares, whether it has one waiting or not
	return len(e.queue) >= 2*e.opts.QueueLen || waiting[ns] >= max(1, e.opts.QueueLen/len(waiting))
}

// nextQueued is the place in the queue of the run that is admitted next: of
// the namespace with the fewest runs in the batch, among equals of the one that
// was longest not admitted, and of it the oldest.
func (e *Engine) nextQueued() int {
	running := byNamespace(e.running)
	best := 0
	for i, r := range e.queue {
		a, b := r.seq.ns, e.queue[best].seq.ns
		if running[a] < running[b] || running[a] == running[b] && e.admitted.at[a] < e.admitted.at[b] {
			best = i
		}
	}
	return best
}

// makePlace takes a place in the full batch for a namespace whose run waits,
// from the namespace that has the most, unless that has only one more. Its
// youngest run waits in the queue from then on, behind all others, and goes on
// with the same tokens later: its pages and its state are in the tree.
func (e *Engine) makePlace(ns string) bool {
	running := byNamespace(e.running)
	var victim *Run
	for _, r := range e.running {
		n := running[r.seq.ns]
		if n < running[ns]+2 || r.seq.moving {
			continue
		}
		if victim == nil || n > running[victim.seq.ns] || n == running[victim.seq.ns] && r.order > victim.order {
			victim = r
		}
	}
	if victim == nil {
		return false
	}
	if !victim.seq.cold {
		e.preempt(victim.seq)
	}
	e.running = removeRun(e.running, victim)
	e.queue = append(e.queue, victim)
	victim.setPhase(Queued)
	return true
}

// byPrefill puts what wants to prefill in the order of whose namespace has
// waited longest for it; inside one, and with only one, the order stays.
func byPrefill[T any](e *Engine, list []T, ns func(T) string) []T {
	out := slices.Clone(list)
	if len(out) > 1 && slices.ContainsFunc(out[1:], func(x T) bool { return ns(x) != ns(out[0]) }) {
		slices.SortStableFunc(out, func(a, b T) int { return cmp.Compare(e.prefilled.at[ns(a)], e.prefilled.at[ns(b)]) })
	}
	return out
}

func runNamespace(r *Run) string { return r.seq.ns }
func seqNamespace(s *Seq) string { return s.ns }
