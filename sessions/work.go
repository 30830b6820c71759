package sessions

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// work is one transaction of two messages: the first begins it and locks what
// it is about, the second carries every statement and the COMMIT. Each message
// more would be a pause of all who wait for the session.
type work struct {
	conn *pgxpool.Conn
	b    *pgx.Batch
	now  time.Time // the transaction's one time, once locked
}

// queue adds a statement to the second message.
func (w *work) queue(sql string, args ...any) *pgx.QueuedQuery { return w.b.Queue(sql, args...) }

// send runs what is queued by now, for a transaction that must read its own
// writes.
func (w *work) send(ctx context.Context) error {
	b := w.b
	w.b = &pgx.Batch{}
	if b.Len() == 0 {
		return nil
	}
	return w.conn.SendBatch(ctx, b).Close()
}

// transact runs one transaction: lock queues the statements of the first
// message, write those of the second. unknown says that the COMMIT was sent
// and got no answer.
func (m *Manager) transact(ctx context.Context, lock func(w *work), write func(w *work) error) (err error, unknown bool) {
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return err, false
	}
	defer conn.Release()
	w := &work{conn: conn, b: &pgx.Batch{}}
	w.queue("BEGIN")
	lock(w)
	if err = w.send(ctx); err == nil {
		err = write(w)
	}
	if err == nil {
		w.queue("COMMIT")
		err = w.send(ctx)
		unknown = err != nil && isUnavailable(err)
	}
	if err != nil {
		m.pool.late(ctx)
	}
	if err != nil && !conn.Conn().IsClosed() {
		// the first error counts; a connection that cannot roll back is not used again
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingTimeMax)
		defer cancel()
		if _, e := conn.Exec(back, "ROLLBACK"); e != nil {
			conn.Conn().Close(back)
		}
	}
	return err, unknown
}

// waitForClient lets a transaction stand still: it goes at the pace of the one
// who reads or sends a bundle, and locks nobody out.
const waitForClient = `SET LOCAL idle_in_transaction_session_timeout = 0`

// readNow gives the transaction its time.
func (w *work) readNow() {
	w.queue("SELECT now()").QueryRow(func(r pgx.Row) error {
		err := r.Scan(&w.now)
		w.now = w.now.UTC()
		return err
	})
}

// lockSession locks a session's row for an owner's write. The row must be the
// one that the caller knows (rev) and not be another server's. Its count of
// children is read anew: who deletes a child writes it, and nothing else of the
// row, so that rev does not tell.
func lockSession(w *work, me uuid.UUID, known *row) {
	w.queue(`SELECT owner_server, epoch, rev, deleted_at, child_count, now() FROM sessions
		WHERE tenant_id = $1 AND id = $2 FOR UPDATE`, known.tenant, known.id).Query(func(rows pgx.Rows) error {
		var owner *uuid.UUID
		var epoch, rev int64
		var deleted *time.Time
		found := false
		for rows.Next() {
			found = true
			if err := rows.Scan(&owner, &epoch, &rev, &deleted, &known.childCount, &w.now); err != nil {
				return fmt.Errorf("lock session: %w", err)
			}
		}
		w.now = w.now.UTC()
		switch {
		case rows.Err() != nil:
			return fmt.Errorf("lock session: %w", rows.Err())
		case !found || deleted != nil:
			return notFound("session", sessionID(known.id))
		case owner != nil && *owner != me:
			return ErrForeign
		case epoch != known.epoch || rev != known.rev:
			return errStale
		}
		return nil
	})
}

// lockTree lets one transaction at a time change several sessions of a tree.
// It comes before any lock of a session below the root.
func lockTree(w *work, x *row) {
	w.queue(`SELECT FROM sessions WHERE tenant_id = $1 AND id = $2 FOR UPDATE`, x.tenant, x.root)
}

// updateSession writes an owner's image of a row that lockSession has locked,
// and counts the write.
func updateSession(w *work, me uuid.UUID, x *row, newChildren int) {
	x.rev++
	if x.owner == nil {
		w.queue(`SELECT pg_notify($1, $2)`, ownerChannel, ownerPayload(liveKey{x.tenant, x.id}))
	}
	x.owner = &me
	w.queue(`UPDATE sessions SET owner_server = $3, rev = rev + 1, epoch = $4, state = $5, length = $6,
			last_seq = $7, turn_count = $8, child_count = child_count + $9, title = $10, labels = $11, pin = $12,
			ttl_seconds = $13, updated_at = $14, expires_at = $15,
			closed_at = CASE WHEN $16 THEN coalesce(closed_at, $14) END
		WHERE tenant_id = $1 AND id = $2 RETURNING child_count`,
		x.tenant, x.id, me, x.epoch, x.state, x.length, x.lastSeq, x.turnCount, newChildren, x.title, x.labels, x.pin,
		x.ttl, x.updated, x.expires, x.state == StateClosed).Query(func(rows pgx.Rows) error {
		for rows.Next() { // none: it was the last one of a deleted tree
			if err := rows.Scan(&x.childCount); err != nil {
				return fmt.Errorf("update session: %w", err)
			}
		}
		return rows.Err()
	})
}
