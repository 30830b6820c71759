package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// leaseTime is how long a server that says nothing counts as alive, unless
	// its advisory lock is free.
	leaseTime  = 15 * time.Second
	leaseRenew = 3 * time.Second

	ttlSweepEvery  = time.Second
	ttlSweepMax    = 100                    // sessions closed in one sweep
	ttlSessionWait = 500 * time.Millisecond // for one that is in use; a later sweep tries again
	longSweepEvery = time.Minute
)

// keeper holds the connection that this server's life hangs on: the advisory
// lock on it is what other servers look at. Only the keepAlive goroutine, after
// Open.
type keeper struct {
	conn *pgxpool.Conn
}

// removeServer removes a server and what it kept in its memory. What it put on disk stays there.
const removeServer = `WITH gone AS (DELETE FROM residency WHERE server_id = $1 AND tier <> 'disk') DELETE FROM servers WHERE id = $1`

// register makes this server known and takes its lock.
func (m *Manager) register(ctx context.Context) error {
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to the ledger: %w", err)
	}
	_, err = conn.Exec(ctx, `INSERT INTO servers (id, lease_until) VALUES ($1, now() + $2::interval)
		ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until`, m.me, leaseTime)
	if err == nil {
		_, err = conn.Exec(ctx, `SELECT pg_try_advisory_lock(hashtextextended($1, 0))`, m.me.String())
	}
	if err != nil {
		conn.Release()
		return fmt.Errorf("register server: %w", err)
	}
	m.keeper.conn = conn
	return nil
}

// keepAlive renews the lease and takes over what dead servers had. It does
// nothing that can wait for a session: a lease that lapses loses all of them.
func (m *Manager) keepAlive() {
	renew := time.NewTicker(leaseRenew)
	defer renew.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-renew.C:
		}
		ctx, cancel := context.WithTimeout(m.ctx, leaseTime/2)
		err := m.renew(ctx)
		if err == nil {
			err = m.takeStock(ctx)
		}
		cancel()
		m.kept(err)
	}
}

// keepHouse closes sessions whose time is up and sweeps what is old.
func (m *Manager) keepHouse() {
	ttl, long := time.NewTicker(ttlSweepEvery), time.NewTicker(longSweepEvery)
	defer ttl.Stop()
	defer long.Stop()
	for {
		ctx, cancel := context.WithTimeout(m.ctx, opTimeout)
		var err error
		select {
		case <-m.ctx.Done():
			cancel()
			return
		case <-ttl.C:
			err = m.closeExpired(ctx)
		case <-long.C:
			err = errors.Join(m.sweep(ctx), m.dropEvents(ctx))
		}
		cancel()
		m.kept(err)
	}
}

// kept reports what went wrong; the next tick tries again.
func (m *Manager) kept(err error) {
	if err != nil && m.ctx.Err() == nil {
		m.log.Warn("keep the ledger", "error", err)
	}
}

func (m *Manager) renew(ctx context.Context) error {
	if c := m.keeper.conn; c != nil {
		tag, err := c.Exec(ctx, `UPDATE servers SET lease_until = now() + $2::interval WHERE id = $1`, m.me, leaseTime)
		if err == nil && tag.RowsAffected() == 1 {
			return nil
		}
		m.keeper.conn = nil
		c.Conn().Close(ctx) // and its lock with it
		c.Release()
	}
	return m.register(ctx)
}

// dead lists the servers whose lease has run out or whose lock is free: a
// server that was killed loses its lock with its connection.
func (m *Manager) dead(ctx context.Context) ([]uuid.UUID, error) {
	c := m.keeper.conn
	if c == nil {
		return nil, errors.New("not registered")
	}
	rows, err := c.Query(ctx, `SELECT id, lease_until < now() FROM servers WHERE id <> $1`, m.me)
	if err != nil {
		return nil, fmt.Errorf("list servers: %w", err)
	}
	type server struct {
		id      uuid.UUID
		expired bool
	}
	var all []server
	for rows.Next() {
		var s server
		if err := rows.Scan(&s.id, &s.expired); err != nil {
			rows.Close()
			return nil, fmt.Errorf("list servers: %w", err)
		}
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list servers: %w", err)
	}
	var out []uuid.UUID
	for _, s := range all {
		free := s.expired
		if !free {
			err := c.QueryRow(ctx, `SELECT pg_try_advisory_lock(hashtextextended($1, 0))`, s.id.String()).Scan(&free)
			if err == nil && free {
				_, err = c.Exec(ctx, `SELECT pg_advisory_unlock(hashtextextended($1, 0))`, s.id.String())
			}
			if err != nil {
				return nil, fmt.Errorf("look at server %s: %w", s.id, err)
			}
		}
		if free {
			out = append(out, s.id)
		}
	}
	return out, nil
}

