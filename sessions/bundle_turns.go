package sessions

import (
	"encoding/json"
	"errors"
	"hash/maphash"
	"math"
	"strings"

	"github.com/google/uuid"
)

// bundleTurnRef is what runs and events need to know of a turn.
type bundleTurnRef struct {
	id      uuid.UUID // as it is to be written
	line    int
	session int32
	state   TurnState // a constant, as finish
	finish  string
	started bool

	from, promptTo, to int32
	clipped            bool // to is past what the session has

	stops []string
	// Sums of what runs must agree with, 0 for what is not there: the text, the
	// prompt, the tokens that the log probabilities are of; and events: usage, error.
	text, prompt, probs, usage, problem uint64

	whole bool   // its runs were there
	rest  string // text that the last token held back, known by then
	begun bool   // its start is among the events
	ended bool   // its end is
}

// generated is how many tokens it has beside its prompt.
func (t *bundleTurnRef) generated() int32 { return max(0, t.to-t.promptTo) }

// turnEnds are the finish reasons of each end.
var turnEnds = map[TurnState][]string{
	TurnCompleted:   {FinishEndToken, FinishStopString, FinishLength, FinishContextLimit, FinishToolCalls},
	TurnCancelled:   {FinishCancelled},
	TurnFailed:      {FinishError},
	TurnInterrupted: {FinishInterrupted},
}

// turn reads one line of the section of turns; false at its end.
func (b *bundleReader) turn() (t bundleTurn, x *bundleEntry, id uuid.UUID, ok bool, err error) {
	if ok, err = b.more(lineTurn, &t); err != nil {
		return t, nil, id, false, err
	}
	if !ok {
		return t, nil, id, false, b.endSection("turns", b.counts.turns, b.head.Turns, b.turnsOver)
	}
	if b.counts.turns++; b.counts.turns > b.head.Turns {
		return t, nil, id, false, b.bad("more turns than the header says (%d)", b.head.Turns)
	}
	if x, err = b.owner(t.SessionID, b.turnsOver); err != nil {
		return t, nil, id, false, err
	}
	ref, err := b.checkTurn(&t, x)
	if err != nil {
		return t, nil, id, false, err
	}
	held := turnRefBytes
	for _, stop := range ref.stops {
		held += len(stop) + 16
	}
	return t, x, ref.id, true, b.hold(held)
}

func (b *bundleReader) turnsOver(x *bundleEntry) error {
	if x.DeletedAt == nil && b.at.turns != x.TurnCount {
		return b.bad("%d turns of %s before it, the session's line says %d", b.at.turns, x.ID, x.TurnCount)
	}
	return nil
}

func (b *bundleReader) checkTurn(t *bundleTurn, x *bundleEntry) (*bundleTurnRef, error) {
	id, ok := parseID(turnPrefix, t.ID)
	if !ok {
		return nil, b.bad("id: %q is no turn id", t.ID)
	}
	if !b.at.began {
		b.at.began, b.at.next = true, x.from
	}
	if b.turns[id] != nil {
		return nil, b.bad("id: %s is there twice", t.ID)
	}
	if err := b.turnEnd(t); err != nil {
		return nil, err
	}
	if err := b.turnPlace(t, x); err != nil {
		return nil, err
	}
	if err := b.tokens("prompt", t.Prompt); err != nil {
		return nil, err
	}
	ref := &bundleTurnRef{id: id, line: b.line, session: b.at.session, state: t.State, started: t.StartedAt != nil,
		from: int32(t.From), promptTo: int32(t.From + len(t.Prompt)), to: int32(t.To), clipped: t.To > x.end, prompt: b.sumOf(t.Prompt)}
	for state, finishes := range turnEnds { // constants, not the line's memory
		for _, finish := range finishes {
			if state == t.State && finish == t.FinishReason {
				ref.state, ref.finish = state, finish
			}
		}
	}
	if t.Text != "" {
		ref.text = maphash.String(b.seed, t.Text) | 1
	}
	if err := b.turnParts(t, ref); err != nil {
		return nil, err
	}
	if b.newIDs {
		ref.id = newID()
	}
	b.at.next = max(b.at.next, t.To)
	b.at.turns++
	b.turns[id] = ref
	x.turns = append(x.turns, ref)
	return ref, nil
}

