package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// takeOverTimeout bounds a look at the other servers with all that is taken
// over. What was not finished is tried again as a whole.
const takeOverTimeout = time.Minute

// takeStock takes over the sessions of dead servers, and sees to the turns that
// nobody has under way.
func (m *Manager) takeStock(ctx context.Context) error {
	_, err := m.lookAround(ctx)
	if err != nil {
		return err
	}
	return m.tidyTurns(ctx)
}

// tidyTurns ends the running turns that nobody runs, and starts those that
// wait in the ledger for a server.
func (m *Manager) tidyTurns(ctx context.Context) error {
	if err := m.endOrphans(ctx); err != nil {
		return err
	}
	return m.startQueued(ctx)
}

// lookAround takes over what dead servers had. doubtful tells that a server
// which must be dead does not look so yet: it had what this one has now.
func (m *Manager) lookAround(ctx context.Context) (doubtful bool, err error) {
	list, err := m.Servers(ctx)
	if err != nil {
		return false, err
	}
	m.peers.keep(list)
	recovered := m.reg.recovered.Load()
	grace := recovered != nil && time.Since(*recovered) < graceAfterOutage
	for _, v := range list {
		// two servers cannot listen at one address, nor have one home; those without an address are told apart by their locks only
		here := !v.Self && (v.Address == m.opts.Address || v.home != "" && v.home == m.opts.Home)
		if v.Self || !here && (v.Alive || grace) {
			continue
		}
		taken, err := m.takeOver(ctx, v.id, here)
		if err != nil {
			return false, err
		}
		doubtful = doubtful || here && !taken
	}
	return doubtful, nil
}

// A server that was killed just now seems alive until Postgres has noticed that its connection is gone. Open looks
// again this often and for this long while there is one that had its address or its home; after that the keeper goes on looking.
const (
	killedWait = 2 * time.Second
	killedLook = 50 * time.Millisecond
)

// firstStock is takeStock at the start: it waits a little for a server that may have been killed just now.
func (m *Manager) firstStock(ctx context.Context) error {
	look := time.NewTicker(killedLook)
	defer look.Stop()
	for until := time.Now().Add(killedWait); ; {
		doubtful, err := m.lookAround(ctx)
		if err != nil {
			return err
		}
		if !doubtful || !time.Now().Before(until) {
			return m.tidyTurns(ctx)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeOver makes a dead server's sessions nobody's, in one transaction: their
// epochs rise, running turns are interrupted at their last committed token,
// queued ones stay queued. A server is dead when its lease has run out; with
// gone, also when its lock is free. It returns false for one that lives.
//
// The server's row is locked first. Its renewal waits for that, finds the row
// gone, and then knows.
func (m *Manager) takeOver(ctx context.Context, server uuid.UUID, gone bool) (taken bool, err error) {
	var ended []takenTurn
	err = pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error {
		var err error
		if taken, err = isDead(ctx, tx, server, gone); err != nil || !taken {
			return err
		}
		ended, err = m.takeSessions(ctx, tx, server)
		return err
	})
	if err != nil {
		return false, ledgerError("take over server "+server.String(), err)
	}
	if taken {
		m.peers.gone(server)
	}
	for _, t := range ended {
		m.log.Warn("turn interrupted by a crash", "session", t.event.SessionID, "turn", t.event.TurnID)
		m.hub.publish(t.tenant, sessionID(t.root), t.event)
	}
	return taken, nil
}

func isDead(ctx context.Context, tx pgx.Tx, server uuid.UUID, gone bool) (bool, error) {
	var dead bool
	err := tx.QueryRow(ctx, `SELECT lease_until < now() FROM servers WHERE id = $1 FOR UPDATE`, server).Scan(&dead)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // another one was faster
		return true, nil
	case err != nil || dead || !gone:
		return dead, err
	}
	err = tx.QueryRow(ctx, `SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))`, server.String()).Scan(&dead)
	return dead, err
}

// takenTurn is the end of a turn that a dead server was running.
type takenTurn struct {
	tenant string
	root   uuid.UUID
	event  Event
}

func (m *Manager) takeSessions(ctx context.Context, tx pgx.Tx, server uuid.UUID) ([]takenTurn, error) {
	// in the order of all who lock several
	_, err := tx.Exec(ctx, `SELECT count(*) FROM (SELECT FROM sessions WHERE owner_server = $1 ORDER BY tenant_id, id FOR UPDATE) s`, server)
	if err != nil {
		return nil, fmt.Errorf("lock its sessions: %w", err)
	}
	rows, err := tx.Query(ctx, `SELECT s.tenant_id, s.id, t.id FROM sessions s
		JOIN turns t ON t.tenant_id = s.tenant_id AND t.session_id = s.id AND t.state = 'running'
		WHERE s.owner_server = $1`, server)
	if err != nil {
		return nil, fmt.Errorf("find its running turns: %w", err)
	}
	type running struct {
		tenant        string
		session, turn uuid.UUID
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x running, err error) {
		return x, r.Scan(&x.tenant, &x.session, &x.turn)
	})
	if err != nil {
		return nil, fmt.Errorf("find its running turns: %w", err)
	}
	var ended []takenTurn
	for _, x := range list {
		t, err := m.interrupt(ctx, tx, x.tenant, x.session, x.turn)
		if err != nil {
			return nil, fmt.Errorf("interrupt %s: %w", turnID(x.turn), err)
		}
		ended = append(ended, t)
	}
	_, err = tx.Exec(ctx, `UPDATE sessions SET owner_server = NULL, epoch = epoch + 1, rev = rev + 1 WHERE owner_server = $1`, server)
	if err != nil {
		return nil, fmt.Errorf("set its sessions free: %w", err)
	}
	if _, err := tx.Exec(ctx, removeServer, server); err != nil {
		return nil, fmt.Errorf("remove it: %w", err)
	}
	return ended, nil
}