// closeExpired closes sessions that were idle for as long as they may be.
func (m *Manager) closeExpired(ctx context.Context) error {
	rows, err := m.pool.Query(ctx, `SELECT tenant_id, id FROM sessions
		WHERE expires_at <= now() AND state IN ('idle', 'detached') AND (owner_server IS NULL OR owner_server = $1)
		ORDER BY expires_at LIMIT $2`, m.me, ttlSweepMax)
	if err != nil {
		return fmt.Errorf("find expired sessions: %w", err)
	}
	var keys []liveKey
	for rows.Next() {
		var k liveKey
		if err := rows.Scan(&k.tenant, &k.id); err != nil {
			rows.Close()
			return fmt.Errorf("find expired sessions: %w", err)
		}
		keys = append(keys, k)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("find expired sessions: %w", err)
	}
	var failed error
	for _, k := range keys {
		// by the time it is held somebody may have used it
		expired := func(x *row) bool {
			return x.expires != nil && !time.Now().Before(*x.expires) && (x.state == StateIdle || x.state == StateDetached)
		}
		limited, cancel := context.WithTimeout(ctx, ttlSessionWait)
		_, err := m.closeSession(limited, k.tenant, sessionID(k.id), noSave, expired)
		cancel()
		if err != nil && ErrorCode(err) != CodeNotFound {
			failed = errors.Join(failed, fmt.Errorf("close expired session %s: %w", sessionID(k.id), err)) // the others get their turn
		}
	}
	return failed
}

// sweep drops expired idempotency keys, and sessions from memory that nobody
// has used for long.
func (m *Manager) sweep(ctx context.Context) error {
	for _, s := range m.sessions() {
		if !s.ops.tryLock() {
			continue
		}
		s.mu.Lock()
		old := time.Since(s.lastUsed) > idleLiveMax && s.waiters == 0 && s.turn == nil && !s.row.pin
		s.mu.Unlock()
		if old {
			m.forget(s)
			s.dropSeq()
		}
		s.ops.unlock()
	}
	if _, err := m.pool.Exec(ctx, `DELETE FROM idempotency WHERE expires_at <= now()`); err != nil {
		return fmt.Errorf("sweep idempotency keys: %w", err)
	}
	return nil
}

// endTurns interrupts every running turn and waits for the ends to be
// committed, or for ctx.
func (m *Manager) endTurns(ctx context.Context) error {
	for {
		var queued, running []*turn
		for _, s := range m.sessions() {
			s.mu.Lock()
			if t := s.turn; t != nil {
				t.interrupt = true
				if t.started {
					running = append(running, t)
				} else {
					queued = append(queued, t)
				}
			}
			s.mu.Unlock()
		}
		open := append(queued, running...)
		if len(open) == 0 {
			return nil
		}
		for _, t := range open { // queued ones first: the end of another must not let them begin
			t.run.Cancel()
		}
		for _, t := range open {
			select {
			case <-t.done:
			case <-ctx.Done():
				return fmt.Errorf("end the running turns: %w", ctx.Err())
			}
		}
	}
}

// releaseAll gives the sessions back: the next server need not take them over,
// so their epochs stay.
func (m *Manager) releaseAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	for _, s := range m.sessions() {
		s.dropSeq()
	}
	if c := m.keeper.conn; c != nil {
		defer c.Release()
		defer c.Conn().Close(ctx) // and the lock with it
	}
	for _, s := range m.sessions() {
		s.mu.Lock()
		open := s.turn != nil
		s.mu.Unlock()
		if open {
			return // its end is not written: the next server takes over as after a crash
		}
	}
	// not on the keeper's connection: the end of its context may have cost it that
	_, err := m.pool.Exec(ctx, `UPDATE sessions SET owner_server = NULL WHERE owner_server = $1`, m.me)
	if err == nil {
		_, err = m.pool.Exec(ctx, removeServer, m.me)
	}
	if err != nil {
		m.log.Warn("give the sessions back", "error", err)
	}
}
