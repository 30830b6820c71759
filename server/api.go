package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humachi"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

// idempotencyKeyMax bounds an Idempotency-Key.
const idempotencyKeyMax = 255

// configureHuma sets what huma has for the whole process only; every server of
// this program wants the same values, and once they are set nobody writes them.
var configureHuma = sync.OnceFunc(func() {
	huma.NewError = humaProblem
	huma.ValidateStrictCasing = true
	// A list that is not there is absent, not null: nor do answers hold null lists.
	huma.DefaultArrayNullable = false
})

// newAPI makes the huma API: JSON only, unknown fields and query parameters
// refused, no links to schemas in bodies, documents served by us.
func newAPI(router chi.Router, version string) huma.API {
	configureHuma()
	config := huma.DefaultConfig("Rocket", version)
	config.Info.Description = "Sessions that fork. A session is a line of tokens; a fork shares everything up to its offset."
	config.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	config.CreateHooks = nil
	config.OpenAPIPath, config.DocsPath, config.SchemasPath = "", "", ""
	config.RejectUnknownQueryParameters = true
	jsonFormat := huma.Format{Marshal: marshalJSON, Unmarshal: unmarshalJSON}
	config.Formats = map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat}
	config.Tags = []*huma.Tag{
		{Name: tagSessions, Description: "Lines of tokens and their lineage"},
		{Name: tagTurns, Description: "Prompts and their continuations"},
		{Name: tagStreams, Description: "Events, live and again"},
		{Name: tagSystem, Description: "Numbers, health, version"},
	}
	return humachi.New(router, config)
}

const (
	tagSessions = "Sessions"
	tagTurns    = "Turns"
	tagStreams  = "Streams"
	tagSystem   = "System"
)

// unmarshalJSON is json.Unmarshal without its repair of invalid UTF-8: text
// that is changed on the way to the model would be a silent fault.
func unmarshalJSON(data []byte, v any) error {
	if !utf8.Valid(data) {
		return errors.New("not valid UTF-8")
	}
	if loneSurrogate(data) {
		return errors.New("\\u escape of half a surrogate pair")
	}
	if values, depth := measureJSON(data); values > jsonValuesMax {
		return fmt.Errorf("more than %d values", jsonValuesMax)
	} else if depth > jsonDepthMax {
		return fmt.Errorf("nested more than %d deep", jsonDepthMax)
	}
	return json.Unmarshal(data, v)
}

// Bounds of JSON text: what a decoder makes of a small one ("[{},{},...") is
// many times larger than its text, and Postgres keeps no deep one. More is
// refused before it is decoded.
const (
	jsonValuesMax = 100_000
	jsonDepthMax  = 100
)

// measureJSON counts what stands before each value of valid JSON but the first
// (a bracket that opens, a comma, a colon), and how deep brackets nest.
func measureJSON(data []byte) (values, depth int) {
	open := 0
	text := false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == '[' || c == '{':
			values++
			open++
			depth = max(depth, open)
		case c == ']' || c == '}':
			open--
		case c == ',' || c == ':':
			values++
		}
	}
	return values, depth
}

// loneSurrogate finds an escape that is half a surrogate pair: it stands for no character, and the decoder would put
// another one in its place.
func loneSurrogate(data []byte) bool {
	high := false // the escape just before was the first half of a pair
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' || i+1 >= len(data) {
			if high {
				return true
			}
			continue
		}
		i++
		var unit uint64
		if data[i] == 'u' && i+4 < len(data) {
			unit, _ = strconv.ParseUint(string(data[i+1:i+5]), 16, 16) // bad digits: the decoder says so
			i += 4
		}
		low := unit >= 0xdc00 && unit < 0xe000
		if high != low {
			return true
		}
		high = unit >= 0xd800 && unit < 0xdc00
	}
	return high
}

// operation fills in what all our operations have in common.
func operation(op huma.Operation) huma.Operation {
	op.MaxBodyBytes = bodyBytesMax + 1 // huma refuses a body that reaches it
	op.BodyReadTimeout = -1            // limitBody has the deadlines
	if op.Responses == nil {
		op.Responses = map[string]*huma.Response{}
	}
	return op
}

