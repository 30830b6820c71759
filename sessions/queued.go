package sessions

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// queuedAtOnce is how many queued turns are looked at in one go; the others
// are found by the next.
const queuedAtOnce = 256

// selectQueued finds queued turns that nobody has under way, of this server's
// model: of sessions that are nobody's, and of those that became this server's
// by another call before anybody started their turn. Of each tenant at most
// perTenant, its oldest, and most in all. Tenants take turns, every tenant's
// oldest comes before anybody's second: so a backlog of one, however old, does
// not keep the others' from being found.
//
// It reads the open turns, which is what the index turns_one_open is of.
func (m *Manager) selectQueued(ctx context.Context, q querier, perTenant, most int) ([]turnRow, error) {
	rows, err := q.Query(ctx, `SELECT `+turnColumns+` FROM (
			SELECT q.tenant_id, q.id, row_number() OVER (PARTITION BY q.tenant_id ORDER BY q.id) AS nth
			FROM turns q JOIN sessions s ON s.tenant_id = q.tenant_id AND s.id = q.session_id
			WHERE q.state = 'queued' AND (s.owner_server IS NULL OR s.owner_server = $5 AND q.id <> ALL($6))
				AND s.deleted_at IS NULL AND s.model_digest = $3 AND s.parity_class = $4
		) n JOIN turns t ON t.tenant_id = n.tenant_id AND t.id = n.id
		WHERE n.nth <= $1 ORDER BY n.nth, n.id LIMIT $2`, perTenant, most, m.info.Digest, m.info.ParityClass, m.me, m.underway())
	if err != nil {
		return nil, fmt.Errorf("find queued turns: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x turnRow, err error) { return x, r.Scan(x.fields()...) })
	if err != nil {
		return nil, fmt.Errorf("find queued turns: %w", err)
	}
	return list, nil
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
