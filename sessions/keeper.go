package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	ttlSweepEvery  = time.Second
	ttlSweepMax    = 100                    // sessions closed in one sweep
	ttlSessionWait = 500 * time.Millisecond // for one that is in use; a later sweep tries again
	longSweepEvery = time.Minute
)

// keepAlive renews the lease. It does nothing that can wait for a session: a
// lease that lapses loses all of them.
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
		m.kept(m.renew(ctx))
		cancel()
	}
}

// keepStock looks after the other servers: it takes over what dead ones had,
// and sees to turns that nobody has under way. One that this server gave up is
// ended at once.
func (m *Manager) keepStock() {
	look := time.NewTicker(leaseRenew)
	defer look.Stop()
	for {
		see := m.takeStock
		select {
		case <-m.ctx.Done():
			return
		case <-look.C:
		case <-m.gaveUp:
			see = m.endOrphans // only that: a queued turn that is given up again and again must not keep this busy
		}
		ctx, cancel := context.WithTimeout(m.ctx, takeOverTimeout)
		m.kept(see(ctx))
		cancel()
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
			err = errors.Join(m.sweep(ctx), m.dropEvents(ctx), m.trimLogs(ctx), m.dropAudit(ctx))
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

// closeExpired closes sessions that were idle for as long as they may be.
func (m *Manager) closeExpired(ctx context.Context) error {
	rows, err := m.pool.Query(ctx, `SELECT tenant_id, id FROM sessions
		WHERE expires_at <= now() AND state IN ('idle', 'detached') AND (owner_server IS NULL OR owner_server = $1)
			AND id <> ALL($3) ORDER BY expires_at LIMIT $2`, m.me, ttlSweepMax, m.resting())
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
			return x.expires != nil && !m.clock.now().Before(*x.expires) && (x.state == StateIdle || x.state == StateDetached)
		}
		limited, cancel := context.WithTimeout(ctx, ttlSessionWait)
		_, err := m.closeSession(limited, k.tenant, sessionID(k.id), noSave, expired)
		cancel()
		if err == nil || ErrorCode(err) == CodeNotFound {
			m.ailing.done(k)
			continue
		}
		m.ailing.failed(k) // the others get their turn
		failed = errors.Join(failed, fmt.Errorf("close expired session %s: %w", sessionID(k.id), err))
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
		old := time.Since(s.lastUsed) > idleLiveMax && s.readers == 0 && s.turn == nil && !s.row.pin
		s.mu.Unlock()
		if old {
			m.forget(s)
			s.dropSeq()
		}
		s.ops.unlock()
	}
	return m.dropExpiredKeys(ctx)
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
	if c := m.reg.conn; c != nil {
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
