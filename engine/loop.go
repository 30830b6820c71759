package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"rocket/kernels"
	"rocket/radix"
)

// maxCommands is how many commands may wait for the loop; at the limit the caller waits in do.
const maxCommands = 256

// do runs fn on the loop and waits for it. ctx cancels only while fn waits for its turn.
func (e *Engine) do(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	cmd := func() { defer close(done); fn() }
	select {
	case e.commands <- cmd:
	case <-ctx.Done():
		return ctx.Err()
	case <-e.stopped:
		return ErrClosed
	}
	select {
	case <-done:
		return nil
	case <-e.stopped:
		select {
		case <-done:
			return nil
		default:
			return ErrClosed
		}
	}
}

// nudge makes a sleeping loop look again.
func (e *Engine) nudge() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// yieldBefore is how long the loop goes on without the Go scheduler, the next step included. From 10 ms on that takes
// the loop's processor away during a call to C, and its monitor, after each time that it did, looks every 20 us for a
// while: it would use more CPU than all that a server does with the tokens. A yield costs too: two threads are woken.
const yieldBefore = 9 * time.Millisecond

// loop is the one goroutine that owns the device. Each turn it drains commands, makes one batch, runs it and hands
// out tokens. It sleeps only when no batch could be made.
func (e *Engine) loop() {
	runtime.LockOSThread()
	kernels.NameThread("rk-loop")
	defer close(e.stopped)
	worked, yielded, last := true, time.Now(), time.Now()
	for {
		if !e.drain(!worked) {
			e.shutdown()
			return
		}
		e.sweep()
		e.admit()
		worked = e.step()
		e.keepQuotas()
		now := time.Now()
		if round := now.Sub(last); worked && now.Sub(yielded)+round > yieldBefore {
			runtime.Gosched()
			yielded = now
		}
		last = now
	}
}

// commandsMax is how many commands run between two steps; the others wait for the next, so that calls without end do
// not keep tokens back.
const commandsMax = 256

// drain runs the waiting commands; with block it waits for the first. It returns false when the engine closes.
func (e *Engine) drain(block bool) bool {
	if block {
		select {
		case cmd := <-e.commands:
			cmd()
			e.keepQuotas()
		case <-e.wake:
		case <-e.closing:
			return false
		}
	}
	for range commandsMax {
		select {
		case cmd := <-e.commands:
			cmd()
			e.keepQuotas()
		case <-e.closing:
			return false
		default:
			return true
		}
	}
	return true
}

// shutdown ends every Run and lets go of every reference.
func (e *Engine) shutdown() {
	for _, r := range append(slices.Clone(e.running), e.queue...) {
		e.finish(r, FinishError, ErrClosed)
	}
	for s := range e.seqs {
		e.drop(s)
	}
	for m := range e.marks {
		e.dropMark(m)
	}
}

// sweep ends cancelled runs, queued ones too.
func (e *Engine) sweep() {
	for _, list := range [][]*Run{e.running, e.queue} {
		for _, r := range slices.Clone(list) {
			if r.cancelled.Load() {
				e.finish(r, FinishCancelled, nil)
			}
		}
	}
}

// admit moves queued runs into the running set while there is a place, by turns of their namespaces.
func (e *Engine) admit() {
	for len(e.queue) > 0 {
		i := e.nextQueued()
		r := e.queue[i]
		if len(e.running) >= e.opts.MaxSeqs && !e.makePlace(r.seq.ns) {
			return
		}
		e.queue = slices.Delete(e.queue, i, i+1)
		e.admitted.took(r.seq.ns)
		e.order++
		r.order = e.order
		e.running = append(e.running, r)
		r.setPhase(Prefilling)
	}
}

// batch is one step's work under construction. Slices are reused from step to step.
type batch struct {
	kernels.Batch
	seqs []*Seq
	outs []*Run // runs to sample for, parallel to OutRows
}

func (b *batch) reset() {
	b.Tokens, b.Segs, b.Pages, b.OutRows = b.Tokens[:0], b.Segs[:0], b.Pages[:0], b.OutRows[:0]
	clear(b.seqs)
	b.seqs, b.outs = b.seqs[:0], b.outs[:0]
}

func (b *batch) has(s *Seq) bool { return slices.Contains(b.seqs, s) }

