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
// nothing that an owner writes. What this server has in memory of such events
// it drops with them; another server does when it sweeps (trimLogs).
func (m *Manager) dropEvents(ctx context.Context) error {
	if m.opts.EventsRetention <= 0 {
		return nil
	}
	var failed error
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
		for _, k := range keys {
			var first int64
			err := pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) (err error) {
				first, err = dropSessionEvents(ctx, tx, k, m.opts.EventsRetention)
				return err
			})
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("drop old events of %s: %w", sessionID(k.id), err))
				continue
			}
			m.trimLog(k, first)
		}
		if seen < retentionPage || ctx.Err() != nil {
			return failed
		}
	}
}

// trimLogs drops from memory what another server's retention, or one whose end
// was not heard of, has dropped from the ledger. It is asked with every sweep,
// also of a server that keeps all events itself: until then, a minute at most,
// it serves what it has.
func (m *Manager) trimLogs(ctx context.Context) error {
	var tenants []string
	var ids []uuid.UUID
	for _, s := range m.sessions() {
		s.mu.Lock()
		if s.log.first <= s.log.committed {
			tenants, ids = append(tenants, s.key.tenant), append(ids, s.key.id)
		}
		s.mu.Unlock()
	}
	for n := 0; n < len(ids); n += retentionPage {
		end := min(n+retentionPage, len(ids))
		rows, err := m.pool.Query(ctx, `SELECT s.tenant_id, s.id, s.first_seq FROM unnest($1::text[], $2::uuid[]) AS k (tenant, id)
			JOIN sessions s ON s.tenant_id = k.tenant AND s.id = k.id WHERE s.first_seq > 1`, tenants[n:end], ids[n:end])
		if err != nil {
			return fmt.Errorf("look for dropped events: %w", err)
		}
		var k liveKey
		var first int64
		_, err = pgx.ForEachRow(rows, []any{&k.tenant, &k.id, &first}, func() error {
			m.trimLog(k, first)
			return nil
		})
		if err != nil {
			return fmt.Errorf("look for dropped events: %w", err)
		}
	}
	return nil
}

// trimLog drops from memory a session's events before first.
func (m *Manager) trimLog(k liveKey, first int64) {
	m.mu.Lock()
	s := m.live[k]
	m.mu.Unlock()
	if s == nil {
		return
	}
	select {
	case <-s.loaded:
		s.mu.Lock()
		s.log.drop(first)
		s.mu.Unlock()
	default: // it begins with nothing in memory
	}
}

// dropSessionEvents drops a log's events before the first that is young enough,
// and returns where the log begins by then. A turn stays whole: the text of a
// delta depends on all before it.
func dropSessionEvents(ctx context.Context, tx pgx.Tx, k liveKey, retention time.Duration) (first int64, err error) {
	var keep int64
	err = tx.QueryRow(ctx, `SELECT first_seq FROM sessions WHERE tenant_id = $1 AND id = $2
			AND deleted_at IS NULL AND state <> 'running' FOR UPDATE SKIP LOCKED`, k.tenant, k.id).Scan(&first)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil // in use: the next sweep comes again
	}
	if err != nil {
		return 0, err
	}
	err = tx.QueryRow(ctx, `WITH young AS (
			SELECT coalesce(min(e.seq), (SELECT last_seq + 1 FROM sessions WHERE tenant_id = $1 AND id = $2)) AS seq
			FROM events e WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.time >= now() - $3::interval)
		SELECT least(y.seq, (SELECT min(b.seq) FROM events b
			WHERE b.tenant_id = $1 AND b.session_id = $2 AND b.type = 'turn.started' AND b.seq < y.seq
				AND EXISTS (SELECT FROM events e WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.turn_id = b.turn_id AND e.seq >= y.seq)))
		FROM young y`, k.tenant, k.id, retention).Scan(&keep)
	if err != nil || keep <= first {
		return first, err
	}
	b := &pgx.Batch{}
	b.Queue(`UPDATE sessions SET first_seq = $3, gone_epoch = (SELECT e.epoch FROM events e
			WHERE e.tenant_id = $1 AND e.session_id = $2 AND e.seq < $3 ORDER BY e.seq DESC LIMIT 1)
		WHERE tenant_id = $1 AND id = $2`, k.tenant, k.id, keep)
	b.Queue(`DELETE FROM events WHERE tenant_id = $1 AND session_id = $2 AND seq < $3`, k.tenant, k.id, keep)
	b.Queue(`UPDATE token_runs SET cuts = '{}', at_ms = '{}'
		WHERE tenant_id = $1 AND session_id = $2 AND first_seq < $3 AND cardinality(cuts) > 0`, k.tenant, k.id, keep)
	return keep, sendBatch(ctx, tx, "drop events", b)
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
