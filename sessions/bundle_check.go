package sessions

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"

	"github.com/google/uuid"
)

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
	id, err = b.checkTurn(&t, x)
	return t, x, id, err == nil, err
}

func (b *bundleReader) turnsOver(x *bundleEntry) error {
	if x.DeletedAt == nil && b.at.turns != x.TurnCount {
		return b.bad("%d turns of %s before it, the session's line says %d", b.at.turns, x.ID, x.TurnCount)
	}
	return nil
}

var finishes = []string{FinishEndToken, FinishStopString, FinishLength, FinishContextLimit, FinishToolCalls, FinishCancelled,
	FinishInterrupted, FinishError}

func (b *bundleReader) checkTurn(t *bundleTurn, x *bundleEntry) (uuid.UUID, error) {
	id, ok := parseID(turnPrefix, t.ID)
	if !ok {
		return id, b.bad("id: %q is no turn id", t.ID)
	}
	if !b.at.began {
		b.at.began, b.at.next = true, x.from
	}
	if _, twice := b.turns[id]; twice {
		return id, b.bad("id: %s is there twice", t.ID)
	}
	promptTo := t.From + len(t.Prompt)
	joined := t.To > t.From
	switch {
	case !t.State.Final() || t.State != TurnCompleted && t.State != TurnCancelled && t.State != TurnFailed && t.State != TurnInterrupted:
		return id, b.bad("state: %q", t.State)
	case !slices.Contains(finishes, t.FinishReason):
		return id, b.bad("finish_reason: %q", t.FinishReason)
	case t.StartedAt == nil && (joined || t.State == TurnCompleted || t.State == TurnInterrupted):
		return id, b.bad("started_at: must be there")
	case t.CreatedAt.IsZero() || t.EndedAt.IsZero():
		return id, b.bad("created_at, ended_at: must be there")
	case t.Seed < 0:
		return id, b.bad("seed: must not be negative")
	case t.From < b.at.next || t.To < t.From || int64(t.To) >= 1<<31 || int64(promptTo) >= 1<<31:
		return id, b.bad("from, to: [%d, %d), behind token %d", t.From, t.To, b.at.next)
	case t.To < promptTo && (joined || t.StartedAt != nil):
		return id, b.bad("to: %d, the prompt ends at %d", t.To, promptTo)
	case x.DeletedAt == nil && t.To > x.end, x.DeletedAt != nil && (t.From >= x.end || !joined || promptTo > x.end):
		return id, b.bad("from, to: [%d, %d) of a line of %d", t.From, t.To, x.end)
	case strings.ContainsRune(t.Text, 0):
		return id, b.bad("text: has NUL characters")
	}
	if err := b.tokens("prompt", t.Prompt); err != nil {
		return id, err
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
			return id, err
		}
	}
	if t.Request == nil || len(request.Stop) > StopMax {
		return id, b.bad("request: not a turn's")
	}
	b.at.next = max(b.at.next, t.To)
	b.at.turns++
	ref := bundleTurnRef{id: id, session: b.at.session, from: int32(t.From), to: int32(t.To)}
	if b.newIDs {
		ref.id = newID()
	}
	b.turns[id] = ref
	return ref.id, b.hold(turnRefBytes)
}

// typed checks that a field has its type's JSON, and makes it what this server
// would have written: nil where it is null.
func (b *bundleReader) typed(name string, data *json.RawMessage, to any) error {
	if len(*data) == 0 || string(*data) == "null" {
		*data = nil
		return nil
	}
	err := json.Unmarshal(*data, to)
	if err == nil {
		*data, err = json.Marshal(to)
	}
	if err != nil {
		return b.bad("%s: %v", name, err)
	}
	if hasNUL(*data) {
		return b.bad("%s: has NUL characters", name)
	}
	return nil
}

// hasNUL finds the escape of a NUL in JSON, which Postgres does not store.
func hasNUL(data []byte) bool {
	for i := 0; i < len(data); i++ {
		if data[i] == '\\' {
			i++
			if bytes.HasPrefix(data[i:], []byte("u0000")) {
				return true
			}
		}
	}
	return false
}

