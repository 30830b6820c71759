package sessions

import (
	"encoding/json"
	"strings"

	"github.com/google/uuid"
)

// eventField is one field of EventData, as a bit.
type eventField uint16

const (
	fieldParentID eventField = 1 << iota
	fieldForkedAt
	fieldRootID
	fieldChildren
	fieldAt
	fieldTier
	fieldRestored
	fieldText
	fieldTokens
	fieldFrom
	fieldTo
	fieldFinishReason
	fieldUsage
	fieldError
	fieldLastSeq
)

// fields tells which are there.
func (d *EventData) fields() (f eventField) {
	for i, there := range []bool{d.ParentID != nil, d.ForkedAt != nil, d.RootID != "", d.Children != nil, d.At != nil, d.Tier != "",
		d.Restored != nil, d.Text != nil, d.Tokens != nil, d.From != nil, d.To != nil, d.FinishReason != "", d.Usage != nil,
		d.Error != nil, d.LastSeq != nil} {
		if there {
			f |= 1 << i
		}
	}
	return f
}

// eventRule is what an event of a type has, and may have.
type eventRule struct {
	must, may eventField
	ends      TurnState // the turn
}

const fieldsOfEnd = fieldFrom | fieldTo | fieldFinishReason

// bundleEvents are the events that a log can have. A delta that is stored has
// the text that the last token held back; the others come of runs.
var bundleEvents = map[EventType]eventRule{
	EventSessionCreated:  {must: fieldRootID, may: fieldParentID | fieldForkedAt},
	EventSessionForked:   {must: fieldChildren | fieldAt},
	EventSessionDetached: {must: fieldTier},
	EventSessionResumed:  {must: fieldRestored},
	EventSessionClosed:   {},
	EventTurnStarted:     {must: fieldFrom | fieldTo},
	EventTurnDelta:       {must: fieldText},
	EventTurnCompleted:   {must: fieldsOfEnd, may: fieldUsage, ends: TurnCompleted},
	EventTurnCancelled:   {must: fieldsOfEnd, may: fieldUsage, ends: TurnCancelled},
	EventTurnFailed:      {must: fieldsOfEnd | fieldError, may: fieldUsage, ends: TurnFailed},
	EventTurnInterrupted: {must: fieldsOfEnd | fieldLastSeq, may: fieldUsage, ends: TurnInterrupted},
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
		b.at.began, b.at.seq, b.at.epoch = true, x.FirstSeq, max(1, x.GoneEpoch)
	}
	for ; b.at.delta < len(x.deltas) && x.deltas[b.at.delta].from == b.at.seq; b.at.delta++ {
		d := x.deltas[b.at.delta]
		switch {
		case d.epoch < b.at.epoch:
			return b.bad("epoch: that of the deltas before it is older than that of the event before them")
		case d.turn != b.at.open:
			return b.bad("the deltas before it are of the turn of line %d, which is not open by then", d.turn.line)
		}
		b.at.seq, b.at.epoch = d.to, d.epoch
		b.at.told += d.tokens
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
	if b.at.open != nil {
		return b.bad("the end of the turn of line %d is not before it", b.at.open.line)
	}
	if x.DeletedAt != nil || x.FirstSeq > 1 {
		return nil
	}
	for _, t := range x.turns {
		if !t.ended {
			return b.bad("the events of the turn of line %d are not before it", t.line)
		}
	}
	return nil
}

func (b *bundleReader) checkEvent(e *bundleEvent, x *bundleEntry, t *bundleTurnRef) error {
	if err := b.passDeltas(x); err != nil {
		return err
	}
	rule, known := bundleEvents[e.Event]
	switch {
	case e.Seq != b.at.seq || e.Seq > x.LastSeq:
		return b.bad("seq: %d, due is %d of %d", e.Seq, b.at.seq, x.LastSeq)
	case e.Epoch < b.at.epoch || e.Epoch > x.Epoch:
		return b.bad("epoch: %d, between %d and %d is due", e.Epoch, b.at.epoch, x.Epoch)
	case !known || e.Seq == 1 && e.Event != EventSessionCreated:
		return b.bad("event: %q", e.Event)
	case strings.HasPrefix(string(e.Event), "turn.") != (t != nil):
		return b.bad("turn_id: events of turns, and no others, have it")
	case !bundleTime(e.Time):
		return b.bad("time: must be between the years %d and %d", bundleYearMin, bundleYearMax)
	}
	var data EventData
	if err := b.typed("data", &e.Data, &data); err != nil {
		return err
	}
	if e.Data == nil {
		e.Data = json.RawMessage("{}")
	}
	if has := data.fields(); has&rule.must != rule.must || has&^(rule.must|rule.may) != 0 {
		return b.bad("data: not that of %s", e.Event)
	}
	var err error
	if t == nil {
		err = b.sessionEvent(e, x, &data)
	} else {
		err = b.turnEvent(e, t, &data, rule)
	}
	if err != nil {
		return err
	}
	if err := b.relate(&data); err != nil {
		return err
	}
	if b.newIDs {
		if e.Data, err = json.Marshal(data); err != nil {
			return b.bad("data: %v", err)
		}
	}
	b.at.seq, b.at.epoch = e.Seq+1, e.Epoch
	return nil
}

