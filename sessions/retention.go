package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// retentionPage is how many sessions one statement looks at for old events.
const retentionPage = 500

// dropEvents drops what is older than Options.EventsRetention of the logs of
// sessions without an open turn: stored events, and the boundaries that deltas
// are rebuilt from. Lineage, turns and tokens stay. It is safe beside an
// owner's writes, of this server or another: it locks the row and changes
// nothing that an owner has in memory.
func (m *Manager) dropEvents(ctx context.Context) error {
	if m.opts.EventsRetention <= 0 {
		return nil
	}
	for after := (liveKey{}); ; {
		var keys []liveKey
		seen := 0
		rows, err := m.pool.Query(ctx, `SELECT s.tenant_id, s.id, s.deleted_at IS NULL AND s.state <> 'running' AND EXISTS (
				SELECT FROM events e WHERE e.tenant_id = s.tenant_id AND e.session_id = s.id AND e.seq = s.first_seq
					AND e.time < now() - $3::interval)
			FROM sessions s WHERE (s.tenant_id, s.id) > ($1, $2) ORDER BY s.tenant_id, s.id LIMIT $4`,
			after.tenant, after.id, m.opts.EventsRetention, retentionPage)
		if err != nil {
			return fmt.Errorf("find old events: %w", err)
		}
		var old bool
		_, err = pgx.ForEachRow(rows, []any{&after.tenant, &after.id, &old}, func() error {
			seen++
			if old {
				keys = append(keys, after)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("find old events: %w", err)
		}
		var failed error
		for _, k := range keys {
			err := pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error { return dropSessionEvents(ctx, tx, k, m.opts.EventsRetention) })
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("drop old events of %s: %w", sessionID(k.id), err))
			}
		}
		if failed != nil || seen < retentionPage {
			return failed
		}
	}
}

// dropSessionEvents drops a log's events before the first that is young enough.
// A turn stays whole: the text of a delta depends on all before it.
func dropSessionEvents(ctx context.Context, tx pgx.Tx, k liveKey, retention time.Duration) error {
	var first, keep int64
	err := tx.QueryRow(ctx, `SELECT first_seq FROM sessions WHERE tenant_id = $1 AND id = $2
			AND deleted_at IS NULL AND state <> 'running' FOR UPDATE SKIP LOCKED`, k.tenant, k.id).Scan(&first)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // in use: the next sweep comes again
	}
	if err != nil {
		return err
	}
	err = tx.QueryRow(ctx, `WITH young AS (
			SELECT coalesce(min(e.seq), (SELECT last_seq + 1 FROM sessions WHERE tenant_id = $1 AND id = $2)) AS seq
			FROM events e WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.time >= now() - $3::interval)
		SELECT least(y.seq, (SELECT min(b.seq) FROM events b
			WHERE b.tenant_id = $1 AND b.session_id = $2 AND b.type = 'turn.started' AND b.seq < y.seq
				AND EXISTS (SELECT FROM events e WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.turn_id = b.turn_id AND e.seq >= y.seq)))
		FROM young y`, k.tenant, k.id, retention).Scan(&keep)
	if err != nil || keep <= first {
		return err
	}
	b := &pgx.Batch{}
	b.Queue(`UPDATE sessions SET first_seq = $3, gone_epoch = (SELECT e.epoch FROM events e
			WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.seq < $3 ORDER BY e.seq DESC LIMIT 1)
		WHERE tenant_id = $1 AND id = $2`, k.tenant, k.id, keep)
	b.Queue(`DELETE FROM events WHERE tenant_id = $1 AND session_id = $2 AND seq < $3`, k.tenant, k.id, keep)
	b.Queue(`UPDATE token_runs SET cuts = '{}', at_ms = '{}'
		WHERE tenant_id = $1 AND session_id = $2 AND first_seq < $3 AND cardinality(cuts) > 0`, k.tenant, k.id, keep)
	return sendBatch(ctx, tx, "drop events", b)
}

// keptEvents reads where a log begins by now, and the epoch of the newest
// event that is gone (0: none).
func keptEvents(ctx context.Context, q querier, tenant string, id uuid.UUID) (first, goneEpoch int64, err error) {
	err = q.QueryRow(ctx, `SELECT first_seq, gone_epoch FROM sessions WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`,
		tenant, id).Scan(&first, &goneEpoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, 0, notFound("session", sessionID(id))
	}
	return first, goneEpoch, ledgerError("read start of log", err)
}

// goneBefore is the answer to who asks for events that are gone.
func goneBefore(first int64) *Error {
	e := fail(CodeGone, "events before seq %d are gone", first)
	e.FirstSeq = first
	return e
}
