package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// turnRow is a turn as the ledger has it.
type turnRow struct {
	tenant                string
	id, session           uuid.UUID
	state                 TurnState
	request               []byte
	seed                  int64
	prompt                []int32
	from, promptTo, to    int
	text                  string
	finish                *string
	usage, problem, probs []byte
	created               time.Time
	started, ended        *time.Time
	inherited, clipped    bool
}

const turnColumns = `t.tenant_id, t.id, t.session_id, t.state, t.request, t.seed, t.prompt, t.tok_from, t.prompt_to, t.tok_to,
	t.text, t.finish_reason, t.usage, t.error, t.logprobs, t.created_at, t.started_at, t.ended_at`

// turnViewColumns are turnColumns without what no client is shown: prompts and
// requests, which are larger than answers.
const turnViewColumns = `t.tenant_id, t.id, t.session_id, t.state, jsonb_build_object('stop', t.request->'stop'), t.seed, NULL::int4[],
	t.tok_from, t.prompt_to, t.tok_to, t.text, t.finish_reason, t.usage, t.error, t.logprobs, t.created_at, t.started_at, t.ended_at`

// turnBytes is about what a turn with its text, but without its tokens, takes
// as JSON.
const turnBytes = 800

// bytes is about what the turn takes, in memory and as JSON. Text that its
// tokens make is not there yet.
func (x *turnRow) bytes() int64 {
	return turnBytes + jsonBytes(x.text) + int64(len(x.usage)+len(x.problem)+len(x.probs))
}

func (x *turnRow) fields() []any {
	return []any{&x.tenant, &x.id, &x.session, &x.state, &x.request, &x.seed, &x.prompt, &x.from, &x.promptTo, &x.to,
		&x.text, &x.finish, &x.usage, &x.problem, &x.probs, &x.created, &x.started, &x.ended}
}

// textFromTokens tells whether the row has not the text that its tokens make:
// there is none before the end, not of a part, not after a purge, and not of
// a turn that a server without its tokenizer ended.
func (x *turnRow) textFromTokens() bool {
	return x.state == TurnRunning || x.clipped || x.text == "" && x.to > x.promptTo
}

func (x *turnRow) stops() ([]string, error) {
	var r TurnRequest
	if err := json.Unmarshal(x.request, &r); err != nil {
		return nil, fmt.Errorf("read request of %s: %w", turnID(x.id), err)
	}
	return r.Stop, nil
}

// turn is the row as clients see it, without tokens.
func (x *turnRow) turn() (Turn, error) {
	t := Turn{
		ID: turnID(x.id), Object: "turn", SessionID: sessionID(x.session), State: x.state, Text: x.text, FinishReason: x.finish,
		From: x.from, To: x.to, Seed: x.seed, Inherited: x.inherited, CreatedAt: x.created.UTC(),
		StartedAt: utc(x.started), EndedAt: utc(x.ended),
	}
	for _, f := range []struct {
		data []byte
		to   any
	}{{x.usage, &t.Usage}, {x.problem, &t.Error}, {x.probs, &t.Logprobs}} {
		if f.data != nil {
			if err := json.Unmarshal(f.data, f.to); err != nil {
				return t, fmt.Errorf("read %s: %w", t.ID, err)
			}
		}
	}
	if x.clipped { // what it came to later is not part of this line
		t.FinishReason, t.Usage, t.Error, t.Logprobs = nil, nil, nil, nil
		t.State = TurnCompleted
	}
	return t, nil
}

func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	u := t.UTC()
	return &u
}

func insertTurn(b *pgx.Batch, x *turnRow) {
	b.Queue(`INSERT INTO turns (tenant_id, id, session_id, state, request, seed, prompt, tok_from, prompt_to, tok_to,
			created_at, started_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)`,
		x.tenant, x.id, x.session, x.state, x.request, x.seed, x.prompt, x.from, x.promptTo, x.to, x.created, x.started)
}

