package sessions

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// flush is what a session has seen and the ledger has not: the events after
// the last committed one, all of the open turn, and the tokens with them. It
// is taken once and written as it is, however often that must be tried.
type flush struct {
	s        *session
	t        *turn
	key      liveKey
	epoch    int64
	rev      int64 // of the row before
	events   []Event
	from, to int // committed length before and after
	lastSeq  int64
	final    *turnFinal // the turn's end, if it is among the events
	// the turn's runs, to replace the rows that earlier flushes wrote; with final only
	merged []run
	tries  int
}

// turnFinal is how a turn ended.
type turnFinal struct {
	state  TurnState
	finish string
	text   string
	usage  *Usage
	err    *TurnError
	probs  []TokenProbs
	to     int
	at     time.Time
}

// flushLocked takes what is pending; nil if nothing is.
func (s *session) flushLocked() *flush {
	events := s.log.pending()
	if len(events) == 0 {
		return nil
	}
	f := &flush{
		s: s, t: s.turn, key: s.key, epoch: s.row.epoch, rev: s.row.rev,
		events: events[:len(events):len(events)], from: s.row.length, to: s.row.length,
		lastSeq: events[len(events)-1].Seq,
	}
	for _, e := range events {
		if e.Type == EventTurnStarted {
			f.to += len(f.t.prompt)
		}
		if e.Type == EventTurnDelta {
			f.to += len(e.Tokens)
		}
	}
	if f.t.final != nil {
		f.final = f.t.final
		if f.from > f.t.promptTo() { // earlier flushes wrote runs
			f.merged = f.t.runs(s.line, s.row.epoch)
		}
	}
	return f
}

// queue adds the flush's statements to a batch. The session's row is locked
// already and updated by the caller.
func (f *flush) queue(b *pgx.Batch) error {
	at := f.from
	var open run
	closeRun := func() {
		if len(open.ids) > 0 && f.merged == nil {
			insertRun(b, f.key.tenant, f.key.id, open)
		}
		open = run{}
	}
	for i, e := range f.events {
		if e.Type == EventTurnDelta && len(e.Tokens) > 0 {
			if len(open.ids) == 0 {
				open = run{tokFrom: at, turn: &f.t.id, firstSeq: e.Seq, base: e.Time, epoch: f.epoch}
			}
			open.add(e)
			at += len(e.Tokens)
			continue
		}
		closeRun()
		if e.Type == EventTurnStarted {
			f.queueStart(b, at, e)
			at += len(f.t.prompt)
		}
		if err := insertEvents(b, f.key.tenant, f.key.id, f.events[i:i+1]); err != nil {
			return err
		}
	}
	closeRun()
	if f.final == nil {
		return nil
	}
	if f.merged != nil {
		b.Queue(`DELETE FROM token_runs WHERE tenant_id = $1 AND session_id = $2 AND tok_from >= $3`,
			f.key.tenant, f.key.id, f.t.promptTo())
		for _, r := range f.merged {
			insertRun(b, f.key.tenant, f.key.id, r)
		}
	}
	return f.queueEnd(b)
}

func (r *run) add(e Event) {
	r.ids = append(r.ids, e.Tokens...)
	r.cuts = append(r.cuts, int16(len(e.Tokens)))
	r.atMS = append(r.atMS, int32(e.Time.Sub(r.base)/time.Millisecond))
}

// queueStart joins the prompt to the line.
func (f *flush) queueStart(b *pgx.Batch, at int, e Event) {
	b.Queue(`UPDATE turns SET state = 'running', started_at = $3, tok_to = prompt_to WHERE tenant_id = $1 AND id = $2`,
		f.key.tenant, f.t.id, e.Time)
	insertPrompt(b, f.key.tenant, f.key.id, f.t, at, e.Seq, f.epoch, e.Time)
}

func insertPrompt(b *pgx.Batch, tenant string, session uuid.UUID, t *turn, at int, seq, epoch int64, now time.Time) {
	if len(t.prompt) > 0 {
		insertRun(b, tenant, session, run{tokFrom: at, ids: t.prompt, turn: &t.id, firstSeq: seq, base: now, epoch: epoch})
	}
}

func (f *flush) queueEnd(b *pgx.Batch) error {
	x := f.final
	var usage, problem, probs []byte
	for _, p := range []struct {
		there bool
		v     any
		to    *[]byte
	}{{x.usage != nil, x.usage, &usage}, {x.err != nil, x.err, &problem}, {x.probs != nil, x.probs, &probs}} {
		if !p.there {
			continue
		}
		data, err := json.Marshal(p.v)
		if err != nil {
			return fmt.Errorf("encode end of turn: %w", err)
		}
		*p.to = data
	}
	b.Queue(`UPDATE turns SET state = $3, finish_reason = $4, text = $5, usage = $6, error = $7, logprobs = $8, tok_to = $9,
			ended_at = $10
		WHERE tenant_id = $1 AND id = $2`,
		f.key.tenant, f.t.id, x.state, x.finish, x.text, usage, problem, probs, x.to, x.at)
	return nil
}

// advance gives the row what the flush makes of it, but the rev.
func (f *flush) advance(x *row) {
	x.length, x.lastSeq = f.to, f.lastSeq
	now := f.events[len(f.events)-1].Time
	if f.final != nil {
		x.state = StateIdle
	}
	x.touch(now)
}

// queueSession updates the row of a flush that is written by itself.
func (f *flush) queueSession(b *pgx.Batch, x row) {
	f.advance(&x)
	b.Queue(`UPDATE sessions SET rev = rev + 1, state = $3, length = $4, last_seq = $5, updated_at = $6, expires_at = $7
		WHERE tenant_id = $1 AND id = $2`, f.key.tenant, f.key.id, x.state, x.length, x.lastSeq, x.updated, x.expires)
}

// flushedLocked makes a committed flush true in memory, but the rev.
func (s *session) flushedLocked(f *flush) {
	f.advance(&s.row)
	s.log.commit(f.lastSeq)
	if n := f.to - f.t.promptTo(); n > 0 {
		f.t.run.Ack(n)
		s.m.counts.flushed(int64(f.to - max(f.from, f.t.promptTo())))
	}
	if f.final != nil && s.turn == f.t {
		s.turn = nil
		f.t.finish()
	}
	s.visibleLocked()
}