// interrupt ends a crashed server's running turn where the ledger has it. The
// first event of the new epoch says so.
func (m *Manager) interrupt(ctx context.Context, tx pgx.Tx, tenant string, session, turn uuid.UUID) (takenTurn, error) {
	var end takenTurn
	rows, err := tx.Query(ctx, `SELECT `+rowColumns+` FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2`, tenant, session)
	if err != nil {
		return end, err
	}
	x, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if err != nil {
		return end, err
	}
	t, err := selectTurn(ctx, tx, tenant, session, x.length, turn)
	if err != nil {
		return end, err
	}
	now, err := txNow(ctx, tx)
	if err != nil {
		return end, err
	}
	last, text := x.lastSeq, ""
	if text, err = m.mergeRuns(ctx, tx, &x, &t); err != nil {
		return end, err
	}
	x.epoch++
	events := []Event{{Type: EventTurnInterrupted, TurnID: turnID(turn), Time: now,
		EventData: EventData{From: &t.from, To: &x.length, FinishReason: FinishInterrupted, LastSeq: &last}}}
	number(events, &x)
	b := &pgx.Batch{}
	if err := insertEvents(b, tenant, session, events); err != nil {
		return end, err
	}
	b.Queue(`UPDATE turns SET state = 'interrupted', finish_reason = 'interrupted', text = $3, tok_to = $4, ended_at = $5
		WHERE tenant_id = $1 AND id = $2`, tenant, turn, text, x.length, now)
	x.state = StateIdle
	x.touch(now)
	b.Queue(`UPDATE sessions SET owner_server = NULL, epoch = $3, rev = rev + 1, state = $4, last_seq = $5, updated_at = $6, expires_at = $7
		WHERE tenant_id = $1 AND id = $2`, tenant, session, x.epoch, x.state, x.lastSeq, x.updated, x.expires)
	return takenTurn{tenant, x.root, events[0]}, sendBatch(ctx, tx, "interrupt turn", b)
}