// sessionEvent checks an event of a session against its line and those of its
// children.
func (b *bundleReader) sessionEvent(e *bundleEvent, x *bundleEntry, d *EventData) error {
	switch e.Event {
	case EventSessionCreated:
		return b.created(e, x, d)
	case EventSessionForked:
		return b.forked(x, d)
	case EventSessionResumed:
		r := d.Restored
		for _, n := range []int{r.Device, r.Host, r.Disk, r.Recomputed} {
			if n < 0 || n > x.Length {
				return b.bad("data.restored: %d tokens of a line of %d", n, x.Length)
			}
		}
	case EventSessionDetached:
		if d.Tier != "host" && d.Tier != "disk" {
			return b.bad("data.tier: %q", d.Tier)
		}
	case EventSessionClosed:
		if x.State != StateClosed || e.Seq != x.LastSeq {
			return b.bad("event: the session goes on behind its end")
		}
	}
	if b.at.open != nil && e.Event != EventSessionResumed {
		return b.bad("event: %s while a turn is open", e.Event)
	}
	return nil
}

func (b *bundleReader) created(e *bundleEvent, x *bundleEntry, d *EventData) error {
	switch {
	case e.Seq != 1:
		return b.bad("event: %s is the first of a log", e.Event)
	case d.RootID != b.sessions[0].ID:
		return b.bad("data.root_id: %q, it is %s", d.RootID, b.sessions[0].ID)
	case (d.ParentID == nil) != (x.ParentID == nil) || d.ParentID != nil && *d.ParentID != *x.ParentID:
		return b.bad("data.parent_id: not the session's")
	case (d.ForkedAt == nil) != (x.ForkedAt == nil) || d.ForkedAt != nil && *d.ForkedAt != *x.ForkedAt:
		return b.bad("data.forked_at: not the session's")
	}
	return nil
}

func (b *bundleReader) forked(x *bundleEntry, d *EventData) error {
	if len(d.Children) < 1 || len(d.Children) > ForkChildrenMax {
		return b.bad("data.children: %d, between 1 and %d can be made at once", len(d.Children), ForkChildrenMax)
	}
	for i, id := range d.Children {
		c, ok := b.byID[id]
		if !ok {
			return b.bad("data.children: %q is not among the sessions", id)
		}
		child := &b.sessions[c]
		switch {
		case child.ParentID == nil || *child.ParentID != x.ID || *child.ForkedAt != *d.At:
			return b.bad("data.children: %s was not forked from the session at %d", id, *d.At)
		case child.told:
			return b.bad("data.children[%d]: %s was forked before", i, id)
		}
		child.told = true
	}
	return nil
}

// turnEvent checks an event of a turn against its line and what came before.
func (b *bundleReader) turnEvent(e *bundleEvent, t *bundleTurnRef, d *EventData, rule eventRule) error {
	if d.From != nil && *d.From != int(t.from) {
		return b.bad("data.from: %d, the turn's is %d", *d.From, t.from)
	}
	switch {
	case e.Event == EventTurnStarted:
		switch {
		case b.at.open != nil || t.begun || t.ended || !t.started || int(t.from) < b.at.next:
			return b.bad("event: the turn of line %d does not start here", t.line)
		case *d.To != int(t.promptTo):
			return b.bad("data.to: %d, the prompt ends at %d", *d.To, t.promptTo)
		}
		t.begun = true
		b.at.open, b.at.told, b.at.rest = t, 0, false
		return nil
	case t.ended || t.started != (b.at.open == t) || !t.started && b.at.open != nil:
		return b.bad("event: the turn of line %d is not open here", t.line)
	case t.started && b.at.told != t.generated() && (rule.ends != "" || e.Event == EventTurnDelta):
		return b.bad("event: %d of the %d tokens of the turn of line %d came before", b.at.told, t.generated(), t.line)
	case e.Event == EventTurnDelta:
		if !t.started || b.at.rest || *d.Text == "" || *d.Text != t.rest {
			return b.bad("data.text: not what the turn's last token held back")
		}
		b.at.rest = true
		return nil
	}
	return b.turnOver(e, t, d, rule)
}

func (b *bundleReader) turnOver(e *bundleEvent, t *bundleTurnRef, d *EventData, rule eventRule) error {
	switch {
	case rule.ends != t.state || d.FinishReason != t.finish:
		return b.bad("event, data.finish_reason: %s with %q, the turn is %s with %q", e.Event, d.FinishReason, t.state, t.finish)
	case *d.To != int(t.to):
		return b.bad("data.to: %d, the turn's is %d", *d.To, t.to)
	case t.state != TurnInterrupted && t.started && t.rest != "" && !b.at.rest:
		return b.bad("event: the text that the turn's last token held back did not come before")
	case d.LastSeq != nil && *d.LastSeq != e.Seq-1:
		return b.bad("data.last_seq: %d, the event before is %d", *d.LastSeq, e.Seq-1)
	}
	var sums [2]uint64
	for i, part := range []struct {
		there bool
		v     any
	}{{d.Usage != nil, d.Usage}, {d.Error != nil, d.Error}} {
		if part.there {
			data, err := json.Marshal(part.v)
			if err != nil {
				return b.bad("data: %v", err)
			}
			sums[i] = b.sumOfJSON(data)
		}
	}
	if sums != [2]uint64{t.usage, t.problem} {
		return b.bad("data.usage, data.error: not those of the turn of line %d", t.line)
	}
	t.ended = true
	b.at.open = nil
	b.at.next = max(b.at.next, int(t.to))
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
