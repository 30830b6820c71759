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

// takeStock takes over the sessions of dead servers and starts the turns that
// wait in the ledger for a server.
func (m *Manager) takeStock(ctx context.Context) error {
	dead, err := m.dead(ctx)
	if err != nil {
		return err
	}
	for _, id := range dead {
		if err := m.takeOver(ctx, id); err != nil {
			return fmt.Errorf("take over server %s: %w", id, err)
		}
	}
	return m.startQueued(ctx)
}

// A server that was killed just now seems alive until Postgres has noticed that its connection is gone. Open looks
// again this often and for this long while somebody else owns sessions; after that the keeper goes on looking.
const (
	killedWait = 2 * time.Second
	killedLook = 50 * time.Millisecond
)

// firstStock is takeStock at the start: it waits a little for a server that may have been killed just now.
func (m *Manager) firstStock(ctx context.Context) error {
	look := time.NewTicker(killedLook)
	defer look.Stop()
	for until := time.Now().Add(killedWait); ; {
		if err := m.takeStock(ctx); err != nil {
			return err
		}
		var owned bool
		err := m.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM sessions WHERE owner_server <> $1)`, m.me).Scan(&owned)
		if err != nil {
			return fmt.Errorf("look for other servers' sessions: %w", err)
		}
		if !owned || !time.Now().Before(until) {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeOver raises the epoch of a dead server's sessions and sets them free.
// Running turns are interrupted at their last committed token; queued ones
// stay queued.
func (m *Manager) takeOver(ctx context.Context, server uuid.UUID) error {
	rows, err := m.pool.Query(ctx, `SELECT s.tenant_id, s.id, t.id FROM sessions s
		JOIN turns t ON t.tenant_id = s.tenant_id AND t.session_id = s.id AND t.state = 'running'
		WHERE s.owner_server = $1`, server)
	if err != nil {
		return fmt.Errorf("find running turns: %w", err)
	}
	type running struct {
		tenant        string
		session, turn uuid.UUID
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x running, err error) {
		return x, r.Scan(&x.tenant, &x.session, &x.turn)
	})
	if err != nil {
		return fmt.Errorf("find running turns: %w", err)
	}
	for _, x := range list {
		err := pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error { return m.interrupt(ctx, tx, server, x.tenant, x.session, x.turn) })
		if err != nil {
			return fmt.Errorf("interrupt %s: %w", turnID(x.turn), err)
		}
		m.log.Warn("turn interrupted by a crash", "session", sessionID(x.session), "turn", turnID(x.turn))
	}
	return pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE sessions SET owner_server = NULL, epoch = epoch + 1, rev = rev + 1 WHERE owner_server = $1`, server)
		if err != nil {
			return fmt.Errorf("set sessions free: %w", err)
		}
		if _, err := tx.Exec(ctx, removeServer, server); err != nil {
			return fmt.Errorf("remove server: %w", err)
		}
		return nil
	})
}

// interrupt ends a crashed server's running turn where the ledger has it. The
// first event of the new epoch says so.
func (m *Manager) interrupt(ctx context.Context, tx pgx.Tx, server uuid.UUID, tenant string, session, turn uuid.UUID) error {
	rows, err := tx.Query(ctx, `SELECT `+rowColumns+` FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2 FOR UPDATE`, tenant, session)
	if err != nil {
		return err
	}
	x, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if err != nil {
		return err
	}
	if x.owner == nil || *x.owner != server {
		return nil // another server was faster
	}
	t, err := selectTurn(ctx, tx, tenant, session, x.length, turn)
	if err != nil || t.state != TurnRunning {
		return err
	}
	now, err := txNow(ctx, tx)
	if err != nil {
		return err
	}
	last, text := x.lastSeq, ""
	if text, err = m.mergeRuns(ctx, tx, &x, &t); err != nil {
		return err
	}
	x.epoch++
	events := []Event{{Type: EventTurnInterrupted, TurnID: turnID(turn), Time: now,
		EventData: EventData{From: &t.from, To: &x.length, FinishReason: FinishInterrupted, LastSeq: &last}}}
	number(events, &x)
	b := &pgx.Batch{}
	if err := insertEvents(b, tenant, session, events); err != nil {
		return err
	}
	b.Queue(`UPDATE turns SET state = 'interrupted', finish_reason = 'interrupted', text = $3, tok_to = $4, ended_at = $5
		WHERE tenant_id = $1 AND id = $2`, tenant, turn, text, x.length, now)
	x.state = StateIdle
	x.touch(now)
	b.Queue(`UPDATE sessions SET owner_server = NULL, epoch = $3, rev = rev + 1, state = $4, last_seq = $5, updated_at = $6, expires_at = $7
		WHERE tenant_id = $1 AND id = $2`, tenant, session, x.epoch, x.state, x.lastSeq, x.updated, x.expires)
	return sendBatch(ctx, tx, "interrupt turn", b)
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
	cut := newCutter(m.tok, stops)
	text := ""
	var merged []run
	for _, g := range list {
		text += cut.push(g.ids)
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
	return text + cut.flush(), sendBatch(ctx, tx, "merge runs", b)
}

// startQueued runs the queued turns of sessions that are nobody's.
func (m *Manager) startQueued(ctx context.Context) error {
	if m.eng == nil || m.draining.Load() {
		return nil
	}
	rows, err := m.pool.Query(ctx, `SELECT `+turnColumns+` FROM turns t
		JOIN sessions s ON s.tenant_id = t.tenant_id AND s.id = t.session_id
		WHERE t.state = 'queued' AND s.owner_server IS NULL AND s.deleted_at IS NULL ORDER BY t.id LIMIT $1`, TurnsPerTenantMax)
	if err != nil {
		return fmt.Errorf("find queued turns: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x turnRow, err error) { return x, r.Scan(x.fields()...) })
	if err != nil {
		return fmt.Errorf("find queued turns: %w", err)
	}
	for i := range list {
		err := m.requeue(ctx, &list[i])
		if e, ok := errors.AsType[*Error](err); ok && (e.Code == CodeQueueFull || e.Code == CodeLimit || e.Code == CodeOverloaded) {
			return nil // the keeper comes back
		}
		if err != nil {
			return fmt.Errorf("start queued %s: %w", turnID(list[i].id), err)
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
		busy, length := s.turn != nil, s.row.length
		s.mu.Unlock()
		if busy || length != x.from {
			return nil // it is under way by now
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
