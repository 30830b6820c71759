package sessions

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// importTimeMax bounds one import, whose transaction is open for as long.
const importTimeMax = 10 * time.Minute

// importLockMax bounds the wait for another import that is about to write the
// same ids, which is at its client's pace: longer ones end with CodeOverloaded.
const importLockMax = 10 * time.Second

// ImportResult is what an import made, after its commit.
type ImportResult struct {
	Session  Session `json:"session"`  // what was exported; its ancestors are above it, as deleted ones
	Sessions int     `json:"sessions"` // rows, those of deleted ones too
	Turns    int     `json:"turns"`
	Tokens   int     `json:"tokens"`
	Events   int     `json:"events"`
	// NewIDs says that ids of the bundle were taken, so that every session and
	// turn has a new one, in the same order. Else all have those of the bundle.
	NewIDs bool `json:"new_ids"`
}

// Import reads a bundle and writes it in one transaction, whole or not at all.
// The bundle must be of this server's model and tokenizer. A bundle that is
// refused is CodeInvalid with the line. A tenant has one import at a time, and
// all together have a few; others are refused with CodeOverloaded
// (bundle_gate.go). Its tokens count against the tenant's tokens a minute, as
// the prompt of a new session does: the first use of a line computes it.
func (m *Manager) Import(ctx context.Context, call Call, r io.Reader) (ImportResult, error) {
	if err := m.open(); err != nil {
		return ImportResult{}, err
	}
	place, leave, err := m.imports.enter(call.Tenant, time.Now())
	if err != nil {
		return ImportResult{}, err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, importTimeMax)
	defer cancel()
	stream := newImportStream(importBody{r, place})
	b := newBundleReader(stream, m.info, m.tok)
	b.hold = place.hold
	stream.b = b
	if err := b.header(); err != nil {
		return ImportResult{}, err
	}
	call.stream = stream
	return once(ctx, m, call, func(save save) (ImportResult, error) {
		if err := m.admitTokens(ctx, call.Tenant); err != nil {
			return ImportResult{}, err
		}
		if err := b.readSessions(); err != nil {
			return ImportResult{}, err
		}
		if err := m.admitSessions(ctx, call.Tenant, len(b.sessions)); err != nil {
			return ImportResult{}, err
		}
		i := &importing{m: m, call: call, tenant: call.Tenant, b: b}
		began := time.Now()
		err, _ := m.transact(ctx, func(w *work) {
			w.queue(waitForClient)
			w.queue(fmt.Sprintf("SET LOCAL lock_timeout = %d", importLockMax.Milliseconds()))
			w.readNow()
		}, func(w *work) error { return i.write(ctx, w, save) })
		if i.failed != nil { // the ledger only knows that the rows ended
			return ImportResult{}, i.failed
		}
		if err != nil {
			return ImportResult{}, ledgerError("import", i.refused(err))
		}
		m.counts.committed(time.Since(began))
		m.spend(call.Tenant, i.result.Tokens)
		i.publish()
		return i.result, nil
	})
}

// importing is one import under way.
type importing struct {
	m      *Manager
	call   Call
	tenant string
	b      *bundleReader
	now    time.Time
	first  int   // line of the section under way
	failed error // what is wrong with the bundle
	result ImportResult
}

