package sessions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// takeLockWait is how long a takeover waits for a row that somebody else has
	// locked: longer than a server that was stopped in the middle of a
	// transaction keeps its locks. After that it is a fault of the one session,
	// which is left: a second try waits takeLockAgain.
	takeLockWait  = stalledTxMax + stalledTxMax/5
	takeLockAgain = 100 * time.Millisecond

	// takeMost is how long a takeover looks for the sessions that are to blame.
	// What it has not come to by then is left as well, and tried by the next.
	takeMost = takeOverTimeout / 3

	// leftLogged bounds the sessions that one takeover names in the log as left.
	leftLogged = 20
)

// A remnant is what is left in the list of servers of one that was taken over
// but for sessions that could not be. Its lease, far in the past, says so.
const remnantLease = `'-infinity'::timestamptz`

// errRowLocked: a session cannot be taken over now.
var errRowLocked = errors.New("another transaction holds its row")

// takeover is one server's. It leaves nothing half done: it is one transaction.
//
// A session that cannot be taken over, whatever is wrong with its rows, must not
// keep the others from it. So all are tried at once, and if that fails by
// halves, under savepoints, down to the ones that are to blame. Those stay the
// dead server's, whose row remains because they name it: calls on them are
// refused with CodeQuarantined, and they are tried again ever more seldom.
//
// The fence holds for them as for the others. What was taken has a higher
// epoch. What was left is as its server had it, and nobody else's: if that
// server only slept, it finds itself a remnant, gives up all it had, and goes on
// with what is still its own.
type takeover struct {
	m       *Manager
	server  uuid.UUID
	until   time.Time // see takeMost
	ended   []takenTurn
	left    []leftSession // to blame
	resting int           // sessions that were to blame a while ago
	later   int           // sessions not tried
}

type leftSession struct {
	liveKey
	err error
}

// takeOver makes a dead server's sessions nobody's, in one transaction: their
// epochs rise, running turns are interrupted at their last committed token,
// queued ones stay queued. A server is dead when its lease has run out; with
// gone, also when its lock is free. It returns false for one that lives.
//
// The server's row is locked first. Its renewal waits for that, finds the row
// gone, or a remnant, and then knows.
func (m *Manager) takeOver(ctx context.Context, server uuid.UUID, gone bool) (taken bool, err error) {
	t := &takeover{m: m, server: server, until: time.Now().Add(takeMost)}
	err = pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error {
		var err error
		if taken, err = isDead(ctx, tx, server, gone); err != nil || !taken {
			return err
		}
		return t.run(ctx, tx)
	})
	if isUnavailable(err) && len(t.ended) > 0 { // it may have happened: who watches is told once that is known
		m.wg.Go(func() {
			x := t.ended[0]
			id, _ := parseID(sessionPrefix, x.event.SessionID)
			if m.newSession(liveKey{x.tenant, id}).settle(x.event.Epoch, 1) {
				t.tell()
			}
		})
	}
	if err != nil {
		return false, ledgerError("take over server "+server.String(), err)
	}
	if !taken {
		return false, nil
	}
	m.peers.gone(server)
	t.tell()
	t.report()
	return true, nil
}

// tell has those who watch, and the log, know of the turns that were ended.
func (t *takeover) tell() {
	for _, x := range t.ended {
		t.m.log.Warn("turn interrupted by a crash", "session", x.event.SessionID, "turn", x.event.TurnID)
		t.m.hub.publish(x.tenant, sessionID(x.root), x.event)
	}
}

func isDead(ctx context.Context, tx pgx.Tx, server uuid.UUID, gone bool) (bool, error) {
	var dead bool
	err := tx.QueryRow(ctx, `SELECT lease_until < now() FROM servers WHERE id = $1 FOR UPDATE`, server).Scan(&dead)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // another one was faster
		return true, nil
	case err != nil || dead || !gone:
		return dead, err
	}
	err = tx.QueryRow(ctx, `SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))`, server.String()).Scan(&dead)
	return dead, err
}