// turnEnd checks how a turn ended, and its times.
func (b *bundleReader) turnEnd(t *bundleTurn) error {
	finishes, ended := turnEnds[t.State]
	known := false
	for _, f := range finishes {
		known = known || f == t.FinishReason
	}
	switch {
	case !ended:
		return b.bad("state: %q", t.State)
	case !known:
		return b.bad("finish_reason: %q, of a turn that is %s", t.FinishReason, t.State)
	case t.StartedAt == nil && (t.To > t.From || t.State == TurnCompleted || t.State == TurnInterrupted):
		return b.bad("started_at: must be there")
	case !bundleTimes(&t.CreatedAt, t.StartedAt, &t.EndedAt):
		return b.bad("created_at, started_at, ended_at: must be between the years %d and %d", bundleYearMin, bundleYearMax)
	case t.Seed < 0:
		return b.bad("seed: must not be negative")
	}
	return nil
}

// turnPlace checks where in its session a turn lies.
func (b *bundleReader) turnPlace(t *bundleTurn, x *bundleEntry) error {
	if t.From < b.at.next || t.To < t.From || t.To > math.MaxInt32 || t.From > math.MaxInt32-len(t.Prompt) {
		return b.bad("from, to: [%d, %d), behind token %d", t.From, t.To, b.at.next)
	}
	promptTo := t.From + len(t.Prompt)
	joined := t.To > t.From
	switch {
	case t.To < promptTo && (joined || t.StartedAt != nil):
		return b.bad("to: %d, the prompt ends at %d", t.To, promptTo)
	case x.DeletedAt == nil && t.To > x.end, x.DeletedAt != nil && (t.From >= x.end || !joined || promptTo > x.end):
		return b.bad("from, to: [%d, %d) of a line of %d", t.From, t.To, x.end)
	case len(t.Prompt) > b.model.Context:
		return b.bad("prompt: %d tokens, the model's context is %d", len(t.Prompt), b.model.Context)
	case t.Text != "" && (t.To <= promptTo || t.To > x.end):
		return b.bad("text: there are no tokens that it is of")
	case strings.ContainsRune(t.Text, 0):
		return b.bad("text: has NUL characters")
	}
	return nil
}

// turnParts checks what a turn has as JSON, and keeps of it what the runs tell
// more of.
func (b *bundleReader) turnParts(t *bundleTurn, ref *bundleTurnRef) error {
	if len(t.Request) > bundleRequestBytesMax {
		return b.bad("request: has more than %d bytes", bundleRequestBytesMax)
	}
	var request TurnRequest
	var usage *Usage
	var problem *TurnError
	var probs []TokenProbs
	for _, f := range []struct {
		name string
		data *json.RawMessage
		to   any
	}{{"request", &t.Request, &request}, {"usage", &t.Usage, &usage}, {"error", &t.Error, &problem}, {"logprobs", &t.Logprobs, &probs}} {
		if err := b.typed(f.name, f.data, f.to); err != nil {
			return err
		}
	}
	if t.Request == nil {
		return b.bad("request: must be there")
	}
	if err := b.request(t, request, ref); err != nil {
		return err
	}
	if err := b.usage("usage", usage); err != nil {
		return err
	}
	if err := b.problem("error", problem, t.State); err != nil {
		return err
	}
	ref.usage, ref.problem = b.sumOfJSON(t.Usage), b.sumOfJSON(t.Error)
	if t.Logprobs == nil {
		return nil
	}
	most := LogprobsMax
	if request.Logprobs != nil {
		most = *request.Logprobs
	}
	return b.logprobs(probs, most, ref)
}

