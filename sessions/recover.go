package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// takeOverTimeout bounds a look at the other servers with all that is taken
// over. A takeover that was not finished is tried again as a whole.
const takeOverTimeout = time.Minute

// takeStock takes over the sessions of dead servers, and sees to the turns that
// nobody has under way.
func (m *Manager) takeStock(ctx context.Context) error {
	_, err := m.lookAround(ctx)
	return errors.Join(err, m.tidyTurns(ctx))
}

// tidyTurns ends the running turns that nobody runs, and starts those that
// wait in the ledger for a server.
func (m *Manager) tidyTurns(ctx context.Context) error {
	return errors.Join(m.endOrphans(ctx), m.startQueued(ctx))
}

// lookAround takes over what dead servers had. doubtful tells that a server
// which must be dead does not look so yet: it had what this one has now. What
// is wrong with one server's takeover does not keep the others' from happening.
func (m *Manager) lookAround(ctx context.Context) (doubtful bool, err error) {
	list, err := m.Servers(ctx)
	if err != nil {
		return false, err
	}
	m.peers.keep(list)
	recovered := m.reg.recovered.Load()
	grace := recovered != nil && time.Since(*recovered) < graceAfterOutage
	var failed error
	for _, v := range list {
		// two servers cannot listen at one address, nor have one home; those without an address are told apart by their locks only
		here := !v.Self && (v.Address == m.opts.Address || v.home != "" && v.home == m.opts.Home)
		if v.Self || !here && (v.Alive || grace) || v.remnant && !m.remnants.due(v.id) {
			continue
		}
		taken, err := m.takeOver(ctx, v.id, here)
		if ctx.Err() != nil {
			return false, errors.Join(failed, err)
		}
		failed = errors.Join(failed, err)
		doubtful = doubtful || here && !taken && err == nil
	}
	return doubtful, failed
}

// A server that was killed just now seems alive until Postgres has noticed that its connection is gone. Open looks
// again this often and for this long while there is one that had its address or its home; after that the keeper goes on looking.
const (
	killedWait = 2 * time.Second
	killedLook = 50 * time.Millisecond
)

// firstTidyMax is how long a start waits for the turns that it finds in the
// ledger; the keeper goes on with those that are left.
const firstTidyMax = 10 * time.Second

// firstStock is takeStock at the start: it waits a little for a server that may
// have been killed just now. It fails only if the ledger is away: what is wrong
// with others' sessions and turns is logged, and tried again by the keeper.
func (m *Manager) firstStock(ctx context.Context) error {
	look := time.NewTicker(killedLook)
	defer look.Stop()
	for until := time.Now().Add(killedWait); ; {
		doubtful, err := m.lookAround(ctx)
		if ctx.Err() != nil || isUnavailable(err) {
			return err
		}
		m.kept(err)
		if !doubtful || !time.Now().Before(until) {
			limited, cancel := context.WithTimeout(ctx, firstTidyMax)
			defer cancel()
			m.kept(m.tidyTurns(limited))
			return ctx.Err()
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takenTurn is the end of a turn that a dead server was running.
type takenTurn struct {
	tenant string
	root   uuid.UUID
	event  Event
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
	for _, x := range list {
		if full[x.tenant] {
			continue
		}
		k := liveKey{x.tenant, x.session}
		switch err := m.requeue(ctx, x); ErrorCode(err) {
		case "", CodeNotFound, CodeOverloaded: // begun, deleted, or another server's by now
			m.ailing.done(k)
		case CodeQueueFull:
			return nil
		case CodeLimit:
			full[x.tenant] = true
		default:
			if err := m.passOver(ctx, k, "a queued turn cannot be started", err); err != nil {
				return fmt.Errorf("start queued %s: %w", turnID(x.turn), err)
			}
		}
	}
	return nil
}

// requeue starts a turn whose row is in the ledger already.
func (m *Manager) requeue(ctx context.Context, q queuedTurn) error {
	return m.operate(ctx, q.tenant, sessionID(q.session), func(o *operation) error {
		x, req, err := o.selectWaiting(ctx, q.turn)
		if err != nil {
			return err
		}
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