// add appends rows tokens of s from its consumed position; with a run, the last row's logits are wanted.
func (b *batch) add(s *Seq, rows int, out *Run) {
	b.Segs = append(b.Segs, kernels.Seg{Row0: int32(len(b.Tokens)), Rows: int32(rows), Pos0: int32(s.consumed),
		Slot: s.slot, Table: int32(len(b.Pages)), WriteFrom: int32(s.have)})
	b.Pages = append(b.Pages, s.pages...)
	b.Tokens = append(b.Tokens, s.line[s.consumed:s.consumed+rows]...)
	b.seqs = append(b.seqs, s)
	if out != nil {
		b.OutRows = append(b.OutRows, int32(len(b.Tokens)-1))
		b.outs = append(b.outs, out)
	}
}

// step makes one batch and runs it: a row for every decoding run, then prefill chunks of the runs, then of timelines
// that are filled behind Open, both by turns of their namespaces and inside one in order of admission. It returns false
// when there was nothing to do.
func (e *Engine) step() bool {
	b := &e.batch
	b.reset()
	e.retry = false
	for _, r := range slices.Clone(e.running) { // decoding rows first: they are what people wait for
		if r.state.Phase == Decoding && !r.held() && !r.seq.moving {
			e.schedule(r.seq, r, 1)
		}
	}
	for _, r := range byPrefill(e, e.running, runNamespace) {
		if budget := e.opts.PrefillRows - len(b.Tokens); budget > 0 && !b.has(r.seq) && !r.held() && !r.seq.moving {
			if e.schedule(r.seq, r, budget); b.has(r.seq) {
				e.prefilled.took(r.seq.ns)
			}
		}
	}
	prefilling := 0
	for _, s := range byPrefill(e, e.behind, seqNamespace) {
		budget := e.opts.PrefillRows - len(b.Tokens)
		if s.run != nil || s.moving {
			continue
		}
		prefilling++
		if budget > 0 {
			if e.schedule(s, nil, budget); b.has(s) {
				e.prefilled.took(s.ns)
			}
		}
	}
	e.stats.Prefilling = prefilling
	if len(b.Segs) == 0 {
		return e.retry
	}
	e.runBatch(b)
	b.reset()
	return true
}

// schedule puts up to budget rows of s into the batch. Without a run the pending token stays pending.
func (e *Engine) schedule(s *Seq, r *Run, budget int) {
	if s.dead || len(e.batch.Segs) >= e.opts.MaxSeqs {
		return
	}
	if s.cold && !e.restoreInLoop(s, r) {
		return
	}
	if r != nil && !r.charged {
		r.charge(s)
	}
	want := len(s.line) - s.consumed
	if r == nil {
		want--
	}
	if want <= 0 {
		e.unfollow(s)
		return
	}
	rows := min(want, budget, e.opts.PrefillRows)
	if cut := s.nextCapture(); cut > s.consumed {
		rows = min(rows, cut-s.consumed)
	}
	if err := e.extend(s, rows); err != nil {
		e.starved(s, r)
		return
	}
	var out *Run
	if r != nil && s.consumed+rows == len(s.line) {
		out = r
	}
	e.batch.add(s, rows, out)
}

// runBatch runs the device, moves every Seq on, captures planned snapshots and samples.
func (e *Engine) runBatch(b *batch) {
	need := len(b.OutRows) * e.opts.Model.Vocab()
	if cap(b.Logits) < need {
		b.Logits = make([]float32, need)
	}
	b.Logits = b.Logits[:need]
	began := time.Now()
	if err := e.plan.Run(&b.Batch); err != nil {
		e.faulted(b, fmt.Errorf("run step of %d rows: %w", len(b.Tokens), err))
		return
	}
	e.stats.Steps++
	e.stats.StepSeconds += time.Since(began).Seconds()
	for i, s := range b.seqs {
		e.moved(s, int(b.Segs[i].Rows))
	}
	vocab := e.opts.Model.Vocab()
	for i, r := range b.outs {
		e.emit(r, b.Logits[i*vocab:(i+1)*vocab])
	}
	for _, s := range b.seqs { // after sampling: a state at n needs a line of more than n tokens
		if s.run == nil {
			e.idled++
		}
		e.capture(s)
		s.report()
	}
}

