package sessions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// leaseTime is how long a server that says nothing counts as alive, by
	// Postgres's clock. Then others take over its sessions.
	leaseTime  = 15 * time.Second
	leaseRenew = 3 * time.Second

	// graceAfterOutage is how long a server to which the ledger has come back
	// takes nobody's lapsed lease for a death: all leases ran out meanwhile, and
	// each server must get to renew its own.
	graceAfterOutage = 2 * leaseRenew
)

// registration is this server's place among the servers of the ledger. Only
// the keepAlive goroutine, after Open, but for renewed and recovered.
type registration struct {
	// conn holds this server's advisory lock: it is free as soon as the process
	// is gone, long before the lease is.
	conn      *pgxpool.Conn
	locked    bool                      // conn has the lock
	missed    bool                      // the last renewal failed
	renewed   atomic.Pointer[time.Time] // when the last renewal that succeeded was sent
	recovered atomic.Pointer[time.Time] // of the first renewal after one that failed; nil: none did
}

// removeServer removes a server and what it kept in its memory. What it put on disk stays there.
const removeServer = `WITH gone AS (DELETE FROM residency WHERE server_id = $1 AND tier <> 'disk') DELETE FROM servers WHERE id = $1`

// register makes this server known and takes its lock. A server that was
// known and is not any more has been taken over: all that it had in memory is
// given up.
func (m *Manager) register(ctx context.Context) error {
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to the ledger: %w", err)
	}
	lost, err := m.enlist(ctx, conn)
	if err == nil {
		m.reg.locked, err = m.takeLock(ctx, conn)
	}
	m.giveUp(lost)
	if err != nil {
		conn.Release()
		return fmt.Errorf("register server: %w", err)
	}
	m.reg.conn = conn
	return m.clock.read(ctx, conn)
}

// takeLock tries to take this server's advisory lock. A connection that was
// lost may hold it until Postgres has noticed.
func (m *Manager) takeLock(ctx context.Context, conn *pgxpool.Conn) (taken bool, err error) {
	err = conn.QueryRow(ctx, `SELECT pg_try_advisory_lock(hashtextextended($1, 0))`, m.me.String()).Scan(&taken)
	return taken, err
}

// extendLease renews the lease of a server that is known; false: it was taken
// over, its row is gone or a remnant.
func (m *Manager) extendLease(ctx context.Context, conn *pgxpool.Conn) (known bool, err error) {
	tag, err := conn.Exec(ctx, `UPDATE servers SET lease_until = now() + $2::interval WHERE id = $1 AND lease_until > `+remnantLease, m.me, leaseTime)
	return tag.RowsAffected() == 1, err
}

// held is a session as this server believed to own it.
type held struct {
	s     *session
	epoch int64
}

// enlist writes this server's row. lost is what it had when there was none: as
// long as there is none, nothing can become this server's, so that the list is
// right whatever happens beside. A remnant becomes a server again, with the
// sessions that nobody could take from it: they are given up in memory only.
func (m *Manager) enlist(ctx context.Context, conn *pgxpool.Conn) (lost []held, err error) {
	known, err := m.extendLease(ctx, conn)
	if err != nil || known {
		return nil, err
	}
	for _, s := range m.sessions() {
		s.mu.Lock()
		if s.mineLocked() {
			lost = append(lost, held{s, s.row.epoch})
		}
		s.mu.Unlock()
	}
	_, err = conn.Exec(ctx, `INSERT INTO servers (id, lease_until, address, home, model, model_digest, parity_class)
		VALUES ($1, now() + $2::interval, $3, $4, $5, $6, $7)
		ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until`,
		m.me, leaseTime, m.opts.Address, m.opts.Home, m.info.Name, m.info.Digest, m.info.ParityClass)
	return lost, err
}

