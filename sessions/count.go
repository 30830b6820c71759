package sessions

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// CountByState counts the sessions of all tenants that are not deleted.
func (m *Manager) CountByState(ctx context.Context) (map[State]int64, error) {
	rows, err := m.pool.Query(ctx, `SELECT state, count(*) FROM sessions WHERE deleted_at IS NULL GROUP BY state`)
	if err != nil {
		return nil, ledgerError("count sessions", err)
	}
	counts := map[State]int64{}
	var state State
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&state, &n}, func() error {
		counts[state] = n
		return nil
	})
	if err != nil {
		return nil, ledgerError("count sessions", err)
	}
	return counts, nil
}
