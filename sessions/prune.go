package sessions

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// PruneMax bounds the sessions that one call deletes: all of them are held,
	// and go in one transaction. A larger subtree is refused with CodeInvalid.
	PruneMax = 10_000

	// pruneTries is how often a subtree that changed before its rows were locked
	// is read anew; then the call gives up with CodeOverloaded.
	pruneTries = 20
)

// errGrew: the subtree is not what was read before its rows were locked.
var errGrew = errors.New("the subtree has changed")

// Prune deletes a session and everything forked from it, all or nothing; open
// turns in it are cancelled. What is left is what Delete leaves of each.
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
	m      *Manager
	tenant string
	id     uuid.UUID
	top    row
	ids    []uuid.UUID            // what is alive in the subtree, in order
	rows   map[uuid.UUID]*row     // what they must still be, by rev
	held   map[uuid.UUID]*session // those of them that are in memory: ops, wlock, alock
	order  []*session             // held, in the order in which they were
	moving int                    // how many of order have wlock and alock
	now    time.Time
}

// prune reads the subtree, holds it, and deletes it if it is still what was
// read. What is held stays so over the tries: a session that is held has no new
// children, so that they come to an end.
func (m *Manager) prune(ctx context.Context, tenant string, id uuid.UUID, save save) error {
	p := &pruning{m: m, tenant: tenant, id: id, held: map[uuid.UUID]*session{}}
	handed := false
	defer func() {
		if !handed {
			p.release()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	var err error
	for range pruneTries {
		if err = p.hold(ctx); err == nil {
			err, handed = p.commit(ctx, save)
		}
		if !errors.Is(err, errGrew) {
			return err
		}
	}
	return &Error{Code: CodeOverloaded, Message: "the subtree keeps changing, try again", cause: err}
}

// read finds out what is alive in the subtree.
func (p *pruning) read(ctx context.Context) error {
	list, err := selectSubtree(ctx, p.m.pool, p.tenant, p.id, PruneMax+1)
	if err != nil {
		return err
	}
	switch {
	case len(list) == 0:
		return notFound("session", sessionID(p.id))
	case len(list) > PruneMax:
		return invalid("subtree", "it has more than %d sessions: prune parts of it first", PruneMax)
	}
	p.top, p.ids, p.rows = list[0], nil, make(map[uuid.UUID]*row, len(list))
	for i := range list {
		p.ids = append(p.ids, list[i].id)
		p.rows[list[i].id] = &list[i]
	}
	// one order for all, so that two that prune do not wait for each other
	slices.SortFunc(p.ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	return nil
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

// hold takes those of the subtree that are in memory or have an open turn, ends
// their turns and makes them stand still. One that comes into memory later, and is used, is
// found out by its rev.
func (p *pruning) hold(ctx context.Context) error {
	for more := true; more; {
		if err := p.read(ctx); err != nil {
			return err
		}
		more = false
		for _, id := range p.ids {
			p.m.mu.Lock()
			_, live := p.m.live[liveKey{p.tenant, id}]
			p.m.mu.Unlock()
			waits := p.rows[id].state == StateRunning // in the ledger, for a server
			if !live && !waits || p.held[id] != nil {
				continue
			}
			s, err := p.m.holdID(ctx, p.tenant, id)
			if ErrorCode(err) == CodeNotFound {
				continue // deleted just now: the next reading does not have it
			}
			if err != nil {
				return err
			}
			p.held[id] = s
			p.order = append(p.order, s)
			more = true
		}
	}
	still := p.order[p.moving:]
	for _, s := range still { // all at once, then one wait
		s.mu.Lock()
		t := s.turn
		s.mu.Unlock()
		if t != nil {
			t.run.Cancel()
		}
	}
	for _, s := range still {
		if err := s.cancelTurn(ctx); err != nil {
			return err
		}
	}
	for _, s := range still {
		if err := s.quiesce(ctx); err != nil {
			return err
		}
		p.moving++
		if err := s.refresh(ctx); err != nil {
			return err
		}
	}
	for _, s := range p.order { // what they have written by now is not what was read
		s.mu.Lock()
		x := s.row
		s.mu.Unlock()
		p.rows[x.id] = &x
	}
	return nil
}

func (p *pruning) release() {
	for _, s := range p.order[:p.moving] {
		s.release()
	}
	for _, s := range p.order {
		s.ops.unlock()
	}
}

// commit deletes the subtree. handed says that what is held is somebody
// else's to release.
func (p *pruning) commit(ctx context.Context, save save) (err error, handed bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	began := time.Now()
	err, unknown := p.m.transact(ctx, p.lock, func(w *work) error {
		if err := p.write(ctx, w); err != nil {
			return err
		}
		return save(w, struct{}{})
	})
	switch {
	case unknown:
		p.m.wg.Go(func() {
			defer p.release()
			top := p.m.newSession(liveKey{p.tenant, p.id}) // to ask the ledger by
			if top.settle(p.rows[p.id].epoch, p.rows[p.id].rev+1) {
				p.apply()
			}
		})
		return ledgerError("prune", err), true
	case errors.Is(err, ErrForeign):
		return &Error{Code: CodeOverloaded, Message: "another server has a session of the subtree", cause: err}, false
	case errors.Is(err, errGrew):
		return err, false
	case err != nil:
		return ledgerError("prune", err), false
	}
	p.m.counts.committed(time.Since(began))
	p.apply()
	return nil, false
}

// lock locks the root, as whoever changes several sessions of a tree does, and
// then the subtree's rows, and compares them with what was read.
func (p *pruning) lock(w *work) {
	lockTree(w, &p.top)
	w.queue(`SELECT id, owner_server, state, rev, deleted_at IS NOT NULL, now() FROM sessions
		WHERE tenant_id = $1 AND id = ANY($2) ORDER BY id FOR UPDATE`, p.tenant, p.ids).Query(func(rows pgx.Rows) error {
		var id uuid.UUID
		var owner *uuid.UUID
		var state State
		var rev int64
		var deleted bool
		n := 0
		_, err := pgx.ForEachRow(rows, []any{&id, &owner, &state, &rev, &deleted, &w.now}, func() error {
			n++
			switch {
			case owner != nil && *owner != p.m.me && !deleted:
				return ErrForeign
			case deleted || rev != p.rows[id].rev || state == StateRunning:
				return errGrew
			}
			return nil
		})
		w.now = w.now.UTC()
		if err == nil && n != len(p.ids) {
			err = errGrew
		}
		return err
	})
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

// apply makes the deletion true in memory, for those too that came there
// meanwhile.
func (p *pruning) apply() {
	for _, id := range p.ids {
		s := p.held[id]
		if s == nil {
			k := liveKey{p.tenant, id}
			p.m.mu.Lock()
			s = p.m.live[k]
			p.m.mu.Unlock()
		}
		if s != nil {
			<-s.loaded
			s.mu.Lock()
			s.deleted = true
			s.mu.Unlock()
			p.m.forget(s)
		}
		if p.held[id] != nil {
			s.dropSeq()
		}
		p.m.hub.publish(p.tenant, sessionID(p.top.root),
			Event{Type: EventSessionDeleted, SessionID: sessionID(id), Epoch: p.rows[id].epoch, Time: p.now})
	}
	p.m.mu.Lock()
	delete(p.m.tenants, p.tenant) // count anew
	p.m.mu.Unlock()
}