func (i *importing) write(ctx context.Context, w *work, save save) error {
	i.now = w.now
	ids := make([]uuid.UUID, len(i.b.sessions))
	for n := range i.b.sessions {
		ids[n] = i.b.sessions[n].id
	}
	var taken bool
	err := w.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM sessions WHERE tenant_id = $1 AND id = ANY($2))`, i.tenant, ids).Scan(&taken)
	if err != nil {
		return err
	}
	if taken {
		i.b.rename()
	}
	for _, section := range []func(context.Context, *work) error{i.place, i.turns, i.runs, i.events} {
		i.first = i.b.line
		if err := section(ctx, w); err != nil {
			return err
		}
	}
	if i.failed = i.b.trailer(); i.failed != nil {
		return i.failed
	}
	top := i.b.byID[i.b.head.ID]
	rows, err := w.conn.Query(ctx, `SELECT `+rowColumns+` FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2`, i.tenant, i.b.sessions[top].id)
	if err != nil {
		return err
	}
	x, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if err != nil {
		return err
	}
	i.result = ImportResult{Session: x.session(), Sessions: len(i.b.sessions), Turns: i.b.counts.turns, Tokens: i.b.counts.tokens,
		Events: i.b.counts.events, NewIDs: i.b.newIDs}
	return save(w, i.result)
}

// copy streams rows into a table; next gives one at a time, nil at the end.
func (i *importing) copy(ctx context.Context, w *work, table string, columns []string, next func() ([]any, error)) error {
	source := &bundleRows{i: i, next: next}
	_, err := w.conn.CopyFrom(ctx, pgx.Identifier{table}, columns, source)
	return err
}

// bundleRows is a section as pgx wants it.
type bundleRows struct {
	i    *importing
	next func() ([]any, error)
	row  []any
}

func (s *bundleRows) Next() bool {
	if s.i.failed != nil {
		return false
	}
	s.row, s.i.failed = s.next()
	return s.row != nil && s.i.failed == nil
}

func (s *bundleRows) Values() ([]any, error) { return s.row, nil }
func (s *bundleRows) Err() error             { return s.i.failed }

// place writes the sessions. They are in memory: when another import has taken
// their ids since they were looked for, they are written with new ones. Ids that
// another transaction is about to write are waited for, for importLockMax.
func (i *importing) place(ctx context.Context, w *work) error {
	if _, err := w.conn.Exec(ctx, "SAVEPOINT place"); err != nil {
		return err
	}
	err := i.sessions(ctx, w)
	if !isUniqueViolation(err, "sessions_pkey") {
		return err
	}
	if _, err := w.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT place"); err != nil {
		return err
	}
	var answered bool
	err = w.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM idempotency WHERE tenant_id = $1 AND route = $2 AND key = $3 AND expires_at > now())`,
		i.tenant, i.call.Route, i.call.IdempotencyKey).Scan(&answered)
	if err != nil {
		return err
	}
	if answered { // it was this call, at another server
		return fail(CodeOverloaded, "another server has imported the bundle meanwhile, try again")
	}
	i.b.rename()
	return i.sessions(ctx, w)
}

func (i *importing) sessions(ctx context.Context, w *work) error {
	columns := []string{"tenant_id", "id", "parent_id", "forked_at", "root_id", "model", "model_digest", "tokenizer_digest", "parity_class",
		"state", "epoch", "first_seq", "last_seq", "gone_epoch", "length", "turn_count", "child_count", "title", "labels", "pin",
		"ttl_seconds", "created_at", "updated_at", "expires_at", "closed_at", "deleted_at", "kept_to"}
	n := 0
	info := i.m.info
	return i.copy(ctx, w, "sessions", columns, func() ([]any, error) {
		if n == len(i.b.sessions) {
			return nil, nil
		}
		x := &i.b.sessions[n]
		n++
		var expires *time.Time
		if x.TTLSeconds != nil && x.State != StateClosed { // an import is a use
			t := i.now.Add(time.Duration(*x.TTLSeconds) * time.Second)
			expires = &t
		}
		labels := x.Labels
		if labels == nil {
			labels = map[string]string{}
		}
		return []any{i.tenant, x.id, x.parent, x.ForkedAt, x.root, info.Name, info.Digest, info.TokenizerDigest, info.ParityClass,
			string(x.State), x.Epoch, x.FirstSeq, x.LastSeq, x.GoneEpoch, x.Length, x.TurnCount, x.children, x.Title, labels, x.Pin,
			x.TTLSeconds, x.CreatedAt, x.UpdatedAt, expires, x.ClosedAt, x.DeletedAt, x.KeptTo}, nil
	})
}