// request checks that a turn's request is one that a call could have brought.
func (b *bundleReader) request(t *bundleTurn, r TurnRequest, ref *bundleTurnRef) error {
	most, seed := r.MaxTokens, r.Seed
	ref.stops = r.Stop
	if err := checkTurn(&r); err != nil { // r is a copy, which gets the defaults
		e, ok := errors.AsType[*Error](err)
		if !ok {
			return err
		}
		return b.bad("request.%s: %s", e.Field, e.Message)
	}
	switch {
	case most != nil && !ref.clipped && int(ref.generated()) > *most:
		return b.bad("request.max_tokens: %d, the turn has %d", *most, ref.generated())
	case seed != nil && *seed != t.Seed:
		return b.bad("request.seed: %d, the turn's is %d", *seed, t.Seed)
	}
	return nil
}

func (b *bundleReader) logprobs(probs []TokenProbs, top int, ref *bundleTurnRef) error {
	if ref.clipped || len(probs) != int(ref.generated()) {
		return b.bad("logprobs: of %d tokens, the turn has %d", len(probs), ref.generated())
	}
	ids := make([]int32, len(probs))
	for i, p := range probs {
		ids[i] = p.Token
		if len(p.Top) > top {
			return b.bad("logprobs[%d].top: %d tokens, at most %d were wanted", i, len(p.Top), top)
		}
		certain := p.Logprob > 0
		for _, other := range p.Top {
			certain = certain || other.Logprob > 0
			if err := b.tokens("logprobs.top.token", []int32{other.Token}); err != nil {
				return err
			}
		}
		if certain {
			return b.bad("logprobs[%d]: the logarithm of more than 1", i)
		}
	}
	ref.probs = b.sumOf(ids)
	return b.tokens("logprobs.token", ids)
}

// usage checks counts of tokens, which no line has more of than int32 holds.
func (b *bundleReader) usage(name string, u *Usage) error {
	if u == nil {
		return nil
	}
	at := 0
	if u.ColdAt != nil {
		at = *u.ColdAt
	}
	r := u.BySource
	for _, n := range []int{u.PromptTokens, u.CompletionTokens, u.CachedTokens, u.CacheWriteTokens, r.Device, r.Host, r.Disk, r.Recomputed,
		at, u.MTP.Drafted, u.MTP.Accepted} {
		if n < 0 || n > math.MaxInt32 {
			return b.bad("%s: counts are between 0 and %d, not %d", name, math.MaxInt32, n)
		}
	}
	for _, v := range []float64{u.MTP.MeanAcceptedLength, u.TTFTMillis, u.TokensPerSecond} {
		if !(v >= 0 && v <= usageFloatMax) {
			return b.bad("%s: measures are between 0 and %g, not %g", name, float64(usageFloatMax), v)
		}
	}
	if len(u.ColdReason) > coldReasonBytesMax {
		return b.bad("%s.cold_reason: has more than %d bytes", name, coldReasonBytesMax)
	}
	return nil
}

// problem checks an error: turns that failed, and no others, have one.
func (b *bundleReader) problem(name string, e *TurnError, state TurnState) error {
	switch {
	case (e != nil) != (state == TurnFailed):
		return b.bad("%s: a turn that failed, and no other, has it", name)
	case e != nil && (len(e.Code) > turnErrorCodeBytesMax || len(e.Message) > turnErrorBytesMax):
		return b.bad("%s: has more than %d bytes of code or %d of message", name, turnErrorCodeBytesMax, turnErrorBytesMax)
	}
	return nil
}

// sumOfJSON is a sum of what typed has written, 0 for null.
func (b *bundleReader) sumOfJSON(data []byte) uint64 {
	if data == nil {
		return 0
	}
	return maphash.Bytes(b.seed, data) | 1
}

// sumOf is a sum of tokens, never 0.
func (b *bundleReader) sumOf(ids []int32) uint64 {
	s := tokenSum{}
	s.h.SetSeed(b.seed)
	s.add(ids)
	return s.sum()
}

// tokenSum is sumOf in pieces.
type tokenSum struct {
	h maphash.Hash
}

func (s *tokenSum) add(ids []int32) {
	for _, id := range ids {
		maphash.WriteComparable(&s.h, id)
	}
}

func (s *tokenSum) sum() uint64 { return s.h.Sum64() | 1 }