// giveUp fences sessions that were taken over while this server could not say
// that it lives, so that their readers learn it and go where they are now.
func (m *Manager) giveUp(lost []held) {
	if len(lost) > 0 {
		m.log.Error("this server was taken for dead: its sessions are others' now", "sessions", len(lost))
	}
	for _, h := range lost {
		m.wg.Go(func() {
			if h.s.ops.lock(m.ctx) != nil {
				return
			}
			defer h.s.ops.unlock()
			h.s.mu.Lock()
			same := !h.s.gone && h.s.row.epoch == h.epoch
			h.s.mu.Unlock()
			if same {
				h.s.fence()
			}
		})
	}
}

// renew says that this server lives.
func (m *Manager) renew(ctx context.Context) error {
	sent := time.Now()
	err := m.renewLease(ctx)
	if err == nil {
		m.reg.renewed.Store(&sent)
	}
	if err == nil && m.reg.missed {
		m.reg.recovered.Store(new(time.Now()))
	}
	m.reg.missed = err != nil
	return err
}

func (m *Manager) renewLease(ctx context.Context) error {
	c := m.reg.conn
	if c != nil {
		known, err := m.extendLease(ctx, c)
		if err == nil && known {
			if !m.reg.locked {
				if m.reg.locked, err = m.takeLock(ctx, c); err != nil {
					return err
				}
			}
			return m.clock.read(ctx, c)
		}
		m.reg.conn = nil
		c.Conn().Close(ctx) // and its lock with it
		c.Release()
	}
	return m.register(ctx)
}

// ID is this server's among those of the ledger.
func (m *Manager) ID() string { return m.me.String() }

// lapsed tells whether this server has not renewed its lease for as long as
// that lasts, so that others may have what it remembers as its own.
func (m *Manager) lapsed() bool {
	renewed := m.reg.renewed.Load()
	return renewed == nil || time.Since(*renewed) > leaseTime
}

// Server is one of the servers on the ledger.
type Server struct {
	ID          string    `json:"id"`
	Self        bool      `json:"self" doc:"it is the one that answers"`
	Address     string    `json:"address,omitempty" doc:"base URL by which the others reach it; absent: they cannot"`
	Model       string    `json:"model"`
	ParityClass string    `json:"parity_class"`
	StartedAt   time.Time `json:"started_at"`
	Alive       bool      `json:"alive" doc:"false: its lease has run out, its sessions are about to be taken over; it stays here while one of them cannot be"`

	id      uuid.UUID
	digest  string
	home    string
	remnant bool // taken over, but for sessions that could not be
}

