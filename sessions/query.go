package sessions

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Get returns one session.
func (m *Manager) Get(ctx context.Context, tenant, id string) (Session, error) {
	u, err := parseSession(id)
	if err != nil {
		return Session{}, err
	}
	x, err := selectRow(ctx, m.pool, tenant, u)
	if err != nil {
		return Session{}, err
	}
	return m.viewRow(&x), nil
}

// viewRow adds to a row of the ledger what only memory knows: where the bytes
// of a session on the device are. Of one that another server has only that one
// knows, and a list does not ask each of them: the view says so.
func (m *Manager) viewRow(x *row) Session {
	m.mu.Lock()
	s := m.live[liveKey{x.tenant, x.id}]
	m.mu.Unlock()
	if s != nil {
		select {
		case <-s.loaded:
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.viewLocked(x)
		default:
		}
	}
	v := x.session()
	v.Elsewhere = x.owner != nil && *x.owner != m.me
	return v
}

// limit checks a page's size and adds one row, by which more is known.
func limit(n int) (int, error) {
	switch {
	case n == 0:
		return ListLimitDefault + 1, nil
	case n < 0 || n > ListLimitMax:
		return 0, invalid("limit", "must be between 1 and %d", ListLimitMax)
	}
	return n + 1, nil
}

// List returns a page of sessions, newest first.
func (m *Manager) List(ctx context.Context, tenant string, f ListFilter) (SessionPage, error) {
	n, err := limit(f.Limit)
	if err != nil {
		return SessionPage{}, err
	}
	switch f.State {
	case "", StateIdle, StateRunning, StateDetached, StateClosed:
	default:
		return SessionPage{}, invalid("state", "must be idle, running, detached or closed")
	}
	var ids [3]*uuid.UUID
	for i, p := range []struct{ field, text string }{{"root", f.Root}, {"parent", f.Parent}, {"after", f.After}} {
		if p.text == "" {
			continue
		}
		id, ok := parseID(sessionPrefix, p.text)
		if !ok {
			return SessionPage{}, invalid(p.field, "%q is no session id", p.text)
		}
		ids[i] = &id
	}
	labels := f.Labels
	if err := checkLabels("label", labels); err != nil {
		return SessionPage{}, invalid("label", "no label can be like that: %s", err.(*Error).Message)
	}
	if labels == nil {
		labels = map[string]string{}
	}
	list, cut, err := pageOf(ctx, m, tenant, m.scanView, (*Session).bytes, func() (pgx.Rows, error) {
		return m.pool.Query(ctx, `SELECT `+rowColumns+` FROM sessions s
		WHERE s.tenant_id = $1 AND s.deleted_at IS NULL AND ($2 = '' OR s.state = $2) AND ($3::uuid IS NULL OR s.root_id = $3)
			AND ($4::uuid IS NULL OR s.parent_id = $4) AND ($5::uuid IS NULL OR s.id < $5) AND ($6::jsonb = '{}' OR s.labels @> $6)
		ORDER BY s.id DESC LIMIT $7`, tenant, f.State, ids[0], ids[1], ids[2], labels, n)
	})
	if err != nil {
		return SessionPage{}, ledgerError("list sessions", err)
	}
	page := SessionPage{Data: list[:min(len(list), n-1)], HasMore: cut || len(list) == n}
	if page.Data == nil {
		page.Data = []Session{}
	}
	if page.HasMore {
		page.Next = &page.Data[len(page.Data)-1].ID
	}
	return page, nil
}

// Tree returns the subtree of id, at most depth levels below it (nil: all).
func (m *Manager) Tree(ctx context.Context, tenant, id string, depth *int) (Tree, error) {
	if depth != nil && *depth < 0 {
		return Tree{}, invalid("depth", "must not be negative")
	}
	if depth != nil && *depth > TreeNodesMax { // no tree that is answered is deeper, and Postgres counts no further
		depth = nil
	}
	u, err := parseSession(id)
	if err != nil {
		return Tree{}, err
	}
	list, err := m.nodes(ctx, tenant, "read tree", `WITH RECURSIVE tree AS (
			SELECT s.tenant_id, s.id, 0 AS depth FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2 AND s.deleted_at IS NULL
			UNION ALL
			SELECT c.tenant_id, c.id, t.depth + 1
			FROM tree t JOIN sessions c ON c.tenant_id = t.tenant_id AND c.parent_id = t.id
			WHERE $3::int IS NULL OR t.depth < $3), picked AS (SELECT t.id, row_number() OVER (ORDER BY t.depth, t.id) AS place FROM tree t)`,
		TreeNodesMax, nil, u, depth)
	switch {
	case errors.Is(err, errTooLarge):
		return Tree{}, invalid("depth", "the tree has more than %d nodes, or %d bytes: ask for fewer levels, or list its sessions by root", TreeNodesMax, TreeBytesMax)
	case err != nil:
		return Tree{}, err
	case len(list) == 0:
		return Tree{}, notFound("session", id)
	}
	return Tree{Root: id, Nodes: list}, nil
}