func (i *importing) turns(ctx context.Context, w *work) error {
	columns := []string{"tenant_id", "id", "session_id", "state", "request", "seed", "prompt", "tok_from", "prompt_to", "tok_to", "text",
		"finish_reason", "usage", "error", "logprobs", "created_at", "started_at", "ended_at"}
	return i.copy(ctx, w, "turns", columns, func() ([]any, error) {
		t, x, id, ok, err := i.b.turn()
		if !ok {
			return nil, err
		}
		prompt := t.Prompt
		if prompt == nil {
			prompt = []int32{}
		}
		return []any{i.tenant, id, x.id, string(t.State), []byte(t.Request), t.Seed, prompt, t.From, t.From + len(prompt), t.To, t.Text,
			t.FinishReason, []byte(t.Usage), []byte(t.Error), []byte(t.Logprobs), t.CreatedAt, t.StartedAt, t.EndedAt}, nil
	})
}

func (i *importing) runs(ctx context.Context, w *work) error {
	columns := []string{"tenant_id", "session_id", "tok_from", "ids", "turn_id", "first_seq", "cuts", "at_ms", "base_time", "epoch"}
	return i.copy(ctx, w, "token_runs", columns, func() ([]any, error) {
		r, x, turn, ok, err := i.b.run()
		if !ok {
			return nil, err
		}
		return []any{i.tenant, x.id, r.From, r.IDs, turn, r.FirstSeq, r.Cuts, r.AtMS, r.Time, r.Epoch}, nil
	})
}

func (i *importing) events(ctx context.Context, w *work) error {
	columns := []string{"tenant_id", "session_id", "seq", "epoch", "type", "turn_id", "time", "data"}
	return i.copy(ctx, w, "events", columns, func() ([]any, error) {
		e, x, turn, ok, err := i.b.event()
		if !ok {
			return nil, err
		}
		return []any{i.tenant, x.id, e.Seq, e.Epoch, string(e.Event), turn, e.Time, []byte(e.Data)}, nil
	})
}

// refused says what the ledger's own rules have against a bundle. Ids of turns
// that are there already, while those of their sessions are not, are no export's.
func (i *importing) refused(err error) error {
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || e.ConstraintName == "idempotency_pkey" {
		return err
	}
	why := e.ConstraintName
	switch {
	case e.Code == "55P03":
		return &Error{Code: CodeOverloaded, Message: "another import of the same sessions is under way, try again", cause: err}
	case e.ConstraintName == "turns_pkey":
		why = "ids of turns that other sessions have here"
	case e.Code[:2] == "22", e.Code[:2] == "23", e.Code[:2] == "54": // data, constraints, what is too large or too deep
	case e.Code == "57014" && strings.HasPrefix(e.Message, copyFailed): // a value that its column cannot hold
		why = strings.TrimPrefix(e.Message, copyFailed)
	default:
		return err
	}
	return &Error{Code: CodeInvalid, Field: "bundle", cause: err,
		Message: fmt.Sprintf("line %d: something in lines %d to %d breaks the ledger's rules (%s)", i.b.line, i.first, i.b.line, why)}
}

// copyFailed is how Postgres begins to say that this server gave up a COPY.
const copyFailed = "COPY from stdin failed: "

// publish tells watchers of the new sessions.
func (i *importing) publish() {
	for n := range i.b.sessions {
		x := &i.b.sessions[n]
		if x.DeletedAt != nil {
			continue
		}
		root := sessionID(x.root)
		e := Event{Seq: 1, Epoch: x.Epoch, Type: EventSessionCreated, SessionID: sessionID(x.id), Time: i.now,
			EventData: EventData{RootID: root, ForkedAt: x.ForkedAt}}
		if x.parent != nil {
			id := sessionID(*x.parent)
			e.ParentID = &id
		}
		i.m.hub.publish(i.tenant, root, e)
	}
}
