package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"

	"rocket/sessions"
)

// WatchFrame is what /v1/watch sends beside events: "watch.ready" once, when
// nothing that happens from then on is missed, and "watch.lost" when the client
// was too slow and should list the sessions anew.
type WatchFrame struct {
	Type string `json:"type" enum:"watch.ready,watch.lost"`
	Lost int64  `json:"lost,omitempty" doc:"events that were overwritten"`
}

// serveWatch is GET /v1/watch: lifecycle events of many sessions, without the
// deltas of their turns. Clients send nothing.
func (s *Server) serveWatch(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	err := refuseUnknown(query, "root", "turns")
	turns := query.Get("turns")
	if err == nil && turns != "" && turns != "true" && turns != "false" {
		err = codeProblem(codeInvalid, "turns: expected boolean", "turns")
	}
	root := query.Get("root")
	if err == nil && root != "" {
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
	watch := s.manager.Watch(tenantOf(r.Context()), sessions.WatchOptions{Root: root, Turns: turns == "true"})
	conn, err := s.accept(w, r)
	if err != nil {
		return
	}
	s.metrics.sockets.Inc()
	defer s.metrics.sockets.Dec()
	s.runWatch(conn, watch, callerOf(r.Context()))
}

// runWatch has three goroutines: this one waits for events and writes them,
// one pings, one reads the peer's close and pongs; anything else that comes is
// closed with 1008.
func (s *Server) runWatch(conn *wsConn, watch *sessions.Watch, who sessions.Identity) {
	gone, left := context.WithCancelCause(context.Background())
	ctx, cancel := context.WithCancel(gone)
	defer cancel()
	held, release := s.manager.Keys().Hold(context.Background(), who)
	defer release()
	defer context.AfterFunc(held, cancel)()
	defer context.AfterFunc(s.closing, cancel)()
	var others sync.WaitGroup
	others.Go(func() {
		defer cancel()
		s.pingWatch(ctx, conn)
	})
	others.Go(func() { // its reads end with the connection
		frames := s.newFrameReader(conn, who.Tenant)
		defer frames.close()
		_, _, err := frames.next()
		if err == nil {
			err = errTalks
		}
		left(err)
	})
	err := s.writeWatch(ctx, conn, watch)
	switch {
	case s.closing.Err() != nil:
		s.closeSocket(conn, errDrain)
	case held.Err() != nil:
		s.closeSocket(conn, errRevoked)
	case errors.Is(context.Cause(gone), errTalks):
		s.closeSocket(conn, errTalks)
	case gone.Err() == nil && !errors.Is(err, context.Canceled):
		s.log.Debug("watch ended", "err", err)
		s.closeSocket(conn, &closeError{websocket.StatusInternalError, "internal error"})
	}
	cancel()
	_ = conn.CloseNow()
	others.Wait()
}

// errTalks ends a watch whose client sends something.
var errTalks = &closeError{websocket.StatusPolicyViolation, "a watch takes no frames"}

func (s *Server) pingWatch(ctx context.Context, conn *wsConn) {
	tick := time.NewTicker(s.opts.Heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		wait, cancel := context.WithTimeout(context.Background(), s.opts.WriteTimeout)
		err := conn.Ping(wait)
		cancel()
		if err != nil {
			return
		}
	}
}

func (s *Server) writeWatch(ctx context.Context, conn *wsConn, watch *sessions.Watch) error {
	put := func(v any) error {
		data, err := compact(v)
		if err != nil {
			return fmt.Errorf("encode frame: %w", err)
		}
		limited, cancel := context.WithTimeout(context.Background(), s.opts.WriteTimeout)
		defer cancel()
		return conn.Write(limited, websocket.MessageText, data)
	}
	if err := put(WatchFrame{Type: "watch.ready"}); err != nil {
		return err
	}
	for {
		events, lost, err := watch.Next(ctx)
		if err != nil {
			return err
		}
		if lost > 0 {
			if err := put(WatchFrame{Type: "watch.lost", Lost: lost}); err != nil {
				return err
			}
		}
		for i := range events {
			if err := put(&events[i]); err != nil {
				return err
			}
		}
	}
}