// run takes what can be taken. Its server's row is locked.
func (t *takeover) run(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT tenant_id, id FROM sessions WHERE owner_server = $1 ORDER BY tenant_id, id`, t.server)
	if err != nil {
		return fmt.Errorf("find its sessions: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (k liveKey, err error) { return k, r.Scan(&k.tenant, &k.id) })
	if err != nil {
		return fmt.Errorf("find its sessions: %w", err)
	}
	found := len(all)
	all = slices.DeleteFunc(all, func(k liveKey) bool { return !t.m.untaken.due(k) })
	t.resting = found - len(all)
	if err := t.take(ctx, tx, all, true); err != nil {
		return err
	}
	if len(t.left)+t.resting+t.later == 0 {
		_, err := tx.Exec(ctx, removeServer, t.server)
		return wrap("remove it", err)
	}
	_, err = tx.Exec(ctx, `WITH gone AS (DELETE FROM residency WHERE server_id = $1 AND tier <> 'disk')
		UPDATE servers SET lease_until = `+remnantLease+` WHERE id = $1`, t.server)
	return wrap("make it a remnant", err)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// take takes all of some sessions, or, where that fails, those that can be
// taken, and notes the others. Its errors are about the ledger.
func (t *takeover) take(ctx context.Context, tx pgx.Tx, keys []liveKey, first bool) error {
	switch {
	case len(keys) == 0:
		return nil
	case !first && time.Now().After(t.until):
		t.later += len(keys)
		return nil
	}
	var ended []takenTurn
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) (err error) { // a savepoint
		ended, err = t.takeAll(ctx, tx, keys, first)
		return err
	})
	switch {
	case err == nil:
		t.ended = append(t.ended, ended...)
		return nil
	case ctx.Err() != nil || isUnavailable(err) || tx.Conn().IsClosed():
		return err
	case len(keys) == 1 && !first:
		t.left = append(t.left, leftSession{keys[0], err})
		return nil
	case first:
		return t.take(ctx, tx, keys, false)
	}
	half := len(keys) / 2
	if err := t.take(ctx, tx, keys[:half], false); err != nil {
		return err
	}
	return t.take(ctx, tx, keys[half:], false)
}

// takeAll takes some sessions, or fails. The first time it waits for those that
// are locked.
func (t *takeover) takeAll(ctx context.Context, tx pgx.Tx, keys []liveKey, first bool) ([]takenTurn, error) {
	tenants, ids := make([]string, len(keys)), make([]uuid.UUID, len(keys))
	for i, k := range keys {
		tenants[i], ids[i] = k.tenant, k.id
	}
	if err := t.lock(ctx, tx, tenants, ids, first); err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, `SELECT s.tenant_id, s.id, t.id FROM unnest($2::text[], $3::uuid[]) AS k (tenant_id, id)
		JOIN sessions s ON s.tenant_id = k.tenant_id AND s.id = k.id AND s.owner_server = $1
		JOIN turns t ON t.tenant_id = s.tenant_id AND t.session_id = s.id AND t.state = 'running'`, t.server, tenants, ids)
	if err != nil {
		return nil, fmt.Errorf("find running turns: %w", err)
	}
	running, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (x queuedTurn, err error) {
		return x, r.Scan(&x.tenant, &x.session, &x.turn)
	})
	if err != nil {
		return nil, fmt.Errorf("find running turns: %w", err)
	}
	var ended []takenTurn
	for _, x := range running {
		end, err := t.m.interrupt(ctx, tx, x.tenant, x.session, x.turn)
		if err != nil {
			return nil, fmt.Errorf("interrupt %s: %w", turnID(x.turn), err)
		}
		ended = append(ended, end)
	}
	_, err = tx.Exec(ctx, `UPDATE sessions s SET owner_server = NULL, epoch = epoch + 1, rev = rev + 1
		FROM unnest($2::text[], $3::uuid[]) AS k (tenant_id, id)
		WHERE s.tenant_id = k.tenant_id AND s.id = k.id AND s.owner_server = $1`, t.server, tenants, ids)
	return ended, wrap("set free", err)
}

// lock locks the rows, in the order of all who lock several.
func (t *takeover) lock(ctx context.Context, tx pgx.Tx, tenants []string, ids []uuid.UUID, first bool) error {
	wait, skip := cmp.Or(t.m.opts.lockWait, takeLockWait), ""
	if !first {
		wait, skip = takeLockAgain, " SKIP LOCKED"
	}
	var there, locked int
	b := &pgx.Batch{}
	b.Queue(fmt.Sprintf(`SET LOCAL lock_timeout = %d`, wait.Milliseconds()))
	const mine = ` FROM unnest($2::text[], $3::uuid[]) AS k (tenant_id, id)
		JOIN sessions s ON s.tenant_id = k.tenant_id AND s.id = k.id AND s.owner_server = $1`
	b.Queue(`SELECT count(*)`+mine, t.server, tenants, ids).QueryRow(func(r pgx.Row) error { return r.Scan(&there) })
	b.Queue(`SELECT count(*) FROM (SELECT`+mine+` ORDER BY s.tenant_id, s.id FOR UPDATE OF s`+skip+`) l`, t.server, tenants, ids).
		QueryRow(func(r pgx.Row) error { return r.Scan(&locked) })
	if err := sendBatch(ctx, tx, "lock", b); err != nil {
		return err
	}
	if !first && locked < there {
		return errRowLocked
	}
	return nil
}

// report says what was left, and when it is tried again.
func (t *takeover) report() {
	m := t.m
	switch {
	case t.later > 0: // at once
		m.remnants.done(t.server)
		m.log.Warn("a takeover is not finished yet", "server", t.server, "sessions", t.later)
	case len(t.left)+t.resting > 0:
		m.remnants.failed(t.server)
	default:
		m.remnants.done(t.server)
	}
	for i, x := range t.left {
		again := m.untaken.failed(x.liveKey)
		if i < leftLogged {
			m.log.Error("a session cannot be taken over, calls on it are refused", "session", sessionID(x.id), "server", t.server,
				"again_in", again.String(), "error", x.err)
		}
	}
	if more := len(t.left) - leftLogged; more > 0 {
		m.log.Error("more sessions cannot be taken over", "server", t.server, "sessions", more)
	}
}

// quarantined refuses a call on a session that no takeover could take.
func quarantined(id uuid.UUID) *Error {
	return fail(CodeQuarantined, "session %q was a server's that is gone, and cannot be taken over: something is wrong with its rows. "+
		"The servers' logs say what; it is tried again from time to time", sessionID(id))
}