// notDeleted keeps a statement about a line from reading what a deletion has
// left of it since the session's row was read.
const notDeleted = ` AND EXISTS (SELECT FROM sessions own WHERE own.tenant_id = $1 AND own.id = $2 AND own.deleted_at IS NULL)`

// turnsSQL reads own and inherited turns of a session whose line has $3 tokens,
// newest first, those older than $4 if it is given, fewer than $5. Their place on
// the line says which is newer; ids are drawn by the clock of whoever had the
// session. Rows behind the first one with which they are more than $6 bytes are
// left off; the last column counts those too, up to $5.
const turnsSQL = linesCTE + `, page AS (
		SELECT t.id, l.depth > 0 AS inherited, l.cut, t.tok_from, t.created_at,
			octet_length(t.text) + coalesce(octet_length(t.logprobs::text), 0)::bigint AS bytes
		FROM line l JOIN turns t ON t.tenant_id = l.tenant_id AND t.session_id = l.id
		WHERE (l.depth = 0 OR t.tok_from < l.cut AND t.tok_to > t.tok_from) AND ($4::uuid IS NULL OR
				(t.tok_from, t.created_at, t.id) < (SELECT a.tok_from, a.created_at, a.id FROM turns a WHERE a.tenant_id = $1 AND a.id = $4))` + notDeleted + `
		ORDER BY t.tok_from DESC, t.created_at DESC, t.id DESC LIMIT $5
	), sized AS (
		SELECT p.*, sum(p.bytes) OVER (ORDER BY p.tok_from DESC, p.created_at DESC, p.id DESC) - p.bytes AS before, count(*) OVER () AS all_of_it
		FROM page p)
	SELECT ` + turnViewColumns + `, p.inherited, p.cut, p.all_of_it
	FROM sized p JOIN turns t ON t.tenant_id = $1 AND t.id = p.id
	WHERE p.before <= $6
	ORDER BY t.tok_from DESC, t.created_at DESC, t.id DESC LIMIT $5::bigint - 1`

// selectTurns reads all own and inherited turns of a session, newest first.
func selectTurns(ctx context.Context, q querier, tenant string, session uuid.UUID, length int) ([]turnRow, error) {
	rows, err := q.Query(ctx, turnsSQL, tenant, session, length, nil, 1<<30, int64(1)<<60)
	if err != nil {
		return nil, ledgerError("read turns", err)
	}
	var all int
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (turnRow, error) { return scanTurn(r, &all) })
	return list, ledgerError("read turns", err)
}

// selectTurn reads one own or inherited turn, of a session that has not been
// deleted.
func selectTurn(ctx context.Context, q querier, tenant string, session uuid.UUID, length int, id uuid.UUID) (turnRow, error) {
	rows, err := q.Query(ctx, linesCTE+`
		SELECT `+turnViewColumns+`, l.depth > 0, l.cut
		FROM line l JOIN turns t ON t.tenant_id = l.tenant_id AND t.session_id = l.id
		WHERE t.id = $4 AND (l.depth = 0 OR t.tok_from < l.cut AND t.tok_to > t.tok_from)`+notDeleted, tenant, session, length, id)
	if err != nil {
		return turnRow{}, ledgerError("read turn", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, func(r pgx.CollectableRow) (turnRow, error) { return scanTurn(r) })
	if errors.Is(err, pgx.ErrNoRows) {
		return x, notFound("turn", turnID(id))
	}
	return x, ledgerError("read turn", err)
}

// scanTurn scans turnViewColumns, inherited and cut, and what follows them.
func scanTurn(r pgx.CollectableRow, more ...any) (turnRow, error) {
	var x turnRow
	var cut int
	err := r.Scan(append(append(x.fields(), &x.inherited, &cut), more...)...)
	if x.state == TurnRunning { // tok_to is written at its end; the line's is what there is by now
		x.to = cut
		x.clipped = x.inherited
	} else if x.inherited && x.to > cut {
		x.to, x.clipped = cut, true
	}
	return x, err
}
