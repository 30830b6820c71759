package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

// Client frames of /v1/sessions/{id}/stream.
const (
	frameTurnCreate  = "turn.create"
	frameTurnCancel  = "turn.cancel"
	frameFork        = "fork"
	frameDetach      = "detach"
	frameResume      = "resume"
	frameSubscribe   = "subscribe"
	frameUnsubscribe = "unsubscribe"
	framePing        = "ping"
)

// FrameHead is what every client frame has. Without SessionID a frame is about
// the session of the socket's path.
type FrameHead struct {
	Type           string `json:"type" enum:"turn.create,turn.cancel,fork,detach,resume,subscribe,unsubscribe,ping"`
	Ref            string `json:"ref,omitempty" maxLength:"255" doc:"echoed in the reply"`
	SessionID      string `json:"session_id,omitempty" maxLength:"255" doc:"default: the session of the path"`
	IdempotencyKey string `json:"idempotency_key,omitempty" maxLength:"255" doc:"as the Idempotency-Key header of the REST call"`
}

// TurnCreateFrame is POST …/turns.
type TurnCreateFrame struct {
	FrameHead
	sessions.TurnRequest
}

// PlainFrame is turn.cancel, resume, unsubscribe and ping.
type PlainFrame struct {
	FrameHead
}

// ForkFrame is POST …/fork. With Follow the socket subscribes to the children,
// from their first event.
type ForkFrame struct {
	FrameHead
	sessions.ForkRequest
	Follow bool `json:"follow,omitempty"`
}

// DetachFrame is POST …/detach.
type DetachFrame struct {
	FrameHead
	sessions.DetachRequest
}

// SubscribeFrame adds a session's events to the socket.
type SubscribeFrame struct {
	FrameHead
	From  int64 `json:"from,omitempty" minimum:"0" doc:"first seq wanted; default the oldest there is"`
	Epoch int64 `json:"epoch,omitempty" minimum:"0" doc:"last epoch seen"`
}

// ReplyFrame answers a client frame that succeeded. Result is what the REST
// call answers; for subscribe the position.
type ReplyFrame struct {
	Type      string `json:"type"` // always "reply"
	To        string `json:"to" doc:"the client frame's type"`
	Ref       string `json:"ref,omitempty"`
	SessionID string `json:"session_id"`
	Result    any    `json:"result,omitempty"`
}

// SubscribedFrame says that a session's events follow, from From on. The first
// frame of every socket is one, for the session of the path.
type SubscribedFrame struct {
	Type      string `json:"type"` // always "subscribed"
	SessionID string `json:"session_id"`
	From      int64  `json:"from"`
	Epoch     int64  `json:"epoch" doc:"the current one"`
	LastSeq   int64  `json:"last_seq"`
}

// ErrorFrame answers a client frame that failed, or says that a session's
// events end (without To).
type ErrorFrame struct {
	Type      string `json:"type"` // always "error"
	To        string `json:"to,omitempty"`
	Ref       string `json:"ref,omitempty"`
	SessionID string `json:"session_id,omitempty"`
	Status    int    `json:"status"`
	Code      string `json:"code"`
	Detail    string `json:"detail"`
	Field     string `json:"field,omitempty"`
	FirstSeq  int64  `json:"first_seq,omitempty"`
}

// PongFrame answers ping.
type PongFrame struct {
	Type string `json:"type"` // always "pong"
	Ref  string `json:"ref,omitempty"`
}

// frame is a decoded client frame; request points to its type's struct.
type frame struct {
	head    FrameHead
	request any
}

// frameDecoder checks frames against the same schemas as REST bodies.
type frameDecoder struct {
	registry huma.Registry
	schemas  map[string]*huma.Schema
	types    map[string]reflect.Type
}

func newFrameDecoder(registry huma.Registry) *frameDecoder {
	d := &frameDecoder{registry: registry, schemas: map[string]*huma.Schema{}, types: map[string]reflect.Type{}}
	for kind, v := range map[string]any{
		frameTurnCreate: TurnCreateFrame{}, frameTurnCancel: PlainFrame{}, frameFork: ForkFrame{}, frameDetach: DetachFrame{},
		frameResume: PlainFrame{}, frameSubscribe: SubscribeFrame{}, frameUnsubscribe: PlainFrame{}, framePing: PlainFrame{},
	} {
		t := reflect.TypeOf(v)
		d.types[kind] = t
		d.schemas[kind] = registry.Schema(t, true, t.Name())
	}
	for _, v := range []any{ReplyFrame{}, SubscribedFrame{}, ErrorFrame{}, PongFrame{}, EventPage{}} {
		registry.Schema(reflect.TypeOf(v), true, reflect.TypeOf(v).Name())
	}
	return d
}

// decode reads one text frame. On failure head holds what could be read of it,
// for the error's sake.
func (d *frameDecoder) decode(data []byte) (f frame, p *Problem) {
	if !utf8.Valid(data) {
		return f, codeProblem(codeMalformed, "frame: not valid UTF-8", "frame")
	}
	var parsed any
	if err := unmarshalJSON(data, &parsed); err != nil {
		return f, codeProblem(codeMalformed, "frame: not JSON: "+err.Error(), "frame")
	}
	object, ok := parsed.(map[string]any)
	if !ok {
		return f, codeProblem(codeInvalid, "frame: expected object", "frame")
	}
	f.head.Type, _ = object["type"].(string)
	f.head.Ref, _ = object["ref"].(string)
	if len(f.head.Ref) > idempotencyKeyMax {
		f.head.Ref = ""
	}
	t, ok := d.types[f.head.Type]
	if !ok {
		f.head.Type = "" // nothing is repeated that is not ours
		return f, codeProblem(codeInvalid, "type: expected one of "+strings.Join(frameTypes, ", "), "type")
	}
	var result huma.ValidateResult
	path := huma.NewPathBuffer(make([]byte, 0, 128), 0)
	path.Push("frame")
	huma.Validate(d.registry, d.schemas[f.head.Type], path, huma.ModeWriteToServer, parsed, &result)
	if len(result.Errors) > 0 {
		return f, humaProblem(statuses[codeInvalid], "validation failed", result.Errors...).(*Problem)
	}
	request := reflect.New(t)
	if err := json.Unmarshal(data, request.Interface()); err != nil {
		field := "frame"
		if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && e.Field != "" {
			field = e.Field
		}
		return f, codeProblem(codeInvalid, fmt.Sprintf("%s: %v", field, err), field)
	}
	f.request = request.Interface()
	f.head = request.Elem().FieldByName("FrameHead").Interface().(FrameHead)
	return f, nil
}

var frameTypes = []string{frameTurnCreate, frameTurnCancel, frameFork, frameDetach, frameResume, frameSubscribe, frameUnsubscribe, framePing}
