// Package server is Rocket's HTTP face: the native REST API, server-sent
// events, WebSockets, metrics, health, and the dashboard's files. It decodes,
// calls sessions, encodes and maps errors; it decides nothing about sessions.
//
// Invariants:
//   - A request's context governs the request only. A turn goes on when its
//     reader leaves.
//   - A socket has one writer goroutine. Readers of events hold an offset into
//     the log, so that a slow one only lags, and past a bound is closed with
//     1013 and the last seq it got.
//   - Who calls is known before anything is done for them, and every call is
//     that tenant's. Of another tenant's ids nothing can be learnt, not even
//     that they exist. API keys are in no log, error or answer.
//   - Events are never merged here: every reader sees the same seq numbers.
//   - Errors become HTTP in one place, errors.go.
//   - Of several servers on a ledger the one that has a session answers its
//     calls; another one passes them on, once, in the caller's name (peers.go).
//   - Every goroutine ends when its request or Serve ends.
package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"

	"rocket/sessions"
)

// Limits of one server. What happens at each is beside it.
const (
	bodyBytesMax     = 8 << 20                // larger request bodies: 413
	bodyDiscardMax   = 32 << 20               // what is read of them after that; past it the connection is reset
	bodyLeftMax      = 256 << 10              // what is read of a body that nobody wants; past it the connection is closed
	frameBytesMax    = 1 << 20                // larger WebSocket frames: close 1009
	headerBytesMax   = 64 << 10               // larger request headers: 431
	subscriptionsMax = 1024                   // sessions one socket follows; more: error frame
	connectionsMax   = 16_384                 // WebSockets and event streams together; more: 503
	eventsPerRead    = 256                    // events taken from a log at once; more wait for their turn
	eventsPageMax    = sessions.ReadMax       // JSON page of events; larger limits are refused
	streamsShared    = connectionsMax * 3 / 4 // from here on a tenant with streamsFew of them gets no more: 503
	streamsFew       = 64
)

// times is how long a client may take. Tests have shorter ones.
type times struct {
	header   time.Duration // for the headers, and a TLS handshake: the connection is closed
	bodyRead time.Duration // between two reads of a body: 408
	bodyAll  time.Duration // for all of a body: 408
	bodyLeft time.Duration // for what is left of a body that is not wanted: the answer goes out, the connection is closed
	frame    time.Duration // from a WebSocket frame's first bytes to its last: close 1008
	idle     time.Duration // keep-alive without a request
	answer   time.Duration // for all of an answer that is no stream, from its first byte: cut; 0: no limit
}

var standardTimes = times{
	header: 10 * time.Second, bodyRead: 30 * time.Second, bodyAll: 5 * time.Minute, bodyLeft: 5 * time.Second,
	frame: time.Minute, idle: 2 * time.Minute, answer: 10 * time.Minute,
}

// errDraining refuses new work while the server shuts down.
var errDraining = errors.New("the server is shutting down")

// Options configures a Server. Sessions is needed; zero values of the others
// work.
type Options struct {
	Sessions *sessions.Manager
	Log      *slog.Logger // default: discards
	Version  Version
	Web      http.Handler // what / serves; nil: a page that points to /docs

	Address string         // base URL by which other servers of the ledger reach this one, as sessions.Options has it
	PeerCA  *x509.CertPool // whom to trust about other servers' certificates; nil: the system's

	// TrustedProxies are reverse proxies whose X-Forwarded-For and Forwarded say
	// which address a call counts for; those of anybody else say nothing.
	TrustedProxies []netip.Prefix

	AllowedHosts []string      // Host names allowed beside the loopback ones
	RequireKeys  bool          // every call needs an API key; else everybody is sessions.DefaultTenant
	TLS          *tls.Config   // what Serve speaks; nil: plain HTTP
	Heartbeat    time.Duration // comment on an idle event stream, ping on an idle socket; default 15 s
	WriteTimeout time.Duration // one write to a client that does not read; default 30 s
	CallTimeout  time.Duration // one command on a socket; default 20 s
	DrainTimeout time.Duration // what running turns get when Serve ends; default 30 s
	LagMax       int64         // events a caught-up reader may fall behind before 1013; default 8192

	// ConnectionsMax bounds open connections; default 32768. One more takes the
	// place of one without a request, or is closed.
	ConnectionsMax int

	times times // zero: standardTimes
}

