package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// queuedAtOnce is how many queued turns are looked at in one go; the others
// are found by the next.
const queuedAtOnce = 256

// queuedTurn names a turn that waits in the ledger.
type queuedTurn struct {
	tenant        string
	session, turn uuid.UUID
}

// selectQueued finds queued turns that nobody has under way, of this server's
// model: of sessions that are nobody's, and of those that became this server's
// by another call before anybody started their turn. Of each tenant at most
// perTenant, its oldest, and most in all. Tenants take turns, every tenant's
// oldest comes before anybody's second: so a backlog of one, however old, does
// not keep the others' from being found. Nor does a turn that cannot be read or
// started: it is read by itself, later, and left out while its session rests.
//
// It reads the open turns, which is what the index turns_one_open is of.
func (m *Manager) selectQueued(ctx context.Context, q querier, perTenant, most int) ([]queuedTurn, error) {
	rows, err := q.Query(ctx, `SELECT n.tenant_id, n.session_id, n.id FROM (
			SELECT q.tenant_id, q.session_id, q.id, row_number() OVER (PARTITION BY q.tenant_id ORDER BY q.id) AS nth
			FROM turns q JOIN sessions s ON s.tenant_id = q.tenant_id AND s.id = q.session_id
			WHERE q.state = 'queued' AND (s.owner_server IS NULL OR s.owner_server = $5 AND q.id <> ALL($6))
				AND s.deleted_at IS NULL AND s.model_digest = $3 AND s.parity_class = $4 AND s.id <> ALL($7)
		) n WHERE n.nth <= $1 ORDER BY n.nth, n.id LIMIT $2`,
		perTenant, most, m.info.Digest, m.info.ParityClass, m.me, m.underway(), m.resting())
	if err != nil {
		return nil, fmt.Errorf("find queued turns: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x queuedTurn, err error) {
		return x, r.Scan(&x.tenant, &x.session, &x.turn)
	})
	if err != nil {
		return nil, fmt.Errorf("find queued turns: %w", err)
	}
	return list, nil
}

// selectWaiting reads a turn of the session that waits in the ledger.
// CodeNotFound: it does not any more.
func (o *operation) selectWaiting(ctx context.Context, turn uuid.UUID) (x turnRow, req TurnRequest, err error) {
	err = o.m.pool.QueryRow(ctx, `SELECT `+turnColumns+` FROM turns t
		WHERE t.tenant_id = $1 AND t.session_id = $2 AND t.id = $3 AND t.state = 'queued'`, o.key.tenant, o.key.id, turn).Scan(x.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		return x, req, notFound("turn", turnID(turn))
	}
	if err != nil {
		return x, req, ledgerError("read queued turn", err)
	}
	if err := json.Unmarshal(x.request, &req); err != nil {
		return x, req, fmt.Errorf("read request of %s: %w", turnID(turn), err)
	}
	return x, req, nil
}

// underway are the turns that this server runs or has in its engine's queue.
func (m *Manager) underway() []uuid.UUID {
	ids := []uuid.UUID{}
	for _, s := range m.sessions() {
		s.mu.Lock()
		if s.turn != nil {
			ids = append(ids, s.turn.id)
		}
		s.mu.Unlock()
	}
	return ids
}
