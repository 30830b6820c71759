package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// querier is what a pool and a transaction have in common.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// row is a session as the ledger has it.
type row struct {
	tenant                 string
	id, root               uuid.UUID
	parent                 *uuid.UUID
	forkedAt               *int
	model                  string
	state                  State
	owner                  *uuid.UUID
	epoch, rev             int64
	length                 int
	lastSeq                int64
	turnCount, childCount  int
	title                  string
	labels                 map[string]string
	pin                    bool
	ttl                    *int
	created, updated       time.Time
	expires, deleted       *time.Time
	residency              Residency
	modelDigest, tokDigest string
	parity                 string
}

const rowColumns = `s.tenant_id, s.id, s.root_id, s.parent_id, s.forked_at, s.model, s.state, s.owner_server, s.epoch, s.rev,
	s.length, s.last_seq, s.turn_count, s.child_count, s.title, s.labels, s.pin, s.ttl_seconds,
	s.created_at, s.updated_at, s.expires_at, s.deleted_at, s.model_digest, s.tokenizer_digest, s.parity_class,
	(SELECT jsonb_build_object(
		'device', coalesce(sum(tokens) FILTER (WHERE tier = 'device'), 0),
		'host', coalesce(sum(tokens) FILTER (WHERE tier = 'host'), 0),
		'disk', coalesce(sum(tokens) FILTER (WHERE tier = 'disk'), 0),
		'snapshots', coalesce(max(snapshots), 0))
	FROM residency p WHERE p.tenant_id = s.tenant_id AND p.session_id = s.id)`

func scanRow(r pgx.CollectableRow) (row, error) { return scanRowAnd(r) }

// scanRowAnd scans the columns of a row and those that follow them.
func scanRowAnd(r pgx.CollectableRow, more ...any) (row, error) {
	var x row
	err := r.Scan(append([]any{&x.tenant, &x.id, &x.root, &x.parent, &x.forkedAt, &x.model, &x.state, &x.owner, &x.epoch, &x.rev,
		&x.length, &x.lastSeq, &x.turnCount, &x.childCount, &x.title, &x.labels, &x.pin, &x.ttl,
		&x.created, &x.updated, &x.expires, &x.deleted, &x.modelDigest, &x.tokDigest, &x.parity, &x.residency}, more...)...)
	return x, err
}

