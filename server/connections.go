package server

import (
	"container/list"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// connectionsDefault is how many connections are open at once: every socket
// and event stream that may be, and as many calls beside them.
const connectionsDefault = 2 * connectionsMax

// acceptWarnEvery is how often the log says that descriptors ran out.
const acceptWarnEvery = time.Minute

// connections is a listener that keeps a bound. A connection on which no
// request is under way (it has sent none, or not all of its headers yet, or
// waits for the next) gives way to a new one, the one that waits for longest
// first: clients that open connections and say nothing do not lock out those
// that do. Where all are at work the new one is closed at once rather than left
// to wait. The same happens when the process runs out of descriptors.
type connections struct {
	net.Listener
	max     int
	log     *slog.Logger
	refused func() // counts

	mu      sync.Mutex
	open    int                        // guarded by mu
	waiting *list.List                 // guarded by mu; of *connection, the one that waits for longest first
	places  map[net.Conn]*list.Element // guarded by mu; in waiting
	warned  time.Time                  // guarded by mu
}

// limitConnections puts a bound before ln; hook must be the server's ConnState.
func limitConnections(ln net.Listener, max int, log *slog.Logger, refused func()) *connections {
	return &connections{Listener: ln, max: max, log: log, refused: refused, waiting: list.New(), places: map[net.Conn]*list.Element{}}
}

// connection is counted until it is closed, whoever has it by then.
type connection struct {
	net.Conn
	all  *connections
	once sync.Once
}

func (c *connection) Close() error {
	c.once.Do(func() {
		c.all.mu.Lock()
		defer c.all.mu.Unlock()
		c.all.open--
		c.all.busyLocked(c)
	})
	return c.Conn.Close()
}

// CloseWrite lets net/http end its side first, so that a client gets to read
// an answer that came before all of its request was sent.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// Accept gives the next connection that there is room for.
func (l *connections) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
				l.outOfDescriptors(err)
			}
			return nil, err // net/http waits a while and tries again where that makes sense
		}
		l.mu.Lock()
		full := l.open >= l.max
		l.mu.Unlock()
		if full {
			l.refused()
			if !l.evict() {
				_ = conn.Close() // nothing was sent on it
				continue
			}
		}
		c := &connection{Conn: conn, all: l}
		l.mu.Lock()
		l.open++
		l.mu.Unlock()
		return c, nil
	}
}

// evict closes the connection that waits for longest, if one does.
func (l *connections) evict() bool {
	l.mu.Lock()
	first := l.waiting.Front()
	var c *connection
	if first != nil {
		c = first.Value.(*connection)
		l.busyLocked(c)
	}
	l.mu.Unlock()
	if c == nil {
		return false
	}
	_ = c.Close() // its handler sees the end of it
	return true
}

// closeWaiting closes all that wait: at its end a server need not give those
// that have said nothing yet the seconds that net/http would.
func (l *connections) closeWaiting() {
	for l.evict() {
	}
}

func (l *connections) outOfDescriptors(err error) {
	evicted := l.evict()
	if evicted {
		l.refused()
	}
	l.mu.Lock()
	warn := time.Since(l.warned) > acceptWarnEvery
	if warn {
		l.warned = time.Now()
	}
	open := l.open
	l.mu.Unlock()
	if warn {
		l.log.Warn("no descriptor is left for new connections", "open", open, "closed_one_that_waited", evicted, "err", err)
	}
}

// state is http.Server.ConnState: it knows which connections wait.
func (l *connections) state(conn net.Conn, state http.ConnState) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	c, ok := conn.(*connection)
	if !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busyLocked(c)
	if state == http.StateNew || state == http.StateIdle {
		l.places[c] = l.waiting.PushBack(c)
	}
}

func (l *connections) busyLocked(c *connection) {
	if place := l.places[c]; place != nil {
		l.waiting.Remove(place)
		delete(l.places, c)
	}
}
