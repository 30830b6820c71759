// Package sessions is the domain: sessions that fork, their turns, their
// events, and the Postgres ledger that is the truth about all of them.
//
// Invariants:
//   - Nothing is visible before its commit. Live deltas are the one exception:
//     they carry an epoch, and after a crash a higher one says from which seq
//     on they never happened.
//   - A session's writes name its owner, epoch and rev; the ledger refuses
//     those of a server that has lost it.
//   - seq is dense, and every reader sees the same events with the same cuts,
//     from memory or from the ledger, live or years later.
//   - A line is append-only and keeps the sampled ids; text is never tokenised
//     again.
//   - One turn at a time; running in the ledger if and only if a turn is open.
//   - A slow reader holds an offset. Nobody waits for it.
//   - Whatever is reached by an id is reached with its tenant. API keys are kept
//     as hashes; a tenant's cached pages are salted from its row.
//
// Goroutines: one writer for all sessions (writer.go), one per open turn
// (turn_run.go), keepers of the server's lease, of the other servers' and of
// TTLs (keeper.go), one that listens to what others take (ears.go), one that
// ends streams of revoked keys (authenticate.go). Locks of one session are
// taken in the order ops, wlock, alock, mu (live.go, operation.go); the
// manager's mu is never held while another lock is taken.
package sessions

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"

	"rocket/engine"
	"rocket/engine/chat"
	"rocket/engine/tokenizer"
)

// DefaultTenant is the tenant of a server without API keys, and of keys that
// were made without naming one.
const DefaultTenant = "local"

const (
	// opTimeout bounds one transaction of a call, waiting for locks included.
	opTimeout = 15 * time.Second

	poolConnsMax = 18 // two of them are held: the lease's and that which listens

	// stalledTxMax is how long the ledger lets a transaction wait for its next
	// statement: a server that was stopped in the middle of one must not keep
	// the rows that it has locked from those who take over.
	stalledTxMax = 10 * time.Second
)

// Options configure Open. The database must have the newest schema.
type Options struct {
	DatabaseURL string
	Engine      *engine.Engine // stays the caller's; it must outlive the Manager
	Template    *chat.Template // nil: messages are refused
	Log         *slog.Logger   // nil: none
	Address     string         // base URL under which other servers of the ledger reach this one; "": they cannot
	Home        string         // name of what only one process can have at a time, as a locked data directory; "": none
	KeyFreshFor time.Duration  // 0: KeyFreshFor
	// EventsRetention is how long events of sessions without an open turn are
	// kept at least; 0: for good. Lineage and tokens always are.
	EventsRetention time.Duration
	DeltaInterval   time.Duration // 0: deltaInterval; tests that want many events have less

	readMax  time.Duration // what one read, look or connection to the ledger may take. Tests wait less than the defaults.
	lockWait time.Duration // 0: takeLockWait
}

// Call is who calls, and what makes a repeated call the same call. An empty
// IdempotencyKey means that there is none.
type Call struct {
	Tenant         string
	KeyID          string // of the API key; "" on a server without keys
	IdempotencyKey string // scope: (Tenant, Route, IdempotencyKey)
	Route          string // method and path with its ids, as the client sent it
	BodyHash       []byte // SHA-256 of the body
	Wait           bool   // a repeated call waits for the first one instead of CodeIdempotencyRunning

	stream *importStream // of an import, in place of BodyHash
}

// Manager owns the live sessions of one server.
type Manager struct {
	opts Options
	pool ledger
	eng  *engine.Engine
	tok  *tokenizer.Tokenizer
	info engine.ModelInfo
	log  *slog.Logger
	me   uuid.UUID // this server

	clock  ledgerClock
	writer *writer
	hub    hub
	reg    registration
	peers  peers
	counts counters
	keys   *Keys
	known  tenants

	ctx    context.Context // ends when Shutdown has ended the turns
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine

	draining atomic.Bool
	checking gate               // one CheckCache at a time
	imports  bundleGate         // under way
	keyRoom  keyRoom            // for idempotency keys
	exports  bundleGate         // Exports under way
	prompts  promptGate         // of large prompts
	answers  answers            // that are made or sent
	gaveUp   chan struct{}      // capacity 1; a turn was given up, look whether the ledger has it as running
	remnants retries[uuid.UUID] // servers with sessions that could not be taken over
	untaken  retries[liveKey]   // those sessions
	ailing   retries[liveKey]   // sessions that a keeper failed with

	mu      sync.Mutex
	live    map[liveKey]*session      // guarded by mu
	calls   map[callKey]chan struct{} // guarded by mu; calls under way by idempotency key
	turns   map[string]int            // guarded by mu; open turns by tenant
	tenants map[string]tenantCount    // guarded by mu
	down    sync.Once
}