// Servers lists the servers of the ledger, oldest first.
func (m *Manager) Servers(ctx context.Context) ([]Server, error) {
	rows, err := m.pool.Query(ctx, `SELECT id, address, home, model, model_digest, parity_class, started_at, lease_until >= now(), lease_until = `+remnantLease+`
		FROM servers ORDER BY started_at, id`)
	if err != nil {
		return nil, ledgerError("list servers", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (v Server, err error) {
		err = r.Scan(&v.id, &v.Address, &v.home, &v.Model, &v.digest, &v.ParityClass, &v.StartedAt, &v.Alive, &v.remnant)
		v.ID, v.Self, v.StartedAt = v.id.String(), v.id == m.me, v.StartedAt.UTC()
		return v, err
	})
	return list, ledgerError("list servers", err)
}

// Place is where a session's calls belong.
type Place struct {
	Server  string          // id of the server; "": this one
	Address string          // its base URL
	Alive   context.Context // ends when that server is found gone
}

// Here tells whether the calls are this server's.
func (p Place) Here() bool { return p.Server == "" }

// Place finds the server that has a session: its owner, as long as that lives
// and can be reached. A session that nobody has, or whose model only another
// server runs, is placed too. An unknown session's calls are this server's,
// which refuses them.
func (m *Manager) Place(ctx context.Context, tenant, id string) (Place, error) {
	u, ok := parseID(sessionPrefix, id)
	if !ok || !m.lapsed() && m.mine(liveKey{tenant, u}) {
		return Place{}, nil
	}
	var owner *uuid.UUID
	var address, class *string
	var lapsed, remnant *bool
	var digest, parity string
	for try := range 2 { // again after a takeover
		err := m.pool.QueryRow(ctx, `SELECT s.owner_server, v.address, v.lease_until < now(), v.lease_until = `+remnantLease+`,
				s.model_digest, s.parity_class, v.parity_class
			FROM sessions s LEFT JOIN servers v ON v.id = s.owner_server
			WHERE s.tenant_id = $1 AND s.id = $2 AND s.deleted_at IS NULL`, tenant, u).
			Scan(&owner, &address, &lapsed, &remnant, &digest, &parity, &class)
		if errors.Is(err, pgx.ErrNoRows) {
			return Place{}, nil
		}
		if err != nil {
			return Place{}, ledgerError("find session", err)
		}
		switch {
		case owner == nil && (digest != m.info.Digest || parity != m.info.ParityClass):
			return m.placeByModel(ctx, digest, parity)
		case owner == nil || *owner == m.me:
			return Place{}, nil
		case !*lapsed && *address == "":
			return Place{}, nil // which refuses what it cannot answer
		case !*lapsed:
			return m.placeAt(*owner, *address), nil
		case *remnant && (try > 0 || !m.remnants.due(*owner)):
			return Place{}, quarantined(u)
		}
		if _, err := m.takeOver(ctx, *owner, false); err != nil {
			return Place{}, err
		}
	}
	return Place{}, nil
}

// mine tells without asking the ledger that a session is this server's.
func (m *Manager) mine(k liveKey) bool {
	m.mu.Lock()
	s := m.live[k]
	m.mu.Unlock()
	if s == nil {
		return false
	}
	select {
	case <-s.loaded:
	default:
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loadErr == nil && !s.gone && s.mineLocked()
}

// placeByModel finds a living server that runs a model.
func (m *Manager) placeByModel(ctx context.Context, digest, class string) (Place, error) {
	list, err := m.Servers(ctx)
	if err != nil {
		return Place{}, err
	}
	for _, v := range list {
		if v.Alive && !v.Self && v.Address != "" && v.digest == digest && v.ParityClass == class {
			return m.placeAt(v.id, v.Address), nil
		}
	}
	return Place{}, nil // the call finds out that this server cannot
}

// peers are other servers that this one has to do with.
type peers struct {
	mu   sync.Mutex
	byID map[uuid.UUID]*peer // guarded by mu
}

type peer struct {
	alive context.Context
	end   context.CancelFunc
}

func (m *Manager) placeAt(id uuid.UUID, address string) Place {
	m.peers.mu.Lock()
	defer m.peers.mu.Unlock()
	p := m.peers.byID[id]
	if p == nil {
		p = &peer{}
		p.alive, p.end = context.WithCancel(m.ctx)
		if m.peers.byID == nil {
			m.peers.byID = map[uuid.UUID]*peer{}
		}
		m.peers.byID[id] = p
	}
	return Place{Server: id.String(), Address: address, Alive: p.alive}
}

// gone ends what waits for a server that was taken over.
func (p *peers) gone(id uuid.UUID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if peer := p.byID[id]; peer != nil {
		peer.end()
		delete(p.byID, id)
	}
}

// keep ends what waits for servers that live no more.
func (p *peers) keep(list []Server) {
	alive := map[uuid.UUID]bool{}
	for _, v := range list {
		alive[v.id] = v.Alive
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, peer := range p.byID {
		if !alive[id] {
			peer.end()
			delete(p.byID, id)
		}
	}
}

// Unreachable is told that a server did not take a connection. If its process
// is gone, which the ledger knows by its lock, its sessions are taken over at
// once: true. Else its lease decides.
func (m *Manager) Unreachable(ctx context.Context, server string) (bool, error) {
	id, err := uuid.Parse(server)
	if err != nil {
		return false, fmt.Errorf("server id: %w", err)
	}
	return m.takeOver(ctx, id, true)
}