// Version is what GET /version answers.
type Version struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Time    string `json:"time,omitempty" doc:"of the commit"`
	Dirty   bool   `json:"dirty,omitempty" doc:"built from a changed tree"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// Server answers requests. Make it with New, run it with Serve.
type Server struct {
	opts    Options
	log     *slog.Logger
	manager *sessions.Manager
	api     huma.API
	frames  *frameDecoder
	peers   *peers

	encodings encodings // of events, shared by their readers
	held      heldBytes // by bodies and frames that are read
	handler   http.Handler
	metrics   *metrics
	spec      []byte // openapi.json
	docs      []byte // the page made of it

	refuse   atomic.Bool     // new turns and sessions are refused
	closing  context.Context // done when sockets and streams must end
	close    context.CancelFunc
	streams  sync.WaitGroup
	streamMu sync.Mutex // guards streamed and stopped
	streamed int
	streamBy map[string]int // guarded by streamMu; of streamed, by tenant
	stopped  bool
}

// New makes a server over a manager; nothing runs until Serve or a request.
func New(opts Options) (*Server, error) {
	if opts.Sessions == nil {
		return nil, errors.New("server: Options.Sessions is nil")
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.Log = sessions.RedactLog(opts.Log)
	setDefault(&opts.Heartbeat, 15*time.Second)
	setDefault(&opts.WriteTimeout, 30*time.Second)
	setDefault(&opts.CallTimeout, 20*time.Second)
	setDefault(&opts.DrainTimeout, 30*time.Second)
	if opts.LagMax == 0 {
		opts.LagMax = 8192
	}
	if opts.ConnectionsMax == 0 {
		opts.ConnectionsMax = connectionsDefault
	}
	if opts.times == (times{}) {
		opts.times = standardTimes
	}
	s := &Server{opts: opts, log: opts.Log, manager: opts.Sessions, streamBy: map[string]int{}, peers: newPeers(opts.PeerCA)}
	s.closing, s.close = context.WithCancel(context.Background())
	s.metrics = newMetrics(s)
	if err := s.routes(); err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	return s, nil
}

func setDefault(d *time.Duration, v time.Duration) {
	if *d == 0 {
		*d = v
	}
}

// Handler is the whole server as a handler, security checks included.
func (s *Server) Handler() http.Handler { return s.handler }

func (s *Server) routes() error {
	router := chi.NewMux()
	router.Use(middleware.GetHead, s.observe, pageHeaders, s.authenticate(router), s.allowHosts(), refuseCrossOrigin(), checkQuery, limitBody, s.place)
	router.NotFound(func(w http.ResponseWriter, r *http.Request) {
		// The dashboard has what the API has not; a catch-all route would hide the API's own 404 and 405.
		page := r.Method == http.MethodGet || r.Method == http.MethodHead
		if s.opts.Web != nil && page && !strings.HasPrefix(r.URL.Path, "/v1/") {
			s.opts.Web.ServeHTTP(w, r)
			return
		}
		writeProblem(w, codeProblem(codeNoRoute, fmt.Sprintf("there is no %s", r.URL.Path), ""))
	})
	router.MethodNotAllowed(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", strings.Join(allowedMethods(router, r.URL.Path), ", "))
		writeProblem(w, codeProblem(codeMethod, fmt.Sprintf("%s does not take %s", r.URL.Path, r.Method), ""))
	})
	s.api = newAPI(router, s.opts.Version.Version)
	s.registerSessions()
	s.registerLineage()
	s.registerTurns()
	s.registerSystem()
	s.registerServers()
	s.registerStreams(router)
	s.registerBundles(router)
	describeSchemas(s.api.OpenAPI())
	describeSecurity(s.api.OpenAPI())
	if err := s.buildDocs(); err != nil {
		return err
	}
	router.Get("/openapi.json", s.serveSpec)
	router.Get("/docs", s.serveDocs)
	router.Get("/docs/style.css", s.serveStyle)
	router.Method(http.MethodGet, "/metrics", s.metrics.handler())
	if s.opts.Web == nil {
		router.Get("/", http.RedirectHandler("/docs", http.StatusFound).ServeHTTP)
	}
	s.handler = router
	return nil
}

// allowedMethods are the methods that a path takes.
func allowedMethods(router chi.Routes, path string) []string {
	var allowed []string
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete} {
		if router.Match(chi.NewRouteContext(), method, path) {
			allowed = append(allowed, method)
		}
	}
	return allowed
}

// Serve answers on ln until ctx ends, then drains: /readyz says 503 and new
// turns are refused at once, running turns get DrainTimeout, then sockets are
// closed with 1012 and event streams end. It returns when every goroutine of
// the server is gone. The manager is the caller's to shut down afterwards.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	limited := limitConnections(ln, s.opts.ConnectionsMax, s.log, s.metrics.dropped.Inc)
	hs := &http.Server{
		Handler:           s.handler,
		ConnState:         limited.state,
		ReadHeaderTimeout: s.opts.times.header,
		IdleTimeout:       s.opts.times.idle,
		MaxHeaderBytes:    headerBytesMax,
		TLSConfig:         s.opts.TLS,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	watch := s.manager.WatchAll(sessions.WatchOptions{Turns: true})
	counted := make(chan struct{})
	go func() {
		defer close(counted)
		defer watch.Close()
		s.metrics.watchTurns(s.closing, watch)
	}()
	failed := make(chan error, 1)
	go func() {
		if s.opts.TLS != nil {
			failed <- hs.ServeTLS(limited, "", "")
			return
		}
		failed <- hs.Serve(limited)
	}()
	select {
	case err := <-failed:
		s.closeStreams()
		<-counted
		return fmt.Errorf("serve %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	s.refuse.Store(true)
	s.log.Info("shutting down", "open_turns", s.openTurns())
	s.awaitTurns()
	s.closeStreams()
	limited.closeWaiting()
	shutdown, cancel := context.WithTimeout(context.Background(), s.opts.WriteTimeout)
	defer cancel()
	err := hs.Shutdown(shutdown)
	if err != nil {
		err = hs.Close() // clients that did not take their answers in time
	}
	<-failed
	<-counted
	s.streams.Wait()
	s.peers.transport.CloseIdleConnections()
	return err
}

// drainPoll is how often a drain looks whether turns still run.
const drainPoll = 50 * time.Millisecond

// awaitTurns returns when no turn runs any more or DrainTimeout is over.
func (s *Server) awaitTurns() {
	deadline := time.NewTimer(s.opts.DrainTimeout)
	defer deadline.Stop()
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for s.openTurns() > 0 {
		select {
		case <-deadline.C:
			return
		case <-tick.C:
		}
	}
}

// closeStreams ends sockets and event streams and lets no new one begin.
func (s *Server) closeStreams() {
	s.refuse.Store(true)
	s.streamMu.Lock()
	defer s.streamMu.Unlock()
	s.stopped = true
	s.close()
}

// beginStream counts a socket or event stream of the caller's in; end must be
// called after. The last quarter is for tenants that have few: one tenant's
// flood does not lock out the others.
func (s *Server) beginStream(ctx context.Context) (end func(), err error) {
	tenant := tenantOf(ctx)
	s.streamMu.Lock()
	defer s.streamMu.Unlock()
	if s.stopped {
		return nil, errDraining
	}
	if s.streamed >= connectionsMax {
		return nil, codeProblem(codeConnectionsMax, fmt.Sprintf("%d sockets and event streams are open already", connectionsMax), "")
	}
	if n := s.streamBy[tenant]; s.streamed >= streamsShared && n >= streamsFew {
		return nil, codeProblem(codeConnectionsMax, fmt.Sprintf("%d sockets and event streams are open, %d of them this tenant's", s.streamed, n), "")
	}
	s.streamed++
	s.streamBy[tenant]++
	s.streams.Add(1)
	return func() {
		s.streamMu.Lock()
		s.streamed--
		if s.streamBy[tenant]--; s.streamBy[tenant] == 0 {
			delete(s.streamBy, tenant)
		}
		s.streamMu.Unlock()
		s.streams.Done()
	}, nil
}