// Open connects to the ledger, takes over what crashed servers left, and runs
// the turns that were queued there.
func Open(ctx context.Context, opts Options) (*Manager, error) {
	cfg, err := pgxpool.ParseConfig(opts.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("parse database url: %w", err)
	}
	m := &Manager{
		opts: opts, eng: opts.Engine, log: opts.Log, me: newID(),
		live: map[liveKey]*session{}, calls: map[callKey]chan struct{}{},
		turns: map[string]int{}, tenants: map[string]tenantCount{}, checking: newGate(), keyRoom: keyRoom{most: IdempotencyKeysMax},
		imports: bundleGate{what: "import", most: importsMax}, exports: bundleGate{what: "export", most: exportsMax},
		gaveUp: make(chan struct{}, 1), answers: answers{page: PageBytesMax, tree: TreeBytesMax},
	}
	if m.opts.DeltaInterval == 0 {
		m.opts.DeltaInterval = deltaInterval
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.log = RedactLog(m.log)
	if m.eng != nil {
		m.tok, m.info = m.eng.Tokenizer(), m.eng.Info()
	}
	cfg.MaxConns = max(cfg.MaxConns, poolConnsMax)
	cfg.ConnConfig.RuntimeParams["application_name"] = "rocket " + m.me.String()
	cfg.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = strconv.FormatInt(stalledTxMax.Milliseconds(), 10)
	cfg.PingTimeout = cmp.Or(opts.readMax, pingTimeMax)
	cfg.ConnConfig.ConnectTimeout = cmp.Or(cfg.ConnConfig.ConnectTimeout, opts.readMax, connectTimeMax)
	cfg.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		pgxuuid.Register(conn.TypeMap()) // ids go as 16 bytes, not as text through database/sql's interfaces
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to the ledger: %w", err)
	}
	m.pool = ledger{pool, cmp.Or(opts.readMax, opTimeout)}
	m.keys = newKeys(pool, opts.KeyFreshFor)
	m.keys.log = m.log
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.hub.init()
	m.writer = newWriter(m)
	if err := m.renew(ctx); err != nil {
		m.cancel()
		m.pool.Close()
		return nil, err
	}
	m.wg.Go(m.writer.loop)
	if err := m.firstStock(ctx); err != nil {
		m.Shutdown(ctx)
		return nil, err
	}
	m.wg.Go(m.keepAlive)
	m.wg.Go(m.keepStock)
	m.wg.Go(m.keepEars)
	m.wg.Go(m.keepHouse)
	m.wg.Go(func() { m.keys.keep(m.ctx, m.kept, m.readQuotas) })
	return m, nil
}

// Shutdown ends every running turn at its last token (interrupted; queued ones
// run after the next start), gives the sessions back to the ledger and waits
// for every goroutine. Calls that come later fail. The engine goes on.
func (m *Manager) Shutdown(ctx context.Context) error {
	var err error
	m.down.Do(func() {
		m.draining.Store(true)
		err = m.endTurns(ctx)
		m.cancel()
		m.wakeAll()
		m.wg.Wait()
		m.releaseAll(ctx)
		m.hub.close()
		m.pool.Close()
	})
	return err
}

// Drain makes every mutating call fail with CodeOverloaded from now on, so
// that a server can end its connections before Shutdown ends the turns.
func (m *Manager) Drain() { m.draining.Store(true) }

// Ready says why the server should get no traffic, or nil.
func (m *Manager) Ready(ctx context.Context) error {
	if m.draining.Load() {
		return fail(CodeOverloaded, "the server is shutting down")
	}
	if since := m.writer.downSince.Load(); since != 0 {
		return fail(CodeLedgerUnavailable, "the ledger does not answer since %s", time.Unix(0, since).UTC().Format(time.RFC3339))
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := m.pool.Ping(ctx); err != nil {
		m.pool.late(ctx)
		return &Error{Code: CodeLedgerUnavailable, Message: "the ledger does not answer", cause: err}
	}
	return nil
}

const readyTimeout = 2 * time.Second

// open refuses mutating calls of a server that is going away.
func (m *Manager) open() error {
	if m.draining.Load() {
		return fail(CodeOverloaded, "the server is shutting down")
	}
	return nil
}

// Keys are the ledger's API keys.
func (m *Manager) Keys() *Keys { return m.keys }
