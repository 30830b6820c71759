package sessions

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"rocket/engine"
)

const (
	// deltaTokensMax bounds one delta: its cut is a smallint in the ledger.
	deltaTokensMax = 16_384

	// deltaInterval is the least time between two deltas of a turn: what is
	// generated meanwhile comes as one. Whoever watches sees no difference at 40
	// a second, and a model that needs longer for a token is not delayed at all;
	// of a fast one each delta would cost more than its token: an event to
	// encode, one write a reader, one wake-up of each, and of the ledger's writer.
	// The first token of a turn and its end never wait, nor does a fork.
	deltaInterval = 25 * time.Millisecond
)

// turn is a session's open turn. Its goroutine reads the engine's run, turns
// tokens into events, and leaves the writing to the writer.
type turn struct {
	s       *session
	id      uuid.UUID
	req     TurnRequest
	prompt  []int32
	from    int // offset of the prompt
	mark    int // see Manager.prompt
	created time.Time
	run     *engine.Run

	ctx    context.Context // of the goroutine: ends when the turn is given up
	cancel context.CancelFunc

	done   chan struct{} // closed when the end is committed, or the turn given up
	failed chan struct{} // closed when it fails without a ledger to say so in
	once   sync.Once     // closes done

	// Only under alock.
	read int // tokens taken from the run
	cut  *cutter
	segs []segment

	// Guarded by the session's mu.
	started   bool // its prompt is on the line
	text      strings.Builder
	probs     []TokenProbs
	problem   *TurnError
	interrupt bool // the server stops
	final     *turnFinal
	spent     *engine.Seq // a timeline to let go of: its line is not the session's
}

// segment is a range of deltas with consecutive seqs: what one row of the
// ledger holds in the end. An event of the session between two deltas, such as
// a fork, ends one.
type segment struct {
	tokFrom, tokTo int
	firstSeq       int64
	cuts           []int16
	atMS           []int32
	base           time.Time
}

func (t *turn) promptTo() int { return t.from + len(t.prompt) }

// runs gives the turn's generated tokens as rows.
func (t *turn) runs(line []int32, epoch int64) []run {
	out := make([]run, 0, len(t.segs))
	for _, g := range t.segs {
		out = append(out, run{tokFrom: g.tokFrom, ids: line[g.tokFrom:g.tokTo], turn: &t.id, firstSeq: g.firstSeq,
			cuts: g.cuts, atMS: g.atMS, base: g.base, epoch: epoch})
	}
	return out
}

// finish says that the end is committed.
func (t *turn) finish() {
	t.once.Do(func() {
		t.s.m.turnEnded(t.s.key.tenant)
		t.cancel()
		close(t.done)
	})
}

// abandon gives the turn up without an end: the ledger says that the session
// is not this server's, or the server stops before the turn has begun.
func (t *turn) abandon() {
	t.run.Cancel()
	t.finish()
}

// fail ends the turn with an error. Whoever waits for it is told at once.
func (t *turn) fail(code Code, message string) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.final != nil || t.problem != nil {
		return
	}
	t.problem = &TurnError{code, message}
	close(t.failed)
	t.run.Cancel()
}

// loop is the turn's goroutine.
func (t *turn) loop() {
	defer t.letGo()
	pause := time.NewTimer(deltaInterval)
	defer pause.Stop()
	for {
		select {
		case <-t.run.Ready():
		case <-t.ctx.Done():
			return
		}
		if t.s.alock.lock(t.ctx) != nil {
			return
		}
		before := t.read
		over := t.s.pump(t)
		delta := t.read > before
		t.s.alock.unlock()
		if over {
			return
		}
		if !delta {
			continue
		}
		pause.Reset(t.s.m.opts.DeltaInterval)
		select {
		case <-pause.C:
		case <-t.run.Done():
		case <-t.ctx.Done():
			return
		}
	}
}

func (t *turn) letGo() {
	t.s.mu.Lock()
	seq := t.spent
	t.spent = nil
	t.s.mu.Unlock()
	if seq != nil {
		t.s.m.eng.Release(seq)
	}
}

// pump takes what the run has produced: one delta, whatever its size, and the
// start and the end if they are there. The caller holds alock.
func (s *session) pump(t *turn) (over bool) {
	tokens, st := t.run.Read(t.read)
	t.read += len(tokens)
	now := s.m.clock.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.turn != t || t.final != nil {
		return true
	}
	if !t.started && joined(st, len(tokens)) {
		s.startLocked(t, now)
	}
	for rest := tokens; len(rest) > 0; {
		n := min(len(rest), deltaTokensMax)
		s.deltaLocked(t, rest[:n], now)
		rest = rest[n:]
	}
	if st.Phase == engine.Done {
		if !t.started && t.interrupt {
			s.turn = nil // it stays queued in the ledger and runs after the next start
			t.spent, s.seq = s.seq, nil
			t.finish()
			return true
		}
		s.endLocked(t, st, now)
	}
	s.visibleLocked()
	s.m.writer.add(s, t.final != nil || len(tokens) == 0)
	return t.final != nil
}

