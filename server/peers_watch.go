package server

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"sync"
	"time"

	"github.com/coder/websocket"

	"rocket/sessions"
)

// A watch sees the sessions of all servers: it opens one at each of the others,
// in the watcher's own name, and passes on what they send. Whenever one of them
// was away, events may be missing, and watch.lost says so.

const (
	watchJoinTimeout = 3 * time.Second // for another server to be ready; watch.ready waits for it, then goes without
	watchLookEvery   = 3 * time.Second // for servers that came, and for those that went
	watchQueued      = 64              // frames that are not written yet; then nobody's events are taken
)

// watcher is one socket of /v1/watch.
type watcher struct {
	server *Server
	conn   *wsConn
	own    *sessions.Watch
	query  string         // for other servers
	from   *relays        // in whose name; nil: another server watches here, and asks the others itself
	frames chan []byte    // to the writer
	all    sync.WaitGroup // every goroutine but the writer
}

func newWatcher(s *Server, conn *wsConn, own *sessions.Watch, from *relays, opts sessions.WatchOptions) *watcher {
	query := url.Values{}
	if opts.Root != "" {
		query.Set("root", opts.Root)
	}
	if opts.Turns {
		query.Set("turns", "true")
	}
	return &watcher{server: s, conn: conn, own: own, query: query.Encode(), from: from, frames: make(chan []byte, watchQueued)}
}

// send gives the writer a frame; it waits while the client does not read.
func (w *watcher) send(ctx context.Context, v any) error {
	data, err := compact(v)
	if err != nil {
		return fmt.Errorf("encode frame: %w", err)
	}
	return w.pass(ctx, data)
}

func (w *watcher) pass(ctx context.Context, data []byte) error {
	select {
	case w.frames <- data:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// write sends watch.ready and then what comes. Own events wait in their ring
// until then, those of others in their sockets.
func (w *watcher) write(ctx context.Context) error {
	if w.from != nil {
		joined := make(chan struct{})
		w.all.Go(func() { w.keepPeers(ctx, joined) })
		select {
		case <-joined:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	data, err := compact(WatchFrame{Type: "watch.ready"})
	if err == nil {
		err = w.put(data)
	}
	if err != nil {
		return err
	}
	beat := w.server.newPinger(w.conn, &w.all, 0)
	defer beat.Stop()
	failed := make(chan error, 1)
	w.all.Go(func() { failed <- w.readOwn(ctx) })
	for {
		select {
		case data := <-w.frames:
			if err := w.put(data); err != nil {
				return err
			}
		case <-beat.C:
			beat.ping()
		case err := <-failed:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (w *watcher) put(data []byte) error { return w.conn.put(data) }

// readOwn passes on what happens on this server.
func (w *watcher) readOwn(ctx context.Context) error {
	for {
		events, lost, err := w.own.Next(ctx)
		if err != nil {
			return err
		}
		if lost > 0 {
			if err := w.send(ctx, WatchFrame{Type: "watch.lost", Lost: lost}); err != nil {
				return err
			}
		}
		for i := range events {
			if err := w.send(ctx, &events[i]); err != nil {
				return err
			}
		}
	}
}

// keepPeers watches at the other servers, as they come and go. joined is
// closed when those that can be reached at the start are ready.
func (w *watcher) keepPeers(ctx context.Context, joined chan struct{}) {
	watched := map[string]context.CancelFunc{}
	look := time.NewTicker(watchLookEvery)
	defer look.Stop()
	for late := false; ; late = true {
		var tried sync.WaitGroup
		limited, cancel := context.WithTimeout(ctx, watchJoinTimeout)
		list, err := w.server.servers(limited)
		cancel()
		if err != nil { // the ledger is away: those that are watched are as they were
			w.server.log.Debug("watch: list servers", "err", err)
		}
		alive := map[string]bool{}
		for _, v := range list {
			if v.Self || !v.Alive || v.Address == "" {
				continue
			}
			alive[v.ID] = true
			if watched[v.ID] == nil {
				one, stop := context.WithCancel(ctx)
				watched[v.ID] = stop
				tried.Add(1)
				w.all.Go(func() { w.watchPeer(ctx, one, v, late, sync.OnceFunc(tried.Done)) })
			}
		}
		for id, stop := range watched {
			if err == nil && !alive[id] {
				stop()
				delete(watched, id)
			}
		}
		if !late {
			tried.Wait()
			close(joined)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// watchPeer passes on what one server sends until alive ends, ctx being the
// watch's. late: events of that server may have been missed already. tried is
// called when it was joined or cannot be.
func (w *watcher) watchPeer(ctx, alive context.Context, v sessions.Server, late bool, tried func()) {
	defer tried()
	for ; ; late = true {
		conn, err := w.join(alive, v.Address)
		if err == nil {
			tried()
			if late {
				err = w.send(ctx, WatchFrame{Type: "watch.lost"})
			}
			if err == nil {
				err = w.pump(ctx, alive, conn)
			}
			_ = conn.CloseNow()
			if w.send(ctx, WatchFrame{Type: "watch.lost"}) != nil {
				return
			}
		}
		w.server.log.Debug("another server is not watched", "server", v.ID, "address", v.Address, "err", err)
		tried()
		select {
		case <-time.After(watchLookEvery):
		case <-alive.Done():
			return
		}
	}
}

// join opens a watch at another server and returns when it misses nothing any more.
func (w *watcher) join(ctx context.Context, address string) (*websocket.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, watchJoinTimeout)
	defer cancel()
	conn, err := w.server.dialPeer(ctx, address, pathWatch, w.query, w.from.header)
	if err != nil {
		return nil, err
	}
	if _, data, err := conn.Read(ctx); err != nil || !bytes.Contains(data, []byte(`"watch.ready"`)) {
		_ = conn.CloseNow()
		return nil, fmt.Errorf("watch at another server: %s: %w", data, err)
	}
	return conn, nil
}

func (w *watcher) pump(ctx, alive context.Context, conn *websocket.Conn) error {
	defer context.AfterFunc(alive, func() { _ = conn.CloseNow() })()
	for {
		_, data, err := conn.Read(context.Background())
		if err == nil {
			err = w.pass(ctx, data)
		}
		if err != nil {
			return err
		}
	}
}
