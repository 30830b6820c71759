package sessions

import (
	"context"
	"fmt"
	"math"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Check reads a tenant's whole ledger and says what is wrong with it: lines
// with gaps or of another length than their session, logs that are not dense,
// turns that do not lie in their line. It is for tests and for `rocket doctor`;
// it reads everything. Sessions with an open turn are left out.
func (m *Manager) Check(ctx context.Context, tenant string) error {
	rows, err := m.pool.Query(ctx, `SELECT `+rowColumns+` FROM sessions s WHERE s.tenant_id = $1`, tenant)
	if err != nil {
		return ledgerError("check sessions", err)
	}
	list, err := pgx.CollectRows(rows, scanRow)
	if err != nil {
		return ledgerError("check sessions", err)
	}
	children := map[uuid.UUID]int{}
	for _, x := range list {
		if x.parent != nil && x.deleted == nil {
			children[*x.parent]++
		}
	}
	for _, x := range list {
		if x.deleted != nil || x.state == StateRunning {
			continue
		}
		if n := children[x.id]; n != x.childCount {
			return fmt.Errorf("%s has %d children, its row says %d", sessionID(x.id), n, x.childCount)
		}
		if err := m.checkSession(ctx, &x); err != nil {
			return fmt.Errorf("%s: %w", sessionID(x.id), err)
		}
	}
	return nil
}

func (m *Manager) checkSession(ctx context.Context, x *row) error {
	if _, err := selectLine(ctx, m.pool, x.tenant, x.id, 0, x.length); err != nil {
		return err
	}
	var over int
	err := m.pool.QueryRow(ctx, `SELECT count(*) FROM token_runs WHERE tenant_id = $1 AND session_id = $2
		AND tok_from + cardinality(ids) > $3`, x.tenant, x.id, x.length).Scan(&over)
	if err != nil {
		return err
	}
	if over > 0 {
		return fmt.Errorf("%d rows of tokens past its length %d", over, x.length)
	}
	first, epoch, err := keptEvents(ctx, m.pool, x.tenant, x.id)
	if err != nil {
		return err
	}
	events, err := selectEvents(ctx, m.pool, m.tok, x.tenant, x.id, first, x.lastSeq, math.MaxInt64)
	if err != nil {
		return err
	}
	for i, e := range events {
		if e.Seq != first+int64(i) || e.Epoch < epoch {
			return fmt.Errorf("event %d has seq %d and epoch %d", first+int64(i), e.Seq, e.Epoch)
		}
		epoch = e.Epoch
	}
	if int64(len(events)) != x.lastSeq-first+1 || epoch > x.epoch {
		return fmt.Errorf("%d events up to epoch %d, the row says %d and %d", len(events), epoch, x.lastSeq, x.epoch)
	}
	turns, err := selectTurns(ctx, m.pool, x.tenant, x.id, x.length)
	if err != nil {
		return err
	}
	own, end := 0, x.length
	for _, t := range turns { // newest first
		if t.from < 0 || t.to < t.from || t.to > end {
			return fmt.Errorf("%s lies at [%d, %d), before %d", turnID(t.id), t.from, t.to, end)
		}
		end = t.from
		if !t.inherited {
			own++
			if !t.state.Final() {
				return fmt.Errorf("%s is %s, its session is %s", turnID(t.id), t.state, x.state)
			}
		}
	}
	if own != x.turnCount {
		return fmt.Errorf("%d turns, the row says %d", own, x.turnCount)
	}
	return nil
}
