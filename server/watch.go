package server

import (
	"context"
	"errors"
	"net/http"

	"github.com/coder/websocket"

	"rocket/sessions"
)

// WatchFrame is what /v1/watch sends beside events: "watch.ready" once, when
// nothing that happens from then on is missed, and "watch.lost" when the client
// was too slow, or another server of the ledger was away, and it should list
// the sessions anew.
type WatchFrame struct {
	Type string `json:"type" enum:"watch.ready,watch.lost"`
	Lost int64  `json:"lost,omitempty" doc:"events of this tenant that were overwritten; absent when nobody knows"`
}

// serveWatch is GET /v1/watch: lifecycle events of many sessions, of all
// servers, without the deltas of their turns. Clients send nothing.
func (s *Server) serveWatch(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	err := refuseUnknown(query, "root", "turns")
	turns := query.Get("turns")
	if err == nil && turns != "" && turns != "true" && turns != "false" {
		err = codeProblem(codeInvalid, "turns: expected boolean", "turns")
	}
	root := query.Get("root")
	if err == nil && root != "" && !fromPeer(r) { // another server has looked already
		var session sessions.Session
		session, err = s.manager.Get(r.Context(), tenantOf(r.Context()), root)
		root = session.RootID // any session of a tree names it
	}
	var end func()
	if err == nil {
		end, err = s.beginStream(r.Context())
	}
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	defer end()
	opts := sessions.WatchOptions{Root: root, Turns: turns == "true"}
	watch := s.manager.Watch(tenantOf(r.Context()), opts)
	defer watch.Close()
	conn, err := s.accept(w, r)
	if err != nil {
		return
	}
	s.metrics.sockets.Inc()
	defer s.metrics.sockets.Dec()
	s.runWatch(newWatcher(s, conn, watch, newRelays(r), opts), callerOf(r.Context()))
}

// runWatch writes what the watcher's goroutines have to tell, and pings. One
// more reads the peer's close and pongs; anything else that comes is closed
// with 1008.
func (s *Server) runWatch(w *watcher, who sessions.Identity) {
	conn := w.conn
	gone, left := context.WithCancelCause(context.Background())
	ctx, cancel := context.WithCancel(gone)
	defer cancel()
	held, release := s.manager.Keys().Hold(context.Background(), who)
	defer release()
	defer context.AfterFunc(held, cancel)()
	defer context.AfterFunc(s.closing, cancel)()
	w.all.Go(func() { // its reads end with the connection
		frames := s.newFrameReader(conn, who.Tenant)
		defer frames.close()
		_, _, err := frames.next()
		if err == nil {
			err = errTalks
		}
		left(err)
	})
	err := w.write(ctx)
	s.log.Debug("watch ended", "why", err, "gone", context.Cause(gone))
	if e := s.endOfWatch(gone, held, err); e != nil {
		s.closeSocket(conn, e)
	}
	cancel()
	_ = conn.CloseNow()
	w.all.Wait()
}

// endOfWatch is how a watch is closed that ended with err; nil: it is cut, since
// the client has left or takes nothing, and no close frame would reach it.
func (s *Server) endOfWatch(gone, held context.Context, err error) *closeError {
	switch {
	case s.closing.Err() != nil:
		return errDrain
	case held.Err() != nil:
		return errRevoked
	case gone.Err() != nil:
		e, _ := errors.AsType[*closeError](context.Cause(gone))
		return e
	case errors.Is(err, errTakesNothing):
		return nil
	case sessions.ErrorCode(err) == sessions.CodeOverloaded: // no more events come
		return errDrain
	}
	s.log.Error("watch failed", "err", err)
	return &closeError{websocket.StatusInternalError, "internal error"}
}

// errTalks ends a watch whose client sends something.
var errTalks = &closeError{websocket.StatusPolicyViolation, "a watch takes no frames"}
