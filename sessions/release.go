package sessions

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// ReleaseRequest says what of a session its server gives up.
type ReleaseRequest struct {
	Subtree bool `json:"subtree,omitempty" doc:"also those forked from it, as far as this server has them"`
	Cancel  bool `json:"cancel,omitempty" doc:"cancel open turns; else a session with one is refused"`
}

// ReleaseResult is what was given up.
type ReleaseResult struct {
	Released int `json:"released" doc:"sessions that were this server's and are nobody's now"`
}

// Release makes sessions of this server nobody's, so that whichever server is
// called next has them. What is cached of them stays, as a cache. It is not
// repeated by an idempotency key: what is nobody's already is no error.
func (m *Manager) Release(ctx context.Context, tenant, id string, req ReleaseRequest) (ReleaseResult, error) {
	if err := m.open(); err != nil {
		return ReleaseResult{}, err
	}
	u, err := parseSession(id)
	if err != nil {
		return ReleaseResult{}, err
	}
	list := []uuid.UUID{u}
	if req.Subtree {
		if list, err = m.ownSubtree(ctx, tenant, u); err != nil {
			return ReleaseResult{}, err
		}
	}
	var out ReleaseResult
	for _, id := range list {
		released, err := m.releaseSession(ctx, tenant, id, req.Cancel)
		if ErrorCode(err) == CodeNotFound && req.Subtree {
			continue // deleted meanwhile
		}
		if err != nil {
			return out, err
		}
		if released {
			out.Released++
		}
	}
	return out, nil
}

// ownSubtree lists what of a subtree is this server's.
func (m *Manager) ownSubtree(ctx context.Context, tenant string, top uuid.UUID) ([]uuid.UUID, error) {
	list, err := selectSubtree(ctx, m.pool, tenant, top, PruneMax+1)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, notFound("session", sessionID(top))
	}
	var own []uuid.UUID
	for i := range list {
		if o := list[i].owner; o != nil && *o == m.me {
			own = append(own, list[i].id)
		}
	}
	return own, nil
}

func (m *Manager) releaseSession(ctx context.Context, tenant string, id uuid.UUID, cancelTurn bool) (bool, error) {
	s, err := m.holdID(ctx, tenant, id)
	if err != nil {
		return false, err
	}
	defer s.ops.unlock()
	if cancelTurn {
		if err := s.cancelTurn(ctx); err != nil {
			return false, err
		}
	}
	released := false
	err = s.still(ctx, func(o *operation) error {
		s.mu.Lock()
		open, mine := s.turn != nil, s.mineLocked()
		x := s.row
		s.mu.Unlock()
		switch {
		case open:
			return fail(CodeTurnInProgress, "a turn is in progress")
		case !mine:
			return nil
		}
		tag, err := m.pool.Exec(ctx, `WITH gone AS (DELETE FROM residency WHERE tenant_id = $1 AND session_id = $2 AND tier <> 'disk')
			UPDATE sessions SET owner_server = NULL, rev = rev + 1 WHERE tenant_id = $1 AND id = $2 AND owner_server = $3 AND epoch = $4`,
			tenant, id, m.me, x.epoch)
		if err != nil {
			return ledgerError("release session", err)
		}
		released = tag.RowsAffected() > 0
		m.forget(s) // with its rows still locked: nobody goes on with what it was
		return nil
	})
	if released {
		s.dropSeq()
	}
	return released, err
}

// SubtreeOwner is another server that has sessions of a subtree.
type SubtreeOwner struct {
	Place
	Session string // one of them
}

// SubtreeOwners lists the other servers that have something of a subtree, and
// which sessions, topmost first.
func (m *Manager) SubtreeOwners(ctx context.Context, tenant, id string) ([]SubtreeOwner, error) {
	u, err := parseSession(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	rows, err := m.pool.Query(ctx, subtreeCTE+`
		SELECT s.id, s.owner_server, v.address FROM tree t JOIN sessions s ON s.tenant_id = $1 AND s.id = t.id
		JOIN servers v ON v.id = s.owner_server
		WHERE s.deleted_at IS NULL AND s.owner_server <> $3 ORDER BY t.depth, s.id LIMIT $4`, tenant, u, m.me, PruneMax)
	if err != nil {
		return nil, ledgerError("find owners", err)
	}
	var out []SubtreeOwner
	var session, owner uuid.UUID
	var address string
	_, err = pgx.ForEachRow(rows, []any{&session, &owner, &address}, func() error {
		out = append(out, SubtreeOwner{m.placeAt(owner, address), sessionID(session)})
		return nil
	})
	return out, ledgerError("find owners", err)
}
