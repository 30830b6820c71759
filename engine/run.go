package engine

import (
	"sync"
	"sync/atomic"
	"time"
)

// Run is one turn's decoding: an append-only list of tokens that the loop writes and anybody reads by offset.
type Run struct {
	e    *Engine
	seq  *Seq
	req  TurnRequest
	wake chan struct{} // capacity 1
	done chan struct{} // closed when the state is Done

	mu     sync.Mutex
	tokens []Token     // guarded by mu; appended by the loop only
	logits [][]float32 // guarded by mu; only with KeepLogits
	state  RunState    // guarded by mu

	acked     atomic.Int64
	cancelled atomic.Bool
	paused    atomic.Bool

	// Only the loop.
	sampler     sampler
	stop        *stopMatcher
	started     time.Time
	first, last time.Time
	produced    int
	charged     bool  // Usage says where the prompt came from
	order       int64 // admission order; the largest is the youngest
}

// Read returns the tokens generated from offset from (0 = the first) and the state at that moment. It never blocks.
// The returned slice must not be changed.
func (r *Run) Read(from int) ([]Token, RunState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from > len(r.tokens) {
		from = len(r.tokens)
	}
	return r.tokens[from:len(r.tokens):len(r.tokens)], r.state
}

// Ready has one pending signal when something changed since it was last received from. One reader should wait on it.
func (r *Run) Ready() <-chan struct{} { return r.wake }

// Done is closed at the end of the Run, for a reader that does not want to be woken by every token before.
func (r *Run) Done() <-chan struct{} { return r.done }

// Ack says that the first n generated tokens are durable.
func (r *Run) Ack(n int) {
	for {
		old := r.acked.Load()
		if int64(n) <= old {
			return
		}
		if r.acked.CompareAndSwap(old, int64(n)) {
			r.e.nudge()
			return
		}
	}
}

// Cancel ends the Run as soon as the loop sees it, in any phase. What was generated stays on the line.
func (r *Run) Cancel() {
	r.cancelled.Store(true)
	r.e.nudge()
}

// Logits returns the logits that generated token i was sampled from, or nil without KeepLogits.
func (r *Run) Logits(i int) []float32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i >= len(r.logits) {
		return nil
	}
	return r.logits[i]
}

func (r *Run) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Run) setPhase(p Phase) {
	r.mu.Lock()
	if r.state.Phase != Done {
		r.state.Phase = p
	}
	r.mu.Unlock()
	r.signal()
}

// Hold leaves the Run out of the batches until it is called with false, for an owner who cannot make anything durable
// and does not know when that ends.
func (r *Run) Hold(on bool) {
	r.paused.Store(on)
	if !on {
		r.e.nudge()
	}
}

// held reports whether the Run is too far ahead of what its owner made durable, or its owner holds it.
func (r *Run) held() bool {
	return r.paused.Load() || int64(r.produced)-r.acked.Load() >= MaxUncommitted
}

// charge notes where the prompt came from, once, when the run first goes on.
func (r *Run) charge(s *Seq) {
	r.charged = true
	r.mu.Lock()
	u := &r.state.Usage
	u.BySource = s.source(u.PromptTokens)
	if u.BySource.Recomputed > 0 && u.BySource.ColdReason == "" {
		u.BySource.ColdReason, u.BySource.ColdAt = ColdNew, s.consumed // nothing was looked up: the prompt's new part is new
	}
	s.fromHost, s.fromDisk, s.coldReason, s.coldAt = 0, 0, "", 0 // reported once
	u.CachedTokens = u.PromptTokens - 1 - u.BySource.Recomputed
	r.mu.Unlock()
	if !s.fresh {
		r.e.stats.TokensRecomputed += int64(u.BySource.Recomputed)
	}
}

// uncharge takes back what charge counted of a prompt that the run did not come to: it ended before its first token.
// The caller holds r.mu.
func (r *Run) uncharge(s *Seq) {
	if !r.charged || r.produced > 0 || s.cold || s.dead {
		return
	}
	u := &r.state.Usage.BySource
	rest := min(u.Recomputed, max(0, len(s.line)-1-s.consumed))
	u.Recomputed -= rest
	if u.Recomputed == 0 {
		u.ColdReason, u.ColdAt = "", 0
	}
	if !s.fresh {
		r.e.stats.TokensRecomputed -= int64(rest)
	}
}
