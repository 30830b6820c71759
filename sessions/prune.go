package sessions

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// PruneMax bounds the sessions that one call deletes: all of them are held,
// and go in one transaction. A larger subtree is refused with CodeInvalid.
const PruneMax = 10_000

// Prune deletes a session and everything forked from it, all or nothing; open
// turns in it are cancelled, once nothing is known that would refuse it. What is
// left is what Delete leaves of each. A subtree of which another server has
// sessions is refused with ErrForeign, before any turn is cancelled.
func (m *Manager) Prune(ctx context.Context, call Call, id string) error {
	if err := m.open(); err != nil {
		return err
	}
	_, err := once(ctx, m, call, func(save save) (struct{}, error) {
		u, err := parseSession(id)
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, m.prune(ctx, call.Tenant, u, audited(call, auditSessionDeleted, id, save))
	})
	return err
}

// pruning is the deletion of a subtree.
type pruning struct {
	holding
	id  uuid.UUID
	top row
	now time.Time
}

// prune reads the subtree, holds it, and deletes it if it is still what was
// read.
func (m *Manager) prune(ctx context.Context, tenant string, id uuid.UUID, save save) error {
	p := &pruning{id: id}
	p.holding = holding{m: m, tenant: tenant, cancel: true, held: map[uuid.UUID]*session{}, list: p.subtree}
	defer p.let()
	return p.change(ctx, func(ctx context.Context) error { return p.commit(ctx, save) })
}

// subtree finds out what is alive in the subtree, if that can be deleted here.
func (p *pruning) subtree(ctx context.Context) ([]row, error) {
	list, err := selectSubtree(ctx, p.m.pool, p.tenant, p.id, PruneMax+1)
	if err != nil {
		return nil, err
	}
	switch {
	case len(list) == 0:
		return nil, notFound("session", sessionID(p.id))
	case len(list) > PruneMax:
		return nil, invalid("subtree", "it has more than %d sessions: prune parts of it first", PruneMax)
	}
	for i := range list {
		if o := list[i].owner; o != nil && *o != p.m.me {
			return nil, p.refused("prune", ErrForeign)
		}
	}
	p.top = list[0]
	return list, nil
}

// selectSubtree reads a session and all that is alive below it, parents first;
// nothing if the session is not alive. Deleted ones in between are walked
// through.
func selectSubtree(ctx context.Context, q querier, tenant string, id uuid.UUID, max int) ([]row, error) {
	rows, err := q.Query(ctx, subtreeCTE+`
		SELECT `+rowColumns+` FROM tree t JOIN sessions s ON s.tenant_id = $1 AND s.id = t.id
		WHERE s.deleted_at IS NULL ORDER BY t.depth, s.id LIMIT $3`, tenant, id, max)
	if err != nil {
		return nil, ledgerError("read subtree", err)
	}
	list, err := pgx.CollectRows(rows, scanRow)
	return list, ledgerError("read subtree", err)
}

const subtreeCTE = `WITH RECURSIVE tree AS (
	SELECT s.id, 0 AS depth FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2 AND s.deleted_at IS NULL
	UNION ALL
	SELECT c.id, t.depth + 1 FROM tree t JOIN sessions c ON c.tenant_id = $1 AND c.parent_id = t.id
)`

// commit deletes the subtree.
func (p *pruning) commit(ctx context.Context, save save) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	began := time.Now()
	err, unknown := p.m.transact(ctx, func(w *work) {
		lockTree(w, &p.top) // as whoever changes several sessions of a tree does
		p.lock(w)
	}, func(w *work) error {
		if err := p.write(ctx, w); err != nil {
			return err
		}
		return save(w, struct{}{})
	})
	switch {
	case unknown:
		p.handed = true
		p.m.wg.Go(func() {
			defer p.release()
			top := p.m.newSession(liveKey{p.tenant, p.id}) // to ask the ledger by
			if top.settle(p.rows[p.id].epoch, p.rows[p.id].rev+1) {
				p.apply()
			}
		})
		return ledgerError("prune", err)
	case err != nil:
		return p.refused("prune", err)
	}
	p.m.counts.committed(time.Since(began))
	p.apply()
	return nil
}

