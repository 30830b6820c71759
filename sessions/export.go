package sessions

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// exportTimeMax bounds one export: a reader that takes little at a time must
	// not hold the snapshot for good.
	exportTimeMax = 10 * time.Minute

	exportChunk = 64 // sessions per statement: what Postgres has to sort at once
)

// Export writes a bundle of a session and everything forked from it, as of one
// moment. Errors that come before the first byte is written leave w alone; a
// bundle without its trailer is none. An open turn in the subtree is refused
// with CodeTurnInProgress. A tenant has one export at a time, and all together
// have a few; others are refused with CodeOverloaded, and a slow one that gives
// way ends with it (bundle_gate.go).
func (m *Manager) Export(ctx context.Context, tenant, id string, w io.Writer) error {
	u, err := parseSession(id)
	if err != nil {
		return err
	}
	place, leave, err := m.exports.enter(tenant, time.Now())
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, exportTimeMax)
	defer cancel()
	x := &export{tenant: tenant, out: newBundleWriter(exportBody{w, place})}
	opts := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, m.pool, opts, func(tx pgx.Tx) error {
		x.tx = tx
		if _, err := tx.Exec(ctx, waitForClient); err != nil {
			return err
		}
		return x.write(ctx, u)
	})
	return ledgerError("export", err)
}

type bundleWriter struct {
	out   *bufio.Writer
	sum   hash.Hash
	lines int
	buf   bytes.Buffer
	enc   *json.Encoder
}

func newBundleWriter(w io.Writer) *bundleWriter {
	b := &bundleWriter{out: bufio.NewWriterSize(w, 64<<10), sum: sha256.New()}
	b.enc = json.NewEncoder(&b.buf)
	b.enc.SetEscapeHTML(false)
	return b
}