func (b *bundleReader) tokens(name string, ids []int32) error {
	for i, id := range ids {
		if id < 0 || int(id) >= b.vocab {
			return b.bad("%s[%d]: the model has no token %d", name, i, id)
		}
	}
	return nil
}

// turnOf finds the turn that a line of a session names; nil for none.
func (b *bundleReader) turnOf(name *string) (*bundleTurnRef, error) {
	if name == nil {
		return nil, nil
	}
	id, _ := parseID(turnPrefix, *name)
	t, ok := b.turns[id]
	if !ok || t.session != b.at.session {
		return nil, b.bad("turn_id: %q is none of the session's turns", *name)
	}
	return &t, nil
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

// runsOver makes sure that a session's own tokens are all there.
func (b *bundleReader) runsOver(x *bundleEntry) error {
	next := b.at.next
	if !b.at.began {
		next = x.from
	}
	if next < x.end {
		return b.bad("the tokens [%d, %d) of %s are not before it", next, x.end, x.ID)
	}
	return nil
}

func (b *bundleReader) checkRun(r *bundleRun, x *bundleEntry, t *bundleTurnRef) error {
	if !b.at.began {
		b.at.began, b.at.next, b.at.seq, b.at.epoch = true, x.from, x.FirstSeq, 1
	}
	if r.Cuts == nil {
		r.Cuts = []int16{}
	}
	if r.AtMS == nil {
		r.AtMS = []int32{}
	}
	sum := 0
	for _, n := range r.Cuts {
		if sum += int(n); n < 0 {
			return b.bad("cuts: negative")
		}
	}
	switch {
	case r.From != b.at.next || len(r.IDs) == 0 || len(r.IDs) > x.end-r.From:
		return b.bad("from, ids: [%d, %d), due are tokens from %d to %d", r.From, r.From+len(r.IDs), b.at.next, x.end)
	case len(r.Cuts) != len(r.AtMS) || len(r.Cuts) > 0 && sum != len(r.IDs):
		return b.bad("cuts, at_ms: of %d tokens, there are %d", sum, len(r.IDs))
	case len(r.Cuts) > 0 && (t == nil || x.DeletedAt != nil):
		return b.bad("cuts: no turn generated these tokens")
	case t != nil && (r.From < int(t.from) || r.From+len(r.IDs) > int(t.to)):
		return b.bad("turn_id: the turn has no tokens [%d, %d)", r.From, r.From+len(r.IDs))
	case r.Time.IsZero() || r.Epoch < 1 || r.Epoch > x.Epoch || r.FirstSeq < 0 || r.FirstSeq >= 1<<62:
		return b.bad("time, epoch, first_seq: out of range")
	}
	if n := int64(len(r.Cuts)); n > 0 {
		if r.FirstSeq < b.at.seq || r.FirstSeq+n-1 > x.LastSeq || r.Epoch < b.at.epoch {
			return b.bad("first_seq, epoch: %d deltas from %d in epoch %d", n, r.FirstSeq, r.Epoch)
		}
		b.at.seq, b.at.epoch = r.FirstSeq+n, r.Epoch
		x.deltas = append(x.deltas, seqRange{r.FirstSeq, r.FirstSeq + n, r.Epoch})
		if err := b.hold(seqRangeBytes); err != nil {
			return err
		}
	}
	b.at.next += len(r.IDs)
	return b.tokens("ids", r.IDs)
}

// event reads one line of the section of events; false at its end.
func (b *bundleReader) event() (e bundleEvent, x *bundleEntry, turn *uuid.UUID, ok bool, err error) {
	if ok, err = b.more(lineEvent, &e); err != nil {
		return e, nil, nil, false, err
	}
	if !ok {
		return e, nil, nil, false, b.endSection("events", b.counts.events, b.head.Events, b.eventsOver)
	}
	if b.counts.events++; b.counts.events > b.head.Events {
		return e, nil, nil, false, b.bad("more events than the header says (%d)", b.head.Events)
	}
	if x, err = b.owner(e.SessionID, b.eventsOver); err != nil {
		return e, nil, nil, false, err
	}
	t, err := b.turnOf(e.TurnID)
	if err == nil {
		err = b.checkEvent(&e, x, t)
	}
	if err != nil {
		return e, nil, nil, false, err
	}
	if t != nil {
		turn = &t.id
	}
	return e, x, turn, true, nil
}

// passDeltas goes over the deltas that come next in the log.
func (b *bundleReader) passDeltas(x *bundleEntry) error {
	if !b.at.began {
		b.at.began, b.at.seq, b.at.epoch = true, x.FirstSeq, 1
	}
	for ; b.at.delta < len(x.deltas) && x.deltas[b.at.delta].from == b.at.seq; b.at.delta++ {
		d := x.deltas[b.at.delta]
		if d.epoch < b.at.epoch {
			return b.bad("epoch: that of the deltas before it is older than that of the event before them")
		}
		b.at.seq, b.at.epoch = d.to, d.epoch
	}
	return nil
}

func (b *bundleReader) eventsOver(x *bundleEntry) error {
	if err := b.passDeltas(x); err != nil {
		return err
	}
	if b.at.seq != x.LastSeq+1 || b.at.delta != len(x.deltas) {
		return b.bad("the event %d of %s is not before it", b.at.seq, x.ID)
	}
	return nil
}

var bundleEvents = []EventType{EventSessionCreated, EventSessionForked, EventSessionDetached, EventSessionResumed, EventSessionClosed,
	EventTurnStarted, EventTurnDelta, EventTurnCompleted, EventTurnFailed, EventTurnCancelled, EventTurnInterrupted}

func (b *bundleReader) checkEvent(e *bundleEvent, x *bundleEntry, t *bundleTurnRef) error {
	if err := b.passDeltas(x); err != nil {
		return err
	}
	switch {
	case e.Seq != b.at.seq || e.Seq > x.LastSeq:
		return b.bad("seq: %d, due is %d of %d", e.Seq, b.at.seq, x.LastSeq)
	case e.Epoch < b.at.epoch || e.Epoch > x.Epoch:
		return b.bad("epoch: %d, between %d and %d is due", e.Epoch, b.at.epoch, x.Epoch)
	case !slices.Contains(bundleEvents, e.Event):
		return b.bad("event: %q", e.Event)
	case strings.HasPrefix(string(e.Event), "turn.") != (t != nil):
		return b.bad("turn_id: events of turns, and no others, have it")
	case e.Time.IsZero():
		return b.bad("time: must be there")
	}
	var data EventData
	if err := b.typed("data", &e.Data, &data); err != nil {
		return err
	}
	if e.Data == nil {
		e.Data = json.RawMessage("{}")
	}
	if err := b.tokens("data.tokens", data.Tokens); err != nil {
		return err
	}
	if err := b.relate(&data); err != nil {
		return err
	}
	if b.newIDs {
		var err error
		if e.Data, err = json.Marshal(data); err != nil {
			return b.bad("data: %v", err)
		}
	}
	b.at.seq, b.at.epoch = e.Seq+1, e.Epoch
	return nil
}

// relate makes the sessions that an event names those that are written.
func (b *bundleReader) relate(d *EventData) error {
	name := func(field string, id *string) error {
		i, ok := b.byID[*id]
		if !ok {
			return b.bad("data.%s: %q is not among the sessions", field, *id)
		}
		*id = sessionID(b.sessions[i].id)
		return nil
	}
	if d.ParentID != nil {
		if err := name("parent_id", d.ParentID); err != nil {
			return err
		}
	}
	if d.RootID != "" {
		if err := name("root_id", &d.RootID); err != nil {
			return err
		}
	}
	for i := range d.Children {
		if err := name("children", &d.Children[i]); err != nil {
			return err
		}
	}
	return nil
}
