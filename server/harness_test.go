package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rocket/client"
	"rocket/engine"
	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/internal/leaktest"
	"rocket/internal/localpg/pgtest"
	"rocket/kernels"
	"rocket/models/nano"
	"rocket/sessions"
)

// The one test cluster of the process lives until the process ends.
func TestMain(m *testing.M) {
	leaktest.Main(m, goleak.IgnoreAnyFunction("rocket/internal/localpg.(*Cluster).supervise"),
		goleak.IgnoreAnyFunction("rocket/internal/localpg.(*Cluster).launch.func1"))
}

// patience bounds waits for things that must happen; nothing waits this long
// in a good run.
const patience = 30 * time.Second

// loadedNano is nano on the device, loaded once a process.
type loadedNano struct {
	device   *kernels.Device
	model    *model.Model
	tok      *tokenizer.Tokenizer
	template *chat.Template
}

var loadNano = sync.OnceValues(func() (*loadedNano, error) {
	dir, err := nano.Extract(filepath.Join(os.TempDir(), "rocket-test-models"))
	if err != nil {
		return nil, err
	}
	l := &loadedNano{}
	if l.device, err = kernels.Open("auto", 2); err != nil {
		return nil, err
	}
	if l.model, err = model.Load(l.device, dir, model.Options{Class: kernels.ClassBF16}); err != nil {
		return nil, err
	}
	if l.tok, err = tokenizer.Load(filepath.Join(dir, "tokenizer.json")); err != nil {
		return nil, err
	}
	l.template, err = chat.Load(dir, l.tok)
	return l, err
})

// world is a running server on a database of its own, with the real engine.
type world struct {
	t       testing.TB
	server  *Server
	manager *sessions.Manager
	engine  *engine.Engine
	api     *client.Client
	base    string
	url     string        // of the database
	lines   *lockedBuffer // what the server logs
	stop    func()        // drains and waits; may be called twice
	from    net.IP        // loopback address that do calls from; nil: any
}

type worldOptions struct {
	server   Options
	engine   engine.Options
	listener func(net.Listener) net.Listener
	database func(url string) string // may put something before the database
	keyFresh time.Duration
	deltas   time.Duration // sessions.Options.DeltaInterval
	logLevel slog.Leveler  // default: warnings
	beside   *world        // another server, whose ledger and, to save memory, engine it shares
}

func start(t testing.TB, opts worldOptions) *world {
	t.Helper()
	l, err := loadNano()
	if err != nil {
		t.Fatal(err)
	}
	e, url := startEngine(t, l, opts)
	var lines lockedBuffer
	if opts.logLevel == nil {
		opts.logLevel = slog.LevelWarn
	}
	logger := slog.New(slog.NewTextHandler(&lines, &slog.HandlerOptions{Level: opts.logLevel}))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the server:\n%s", lines.String())
		}
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	base := "http://" + ln.Addr().String()
	opts.server.Address = base
	m, err := sessions.Open(t.Context(), sessions.Options{DatabaseURL: url, Engine: e, Template: l.template, Log: logger, KeyFreshFor: opts.keyFresh, DeltaInterval: opts.deltas, Address: base})
	if err != nil {
		t.Fatal(err)
	}
	opts.server.Sessions, opts.server.Log = m, logger
	if opts.server.DrainTimeout == 0 {
		opts.server.DrainTimeout = time.Millisecond // tests that leave turns behind do not want them
	}
	s, err := New(opts.server)
	if err != nil {
		t.Fatal(err)
	}
	if opts.listener != nil {
		ln = opts.listener(ln)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	api, err := client.New(base, client.Options{Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	w := &world{t: t, server: s, manager: m, engine: e, api: api, base: base, url: url, lines: &lines}
	w.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-served; err != nil {
				t.Errorf("serve: %v", err)
			}
			api.Close()
			shut, done := context.WithTimeout(context.Background(), patience)
			defer done()
			if err := m.Check(shut, sessions.DefaultTenant); err != nil && !t.Failed() {
				t.Errorf("ledger: %v", err)
			}
			if err := m.Shutdown(shut); err != nil {
				t.Errorf("shut the manager down: %v", err)
			}
		})
	}
	t.Cleanup(w.stop)
	return w
}

// startEngine makes an engine and a database, or takes another server's.
func startEngine(t testing.TB, l *loadedNano, opts worldOptions) (*engine.Engine, string) {
	t.Helper()
	if opts.beside != nil {
		return opts.beside.engine, opts.beside.url
	}
	eo := opts.engine
	eo.Device, eo.Model, eo.Tokenizer, eo.Name = l.device, l.model, l.tok, "nano"
	setBytes(&eo.PageBytes, 64<<20)
	setBytes(&eo.SnapshotBytes, 64<<20)
	setBytes(&eo.HostBytes, 64<<20)
	e, err := engine.New(eo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil {
			t.Errorf("engine: %v", err)
		}
		e.Close()
	})
	url := pgtest.New(t)
	if opts.database != nil {
		url = opts.database(url)
	}
	return e, url
}

// lockedBuffer collects what many goroutines log.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func setBytes(v *int64, def int64) {
	if *v == 0 {
		*v = def
	}
}

// ctx ends when the test does, or when something takes too long.
func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	w.t.Cleanup(cancel)
	return ctx
}

// create makes a session that begins with text.
func (w *world) create(text string) client.Session {
	w.t.Helper()
	s, err := w.api.Create(w.ctx(), client.CreateRequest{Input: &text}, client.CallOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// turn runs n greedy tokens to the end.
func (w *world) turn(id string, n int) client.Turn {
	w.t.Helper()
	turn, err := w.api.RunTurn(w.ctx(), id, greedy(n), client.CallOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return turn
}

func greedy(n int) client.TurnRequest {
	return client.TurnRequest{MaxTokens: &n, IgnoreEOS: true}
}

// answered is an HTTP answer that was read to its end.
type answered struct {
	status int
	header http.Header
	body   []byte
}

// do sends a request as it is, for what the client would not send.
func (w *world) do(method, path, body string, header ...string) answered {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.ctx(), method, w.base+path, bytes.NewReader([]byte(body)))
	if err != nil {
		w.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	dialer := &net.Dialer{}
	if w.from != nil {
		dialer.LocalAddr = &net.TCPAddr{IP: w.from}
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: dialer.DialContext}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answered{resp.StatusCode, resp.Header, data}
}

// into decodes an answer that must have the status.
func (a answered) into(t testing.TB, status int, v any) {
	t.Helper()
	if a.status != status {
		t.Fatalf("status %d, want %d: %s", a.status, status, a.body)
	}
	if v != nil {
		if err := json.Unmarshal(a.body, v); err != nil {
			t.Fatalf("%v: %s", err, a.body)
		}
	}
}
