package sessions

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// Close makes a session read-only; an open turn is cancelled.
func (m *Manager) Close(ctx context.Context, call Call, id string) (Session, error) {
	if err := m.open(); err != nil {
		return Session{}, err
	}
	return once(ctx, m, call, func(save save) (Session, error) {
		return m.closeSession(ctx, call.Tenant, id, save, func(*row) bool { return true })
	})
}

// closeSession closes a session for which sure still says so once it is held.
func (m *Manager) closeSession(ctx context.Context, tenant, id string, save save, sure func(*row) bool) (Session, error) {
	s, err := m.hold(ctx, tenant, id)
	if err != nil {
		return Session{}, err
	}
	defer s.ops.unlock()
	s.mu.Lock()
	out, goOn := s.viewLocked(&s.row), sure(&s.row)
	s.mu.Unlock()
	if !goOn {
		return out, nil
	}
	if err := s.cancelTurn(ctx); err != nil {
		return Session{}, err
	}
	var events []Event
	err = s.still(ctx, func(o *operation) error {
		return o.commit(ctx, effect{
			write: func(ctx context.Context, w *work, x *row) error {
				if x.state != StateClosed {
					events = []Event{{Type: EventSessionClosed, Time: w.now}}
					number(events, x)
					x.state = StateClosed
					x.touch(w.now)
					clearResidency(w, x)
					if err := insertEvents(w.b, x.tenant, x.id, events); err != nil {
						return err
					}
				}
				out = x.session()
				return save(w, out)
			},
			apply: func() { s.appendLocked(events) },
			after: func() {
				s.dropSeq()
				m.forgetIdle(s)
			},
		})
	})
	return out, err
}

// cancelTurn cancels the open turn, if there is one, in whatever phase, and
// waits for its end to be committed. The caller holds ops.
func (s *session) cancelTurn(ctx context.Context) error {
	s.mu.Lock()
	t := s.turn
	idle := s.mineLocked() && s.row.state != StateRunning
	s.mu.Unlock()
	switch {
	case t != nil:
		t.run.Cancel()
		return t.wait(ctx)
	case idle:
		return nil
	}
	return s.endWaiting(ctx, TurnQueued, TurnRunning)
}