// joined tells whether a run is past the queue. One that was cancelled or
// failed before its first token, unseen past the queue, counts as never
// started.
func joined(st engine.RunState, tokens int) bool {
	switch {
	case tokens > 0 || st.Phase == engine.Prefilling || st.Phase == engine.Decoding:
		return true
	case st.Phase == engine.Done:
		return st.Finish != engine.FinishCancelled && st.Finish != engine.FinishError
	}
	return false
}

func (s *session) startLocked(t *turn, now time.Time) {
	t.started = true
	s.line = append(s.line, t.prompt...)
	s.log.append(t.startedEvent(s.row.epoch, now))
}

func (t *turn) startedEvent(epoch int64, now time.Time) Event {
	from, to := t.from, t.promptTo()
	return Event{Epoch: epoch, Type: EventTurnStarted, SessionID: sessionID(t.s.key.id), TurnID: turnID(t.id), Time: now,
		EventData: EventData{From: &from, To: &to}}
}

func (s *session) deltaLocked(t *turn, tokens []engine.Token, now time.Time) {
	ids := make([]int32, len(tokens))
	for i, tok := range tokens {
		ids[i] = tok.ID
		if t.req.Logprobs != nil {
			t.probs = append(t.probs, tokenProbs(tok))
		}
	}
	s.m.spend(s.key.tenant, len(ids))
	text := t.cut.push(ids)
	t.text.WriteString(text)
	at := len(s.line)
	s.line = append(s.line, ids...)
	e := s.log.append(deltaEvent(0, s.row.epoch, sessionID(s.key.id), turnID(t.id), now, text, ids))
	if n := len(t.segs); n == 0 || t.segs[n-1].firstSeq+int64(len(t.segs[n-1].cuts)) != e.Seq {
		t.segs = append(t.segs, segment{tokFrom: at, tokTo: at, firstSeq: e.Seq, base: now})
	}
	g := &t.segs[len(t.segs)-1]
	g.tokTo += len(ids)
	g.cuts = append(g.cuts, int16(len(ids)))
	g.atMS = append(g.atMS, int32(now.Sub(g.base)/time.Millisecond))
}

func tokenProbs(t engine.Token) TokenProbs {
	p := TokenProbs{Token: t.ID, Logprob: t.Logprob}
	for _, x := range t.Top {
		p.Top = append(p.Top, TokenProb{x.ID, x.Logprob})
	}
	return p
}

// endLocked releases held text and closes the turn.
func (s *session) endLocked(t *turn, st engine.RunState, now time.Time) {
	if rest := t.cut.flush(); rest != "" && t.started {
		t.text.WriteString(rest)
		s.log.append(deltaEvent(0, s.row.epoch, sessionID(s.key.id), turnID(t.id), now, rest, nil))
	}
	f := &turnFinal{text: t.text.String(), probs: t.probs, to: t.from, at: now, err: t.problem}
	if t.started {
		f.to = len(s.line)
		f.usage = usage(st.Usage)
	} else {
		// the engine put the prompt on its line when it queued the run
		t.spent, s.seq = s.seq, nil
	}
	e := Event{Epoch: s.row.epoch, SessionID: sessionID(s.key.id), TurnID: turnID(t.id), Time: now}
	switch {
	case t.problem != nil || st.Finish == engine.FinishError:
		if f.err == nil {
			f.err = runError(st.Err)
			s.m.log.Error("turn failed", "session", sessionID(s.key.id), "turn", turnID(t.id), "error", st.Err)
		}
		f.state, f.finish, e.Type = TurnFailed, FinishError, EventTurnFailed
	case t.interrupt && st.Finish == engine.FinishCancelled:
		last := s.log.next - 1
		f.state, f.finish, e.Type, e.LastSeq = TurnInterrupted, FinishInterrupted, EventTurnInterrupted, &last
	case st.Finish == engine.FinishCancelled:
		f.state, f.finish, e.Type = TurnCancelled, FinishCancelled, EventTurnCancelled
	default:
		f.state, f.finish, e.Type = TurnCompleted, st.Finish, EventTurnCompleted
	}
	from, to := t.from, f.to
	e.From, e.To, e.FinishReason, e.Usage, e.Error = &from, &to, f.finish, f.usage, f.err
	s.log.append(e)
	t.final = f
}

func runError(err error) *TurnError {
	if e, ok := engineError("run turn", err, "").(*Error); ok {
		return &TurnError{e.Code, e.Message}
	}
	return &TurnError{CodeInternal, "the turn failed"}
}

func usage(u engine.Usage) *Usage {
	out := &Usage{
		PromptTokens: u.PromptTokens, CompletionTokens: u.CompletionTokens,
		CachedTokens: u.CachedTokens, CacheWriteTokens: u.CacheWriteTokens,
		BySource:   restored(u.BySource),
		ColdReason: u.BySource.ColdReason,
		ColdAt:     coldAt(u.BySource),
		TTFTMillis: float64(u.TTFT.Microseconds()) / 1e3,
	}
	if s := u.Decode.Seconds(); s > 0 && u.CompletionTokens > 1 {
		out.TokensPerSecond = float64(u.CompletionTokens-1) / s
	}
	return out
}

func coldAt(r engine.Restored) *int {
	if r.ColdReason == "" {
		return nil
	}
	return &r.ColdAt
}

func restored(r engine.Restored) Restored {
	return Restored{Device: r.Device, Host: r.Host, Disk: r.Disk, Recomputed: r.Recomputed}
}
