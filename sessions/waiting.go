package sessions

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// endWaiting ends the open turn of a session for which this server has no
// goroutine: a queued one that waits in the ledger for a server, or one that
// was running when this server gave the session up. It is cancelled where the
// ledger has it. The caller holds ops.
func (s *session) endWaiting(ctx context.Context) error {
	return s.still(ctx, func(o *operation) error {
		s.mu.Lock()
		open := s.row.state == StateRunning && s.turn == nil
		s.mu.Unlock()
		if !open {
			return nil
		}
		turn, state, err := s.openTurn(ctx)
		if err != nil {
			return err
		}
		if state == TurnRunning {
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
	if err != nil {
		return s.refused(err)
	}
	s.m.hub.publish(ended.tenant, sessionID(ended.root), ended.event)
	return s.reload(ctx)
}