// write deletes the subtree. Its rows are locked, so that it has no more new
// children; those which came before are seen now.
func (p *pruning) write(ctx context.Context, w *work) error {
	if err := w.send(ctx); err != nil {
		return err
	}
	p.now = w.now
	var more bool
	err := w.conn.QueryRow(ctx, subtreeCTE+` SELECT EXISTS (SELECT FROM tree t JOIN sessions s ON s.tenant_id = $1 AND s.id = t.id
		WHERE s.deleted_at IS NULL AND NOT s.id = ANY($3))`, p.tenant, p.top.id, p.ids).Scan(&more)
	if err != nil {
		return fmt.Errorf("read subtree again: %w", err)
	}
	if more {
		return errGrew
	}
	p.tell(w)
	w.queue(`UPDATE sessions SET state = 'closed', closed_at = coalesce(closed_at, $3), deleted_at = $3, kept_to = 0, rev = rev + 1,
			title = '', labels = '{}', ttl_seconds = NULL, expires_at = NULL, updated_at = $3
		WHERE tenant_id = $1 AND id = ANY($2)`, p.tenant, p.ids, p.now)
	// deleted ones in between kept tokens for these only
	w.queue(`WITH RECURSIVE tree AS (
			SELECT $2::uuid AS id
			UNION ALL
			SELECT c.id FROM tree t JOIN sessions c ON c.tenant_id = $1 AND c.parent_id = t.id
		) UPDATE sessions s SET child_count = 0, kept_to = 0 FROM tree t WHERE s.tenant_id = $1 AND s.id = t.id`, p.tenant, p.top.id)
	if err := w.send(ctx); err != nil {
		return fmt.Errorf("mark deleted: %w", err)
	}
	var alive bool
	err = w.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM sessions WHERE tenant_id = $1 AND root_id = $2 AND deleted_at IS NULL)`,
		p.tenant, p.top.root).Scan(&alive)
	if err != nil {
		return fmt.Errorf("look for living sessions: %w", err)
	}
	if !alive {
		w.queue(`DELETE FROM sessions WHERE tenant_id = $1 AND root_id = $2`, p.tenant, p.top.root)
		return nil
	}
	for _, table := range []string{"token_runs", "turns", "items", "events", "residency"} {
		w.queue(`WITH RECURSIVE tree AS (
				SELECT $2::uuid AS id
				UNION ALL
				SELECT c.id FROM tree t JOIN sessions c ON c.tenant_id = $1 AND c.parent_id = t.id
			) DELETE FROM `+table+` x USING tree t WHERE x.tenant_id = $1 AND x.session_id = t.id`, p.tenant, p.top.id)
	}
	return p.above(ctx, w)
}

// tell has servers that remember sessions of the subtree as nobody's forget
// them: readers may wait there.
func (p *pruning) tell(w *work) {
	var payloads []string
	for _, id := range p.ids {
		if p.rows[id].owner == nil {
			payloads = append(payloads, ownerPayload(liveKey{p.tenant, id}))
		}
	}
	if len(payloads) > 0 {
		w.queue(`SELECT pg_notify($1, p) FROM unnest($2::text[]) AS p`, ownerChannel, payloads)
	}
}

// above counts the top out of its parent, and takes from deleted ancestors
// what they kept for the subtree.
func (p *pruning) above(ctx context.Context, w *work) error {
	if p.top.parent == nil {
		return nil
	}
	var deleted bool
	err := w.conn.QueryRow(ctx, `UPDATE sessions SET child_count = child_count - 1 WHERE tenant_id = $1 AND id = $2
		RETURNING deleted_at IS NOT NULL`, p.tenant, *p.top.parent).Scan(&deleted)
	if err != nil {
		return fmt.Errorf("count children: %w", err)
	}
	if !deleted {
		return nil
	}
	for id := p.top.parent; id != nil; {
		if id, err = purge(ctx, w, p.tenant, *id); err != nil {
			return err
		}
	}
	return nil
}

// apply makes the deletion true in memory.
func (p *pruning) apply() {
	p.forget(true)
	for _, id := range p.ids {
		p.m.hub.publish(p.tenant, sessionID(p.top.root),
			Event{Type: EventSessionDeleted, SessionID: sessionID(id), Epoch: p.rows[id].epoch, Time: p.now})
	}
	p.m.mu.Lock()
	delete(p.m.tenants, p.tenant) // count anew
	p.m.mu.Unlock()
}