// wait returns when the turn's end is committed.
func (t *turn) wait(ctx context.Context) error {
	select {
	case <-t.done:
		return nil
	case <-t.failed:
		return fail(CodeLedgerUnavailable, "the ledger does not answer; what the turn came to is not written yet")
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Delete makes a session unknown from now on; an open turn is cancelled. What
// descendants inherit of its line stays until the last of them goes.
func (m *Manager) Delete(ctx context.Context, call Call, id string) error {
	if err := m.open(); err != nil {
		return err
	}
	_, err := once(ctx, m, call, func(save save) (struct{}, error) {
		return struct{}{}, m.deleteSession(ctx, call.Tenant, id, audited(call, auditSessionDeleted, id, save))
	})
	return err
}

func (m *Manager) deleteSession(ctx context.Context, tenant, id string, save save) error {
	s, err := m.hold(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer s.ops.unlock()
	if err := s.cancelTurn(ctx); err != nil {
		return err
	}
	var at time.Time
	return s.still(ctx, func(o *operation) error {
		return o.commit(ctx, effect{
			tree: true,
			write: func(ctx context.Context, w *work, x *row) error {
				at = w.now
				x.state, x.deleted, x.title, x.labels, x.ttl = StateClosed, &at, "", map[string]string{}, nil
				x.touch(at)
				if err := deleteRow(ctx, w, x); err != nil {
					return err
				}
				return save(w, struct{}{})
			},
			apply: func() {
				s.deleted = true
				s.wakeLocked()
			},
			after: func() { m.deleted(s, at) },
		})
	})
}

// deleted is what a committed deletion means for this server.
func (m *Manager) deleted(s *session, at time.Time) {
	m.forget(s)
	s.dropSeq()
	m.mu.Lock()
	delete(m.tenants, s.key.tenant) // count anew
	m.mu.Unlock()
	s.mu.Lock()
	root, epoch := s.row.root, s.row.epoch
	s.mu.Unlock()
	m.hub.publish(s.key.tenant, sessionID(root), Event{Type: EventSessionDeleted, SessionID: sessionID(s.key.id), Epoch: epoch, Time: at})
}

// deleteRow marks a session deleted, purges what nobody inherits, and does the
// same for deleted ancestors that were kept for it. When nobody in the tree is
// left alive, all its rows go. The tree is locked: two last siblings must not
// each take the other for alive.
func deleteRow(ctx context.Context, w *work, x *row) error {
	if err := w.send(ctx); err != nil { // what is queued comes first
		return err
	}
	tx, now := w.conn, w.now
	_, err := tx.Exec(ctx, `UPDATE sessions SET state = 'closed', closed_at = coalesce(closed_at, $3), deleted_at = $3, kept_to = 0
		WHERE tenant_id = $1 AND id = $2`, x.tenant, x.id, now)
	if err != nil {
		return fmt.Errorf("mark deleted: %w", err)
	}
	var alive bool
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM sessions WHERE tenant_id = $1 AND root_id = $2 AND deleted_at IS NULL)`,
		x.tenant, x.root).Scan(&alive)
	if err != nil {
		return fmt.Errorf("look for living descendants: %w", err)
	}
	if !alive {
		_, err := tx.Exec(ctx, `DELETE FROM sessions WHERE tenant_id = $1 AND root_id = $2`, x.tenant, x.root)
		if err != nil {
			return fmt.Errorf("delete tree: %w", err)
		}
		return nil
	}
	if x.parent != nil {
		_, err = tx.Exec(ctx, `UPDATE sessions SET child_count = child_count - 1 WHERE tenant_id = $1 AND id = $2`, x.tenant, *x.parent)
		if err != nil {
			return fmt.Errorf("count children: %w", err)
		}
	}
	for id := &x.id; id != nil; {
		if id, err = purge(ctx, w, x.tenant, *id); err != nil {
			return err
		}
	}
	return nil
}

// purge cuts a deleted session's own part of the line down to what living
// descendants read, and returns its parent if that is deleted too.
func purge(ctx context.Context, w *work, tenant string, id uuid.UUID) (*uuid.UUID, error) {
	var kept int
	var next *uuid.UUID
	err := w.conn.QueryRow(ctx, `UPDATE sessions s SET kept_to = (
			SELECT coalesce(max(least(c.forked_at, c.kept_to)), 0) FROM sessions c
			WHERE c.tenant_id = s.tenant_id AND c.parent_id = s.id AND (c.deleted_at IS NULL OR c.kept_to > 0))
		WHERE s.tenant_id = $1 AND s.id = $2
		RETURNING kept_to, (SELECT p.id FROM sessions p
			WHERE p.tenant_id = s.tenant_id AND p.id = s.parent_id AND p.deleted_at IS NOT NULL)`, tenant, id).Scan(&kept, &next)
	if err != nil {
		return nil, fmt.Errorf("find what descendants keep: %w", err)
	}
	for _, sql := range []string{
		`DELETE FROM token_runs WHERE tenant_id = $1 AND session_id = $2 AND tok_from >= $3`,
		`UPDATE token_runs SET ids = ids[1:$3 - tok_from], cuts = '{}', at_ms = '{}'
			WHERE tenant_id = $1 AND session_id = $2 AND tok_from + cardinality(ids) > $3`,
		`DELETE FROM turns WHERE tenant_id = $1 AND session_id = $2 AND tok_from >= $3`,
		`UPDATE turns SET prompt = prompt[1:$3 - tok_from], prompt_to = least(prompt_to, $3), tok_to = $3, text = '', logprobs = NULL,
				request = request - 'messages' - 'input'
			WHERE tenant_id = $1 AND session_id = $2 AND tok_to > $3`,
		`DELETE FROM items WHERE tenant_id = $1 AND session_id = $2 AND tok_to > $3`,
	} {
		w.queue(sql, tenant, id, kept)
	}
	w.queue(`DELETE FROM events WHERE tenant_id = $1 AND session_id = $2`, tenant, id)
	w.queue(`DELETE FROM residency WHERE tenant_id = $1 AND session_id = $2`, tenant, id)
	if err := w.send(ctx); err != nil {
		return nil, fmt.Errorf("purge deleted session: %w", err)
	}
	return next, nil
}
