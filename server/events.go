package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

// sseRetryMillis is how long an EventSource waits before it comes back.
const sseRetryMillis = 1000

// position is where a reader of events wants to begin.
type position struct {
	from  int64 // first seq wanted; 0: the oldest there is
	epoch int64 // last epoch seen; 0: none
}

// EventPage is a JSON page of events, oldest first. Next goes into from.
type EventPage struct {
	Data    []sessions.Event `json:"data"`
	HasMore bool             `json:"has_more"`
	Next    int64            `json:"next"`
	Epoch   int64            `json:"epoch"`
	LastSeq int64            `json:"last_seq"`
}

// parsePosition reads from, epoch and Last-Event-ID; the header wins, since a
// browser that reconnects repeats the query of its first connection.
func parsePosition(query url.Values, lastEventID string) (position, error) {
	var p position
	var err error
	if p.from, err = queryInt(query, "from", 0, 1<<62); err != nil {
		return p, err
	}
	if p.epoch, err = queryInt(query, "epoch", 0, 1<<62); err != nil {
		return p, err
	}
	if lastEventID == "" {
		return p, nil
	}
	epoch, seq, ok := strings.Cut(lastEventID, "-")
	e, err1 := strconv.ParseInt(epoch, 10, 64)
	n, err2 := strconv.ParseInt(seq, 10, 64)
	if !ok || err1 != nil || err2 != nil || e < 0 || n < 0 || n >= 1<<62 {
		return p, codeProblem(codeInvalid, fmt.Sprintf("Last-Event-ID: want EPOCH-SEQ, not %q", lastEventID), "Last-Event-ID")
	}
	return position{from: n + 1, epoch: e}, nil
}

func queryInt(query url.Values, name string, min, max int64) (int64, error) {
	text := query.Get(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, codeProblem(codeInvalid, name+": expected integer", name)
	}
	if n < min || n > max {
		return 0, codeProblem(codeInvalid, fmt.Sprintf("%s: expected number >= %d and <= %d", name, min, max), name)
	}
	return n, nil
}

// refuseUnknown refuses query parameters that a handler outside of huma does
// not have.
func refuseUnknown(query url.Values, known ...string) error {
next:
	for name := range query {
		for _, k := range known {
			if name == k {
				continue next
			}
		}
		return codeProblem(codeInvalid, name+": unknown query parameter", name)
	}
	return nil
}

// openLog finds a session's log and the first seq to read from it. A reader
// that names no position gets what is left when older events are gone.
func (s *Server) openLog(ctx context.Context, id string, p position) (*sessions.Log, int64, error) {
	log, err := s.manager.Log(ctx, tenantOf(ctx), id)
	if err != nil {
		return nil, 0, err
	}
	next, err := log.Start(ctx, max(p.from, 1), p.epoch)
	if e, ok := errors.AsType[*sessions.Error](err); ok && e.Code == sessions.CodeGone && p.from == 0 {
		return log, e.FirstSeq, nil
	}
	return log, next, err
}

// getEvents answers with server-sent events where the client accepts them, and
// with a JSON page otherwise.
func (s *Server) getEvents(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	err := refuseUnknown(query, "from", "epoch", "limit")
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	limit, err := queryInt(query, "limit", 1, eventsPageMax)
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	pos, err := parsePosition(query, r.Header.Get("Last-Event-ID"))
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	log, next, err := s.openLog(r.Context(), chi.URLParam(r, "id"), pos)
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	if strings.Contains(r.Header.Get("Accept"), "text/event-stream") {
		s.streamEvents(w, r, log, next)
		return
	}
	if limit == 0 {
		limit = eventsPageMax
	}
	s.pageEvents(w, r, log, next, int(limit))
}

func (s *Server) pageEvents(w http.ResponseWriter, r *http.Request, log *sessions.Log, next int64, limit int) {
	events, err := log.Page(r.Context(), next, limit)
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	page := EventPage{Data: events, Next: next}
	if len(events) > 0 {
		page.Next = events[len(events)-1].Seq + 1
	} else {
		page.Data = []sessions.Event{}
	}
	if page.Epoch, page.LastSeq, err = log.Last(r.Context()); err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	page.HasMore = page.Next <= page.LastSeq
	var body bytes.Buffer
	if err := marshalJSON(&body, page); err != nil { // before a header says that all is well
		writeProblem(w, s.problem(fmt.Errorf("encode events from %d: %w", next, err)))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body.Bytes()) // the client is gone; nobody is left to tell
}

// streamEvents sends events until the client leaves, the session is deleted,
// or the server closes. The id of each event is what Last-Event-ID brings back.
func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request, log *sessions.Log, next int64) {
	end, err := s.beginStream(r.Context())
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	defer end()
	markStream(w)
	s.metrics.sse.Inc()
	defer s.metrics.sse.Dec()
	ctx, release := s.manager.Keys().Hold(r.Context(), callerOf(r.Context()))
	defer release()
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)()

	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies must not hold events back
	flush := http.NewResponseController(w)
	var buf bytes.Buffer
	fmt.Fprintf(&buf, "retry: %d\n\n", sseRetryMillis)
	for {
		last := s.closing.Err() != nil // one more look, so that the ends of turns still go out
		events, err := log.Read(ctx, next, eventsPerRead)
		if sessions.ErrorCode(err) == sessions.CodeNotFound { // deleted since the last look
			return
		}
		if err != nil {
			s.endStream(w, ctx, err)
			return
		}
		for i := range events {
			if err := s.encodeSSE(&buf, tenantOf(ctx), &events[i]); err != nil {
				s.endStream(w, ctx, err)
				return
			}
			next = events[i].Seq + 1
		}
		if buf.Len() > 0 {
			if _, err := w.Write(buf.Bytes()); err != nil {
				return // the client is gone or does not read; it comes back with Last-Event-ID
			}
			if err := flush.Flush(); err != nil {
				return
			}
			buf.Reset()
		}
		if len(events) == eventsPerRead || last && len(events) > 0 {
			continue
		}
		if last {
			return
		}
		more, err := s.waitOrBeat(wait, log, next)
		switch {
		case s.closing.Err() != nil:
		case errors.Is(err, errHeartbeat):
			buf.WriteString(": heartbeat\n\n")
		case err != nil:
			s.endStream(w, ctx, err)
			return
		case !more: // deleted; coming back answers 404, which ends an EventSource
			return
		}
	}
}

// errHeartbeat ends a wait that took as long as Options.Heartbeat.
var errHeartbeat = errors.New("nothing new")

func (s *Server) waitOrBeat(ctx context.Context, log *sessions.Log, next int64) (bool, error) {
	wait, cancel := context.WithTimeoutCause(ctx, s.opts.Heartbeat, errHeartbeat)
	defer cancel()
	more, err := log.Wait(wait, next)
	if err != nil && errors.Is(context.Cause(wait), errHeartbeat) {
		return false, errHeartbeat
	}
	return more, err
}

// endStream says why a stream ends, if somebody may still be listening.
func (s *Server) endStream(w http.ResponseWriter, ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	data, encodeErr := compact(s.problem(err))
	if encodeErr != nil {
		return
	}
	fmt.Fprintf(w, "event: stream.error\ndata: %s\n\n", data)
}

func (s *Server) encodeSSE(buf *bytes.Buffer, tenant string, e *sessions.Event) error {
	data, err := s.encodings.encode(tenant, e)
	if err != nil {
		return fmt.Errorf("encode event %d: %w", e.Seq, err)
	}
	fmt.Fprintf(buf, "id: %d-%d\nevent: %s\ndata: %s\n\n", e.Epoch, e.Seq, e.Type, data)
	return nil
}