// Tokens returns [from, to) of the line; nil means its start and its end.
func (m *Manager) Tokens(ctx context.Context, tenant, id string, from, to *int) (TokenRange, error) {
	u, err := parseSession(id)
	if err != nil {
		return TokenRange{}, err
	}
	x, err := selectRow(ctx, m.pool, tenant, u)
	if err != nil {
		return TokenRange{}, err
	}
	if err := m.canRead(&x); err != nil {
		return TokenRange{}, err
	}
	a, b := 0, x.length
	if from != nil {
		a = *from
	}
	if to != nil {
		b = *to
	}
	switch {
	case b < 0 || b > x.length:
		return TokenRange{}, invalid("to", "the session's line has %d tokens", x.length)
	case a < 0 || a > b:
		return TokenRange{}, invalid("from", "must be between 0 and %d", b)
	}
	if err := m.holdAnswer(ctx, tenant, int64(b-a)*tokenBytes); err != nil {
		return TokenRange{}, err
	}
	ids, err := m.readLine(ctx, tenant, u, a, b)
	if err != nil {
		return TokenRange{}, err
	}
	return TokenRange{Tokens: ids, Text: m.tok.Decode(ids)}, nil
}

// readLine reads [from, to) of a line whose row was read before. In between the
// session may have been deleted and its tokens purged: that is no gap.
func (m *Manager) readLine(ctx context.Context, tenant string, id uuid.UUID, from, to int) ([]int32, error) {
	ids, err := selectLine(ctx, m.pool, tenant, id, from, to)
	if err != nil {
		if _, gone := selectRow(ctx, m.pool, tenant, id); ErrorCode(gone) == CodeNotFound {
			return nil, gone
		}
	}
	return ids, err
}

// Pieces returns the text that each token adds; joined they are the tokens'
// text. A token that ends inside a character adds nothing, and the one that
// completes it adds the character.
func (m *Manager) Pieces(ids []int32) []string {
	pieces := make([]string, len(ids))
	stream := m.tok.NewStream()
	for i, id := range ids {
		pieces[i] = stream.Push(id)
	}
	if n := len(ids); n > 0 {
		pieces[n-1] += stream.Flush()
	}
	return pieces
}

// Turn returns one own or inherited turn with its tokens.
func (m *Manager) Turn(ctx context.Context, tenant, id, turn string) (Turn, error) {
	u, err := parseSession(id)
	if err != nil {
		return Turn{}, err
	}
	tu, err := parseTurn(turn)
	if err != nil {
		return Turn{}, err
	}
	s, err := selectRow(ctx, m.pool, tenant, u)
	if err != nil {
		return Turn{}, err
	}
	if err := m.canRead(&s); err != nil {
		return Turn{}, err
	}
	x, err := selectTurn(ctx, m.pool, tenant, u, s.length, tu)
	if err != nil {
		return Turn{}, err
	}
	if n := x.bytes() + int64(x.to-x.promptTo)*tokenBytes; n > answerFree {
		x = turnRow{} // whoever waits holds nothing
		if err := m.holdAnswer(ctx, tenant, n); err != nil {
			return Turn{}, err
		}
		if x, err = selectTurn(ctx, m.pool, tenant, u, s.length, tu); err != nil {
			return Turn{}, err
		}
	}
	t, ids, err := m.readTurn(ctx, u, &x)
	t.Tokens = ids
	return t, err
}

// readTurn makes a turn of a row, and reads its tokens from the line of the
// session that was asked for.
func (m *Manager) readTurn(ctx context.Context, session uuid.UUID, x *turnRow) (Turn, []int32, error) {
	t, err := x.turn()
	if err != nil {
		return t, nil, err
	}
	if x.promptTo >= x.to {
		return t, []int32{}, nil
	}
	ids, err := m.readLine(ctx, x.tenant, session, x.promptTo, x.to)
	if err != nil {
		return t, nil, err
	}
	if x.textFromTokens() {
		stops, err := x.stops()
		if err != nil {
			return t, nil, err
		}
		cut := newCutter(m.tok, stops)
		t.Text = cut.push(ids)
		if x.state != TurnRunning || x.clipped {
			t.Text += cut.flush()
		}
	}
	return t, ids, nil
}

