package sessions

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
)

// What audit_events record. The rows are for operators and their SQL; nothing
// here reads them.
const (
	auditKeyCreated     = "key.created"
	auditKeyRevoked     = "key.revoked"
	auditTenantLimits   = "tenant.limits"
	auditSessionDeleted = "session.deleted"
	auditAuthFailed     = "auth.failed"
)

const (
	// AuditKeptFor is how long a record is kept; the keeper drops it then.
	AuditKeptFor = 90 * 24 * time.Hour

	auditDropMax   = 1000 // records that one statement looks at
	auditDropPages = 100  // of them in one sweep; the next goes on
)

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// audit records what an operator did, in the transaction that does it.
func audit(ctx context.Context, tx execer, action, tenant, subject string) error {
	_, err := tx.Exec(ctx, `INSERT INTO audit_events (tenant_id, action, subject) VALUES ($1, $2, $3)`, tenant, action, subject)
	return err
}

// audited makes a call's answer be saved together with a record of the call.
func audited(call Call, action, subject string, save save) save {
	return func(w *work, answer any) error {
		var key *uuid.UUID
		if id, ok := parseID(keyPrefix, call.KeyID); ok {
			key = &id
		}
		w.queue(`INSERT INTO audit_events (at, tenant_id, key_id, action, subject) VALUES ($1, $2, $3, $4, $5)`,
			w.now, call.Tenant, key, action, subject)
		return save(w, answer)
	}
}

// dropAudit drops records older than AuditKeptFor. Ids rise with time, so it
// looks at the oldest ones only, and stops at a page that has one to keep.
func (m *Manager) dropAudit(ctx context.Context) error {
	for range auditDropPages {
		var seen, dropped int
		err := m.pool.QueryRow(ctx, `WITH oldest AS (SELECT id, at FROM audit_events ORDER BY id LIMIT $2),
				gone AS (DELETE FROM audit_events a USING oldest o WHERE a.id = o.id AND o.at < now() - $1::interval RETURNING 1)
			SELECT (SELECT count(*) FROM oldest), (SELECT count(*) FROM gone)`, AuditKeptFor, auditDropMax).Scan(&seen, &dropped)
		if err != nil {
			return fmt.Errorf("drop old audit records: %w", err)
		}
		if dropped < seen || seen < auditDropMax {
			return nil
		}
	}
	return nil
}

// writeFailures records the failed authentications since the last time: a row,
// whose subject says where they came from, and a line of the log.
func (k *Keys) writeFailures(ctx context.Context, force bool) error {
	n := k.fails.due(time.Now(), force)
	if n.count == 0 {
		return nil
	}
	k.log.Warn("authentications failed", "count", n.count, "from", n.from)
	_, err := k.pool.Exec(ctx, `INSERT INTO audit_events (action, subject, count) VALUES ($1, $2, $3)`, auditAuthFailed, n.from, min(n.count, math.MaxInt32))
	return ledgerError("record failed authentications", err)
}