// moved accounts for rows that the device consumed.
func (e *Engine) moved(s *Seq, rows int) {
	if s.run != nil && s.run.state.Phase == Decoding {
		e.stats.RowsDecode += int64(rows)
	} else {
		e.stats.RowsPrefill += int64(rows)
	}
	s.consumed += rows
	s.have = max(s.have, s.consumed)
}

// capture publishes the state where that was planned, and in long answers at the same spacing as in long prompts.
func (e *Engine) capture(s *Seq) {
	if s.fresh || s.cold || s.dead {
		return
	}
	planned := s.nextCapture() == s.consumed && s.consumed > 0
	if planned {
		s.captures = s.captures[1:]
	}
	if planned || s.consumed%radix.PageTokens == 0 && s.consumed-s.lastCapture >= e.spacing {
		e.publish(s)
	}
}

var errNaN = errors.New("the model's logits are not numbers")

// emit samples one token for r and ends the run where it must end.
func (e *Engine) emit(r *Run, logits []float32) {
	s := r.seq
	pos := len(s.line)
	id := r.sampler.pick(logits, pos)
	if l := logits[id]; l != l { // a broken model or device: nothing that this state touches may be kept
		e.drop(s)
		e.finish(r, FinishError, errNaN)
		return
	}
	t := Token{ID: id}
	if r.req.Logprobs >= 0 {
		t.Logprob, t.Top = logprobs(logits, id, r.req.Logprobs)
	}
	s.line = append(s.line, id)
	r.produced++
	e.stats.TokensGenerated++
	now := time.Now()
	if r.first.IsZero() {
		r.first = now
	}
	r.mu.Lock()
	r.tokens = append(r.tokens, t)
	if r.req.KeepLogits {
		r.logits = append(r.logits, slices.Clone(logits))
	}
	r.state.Phase = Decoding
	r.mu.Unlock()
	r.last = now
	stop := -1
	if len(r.req.Stop) > 0 {
		stop = r.stop.push(e.opts.Tokenizer.Bytes(id))
	}
	switch {
	case !r.req.IgnoreEOS && slices.Contains(e.eos, id):
		e.finish(r, FinishEnd, nil)
	case stop >= 0:
		r.mu.Lock()
		r.state.StopBytes = stop
		r.mu.Unlock()
		e.finish(r, FinishStop, nil)
	case r.produced >= r.req.MaxTokens:
		e.finish(r, FinishLength, nil)
	case len(s.line) >= e.opts.Model.ContextLimit():
		e.finish(r, FinishContext, nil)
	default:
		r.signal()
	}
}

// finish ends a run: the timeline becomes idle with an exact snapshot of its end in the tree.
func (e *Engine) finish(r *Run, reason string, err error) {
	if r.state.Phase == Done { // only the loop writes the phase
		return
	}
	s := r.seq
	e.running = removeRun(e.running, r)
	e.queue = removeRun(e.queue, r)
	s.run = nil
	e.idled++
	written := s.inserted
	if !s.cold && !s.dead && !s.fresh {
		e.publish(s)
		e.repin(s)
	}
	if !s.dead && reason != FinishError && len(s.line)-s.consumed > 1 && !s.lazy { // cancelled while prefilling
		e.follow(s)
	}
	r.mu.Lock()
	r.state.Finish, r.state.Err, r.state.Phase = reason, err, Done
	r.uncharge(s)
	u := &r.state.Usage
	u.CompletionTokens = r.produced
	u.CacheWriteTokens = max(0, s.inserted-max(written, u.CachedTokens))
	if !r.first.IsZero() {
		u.TTFT, u.Decode = r.first.Sub(r.started), r.last.Sub(r.first)
	}
	r.mu.Unlock()
	close(r.done)
	r.signal()
	s.report()
}

// faulted ends every run of a batch that the device refused; their timelines fall back to the tree. What they hold is
// let go of first: the step may have touched it, so it must not be published.
func (e *Engine) faulted(b *batch, err error) {
	e.opts.Log.Error("device step failed", "error", err)
	for _, s := range b.seqs {
		e.unfollow(s)
		e.drop(s)
		if s.run != nil {
			e.finish(s.run, FinishError, err)
		}
		s.report()
	}
}

func removeRun(list []*Run, r *Run) []*Run {
	return slices.DeleteFunc(list, func(x *Run) bool { return x == r })
}

func removeSeq(list []*Seq, s *Seq) []*Seq {
	return slices.DeleteFunc(list, func(x *Seq) bool { return x == s })
}
