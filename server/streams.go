package server

import (
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"
	"github.com/go-chi/chi/v5"
)

const (
	pathEvents = "/v1/sessions/{id}/events"
	pathStream = "/v1/sessions/{id}/stream"
	pathWatch  = "/v1/watch"
)

// registerStreams adds the routes that huma cannot serve, since it writes each
// answer at once, and documents them beside the others.
func (s *Server) registerStreams(router chi.Router) {
	registry := s.api.OpenAPI().Components.Schemas
	s.frames = newFrameDecoder(registry)
	registry.Schema(reflect.TypeFor[WatchFrame](), true, "WatchFrame")

	integer := func(min float64) *huma.Schema {
		return &huma.Schema{Type: huma.TypeInteger, Format: "int64", Minimum: &min}
	}
	text := &huma.Schema{Type: huma.TypeString}
	id := &huma.Param{Name: "id", In: "path", Required: true, Description: "session id", Schema: text}
	from := &huma.Param{Name: "from", In: "query", Description: "first seq wanted, inclusive; default the oldest there is", Schema: integer(0)}
	epoch := &huma.Param{Name: "epoch", In: "query", Description: "last epoch seen; when it is over, the stream begins at the next one's first event", Schema: integer(0)}
	ref := func(name string) *huma.Schema { return &huma.Schema{Ref: "#/components/schemas/" + name} }
	one, most := 1.0, float64(eventsPageMax)
	switching := &huma.Response{Description: "WebSocket, subprotocol " + subprotocol}

	docs := s.api.OpenAPI()
	docs.AddOperation(&huma.Operation{
		OperationID: "get-events", Method: http.MethodGet, Path: pathEvents, Tags: []string{tagStreams}, Summary: "Read or follow a session's events",
		Description: "With Accept: text/event-stream live, else a JSON page, oldest first. " + pageBytesNote + " Events gone by retention: 410 with first_seq.",
		Parameters: []*huma.Param{id, from, epoch,
			{Name: "limit", In: "query", Description: "of a JSON page", Schema: &huma.Schema{Type: huma.TypeInteger, Minimum: &one, Maximum: &most, Default: eventsPageMax}},
			{Name: "Last-Event-ID", In: "header", Description: "EPOCH-SEQ of the last event seen; wins over from and epoch", Schema: text}},
		Responses: map[string]*huma.Response{
			"200": {Description: "Events", Content: map[string]*huma.MediaType{
				"application/json": {Schema: ref("EventPage")}, "text/event-stream": {Schema: ref("Event")}}},
		},
	})
	docs.AddOperation(&huma.Operation{
		OperationID: "stream-session", Method: http.MethodGet, Path: pathStream, Tags: []string{tagStreams}, Summary: "Follow and drive sessions over a WebSocket",
		Description: "Server frames are Events, SubscribedFrame, ReplyFrame, ErrorFrame and PongFrame. Client frames are TurnCreateFrame, ForkFrame, DetachFrame, SubscribeFrame, and PlainFrame for turn.cancel, resume, unsubscribe and ping. " +
			"The session's own events follow at once, unless follow=false. Sessions may be of any server of the ledger. When a session moves to another server an ErrorFrame with code session_moved ends its events: " +
			"subscribe again with the last epoch and behind the last seq that you saw.",
		Parameters: []*huma.Param{id, from, epoch,
			{Name: "follow", In: "query", Description: "false: open the socket without the events of the path's session", Schema: &huma.Schema{Type: huma.TypeBoolean, Default: true}}},
		Responses: map[string]*huma.Response{"101": switching},
	})
	docs.AddOperation(&huma.Operation{
		OperationID: "watch", Method: http.MethodGet, Path: pathWatch, Tags: []string{tagStreams}, Summary: "Follow the lifecycle of many sessions over a WebSocket",
		Description: "Server frames are WatchFrame and session.* Events, with turns=true turn.* Events too (no deltas).",
		Parameters: []*huma.Param{
			{Name: "root", In: "query", Description: "only this tree", Schema: text},
			{Name: "turns", In: "query", Schema: &huma.Schema{Type: huma.TypeBoolean, Default: false}}},
		Responses: map[string]*huma.Response{"101": switching},
	})
	router.Get(pathEvents, s.getEvents)
	router.Get(pathStream, s.serveStream)
	router.Get(pathWatch, s.serveWatch)
}
