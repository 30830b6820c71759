package sessions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// orphansAtOnce is how many orphans are ended in one go; the next look finds
	// the others.
	orphansAtOnce = 256

	// orphanWait is how long a look waits for a session that is in use: most
	// likely its turn has just begun or ended, or somebody is ending it.
	orphanWait = 500 * time.Millisecond
)

// endOrphans interrupts turns that the ledger has as running and that nobody
// runs: of sessions that this server gave up while the ledger has them as its
// own (fence), and of sessions that are nobody's. Queued ones are started by
// startQueued.
func (m *Manager) endOrphans(ctx context.Context) error {
	rows, err := m.pool.Query(ctx, `SELECT s.tenant_id, s.id FROM turns t
		JOIN sessions s ON s.tenant_id = t.tenant_id AND s.id = t.session_id
		WHERE t.state = 'running' AND (s.owner_server IS NULL OR s.owner_server = $1) AND t.id <> ALL($2)
			AND s.deleted_at IS NULL AND s.id <> ALL($3) LIMIT $4`, m.me, m.underway(), m.resting(), orphansAtOnce)
	if err != nil {
		return fmt.Errorf("find orphaned turns: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (k liveKey, err error) { return k, r.Scan(&k.tenant, &k.id) })
	if err != nil {
		return fmt.Errorf("find orphaned turns: %w", err)
	}
	for _, k := range list {
		switch err := m.endOrphan(ctx, k); {
		case err == nil, ErrorCode(err) == CodeNotFound, ErrorCode(err) == CodeOverloaded: // ended, deleted, or another server's by now
			m.ailing.done(k)
		default:
			if err := m.passOver(ctx, k, "an orphaned turn cannot be ended", err); err != nil {
				return fmt.Errorf("end orphaned turn of %s: %w", sessionID(k.id), err)
			}
		}
	}
	return nil
}

// endOrphan looks at a session once it is held: its turn may have begun just
// now, or ended.
func (m *Manager) endOrphan(ctx context.Context, k liveKey) error {
	wait, cancel := context.WithTimeout(ctx, orphanWait)
	defer cancel()
	s, err := m.holdID(wait, k.tenant, k.id)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		return nil // in use: the next look comes back
	}
	if err != nil {
		return err
	}
	defer s.ops.unlock()
	limited, stop := context.WithTimeout(ctx, opTimeout)
	defer stop()
	return s.endWaiting(limited, TurnRunning)
}

// endWaiting ends the open turn of a session for which this server has no
// goroutine, where the ledger has it, if it is in one of the states: a queued
// one that waits for a server is cancelled, one that was running when its
// server gave the session up is interrupted. The caller holds ops.
func (s *session) endWaiting(ctx context.Context, states ...TurnState) error {
	return s.still(ctx, func(o *operation) error {
		s.mu.Lock()
		open := s.row.state == StateRunning && s.turn == nil
		s.mu.Unlock()
		if !open {
			return nil
		}
		turn, state, err := s.openTurn(ctx)
		switch {
		case err != nil:
			return err
		case !slices.Contains(states, state):
			return nil
		case state == TurnRunning:
			return o.interruptOrphan(ctx, turn)
		}
		return o.cancelQueued(ctx, turn)
	})
}

// openTurn reads the open turn of the ledger.
func (s *session) openTurn(ctx context.Context) (id uuid.UUID, state TurnState, err error) {
	err = s.m.pool.QueryRow(ctx, `SELECT id, state FROM turns WHERE tenant_id = $1 AND session_id = $2 AND state IN ('queued', 'running')`,
		s.key.tenant, s.key.id).Scan(&id, &state)
	if errors.Is(err, pgx.ErrNoRows) {
		return id, state, fmt.Errorf("%s is running without a turn", sessionID(s.key.id))
	}
	return id, state, ledgerError("read open turn", err)
}

// cancelQueued cancels a turn that never began.
func (o *operation) cancelQueued(ctx context.Context, turn uuid.UUID) error {
	s := o.session
	var events []Event
	return o.commit(ctx, effect{
		write: func(ctx context.Context, w *work, x *row) error {
			at := x.length
			events = []Event{{Type: EventTurnCancelled, TurnID: turnID(turn), Time: w.now,
				EventData: EventData{From: &at, To: &at, FinishReason: FinishCancelled}}}
			number(events, x)
			w.queue(`UPDATE turns SET state = 'cancelled', finish_reason = 'cancelled', ended_at = $3 WHERE tenant_id = $1 AND id = $2`,
				x.tenant, turn, w.now)
			x.state = StateIdle
			x.touch(w.now)
			return insertEvents(w.b, x.tenant, x.id, events)
		},
		apply: func() { s.appendLocked(events) },
	})
}

// interruptOrphan ends a running turn of nobody's as a takeover would.
func (o *operation) interruptOrphan(ctx context.Context, turn uuid.UUID) error {
	s := o.session
	s.mu.Lock()
	x := s.row
	s.mu.Unlock()
	var ended takenTurn
	err := pgx.BeginFunc(ctx, s.m.pool, func(tx pgx.Tx) error {
		var same bool
		err := tx.QueryRow(ctx, `SELECT rev = $3 AND (owner_server IS NULL OR owner_server = $4) FROM sessions
			WHERE tenant_id = $1 AND id = $2 FOR UPDATE`, x.tenant, x.id, x.rev, s.m.me).Scan(&same)
		if err == nil && !same {
			err = errStale
		}
		if err == nil {
			ended, err = s.m.interrupt(ctx, tx, x.tenant, x.id, turn)
		}
		return err
	})
	if isUnavailable(err) { // it may have happened: once that is known, who asks for the session reads its row
		o.handed = true
		s.settling(func() {
			if s.settle(x.epoch+1, x.rev+1) && ended.tenant != "" {
				s.m.hub.publish(ended.tenant, sessionID(ended.root), ended.event)
			}
			s.m.forget(s)
		})
	}
	if err != nil {
		return s.refused(err)
	}
	s.m.log.Warn("turn interrupted, nobody ran it", "session", ended.event.SessionID, "turn", ended.event.TurnID)
	s.m.hub.publish(ended.tenant, sessionID(ended.root), ended.event)
	return s.reload(ctx)
}