// Mutation is embedded by the inputs of calls that change something. It is
// exported, as SessionInput is, since huma sees no other fields.
type Mutation struct {
	IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"a repeated call with the same key and body gets the first one's answer, for 24 hours; of a tenant with very many keys for an hour at least"`
}

// SessionInput is embedded by the inputs of calls on one session.
type SessionInput struct {
	ID string `path:"id" doc:"session id" example:"ses_019377c8-7d00-7aaa-8000-000000000001"`
}

// call makes the identity of a mutating call. The hash is over the decoded
// request, so that white space does not matter and a WebSocket frame is the
// same call as the REST call it stands for.
func call(ctx context.Context, key, route string, request any, wait bool) (sessions.Call, error) {
	who := callerOf(ctx)
	c := sessions.Call{Tenant: who.Tenant, KeyID: who.KeyID, Wait: wait}
	if key == "" {
		return c, nil
	}
	if !storable(route) { // an id that none has: the call does nothing that could be done twice
		return c, nil
	}
	if !storable(key) {
		return c, codeProblem(codeInvalid, "idempotency_key: must be UTF-8 without NUL characters", "idempotency_key")
	}
	if len(key) > idempotencyKeyMax {
		return c, codeProblem(codeInvalid, fmt.Sprintf("idempotency_key: expected length <= %d", idempotencyKeyMax), "idempotency_key")
	}
	data, err := json.Marshal(request)
	if err != nil {
		return c, fmt.Errorf("hash request: %w", err)
	}
	sum := sha256.Sum256(data)
	c.IdempotencyKey, c.Route, c.BodyHash = key, route, sum[:]
	return c, nil
}

// storable tells whether Postgres takes a text.
func storable(text string) bool { return utf8.ValidString(text) && !strings.ContainsRune(text, 0) }

// body is an answer with nothing but a JSON body.
type body[T any] struct {
	Body T
}

func answer[T any](s *Server, v T, err error) (*body[T], error) {
	if err != nil {
		return nil, s.problem(err)
	}
	return &body[T]{Body: v}, nil
}

// optional is a query parameter that may be absent, where its zero value means
// something else.
type optional[T any] struct {
	Value T
	Set   bool
}

// Schema is the plain value's.
func (o optional[T]) Schema(r huma.Registry) *huma.Schema {
	return huma.SchemaFromType(r, reflect.TypeFor[T]())
}

// Receiver is where huma parses the value to.
func (o *optional[T]) Receiver() reflect.Value { return reflect.ValueOf(o).Elem().Field(0) }

// OnParamSet is huma's word on whether it was there.
func (o *optional[T]) OnParamSet(set bool, _ any) { o.Set = set }

func (o optional[T]) pointer() *T {
	if !o.Set {
		return nil
	}
	return &o.Value
}

// field describes one property of a schema. Bounds come from the constants of
// sessions, which checks them again; they are here to be documented.
type field struct {
	path     string // Schema.property
	doc      string
	min, max float64 // both 0: none
	def      any
	enum     []any
	null     bool // a reference that may be null, which the Go type cannot say
}

// frameOf names the frame that has all fields of a request.
var frameOf = map[string]string{"TurnRequest": "TurnCreateFrame", "ForkRequest": "ForkFrame", "DetachRequest": "DetachFrame"}

// requests are the schemas that refuse unknown fields; answers may get new ones.
var requests = map[string]bool{
	"CreateRequest": true, "PatchRequest": true, "TurnRequest": true, "ForkRequest": true, "DetachRequest": true, "ReleaseRequest": true,
	"Message": true, "MTPRequest": true, "ForkChild": true,
	"TurnCreateFrame": true, "PlainFrame": true, "ForkFrame": true, "DetachFrame": true, "SubscribeFrame": true,
}

// describeSchemas adds what Go types cannot say. Every type must be registered
// by then.
func describeSchemas(api *huma.OpenAPI) {
	schemas := api.Components.Schemas.Map()
	for _, f := range fields {
		name, property, _ := strings.Cut(f.path, ".")
		f.apply(schemas[name], property)
		if frame := frameOf[name]; frame != "" {
			f.apply(schemas[frame], property)
		}
	}
	for name, schema := range schemas {
		if !requests[name] {
			schema.AdditionalProperties = nil
		}
	}
	failure := &huma.Response{Description: "Error", Content: map[string]*huma.MediaType{
		"application/problem+json": {Schema: &huma.Schema{Ref: "#/components/schemas/Problem"}}}}
	for _, item := range api.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Patch, item.Delete} {
			if op != nil && op.Responses["default"] == nil {
				op.Responses["default"] = failure
			}
		}
	}
}

func (f field) apply(schema *huma.Schema, property string) {
	if schema == nil || schema.Properties[property] == nil {
		panic("server: no such schema property: " + f.path)
	}
	p := schema.Properties[property]
	if f.null {
		schema.Properties[property] = &huma.Schema{Description: f.doc, AnyOf: []*huma.Schema{p, {Type: "null"}}}
		return
	}
	if p.Ref != "" { // a copy: a reference's siblings are its own
		p = &huma.Schema{Ref: p.Ref}
		schema.Properties[property] = p
	}
	p.Description = f.doc
	if f.min != 0 || f.max != 0 {
		p.Minimum, p.Maximum = &f.min, &f.max
	}
	p.Default, p.Enum = f.def, f.enum
	p.PrecomputeMessages()
}

func enum[T ~string](values ...T) []any {
	list := make([]any, len(values))
	for i, v := range values {
		list[i] = string(v)
	}
	return list
}

var finishReasons = enum(sessions.FinishEndToken, sessions.FinishStopString, sessions.FinishLength, sessions.FinishContextLimit,
	sessions.FinishToolCalls, sessions.FinishCancelled, sessions.FinishInterrupted, sessions.FinishError)

var fields = []field{
	{path: "CreateRequest.messages", doc: "goes through the chat template without a generation prompt; not together with input"},
	{path: "CreateRequest.input", doc: "raw text; not together with messages"},
	{path: "CreateRequest.ttl_seconds", doc: "idle seconds until the session closes", min: 1, max: sessions.TTLSecondsMax},
	{path: "CreateRequest.pin", doc: "protect from eviction, within half of each budget"},
	{path: "PatchRequest.labels", doc: "replaces all labels"},
	{path: "PatchRequest.ttl_seconds", doc: "0 takes the limit away", min: 0, max: sessions.TTLSecondsMax},
	{path: "TurnRequest.messages", doc: "new chat messages; not together with input. No text, or an empty one: decoding just goes on"},
	{path: "TurnRequest.input", doc: "raw text, tokenised by itself; not together with messages"},
	{path: "TurnRequest.max_tokens", min: 1, max: 1 << 30, def: sessions.MaxTokensDefault, doc: "tokens to generate at most"},
	{path: "TurnRequest.temperature", min: 0, max: sessions.TemperatureMax, doc: "0 takes the likeliest token"},
	{path: "TurnRequest.top_p", min: 0, max: 1, doc: "smallest set of tokens with this probability; more than 0"},
	{path: "TurnRequest.top_k", min: 0, max: sessions.TopKMax, doc: "likeliest tokens only; 0: all"},
	{path: "TurnRequest.seed", min: 0, max: 1<<63 - 1024, doc: "drawn and returned when absent; the same seed at the same offset gives the same tokens"},
	{path: "TurnRequest.stop", doc: "strings that end the turn; the text ends before them, their tokens stay on the line"},
	{path: "TurnRequest.logprobs", min: 0, max: sessions.LogprobsMax, doc: "log probabilities of each token and of this many others"},
	{path: "TurnRequest.ignore_eos", doc: "go on past end tokens"},
	{path: "TurnRequest.mtp", doc: "speculation; it never changes tokens. This version does not speculate: it is taken and has no effect"},
	{path: "MTPRequest.max_depth", min: 0, max: sessions.MTPDepthMax},
	{path: "ForkRequest.at", min: 0, max: 1 << 30, doc: "token offset; default: the end of the line (while decoding the last verified token, while prefilling the prompt's end)"},
	{path: "ForkRequest.n", min: 1, max: sessions.ForkChildrenMax, doc: "how many children; not together with children"},
	{path: "ForkRequest.children", doc: "title and labels of each child; not together with n"},
	{path: "DetachRequest.tier", doc: "host (default) or disk, which outlives a restart; a server without a disk tier refuses disk"},
	{path: "Session.state", enum: enum(sessions.StateIdle, sessions.StateRunning, sessions.StateDetached, sessions.StateClosed)},
	{path: "Session.forked_at", doc: "token offset in the parent's line; null for a root"},
	{path: "Session.length", doc: "tokens of the whole line, inherited ones too"},
	{path: "Session.residency", doc: "where the bytes are, in tokens; reported after the fact. With elsewhere only what was committed when the session was detached: its own server tells the rest"},
	{path: "Session.elsewhere", doc: "true in lists, trees and lineage where another server has the session, absent else; get-session asks that one, whichever server is called"},
	{path: "Session.epoch", doc: "rises when another server, or its own after a crash, takes the session over; see events"},
	{path: "Turn.state", enum: enum(sessions.TurnQueued, sessions.TurnRunning, sessions.TurnCompleted, sessions.TurnCancelled, sessions.TurnFailed, sessions.TurnInterrupted)},
	{path: "Turn.finish_reason", doc: "null while the turn is open, and for an inherited one that is clipped: one of end_token, stop_string, length, context_limit, tool_calls, cancelled, interrupted, error"},
	{path: "Turn.usage", null: true, doc: "null while the turn is open, if it never started, if a crash ended it, and for an inherited one that is clipped"},
	{path: "Turn.from", doc: "the turn's first token in the line (its prompt's)"},
	{path: "Turn.to", doc: "one past the turn's last token in the line"},
	{path: "Turn.tokens", doc: "generated token ids; absent in lists"},
	{path: "Event.type", enum: enum(sessions.EventSessionCreated, sessions.EventSessionForked, sessions.EventSessionDetached,
		sessions.EventSessionResumed, sessions.EventSessionClosed, sessions.EventSessionDeleted, sessions.EventTurnStarted, sessions.EventTurnDelta,
		sessions.EventTurnCompleted, sessions.EventTurnFailed, sessions.EventTurnCancelled, sessions.EventTurnInterrupted)},
	{path: "Event.finish_reason", enum: finishReasons},
	{path: "Event.last_seq", doc: "of turn.interrupted: events of older epochs past it never happened"},
	{path: "Event.seq", doc: "dense per session, from 1"},
	{path: "TokenRange.pieces", doc: "with pieces=true: what each token adds to text"},
	{path: "Common.ancestor", null: true, doc: "the nearest session that both are or come from; null between different trees"},
	{path: "Common.at", doc: "the lines are the same in [0, at)"},
	{path: "Path.at", doc: "the lines of the two ends are the same in [0, at)"},
	{path: "Path.ancestor", doc: "the node where the path turns; null between different trees"},
	{path: "Usage.cached_tokens", doc: "prompt tokens that were not computed again"},
}

// register adds an operation whose errors are those of every call.
func register[I, O any](s *Server, op huma.Operation, handler func(context.Context, *I) (*O, error)) {
	huma.Register(s.api, operation(op), handler)
}

// compact is v as JSON without a line end, as frames and event data have it.
func compact(v any) ([]byte, error) {
	var buf bytes.Buffer
	if err := marshalJSON(&buf, v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(buf.Bytes(), "\n"), nil
}

// routeOf names a mutating call for its idempotency key, with ids filled in.
func routeOf(method, path string, id string) string {
	return method + " " + strings.Replace(path, "{id}", id, 1)
}
