package sessions

import (
	"reflect"
	"slices"
	"time"
)

// EventType names what happened.
type EventType string

const (
	EventSessionCreated  EventType = "session.created"
	EventSessionForked   EventType = "session.forked"
	EventSessionDetached EventType = "session.detached"
	EventSessionResumed  EventType = "session.resumed"
	EventSessionClosed   EventType = "session.closed"
	EventSessionDeleted  EventType = "session.deleted" // watchers only: the log is gone
	EventTurnStarted     EventType = "turn.started"
	EventTurnDelta       EventType = "turn.delta"
	EventTurnCompleted   EventType = "turn.completed"
	EventTurnFailed      EventType = "turn.failed"
	EventTurnCancelled   EventType = "turn.cancelled"
	EventTurnInterrupted EventType = "turn.interrupted"
)

// Event is one entry of a session's log. Seq is dense from 1; deltas may be
// seen before their commit, everything else only after. Which of the optional
// fields are there depends on Type.
type Event struct {
	Seq       int64     `json:"seq"`
	Epoch     int64     `json:"epoch"`
	Type      EventType `json:"type"`
	SessionID string    `json:"session_id"`
	TurnID    string    `json:"turn_id,omitempty"`
	Time      time.Time `json:"time"`

	EventData
}

// EventData holds the fields that belong to some types only; it is also what
// the ledger stores of an event beside its columns.
type EventData struct {
	ParentID     *string    `json:"parent_id,omitempty"`     // session.created
	ForkedAt     *int       `json:"forked_at,omitempty"`     // session.created
	RootID       string     `json:"root_id,omitempty"`       // session.created
	Children     []string   `json:"children,omitempty"`      // session.forked
	At           *int       `json:"at,omitempty"`            // session.forked
	Tier         string     `json:"tier,omitempty"`          // session.detached
	Restored     *Restored  `json:"restored,omitempty"`      // session.resumed
	Text         *string    `json:"text,omitempty"`          // turn.delta
	Tokens       []int32    `json:"tokens,omitempty"`        // turn.delta
	From         *int       `json:"from,omitempty"`          // turn.*: the turn's start in the line
	To           *int       `json:"to,omitempty"`            // turn.started: end of the prompt; final ones: end of the turn
	FinishReason string     `json:"finish_reason,omitempty"` // final ones
	Usage        *Usage     `json:"usage,omitempty"`         // final ones
	Error        *TurnError `json:"error,omitempty"`         // turn.failed
	LastSeq      *int64     `json:"last_seq,omitempty"`      // turn.interrupted: later ones of older epochs never happened
}

// Equal tells whether two events say the same. Of deltas it is asked for every
// reader, so they are compared without reflection.
func (e *Event) Equal(o *Event) bool {
	if e.Seq != o.Seq || e.Epoch != o.Epoch || e.Type != o.Type || e.SessionID != o.SessionID || e.TurnID != o.TurnID || !e.Time.Equal(o.Time) {
		return false
	}
	if e.Type != EventTurnDelta || e.Text == nil || o.Text == nil {
		return reflect.DeepEqual(e.EventData, o.EventData)
	}
	return *e.Text == *o.Text && slices.Equal(e.Tokens, o.Tokens)
}

// bytes is about what an event takes, in memory and as JSON.
func (e *Event) bytes() int64 {
	n := 250 + int64(8*len(e.Tokens)+48*len(e.Children))
	if e.Text != nil {
		n += jsonBytes(*e.Text)
	}
	if e.Error != nil {
		n += jsonBytes(e.Error.Message)
	}
	if e.Usage != nil {
		n += 400
	}
	return n
}