// mergeRuns makes one row of each range of consecutive deltas of a turn, as
// its end would have, and returns the text of all of them.
func (m *Manager) mergeRuns(ctx context.Context, tx pgx.Tx, x *row, t *turnRow) (string, error) {
	stops, err := t.stops()
	if err != nil {
		return "", err
	}
	rows, err := tx.Query(ctx, `SELECT tok_from, ids, first_seq, cuts, at_ms, base_time, epoch FROM token_runs
		WHERE tenant_id = $1 AND session_id = $2 AND tok_from >= $3 ORDER BY tok_from`, x.tenant, x.id, t.promptTo)
	if err != nil {
		return "", err
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (run, error) {
		g := run{turn: &t.id}
		err := r.Scan(&g.tokFrom, &g.ids, &g.firstSeq, &g.cuts, &g.atMS, &g.base, &g.epoch)
		return g, err
	})
	if err != nil {
		return "", err
	}
	text := ""
	cut := newCutter(m.tok, stops)
	if m.canRead(x) != nil {
		cut = nil // whoever can reads the text from the tokens
	}
	var merged []run
	for _, g := range list {
		if cut != nil {
			text += cut.push(g.ids)
		}
		n := len(merged)
		if n == 0 || merged[n-1].firstSeq+int64(len(merged[n-1].cuts)) != g.firstSeq {
			merged = append(merged, g)
			continue
		}
		p := &merged[n-1]
		shift := int32(g.base.Sub(p.base) / time.Millisecond)
		p.ids, p.cuts = append(p.ids, g.ids...), append(p.cuts, g.cuts...)
		for _, ms := range g.atMS {
			p.atMS = append(p.atMS, ms+shift)
		}
	}
	b := &pgx.Batch{}
	b.Queue(`DELETE FROM token_runs WHERE tenant_id = $1 AND session_id = $2 AND tok_from >= $3`, x.tenant, x.id, t.promptTo)
	for _, g := range merged {
		insertRun(b, x.tenant, x.id, g)
	}
	if cut != nil {
		text += cut.flush()
	}
	return text, sendBatch(ctx, tx, "merge runs", b)
}

// startQueued runs the queued turns of sessions that are nobody's and of this
// server's model. What cannot be started now stays queued: the keeper comes
// back, and a cancel ends it.
func (m *Manager) startQueued(ctx context.Context) error {
	if m.eng == nil || m.draining.Load() {
		return nil
	}
	list, err := m.selectQueued(ctx, m.pool, TurnsPerTenantMax, queuedAtOnce)
	if err != nil {
		return err
	}
	full := map[string]bool{} // tenants that may have no more open turns
	for i := range list {
		x := &list[i]
		if full[x.tenant] {
			continue
		}
		switch err := m.requeue(ctx, x); ErrorCode(err) {
		case "", CodeNotFound, CodeOverloaded: // begun, deleted, or another server's by now
		case CodeQueueFull:
			return nil
		case CodeLimit:
			full[x.tenant] = true
		default:
			if isUnavailable(err) || ctx.Err() != nil {
				return fmt.Errorf("start queued %s: %w", turnID(x.id), err)
			}
			m.log.Error("a queued turn cannot be started", "session", sessionID(x.session), "turn", turnID(x.id), "error", err)
		}
	}
	return nil
}

// requeue starts a turn whose row is in the ledger already.
func (m *Manager) requeue(ctx context.Context, x *turnRow) error {
	var req TurnRequest
	if err := json.Unmarshal(x.request, &req); err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	return m.operate(ctx, x.tenant, sessionID(x.session), func(o *operation) error {
		s := o.session
		s.mu.Lock()
		busy, length, fits := s.turn != nil || s.row.state != StateRunning, s.row.length, m.canRun(&s.row)
		s.mu.Unlock()
		if busy || length != x.from || fits != nil {
			return nil // it is under way by now, or another server's to run
		}
		if err := s.loadLine(ctx); err != nil {
			return err
		}
		t := s.newTurn(x.id, req, x.prompt, x.from, x.created)
		if err := m.turnBegan(x.tenant); err != nil {
			return err
		}
		if _, err := s.startRun(ctx, t); err != nil {
			m.turnEnded(x.tenant)
			return err
		}
		return o.commit(ctx, effect{ // the row becomes this server's
			apply: func() {
				s.turn = t
				m.wg.Go(t.loop)
			},
			abort: func() {
				t.abandon()
				s.dropSeq()
			},
		})
	})
}

// txNow is the transaction's one time.
func txNow(ctx context.Context, tx pgx.Tx) (time.Time, error) {
	var now time.Time
	if err := tx.QueryRow(ctx, "SELECT now()").Scan(&now); err != nil {
		return now, fmt.Errorf("read the ledger's clock: %w", err)
	}
	return now.UTC(), nil
}
