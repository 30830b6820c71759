package sessions

import (
	"context"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// ReleaseRequest says what of a session its server gives up.
type ReleaseRequest struct {
	Subtree bool `json:"subtree,omitempty" doc:"also those forked from it, as far as this server has them; all or nothing"`
	Cancel  bool `json:"cancel,omitempty" doc:"cancel open turns; else a session with one is refused"`
	Check   bool `json:"check,omitempty" doc:"only say what would be released: nothing is given up, and no turn cancelled"`
}

// ReleaseResult is what was given up.
type ReleaseResult struct {
	Released int `json:"released" doc:"sessions that were this server's and are nobody's now"`
}

// Release makes sessions of this server nobody's, all or nothing, so that
// whichever server is called next has them. What is cached of them stays, as a
// cache. What is nobody's already is no error; the answer to a call with an
// idempotency key is kept all the same, or the call, repeated at a server that
// has the session by then, would have another effect there.
func (m *Manager) Release(ctx context.Context, call Call, id string, req ReleaseRequest) (ReleaseResult, error) {
	if err := m.open(); err != nil {
		return ReleaseResult{}, err
	}
	if req.Check {
		return m.checkRelease(ctx, call.Tenant, id, req)
	}
	return once(ctx, m, call, func(save save) (ReleaseResult, error) {
		r, err := m.newReleasing(call.Tenant, id, req)
		if err != nil {
			return ReleaseResult{}, err
		}
		defer r.let()
		var out ReleaseResult
		err = r.change(ctx, func(ctx context.Context) error {
			out.Released = len(r.ids)
			return r.commit(ctx, func(w *work) error { return save(w, out) })
		})
		return out, err
	})
}

// checkRelease says what a release would come to now.
func (m *Manager) checkRelease(ctx context.Context, tenant, id string, req ReleaseRequest) (out ReleaseResult, err error) {
	r, err := m.newReleasing(tenant, id, req)
	if err != nil {
		return out, err
	}
	list, err := r.list(ctx)
	for i := range list {
		if list[i].state == StateRunning && !req.Cancel {
			return out, fail(CodeTurnInProgress, "a turn is in progress")
		}
	}
	out.Released = len(list)
	return out, err
}

// releasing is the release of sessions.
type releasing struct {
	holding
	id      uuid.UUID
	subtree bool
}

func (m *Manager) newReleasing(tenant, id string, req ReleaseRequest) (*releasing, error) {
	u, err := parseSession(id)
	if err != nil {
		return nil, err
	}
	r := &releasing{id: u, subtree: req.Subtree}
	r.holding = holding{m: m, tenant: tenant, cancel: req.Cancel, own: true, held: map[uuid.UUID]*session{}, list: r.mine}
	return r, nil
}

// mine lists what is this server's.
func (r *releasing) mine(ctx context.Context) ([]row, error) {
	most := 1
	if r.subtree {
		most = PruneMax + 1
	}
	list, err := selectSubtree(ctx, r.m.pool, r.tenant, r.id, most)
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, notFound("session", sessionID(r.id))
	case len(list) > PruneMax:
		return nil, invalid("subtree", "it has more than %d sessions: release parts of it", PruneMax)
	case !r.subtree && list[0].owner != nil && *list[0].owner != r.m.me:
		return nil, &Error{Code: CodeOverloaded, Message: "another server has this session", cause: ErrForeign}
	}
	return slices.DeleteFunc(list, func(x row) bool { return x.owner == nil || *x.owner != r.m.me }), nil
}

// commit gives the sessions up. Nobody goes on with what they were: they are
// forgotten, with their rows still locked.
//
// A commit without an answer is settled behind. They are forgotten then too,
// whatever it came to: who asks for one reads its row.
func (r *releasing) commit(ctx context.Context, save func(w *work) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	began := time.Now()
	err, unknown := r.m.transact(ctx, func(w *work) {
		if r.lock(w); len(r.ids) == 0 {
			w.readNow()
		}
	}, func(w *work) error {
		w.queue(`DELETE FROM residency WHERE tenant_id = $1 AND session_id = ANY($2) AND tier <> 'disk'`, r.tenant, r.ids)
		w.queue(`UPDATE sessions SET owner_server = NULL, rev = rev + 1 WHERE tenant_id = $1 AND id = ANY($2)`, r.tenant, r.ids)
		return save(w)
	})
	switch {
	case unknown && len(r.ids) > 0:
		r.handed = true
		r.m.wg.Go(func() {
			defer r.release()
			x := r.rows[r.ids[0]]
			r.m.newSession(liveKey{r.tenant, x.id}).settle(x.epoch, x.rev+1) // to ask the ledger by
			r.forget(false)
		})
		return ledgerError("release", err)
	case err != nil:
		return r.refused("release", err)
	}
	r.m.counts.committed(time.Since(began))
	r.forget(false)
	return nil
}

// SubtreeOwner is another server that has sessions of a subtree.
type SubtreeOwner struct {
	Place
	Session string // one of them
}

// SubtreeOwners lists the other servers that have something of a subtree, and
// which sessions, topmost first. Those that are dead are taken over before;
// CodeQuarantined if one of their sessions cannot be.
func (m *Manager) SubtreeOwners(ctx context.Context, tenant, id string) ([]SubtreeOwner, error) {
	u, err := parseSession(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	for try := 0; ; try++ {
		list, err := m.selectOwners(ctx, tenant, u)
		if err != nil {
			return nil, err
		}
		var out []SubtreeOwner
		lapsed := map[uuid.UUID]bool{}
		for _, x := range list {
			switch {
			case x.remnant && (try > 0 || !m.remnants.due(x.owner)):
				return nil, quarantined(x.session)
			case x.lapsed:
				lapsed[x.owner] = true
			}
			out = append(out, SubtreeOwner{m.placeAt(x.owner, x.address), sessionID(x.session)})
		}
		if len(lapsed) == 0 || try > 0 {
			return out, nil
		}
		for server := range lapsed {
			if _, err := m.takeOver(ctx, server, false); err != nil {
				return nil, err
			}
		}
	}
}

// otherOwner is another server's session.
type otherOwner struct {
	session, owner  uuid.UUID
	address         string
	lapsed, remnant bool // of the server
}

func (m *Manager) selectOwners(ctx context.Context, tenant string, top uuid.UUID) ([]otherOwner, error) {
	rows, err := m.pool.Query(ctx, subtreeCTE+`
		SELECT s.id, s.owner_server, v.address, v.lease_until < now(), v.lease_until = `+remnantLease+`
		FROM tree t JOIN sessions s ON s.tenant_id = $1 AND s.id = t.id JOIN servers v ON v.id = s.owner_server
		WHERE s.deleted_at IS NULL AND s.owner_server <> $3 ORDER BY t.depth, s.id LIMIT $4`, tenant, top, m.me, PruneMax)
	if err != nil {
		return nil, ledgerError("find owners", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x otherOwner, err error) {
		return x, r.Scan(&x.session, &x.owner, &x.address, &x.lapsed, &x.remnant)
	})
	return list, ledgerError("find owners", err)
}