func (b *bundleWriter) line(v any) error {
	b.buf.Reset()
	if err := b.enc.Encode(v); err != nil { // with its line end
		return fmt.Errorf("encode line %d: %w", b.lines+1, err)
	}
	if b.buf.Len() > BundleLineBytesMax {
		return invalid("session_id", "line %d of the bundle would have %d bytes, at most %d are allowed", b.lines+1, b.buf.Len(), BundleLineBytesMax)
	}
	b.lines++
	b.sum.Write(b.buf.Bytes())
	if _, err := b.out.Write(b.buf.Bytes()); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

func (b *bundleWriter) end() error {
	t := bundleTrailer{Type: lineTrailer, Lines: b.lines, SHA256: hex.EncodeToString(b.sum.Sum(nil))}
	if err := b.line(t); err != nil {
		return err
	}
	if err := b.out.Flush(); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	return nil
}

// export is one export under way. ids and cuts go together: cuts[i] is how much
// of a line is wanted where not all of it is, -1 else.
type export struct {
	tenant string
	tx     pgx.Tx
	out    *bundleWriter
	list   []bundleSession
	ids    []uuid.UUID
	cuts   []int32
}

func (x *export) write(ctx context.Context, id uuid.UUID) error {
	h := bundleHeader{Type: lineHeader, Format: bundleFormat, Version: bundleVersion, ID: sessionID(id)}
	err := x.tx.QueryRow(ctx, `SELECT now(), model, model_digest, tokenizer_digest, parity_class FROM sessions
		WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`, x.tenant, id).
		Scan(&h.ExportedAt, &h.Model, &h.ModelDigest, &h.TokenizerDigest, &h.ParityClass)
	if err == pgx.ErrNoRows {
		return notFound("session", sessionID(id))
	}
	if err != nil {
		return err
	}
	h.ExportedAt = h.ExportedAt.UTC()
	if err := x.readSessions(ctx, id, h.ExportedAt); err != nil {
		return err
	}
	h.Sessions = len(x.list)
	if err := x.count(ctx, &h); err != nil {
		return err
	}
	if err := x.out.line(h); err != nil {
		return err
	}
	for i := range x.list {
		if err := x.out.line(&x.list[i]); err != nil {
			return err
		}
	}
	for _, section := range []func(context.Context, []uuid.UUID, []int32) error{x.turns, x.runs, x.events} {
		for at := 0; at < len(x.ids); at += exportChunk {
			to := min(at+exportChunk, len(x.ids))
			if err := section(ctx, x.ids[at:to], x.cuts[at:to]); err != nil {
				return err
			}
		}
	}
	return x.out.end()
}

// readSessions lists the ancestors, cut where the lines leave them, and the
// subtree with the places of its deleted ones.
func (x *export) readSessions(ctx context.Context, id uuid.UUID, now time.Time) error {
	rows, err := x.tx.Query(ctx, `WITH RECURSIVE up AS (
			SELECT s.id, s.parent_id, s.forked_at, s.length AS cut, 0 AS depth FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2
			UNION ALL
			SELECT p.id, p.parent_id, p.forked_at, least(u.cut, u.forked_at), u.depth - 1
			FROM up u JOIN sessions p ON p.tenant_id = $1 AND p.id = u.parent_id
		), down AS (
			SELECT s.id, 0 AS depth FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2
			UNION ALL
			SELECT c.id, d.depth + 1 FROM down d JOIN sessions c ON c.tenant_id = $1 AND c.parent_id = d.id
		)
		SELECT s.id, s.parent_id, s.forked_at, s.state, s.length, s.turn_count, s.epoch, s.first_seq, s.last_seq, s.gone_epoch,
			s.title, s.labels, s.pin, s.ttl_seconds, s.created_at, s.updated_at, s.closed_at, s.deleted_at, s.kept_to, k.cut
		FROM (SELECT id, cut, depth FROM up WHERE depth < 0 UNION ALL SELECT id, NULL, depth FROM down) k
		JOIN sessions s ON s.tenant_id = $1 AND s.id = k.id ORDER BY k.depth, s.id LIMIT $3`, x.tenant, id, BundleSessionsMax+1)
	if err != nil {
		return err
	}
	var s bundleSession
	var self uuid.UUID
	var parent *uuid.UUID
	var cut *int
	_, err = pgx.ForEachRow(rows, []any{&self, &parent, &s.ForkedAt, &s.State, &s.Length, &s.TurnCount, &s.Epoch, &s.FirstSeq,
		&s.LastSeq, &s.GoneEpoch, &s.Title, &s.Labels, &s.Pin, &s.TTLSeconds, &s.CreatedAt, &s.UpdatedAt, &s.ClosedAt, &s.DeletedAt,
		&s.KeptTo, &cut}, func() error {
		if s.State == StateRunning && cut == nil {
			return fail(CodeTurnInProgress, "session %s has an open turn: wait for its end or cancel it", sessionID(self))
		}
		x.add(s, self, parent, cut, now)
		s.Labels = nil // the next row's is a new map
		return nil
	})
	if err == nil && len(x.list) > BundleSessionsMax {
		err = invalid("session_id", "the subtree and its ancestors are more than %d sessions", BundleSessionsMax)
	}
	return err
}

func (x *export) add(s bundleSession, id uuid.UUID, parent *uuid.UUID, cut *int, now time.Time) {
	s.Type, s.ID, s.ParentID = lineSession, sessionID(id), nil
	if parent != nil {
		p := sessionID(*parent)
		s.ParentID = &p
	}
	if cut != nil { // an ancestor: what a deleted one would be
		s.State, s.ClosedAt, s.DeletedAt, s.KeptTo = StateClosed, &now, &now, cut
		s.Length = *cut
		if s.ForkedAt != nil {
			s.Length = max(s.Length, *s.ForkedAt)
		}
	}
	wanted := int32(-1)
	if s.DeletedAt != nil {
		wanted = int32(*s.KeptTo)
		s.Title, s.Labels, s.Pin, s.TTLSeconds, s.TurnCount = "", nil, false, nil, 0
		s.FirstSeq, s.LastSeq, s.GoneEpoch = 1, 0, 0 // it has no log
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	s.CreatedAt, s.UpdatedAt, s.ClosedAt, s.DeletedAt = s.CreatedAt.UTC(), s.UpdatedAt.UTC(), utc(s.ClosedAt), utc(s.DeletedAt)
	x.list = append(x.list, s)
	x.ids = append(x.ids, id)
	x.cuts = append(x.cuts, wanted)
}

// What of the turns and runs goes into a bundle; k is (id, cut, place).
const (
	exportOf      = ` FROM unnest($2::uuid[], $3::int[]) WITH ORDINALITY AS k (id, cut, place) JOIN `
	exportTurns   = exportOf + `turns t ON t.tenant_id = $1 AND t.session_id = k.id WHERE (k.cut < 0 OR t.tok_from < k.cut AND (t.tok_to > t.tok_from OR t.state = 'running'))`
	exportRuns    = exportOf + `token_runs r ON r.tenant_id = $1 AND r.session_id = k.id WHERE (k.cut < 0 OR r.tok_from < k.cut)`
	exportEvents  = exportOf + `events e ON e.tenant_id = $1 AND e.session_id = k.id WHERE k.cut < 0`
	exportClipped = `(k.cut >= 0 AND (t.tok_to > k.cut OR t.ended_at IS NULL))`
)

func (x *export) count(ctx context.Context, h *bundleHeader) error {
	for _, c := range []struct {
		what, from string
		n          *int
		max        int
	}{{"turns", exportTurns, &h.Turns, BundleTurnsMax}, {"runs of tokens", exportRuns, &h.TokenRuns, BundleRunsMax},
		{"events", exportEvents, &h.Events, 1<<63 - 1}} {
		if err := x.tx.QueryRow(ctx, "SELECT count(*)"+c.from, x.tenant, x.ids, x.cuts).Scan(c.n); err != nil {
			return err
		}
		if *c.n > c.max {
			return invalid("session_id", "the subtree has more than %d %s", c.max, c.what)
		}
	}
	return nil
}

// turns writes the turns; those of ancestors that go on past the cut without
// what came after it, but with their ends, by which they are known to be cut.
func (x *export) turns(ctx context.Context, ids []uuid.UUID, cuts []int32) error {
	rows, err := x.tx.Query(ctx, `SELECT t.session_id, t.id, CASE WHEN t.ended_at IS NULL THEN 'interrupted' ELSE t.state END,
			CASE WHEN `+exportClipped+` THEN t.request - 'messages' - 'input' ELSE t.request END, t.seed,
			CASE WHEN `+exportClipped+` THEN t.prompt[1:k.cut - t.tok_from] ELSE t.prompt END, t.tok_from,
			CASE WHEN t.ended_at IS NULL THEN k.cut + 1 ELSE t.tok_to END, CASE WHEN `+exportClipped+` THEN '' ELSE t.text END,
			coalesce(t.finish_reason, 'interrupted'), t.usage, t.error, CASE WHEN NOT `+exportClipped+` THEN t.logprobs END,
			t.created_at, t.started_at, coalesce(t.ended_at, now())`+exportTurns+` ORDER BY k.place, t.tok_from, t.created_at, t.id`, x.tenant, ids, cuts)
	if err != nil {
		return err
	}
	t := bundleTurn{Type: lineTurn}
	var session, id uuid.UUID
	var request, usage, problem, probs []byte
	_, err = pgx.ForEachRow(rows, []any{&session, &id, &t.State, &request, &t.Seed, &t.Prompt, &t.From, &t.To, &t.Text, &t.FinishReason,
		&usage, &problem, &probs, &t.CreatedAt, &t.StartedAt, &t.EndedAt}, func() error {
		t.SessionID, t.ID, t.Request, t.Usage, t.Error, t.Logprobs = sessionID(session), turnID(id), request, usage, problem, probs
		t.CreatedAt, t.StartedAt, t.EndedAt = t.CreatedAt.UTC(), utc(t.StartedAt), t.EndedAt.UTC()
		return x.out.line(&t)
	})
	return err
}

func (x *export) runs(ctx context.Context, ids []uuid.UUID, cuts []int32) error {
	rows, err := x.tx.Query(ctx, `SELECT r.session_id, r.turn_id, r.tok_from,
			CASE WHEN k.cut < 0 THEN r.ids ELSE r.ids[1:k.cut - r.tok_from] END, r.first_seq,
			CASE WHEN k.cut < 0 THEN r.cuts ELSE '{}' END, CASE WHEN k.cut < 0 THEN r.at_ms ELSE '{}' END, r.base_time, r.epoch`+
		exportRuns+` ORDER BY k.place, r.tok_from`, x.tenant, ids, cuts)
	if err != nil {
		return err
	}
	r := bundleRun{Type: lineTokens}
	var session uuid.UUID
	var turn *uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&session, &turn, &r.From, &r.IDs, &r.FirstSeq, &r.Cuts, &r.AtMS, &r.Time, &r.Epoch}, func() error {
		r.SessionID, r.TurnID, r.Time = sessionID(session), turnRef(turn), r.Time.UTC()
		return x.out.line(&r)
	})
	return err
}

func (x *export) events(ctx context.Context, ids []uuid.UUID, cuts []int32) error {
	rows, err := x.tx.Query(ctx, `SELECT e.session_id, e.turn_id, e.seq, e.epoch, e.type, e.time, e.data`+
		exportEvents+` ORDER BY k.place, e.seq`, x.tenant, ids, cuts)
	if err != nil {
		return err
	}
	e := bundleEvent{Type: lineEvent}
	var session uuid.UUID
	var turn *uuid.UUID
	var data []byte
	_, err = pgx.ForEachRow(rows, []any{&session, &turn, &e.Seq, &e.Epoch, &e.Event, &e.Time, &data}, func() error {
		e.SessionID, e.TurnID, e.Time, e.Data = sessionID(session), turnRef(turn), e.Time.UTC(), data
		return x.out.line(&e)
	})
	return err
}

func turnRef(id *uuid.UUID) *string {
	if id == nil {
		return nil
	}
	text := turnID(*id)
	return &text
}