// Turns returns own and inherited turns, newest first, without token lists.
func (m *Manager) Turns(ctx context.Context, tenant, id string, f TurnFilter) (TurnPage, error) {
	n, err := limit(f.Limit)
	if err != nil {
		return TurnPage{}, err
	}
	u, err := parseSession(id)
	if err != nil {
		return TurnPage{}, err
	}
	var after *uuid.UUID
	if f.After != "" {
		a, ok := parseID(turnPrefix, f.After)
		if !ok {
			return TurnPage{}, invalid("after", "%q is no turn id", f.After)
		}
		after = &a
	}
	s, err := selectRow(ctx, m.pool, tenant, u)
	if err != nil {
		return TurnPage{}, err
	}
	if err := m.canRead(&s); err != nil {
		return TurnPage{}, err
	}
	all := 0
	list, _, err := pageOf(ctx, m, tenant, func(r pgx.CollectableRow) (turnRow, error) { return scanTurn(r, &all) },
		func(x *turnRow) int64 {
			if x.textFromTokens() {
				return x.bytes() + int64(x.to-x.promptTo)*tokenTextBytes
			}
			return x.bytes()
		},
		func() (pgx.Rows, error) {
			return m.pool.Query(ctx, turnsSQL, tenant, u, s.length, after, n, m.answers.page)
		})
	if err == nil && len(list) == 0 { // has it none, or is it gone?
		_, err = selectRow(ctx, m.pool, tenant, u)
	}
	if err != nil {
		return TurnPage{}, ledgerError("read turns", err)
	}
	page := TurnPage{Data: []Turn{}}
	total := int64(0)
	for i := range list {
		x := &list[i]
		var t Turn
		if x.textFromTokens() {
			t, _, err = m.readTurn(ctx, u, x)
		} else {
			t, err = x.turn()
		}
		if err != nil {
			return TurnPage{}, err
		}
		total += x.bytes()
		if x.text != t.Text {
			total += jsonBytes(t.Text) - jsonBytes(x.text)
		}
		if total > m.answers.page && i > 0 {
			break
		}
		page.Data = append(page.Data, t)
		*x = turnRow{} // its logprobs would be there twice
	}
	if page.HasMore = len(page.Data) < all; page.HasMore {
		page.Next = &page.Data[len(page.Data)-1].ID
	}
	return page, nil
}

// WaitTurn returns the turn when it has ended, or ctx's error.
func (m *Manager) WaitTurn(ctx context.Context, tenant, id, turn string) (Turn, error) {
	u, err := parseSession(id)
	if err != nil {
		return Turn{}, err
	}
	s, err := m.acquire(ctx, tenant, u)
	if err == nil {
		err = s.known(ctx)
	}
	if err != nil {
		return Turn{}, err
	}
	s.mu.Lock()
	t := s.turn
	s.mu.Unlock()
	if t != nil && turnID(t.id) == turn {
		if err := t.wait(ctx); err != nil {
			return Turn{}, err
		}
	}
	out, err := m.Turn(ctx, tenant, id, turn)
	if err == nil && !out.State.Final() {
		return out, fail(CodeOverloaded, "the turn is not this server's any more")
	}
	return out, err
}

// Cancel ends the open turn, whatever its phase, and returns it ended. With no
// open turn it returns the last one, or CodeNotFound if there was none.
func (m *Manager) Cancel(ctx context.Context, call Call, id string) (Turn, error) {
	out, err := once(ctx, m, call, func(save save) (Turn, error) {
		s, err := m.hold(ctx, call.Tenant, id)
		if err != nil {
			return Turn{}, err
		}
		defer s.ops.unlock()
		s.mu.Lock()
		t := s.turn
		s.mu.Unlock()
		var out Turn
		if t != nil {
			// the answer names the turn; a repeated call looks it up and cancels no other
			out.ID = turnID(t.id)
		} else {
			page, err := m.Turns(ctx, call.Tenant, id, TurnFilter{Limit: 1})
			if err != nil {
				return Turn{}, err
			}
			if len(page.Data) == 0 || page.Data[0].Inherited {
				return Turn{}, fail(CodeNotFound, "the session has no turn")
			}
			out.ID = page.Data[0].ID
		}
		if call.IdempotencyKey != "" {
			err, _ := m.transact(ctx, func(*work) {}, func(w *work) error { return save(w, out) })
			if err != nil {
				return Turn{}, ledgerError("store cancellation", err)
			}
		}
		if err := s.cancelTurn(ctx); err != nil {
			return Turn{}, err
		}
		return out, nil
	})
	if err != nil {
		return Turn{}, err
	}
	t, err := m.Turn(ctx, call.Tenant, id, out.ID)
	if err == nil && !t.State.Final() {
		// an earlier call with this key came as far as naming the turn: its server died
		if err := m.endNamed(ctx, call.Tenant, id, out.ID); err != nil {
			return Turn{}, err
		}
		t, err = m.Turn(ctx, call.Tenant, id, out.ID)
	}
	if err != nil {
		return Turn{}, fmt.Errorf("read cancelled turn: %w", err)
	}
	return t, nil
}

// endNamed cancels a turn unless it has ended by now.
func (m *Manager) endNamed(ctx context.Context, tenant, id, turn string) error {
	s, err := m.hold(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer s.ops.unlock()
	t, err := m.Turn(ctx, tenant, id, turn)
	if err != nil || t.State.Final() {
		return err
	}
	return s.cancelTurn(ctx) // a session has one open turn
}
