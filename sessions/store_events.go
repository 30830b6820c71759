package sessions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/engine/tokenizer"
)

// selectEvents reads the events [from, to] of a session's log, or the first of
// them that are at most so many bytes, at least one. Deltas are rebuilt from the
// runs of tokens; the text of one depends on the tokens of its turn before it,
// so a turn's runs are read from its start.
func selectEvents(ctx context.Context, q querier, tok *tokenizer.Tokenizer, tenant string, id uuid.UUID, from, to, bytes int64) ([]Event, error) {
	if from > to {
		return nil, nil
	}
	events, err := selectStoredEvents(ctx, q, tenant, id, from, to)
	if err != nil {
		return nil, err
	}
	if int64(len(events)) < to-from+1 {
		deltas, cut, err := selectDeltas(ctx, q, tok, tenant, id, from, to, bytes)
		if err != nil {
			return nil, err
		}
		if cut != 0 { // what lies behind is for the next read
			events = slices.DeleteFunc(events, func(e Event) bool { return e.Seq >= cut })
		}
		events = append(events, deltas...)
		sort.Slice(events, func(i, j int) bool { return events[i].Seq < events[j].Seq })
	}
	if n := fitting(events, bytes); n < len(events) {
		return slices.Clone(events[:n]), nil
	}
	return events, nil
}

func selectStoredEvents(ctx context.Context, q querier, tenant string, id uuid.UUID, from, to int64) ([]Event, error) {
	rows, err := q.Query(ctx, `SELECT seq, epoch, type, turn_id, time, data FROM events
		WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND $4 ORDER BY seq`, tenant, id, from, to)
	if err != nil {
		return nil, ledgerError("read events", err)
	}
	events, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (Event, error) {
		e := Event{SessionID: sessionID(id)}
		var turn *uuid.UUID
		var data []byte
		if err := r.Scan(&e.Seq, &e.Epoch, &e.Type, &turn, &e.Time, &data); err != nil {
			return e, err
		}
		e.Time = e.Time.UTC()
		if turn != nil {
			e.TurnID = turnID(*turn)
		}
		return e, json.Unmarshal(data, &e.EventData)
	})
	return events, ledgerError("read events", err)
}

// selectDeltas reads the deltas [from, to], up to the one with which they are
// more than so many bytes; that one is the last, and cut the seq behind it.
func selectDeltas(ctx context.Context, q querier, tok *tokenizer.Tokenizer, tenant string, id uuid.UUID, from, to, bytes int64) (events []Event, cut int64, err error) {
	rows, err := q.Query(ctx, `
		SELECT r.turn_id, t.request->'stop', r.ids, r.first_seq, r.cuts, r.at_ms, r.base_time, r.epoch
		FROM token_runs r JOIN turns t ON t.tenant_id = r.tenant_id AND t.id = r.turn_id
		WHERE r.tenant_id = $1 AND r.session_id = $2 AND cardinality(r.cuts) > 0 AND r.first_seq <= $4
			AND r.turn_id IN (SELECT h.turn_id FROM token_runs h
				WHERE h.tenant_id = $1 AND h.session_id = $2 AND cardinality(h.cuts) > 0
					AND h.first_seq <= $4 AND h.first_seq + cardinality(h.cuts) > $3)
		ORDER BY r.tok_from`, tenant, id, from, to)
	if err != nil {
		return nil, 0, ledgerError("read deltas", err)
	}
	var turn, current uuid.UUID
	var stop []byte
	var r run
	var texts *cutter
	_, err = pgx.ForEachRow(rows, []any{&turn, &stop, &r.ids, &r.firstSeq, &r.cuts, &r.atMS, &r.base, &r.epoch}, func() error {
		if cut != 0 { // what is left of the rows is let go of
			return nil
		}
		if texts == nil || turn != current {
			var stops []string
			if len(stop) > 0 {
				if err := json.Unmarshal(stop, &stops); err != nil {
					return fmt.Errorf("read stop strings: %w", err)
				}
			}
			texts, current = newCutter(tok, stops), turn
		}
		ids := r.ids
		for i, n := range r.cuts {
			part := ids[:n]
			ids = ids[n:]
			text := texts.push(part)
			seq := r.firstSeq + int64(i)
			if cut != 0 || seq < from || seq > to {
				continue
			}
			at := r.base.Add(time.Duration(r.atMS[i]) * time.Millisecond).UTC()
			events = append(events, deltaEvent(seq, r.epoch, sessionID(id), turnID(turn), at, text, part))
			if bytes -= events[len(events)-1].bytes(); bytes < 0 {
				cut = seq + 1
			}
		}
		return nil
	})
	return events, cut, ledgerError("read deltas", err)
}

func deltaEvent(seq, epoch int64, session, turn string, at time.Time, text string, ids []int32) Event {
	return Event{Seq: seq, Epoch: epoch, Type: EventTurnDelta, SessionID: session, TurnID: turn, Time: at,
		EventData: EventData{Text: &text, Tokens: ids}}
}

// epochStart finds the first event of the epoch after the given one, 0 if that
// has none yet.
func epochStart(ctx context.Context, q querier, tenant string, id uuid.UUID, after int64) (int64, error) {
	var seq int64
	err := q.QueryRow(ctx, `SELECT least(
			coalesce((SELECT min(seq) FROM events WHERE tenant_id = $1 AND session_id = $2 AND epoch > $3), $4),
			coalesce((SELECT min(first_seq) FROM token_runs WHERE tenant_id = $1 AND session_id = $2 AND epoch > $3
				AND cardinality(cuts) > 0), $4))`, tenant, id, after, int64(1)<<62).Scan(&seq)
	if err != nil {
		return 0, ledgerError("find epoch", err)
	}
	if seq == 1<<62 {
		return 0, nil
	}
	return seq, nil
}
