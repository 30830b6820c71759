package sessions

import (
	"hash/maphash"

	"github.com/google/uuid"
)

// turnTokens is what the runs of one turn come to.
type turnTokens struct {
	t    *bundleTurnRef
	have int32 // tokens, its prompt's too
	ids  tokenSum
	text maphash.Hash
	cut  *cutter
}

// run reads one line of the section of tokens; false at its end.
func (b *bundleReader) run() (r bundleRun, x *bundleEntry, turn *uuid.UUID, ok bool, err error) {
	if ok, err = b.more(lineTokens, &r); err != nil {
		return r, nil, nil, false, err
	}
	if !ok {
		return r, nil, nil, false, b.endSection("runs of tokens", b.counts.runs, b.head.TokenRuns, b.runsOver)
	}
	if b.counts.runs++; b.counts.runs > b.head.TokenRuns {
		return r, nil, nil, false, b.bad("more runs of tokens than the header says (%d)", b.head.TokenRuns)
	}
	if x, err = b.owner(r.SessionID, b.runsOver); err != nil {
		return r, nil, nil, false, err
	}
	t, err := b.turnOf(r.TurnID)
	if err == nil {
		err = b.checkRun(&r, x, t)
	}
	if err != nil {
		return r, nil, nil, false, err
	}
	b.counts.tokens += len(r.IDs)
	if t != nil {
		turn = &t.id
	}
	return r, x, turn, true, nil
}

// runsOver makes sure that a session's own tokens are all there. Turns are
// disjoint and what no turn brought comes first, so that each has its own.
func (b *bundleReader) runsOver(x *bundleEntry) error {
	next := b.at.next
	if !b.at.began {
		next = x.from
	}
	if next < x.end {
		return b.bad("the tokens [%d, %d) of %s are not before it", next, x.end, x.ID)
	}
	if err := b.turnComplete(x); err != nil {
		return err
	}
	for _, t := range x.turns {
		if !t.whole && min(t.to, int32(x.end)) > t.from {
			return b.bad("the tokens of the turn of line %d are not before it", t.line)
		}
	}
	return nil
}

func (b *bundleReader) checkRun(r *bundleRun, x *bundleEntry, t *bundleTurnRef) error {
	if !b.at.began {
		b.at.began, b.at.next, b.at.seq, b.at.epoch = true, x.from, x.FirstSeq, max(1, x.GoneEpoch)
	}
	if r.Cuts == nil {
		r.Cuts = []int16{}
	}
	if r.AtMS == nil {
		r.AtMS = []int32{}
	}
	sum := 0
	for _, n := range r.Cuts {
		if sum += int(n); n < 1 {
			return b.bad("cuts: each is of one token at least")
		}
	}
	end := r.From + len(r.IDs)
	switch {
	case r.From != b.at.next || len(r.IDs) == 0 || len(r.IDs) > x.end-r.From:
		return b.bad("from, ids: [%d, %d), due are tokens from %d to %d", r.From, end, b.at.next, x.end)
	case len(r.Cuts) != len(r.AtMS) || len(r.Cuts) > 0 && sum != len(r.IDs):
		return b.bad("cuts, at_ms: of %d tokens, there are %d", sum, len(r.IDs))
	case len(r.Cuts) > 0 && (t == nil || x.DeletedAt != nil):
		return b.bad("cuts: no turn generated these tokens")
	case t == nil && (x.parent != nil || r.From != 0):
		return b.bad("turn_id: all tokens but the first of a root are a turn's")
	case t != nil && (r.From < int(t.from) || end > int(t.to)):
		return b.bad("turn_id: the turn has no tokens [%d, %d)", r.From, end)
	case !bundleTime(r.Time):
		return b.bad("time: must be between the years %d and %d", bundleYearMin, bundleYearMax)
	case r.Epoch < 1 || r.Epoch > x.Epoch:
		return b.bad("epoch: %d, the session's is %d", r.Epoch, x.Epoch)
	case r.FirstSeq < 0 || r.FirstSeq > bundleSeqMax:
		return b.bad("first_seq: %d", r.FirstSeq)
	}
	if n := int64(len(r.Cuts)); n > 0 {
		if r.FirstSeq < b.at.seq || r.FirstSeq+n-1 > x.LastSeq || r.Epoch < b.at.epoch {
			return b.bad("first_seq, epoch: %d deltas from %d in epoch %d", n, r.FirstSeq, r.Epoch)
		}
		b.at.seq, b.at.epoch = r.FirstSeq+n, r.Epoch
		x.deltas = append(x.deltas, seqRange{r.FirstSeq, r.FirstSeq + n, r.Epoch, int32(len(r.IDs)), t})
		if err := b.hold(seqRangeBytes); err != nil {
			return err
		}
	}
	b.at.next = end
	if err := b.tokens("ids", r.IDs); err != nil {
		return err
	}
	return b.turnRun(r, x, t)
}

// turnRun takes a run to its turn.
func (b *bundleReader) turnRun(r *bundleRun, x *bundleEntry, t *bundleTurnRef) error {
	if b.at.run != nil && b.at.run.t != t {
		if err := b.turnComplete(x); err != nil {
			return err
		}
	}
	if t == nil {
		return nil
	}
	if b.at.run == nil {
		b.at.run = &turnTokens{t: t, cut: newCutter(b.tok, t.stops)}
		b.at.run.ids.h.SetSeed(b.seed)
		b.at.run.text.SetSeed(b.seed)
	}
	g := b.at.run
	if from := int32(r.From); from < t.promptTo { // the prompt is a row by itself
		if from != t.from || from+int32(len(r.IDs)) != t.promptTo || len(r.Cuts) > 0 || b.sumOf(r.IDs) != t.prompt {
			return b.bad("ids: [%d, %d) is not the prompt of the turn of line %d", r.From, r.From+len(r.IDs), t.line)
		}
	} else {
		g.ids.add(r.IDs)
		g.text.WriteString(g.cut.push(r.IDs))
	}
	g.have += int32(len(r.IDs))
	return nil
}

// turnComplete compares what the runs of the turn under way came to with its line.
func (b *bundleReader) turnComplete(x *bundleEntry) error {
	g := b.at.run
	b.at.run = nil
	if g == nil {
		return nil
	}
	t := g.t
	if want := min(t.to, int32(x.end)) - t.from; g.have != want {
		return b.bad("the turn of line %d has %d tokens, %d are before it", t.line, want, g.have)
	}
	t.whole = true
	if t.clipped {
		return nil
	}
	t.rest = g.cut.flush()
	g.text.WriteString(t.rest)
	switch {
	case t.text != 0 && t.text != g.text.Sum64()|1:
		return b.bad("the text of the turn of line %d is not that of its tokens", t.line)
	case t.probs != 0 && t.probs != g.ids.sum():
		return b.bad("the logprobs of the turn of line %d are not of its tokens", t.line)
	}
	return b.hold(len(t.rest))
}