// session is the row as clients see it.
func (x *row) session() Session {
	s := Session{
		ID: sessionID(x.id), Object: "session", Model: x.model, Title: x.title, Labels: x.labels, State: x.state,
		RootID: sessionID(x.root), ForkedAt: x.forkedAt, Length: x.length, TurnCount: x.turnCount, ChildCount: x.childCount,
		Residency: x.residency, LastSeq: x.lastSeq, Epoch: x.epoch, TTLSeconds: x.ttl, Pin: x.pin,
		CreatedAt: x.created.UTC(), UpdatedAt: x.updated.UTC(),
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	if x.parent != nil {
		id := sessionID(*x.parent)
		s.ParentID = &id
	}
	if x.expires != nil && x.state != StateRunning && x.state != StateClosed {
		t := x.expires.UTC()
		s.ExpiresAt = &t
	}
	return s
}

// selectRow reads one session that is not deleted.
func selectRow(ctx context.Context, q querier, tenant string, id uuid.UUID) (row, error) {
	rows, err := q.Query(ctx, `SELECT `+rowColumns+` FROM sessions s
		WHERE s.tenant_id = $1 AND s.id = $2 AND s.deleted_at IS NULL`, tenant, id)
	if err != nil {
		return row{}, ledgerError("read session", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if errors.Is(err, pgx.ErrNoRows) {
		return row{}, notFound("session", sessionID(id))
	}
	if err != nil {
		return row{}, ledgerError("read session", err)
	}
	return x, nil
}

// lines selects the sessions whose runs make up a session's line: itself and
// its ancestors, each cut where the younger one leaves it.
const linesCTE = `WITH RECURSIVE line AS (
	SELECT s.tenant_id, s.id, s.parent_id, s.forked_at, $3::int AS cut, 0 AS depth
	FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2
	UNION ALL
	SELECT p.tenant_id, p.id, p.parent_id, p.forked_at, least(l.cut, l.forked_at), l.depth + 1
	FROM line l JOIN sessions p ON p.tenant_id = l.tenant_id AND p.id = l.parent_id
	WHERE l.parent_id IS NOT NULL
)`

// selectLineSQL reads the runs that have tokens of [$4, $3) of a line, in no
// order: Postgres would sort a million tokens on disk. An ancestor that the
// line leaves before $4 has none, and is not looked at.
const selectLineSQL = linesCTE + `
	SELECT r.tok_from, r.ids[1:least(l.cut - r.tok_from, cardinality(r.ids))]
	FROM line l JOIN token_runs r ON r.tenant_id = l.tenant_id AND r.session_id = l.id
	WHERE l.cut > $4 AND r.tok_from < l.cut AND r.tok_from + cardinality(r.ids) > $4`

// selectLine reads [from, to) of a session's line, over all its ancestors, in
// one query.
func selectLine(ctx context.Context, q querier, tenant string, id uuid.UUID, from, to int) ([]int32, error) {
	if from >= to {
		return []int32{}, nil
	}
	rows, err := q.Query(ctx, selectLineSQL, tenant, id, to, from)
	if err != nil {
		return nil, ledgerError("read line", err)
	}
	line := make([]int32, to-from)
	have := 0 // runs do not overlap: together they are all, or there is a gap
	var start int
	var ids []int32
	_, err = pgx.ForEachRow(rows, []any{&start, &ids}, func() error {
		if start < from {
			ids = ids[min(from-start, len(ids)):]
			start = from
		}
		if start+len(ids) > to {
			return fmt.Errorf("the ledger has tokens [%d, %d) of %s in a line cut at %d", start, start+len(ids), sessionID(id), to)
		}
		have += copy(line[start-from:], ids)
		return nil
	})
	if err != nil {
		return nil, ledgerError("read line", err)
	}
	if have != to-from {
		return nil, fmt.Errorf("the ledger has %d tokens of [%d, %d) of %s", have, from, to, sessionID(id))
	}
	return line, nil
}

var (
	// ErrForeign is the cause of an error when another server has the session.
	ErrForeign = errors.New("session is owned by another server")
	// errStale: the ledger's row is not the one in memory.
	errStale = errors.New("session changed in the ledger")
)

// touch moves a session's idle time on.
func (x *row) touch(now time.Time) {
	x.updated = now
	x.expires = nil
	if x.ttl != nil && x.state != StateClosed {
		t := now.Add(time.Duration(*x.ttl) * time.Second)
		x.expires = &t
	}
}

// insertSessions inserts sessions that differ in id, title and labels only,
// with the created event that is the same for all, in two statements: sixty
// children cost little more than one.
func insertSessions(b *pgx.Batch, all []*row, created Event) error {
	ids, titles, labels := make([]uuid.UUID, len(all)), make([]string, len(all)), make([]string, len(all))
	for i, x := range all {
		text, err := json.Marshal(x.labels)
		if err != nil {
			return fmt.Errorf("encode labels: %w", err)
		}
		ids[i], titles[i], labels[i] = x.id, x.title, string(text)
	}
	x := all[0]
	root := &x.root
	if x.parent == nil {
		root = nil // its own id
	}
	b.Queue(`INSERT INTO sessions (tenant_id, id, parent_id, forked_at, root_id, model, model_digest, tokenizer_digest,
			parity_class, state, owner_server, epoch, rev, length, last_seq, title, labels, pin, ttl_seconds,
			created_at, updated_at, expires_at)
		SELECT $1, k.id, $4, $5, coalesce($6, k.id), $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, k.title, k.labels::jsonb, $17, $18,
			$19, $20, $21
		FROM unnest($2::uuid[], $3::text[], $22::text[]) AS k (id, title, labels)`,
		x.tenant, ids, titles, x.parent, x.forkedAt, root, x.model, x.modelDigest, x.tokDigest, x.parity, x.state, x.owner,
		x.epoch, x.rev, x.length, x.lastSeq, x.pin, x.ttl, x.created, x.updated, x.expires, labels)
	data, err := json.Marshal(created.EventData)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	b.Queue(`INSERT INTO events (tenant_id, session_id, seq, epoch, type, time, data)
		SELECT $1, id, $3, $4, $5, $6, $7 FROM unnest($2::uuid[]) AS k (id)`,
		x.tenant, ids, created.Seq, created.Epoch, created.Type, created.Time, data)
	return nil
}

func insertEvents(b *pgx.Batch, tenant string, session uuid.UUID, events []Event) error {
	for _, e := range events {
		data, err := json.Marshal(e.EventData)
		if err != nil {
			return fmt.Errorf("encode event: %w", err)
		}
		var turn *uuid.UUID
		if id, ok := parseID(turnPrefix, e.TurnID); ok {
			turn = &id
		}
		b.Queue(`INSERT INTO events (tenant_id, session_id, seq, epoch, type, turn_id, time, data)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`, tenant, session, e.Seq, e.Epoch, e.Type, turn, e.Time, data)
	}
	return nil
}

func sendBatch(ctx context.Context, tx pgx.Tx, what string, b *pgx.Batch) error {
	if b.Len() == 0 {
		return nil
	}
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// run is one row of token_runs.
type run struct {
	tokFrom  int
	ids      []int32
	turn     *uuid.UUID
	firstSeq int64
	cuts     []int16
	atMS     []int32
	base     time.Time
	epoch    int64
}

func insertRun(b *pgx.Batch, tenant string, session uuid.UUID, r run) {
	if r.cuts == nil {
		r.cuts, r.atMS = []int16{}, []int32{}
	}
	b.Queue(`INSERT INTO token_runs (tenant_id, session_id, tok_from, ids, turn_id, first_seq, cuts, at_ms, base_time, epoch)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		tenant, session, r.tokFrom, r.ids, r.turn, r.firstSeq, r.cuts, r.atMS, r.base, r.epoch)
}

// ledgerError gives a failed statement its code: whether the ledger is away or
// something is wrong.
func ledgerError(what string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if errors.Is(err, context.Canceled) {
		return err
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.ConstraintName == "sessions_owner_server_fkey" {
		return &Error{Code: CodeOverloaded, Message: "this server was taken for dead and is about to come back, try again", cause: err}
	}
	if isUnavailable(err) {
		return &Error{Code: CodeLedgerUnavailable, Message: "the ledger does not answer", cause: fmt.Errorf("%s: %w", what, err)}
	}
	return &Error{Code: CodeInternal, Message: what + " failed", cause: err}
}

// isUnavailable tells whether err is about reaching Postgres rather than about
// what it was asked.
func isUnavailable(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return !errors.Is(err, pgx.ErrNoRows) && isConnError(err)
	}
	if e.Code == "25P03" { // this server stood still in the middle of a transaction
		return true
	}
	switch e.Code[:2] {
	case "08", "57", "53": // connection, shutting down or starting up, out of resources
		return true
	}
	return false
}

func isConnError(err error) bool {
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	for _, known := range []error{io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, pgconn.ErrConnClosed} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// isUniqueViolation tells whether a constraint of that name refused a row.
func isUniqueViolation(err error, constraint string) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && e.Code == "23505" && e.ConstraintName == constraint
}
