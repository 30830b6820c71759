package sessions

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// changedTries is how often sessions that changed before their rows were locked
// are read anew; then the call gives up with CodeOverloaded.
const changedTries = 20

// errGrew: the sessions are not what was read before their rows were locked.
var errGrew = errors.New("the subtree has changed")

// holding is several sessions of a tree that one call changes in one
// transaction. Those in memory, and those with an open turn, are held and stand
// still, without a turn; the others are known by their rows' revs. What is held
// stays so over the tries: a session that is held has no new children, so that
// they come to an end.
type holding struct {
	m      *Manager
	tenant string
	list   func(ctx context.Context) ([]row, error) // what it is about; refuses what cannot be done before anything is
	cancel bool                                     // cancel open turns; else they are a refusal
	own    bool                                     // this server's only; else those of nobody too

	ids    []uuid.UUID            // in the order of all who lock several
	rows   map[uuid.UUID]*row     // what they must still be, by rev
	held   map[uuid.UUID]*session // those of them that are in memory: ops, wlock, alock
	order  []*session             // held, in the order in which they were
	moving int                    // how many of order have wlock and alock
	wrong  []*session             // held, and not as memory has it
	handed bool                   // somebody else releases what is held
}

// change holds the sessions and commits, again while they change. The caller
// must defer let. A client that leaves does not end it in the middle, when turns
// were cancelled and nothing is committed yet.
func (h *holding) change(ctx context.Context, commit func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	var err error
	for range changedTries {
		if err = h.hold(ctx); err == nil {
			err = commit(ctx)
		}
		if !errors.Is(err, errGrew) {
			return err
		}
	}
	return &Error{Code: CodeOverloaded, Message: "the subtree keeps changing, try again", cause: err}
}

// read lists the sessions.
func (h *holding) read(ctx context.Context) error {
	list, err := h.list(ctx)
	if err != nil {
		return err
	}
	h.ids, h.rows = nil, make(map[uuid.UUID]*row, len(list))
	for i := range list {
		h.ids = append(h.ids, list[i].id)
		h.rows[list[i].id] = &list[i]
	}
	// one order for all, so that two do not wait for each other
	slices.SortFunc(h.ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	return nil
}

// hold takes those that are in memory or have an open turn, ends their turns and
// makes them stand still. One that comes into memory later, and is used, is
// found out by its rev.
func (h *holding) hold(ctx context.Context) error {
	for more := true; more; {
		if err := h.read(ctx); err != nil {
			return err
		}
		more = false
		for _, id := range h.ids {
			h.m.mu.Lock()
			_, live := h.m.live[liveKey{h.tenant, id}]
			h.m.mu.Unlock()
			waits := h.rows[id].state == StateRunning // in the ledger, for a server
			if !live && !waits || h.held[id] != nil {
				continue
			}
			s, err := h.m.holdID(ctx, h.tenant, id)
			if ErrorCode(err) == CodeNotFound {
				continue // deleted just now: the next reading does not have it
			}
			if err != nil {
				return err
			}
			h.held[id] = s
			h.order = append(h.order, s)
			more = true
		}
	}
	if err := h.endTurns(ctx); err != nil {
		return err
	}
	for _, s := range h.order[h.moving:] {
		if err := s.quiesce(ctx); err != nil {
			return err
		}
		h.moving++
		if err := s.refresh(ctx); err != nil {
			return err
		}
	}
	for _, s := range h.order { // what they have written by now is not what was read
		s.mu.Lock()
		x := s.row
		s.mu.Unlock()
		if h.rows[x.id] != nil {
			h.rows[x.id] = &x
		}
	}
	return nil
}

// endTurns cancels the open turns of what has come to be held, or refuses to
// before any of them is.
func (h *holding) endTurns(ctx context.Context) error {
	still := h.order[h.moving:]
	for _, s := range still {
		s.mu.Lock()
		open := s.turn != nil || s.row.state == StateRunning
		s.mu.Unlock()
		if open && !h.cancel {
			return fail(CodeTurnInProgress, "a turn is in progress")
		}
	}
	for _, s := range still { // all at once, then one wait
		s.mu.Lock()
		t := s.turn
		s.mu.Unlock()
		if t != nil {
			t.run.Cancel()
		}
	}
	for _, s := range still {
		if err := s.cancelTurn(ctx); err != nil {
			return err
		}
	}
	return nil
}

// let lets go of what is held, unless somebody else does.
func (h *holding) let() {
	if !h.handed {
		h.release()
	}
}

func (h *holding) release() {
	for _, s := range h.order[:h.moving] {
		s.release()
	}
	for _, s := range h.order {
		s.ops.unlock()
	}
}

// lock locks the rows and compares them with what was read.
func (h *holding) lock(w *work) {
	h.wrong = nil
	w.queue(`SELECT id, owner_server, state, rev, deleted_at IS NOT NULL, now() FROM sessions
		WHERE tenant_id = $1 AND id = ANY($2) ORDER BY id FOR UPDATE`, h.tenant, h.ids).Query(func(rows pgx.Rows) error {
		var x row
		var deleted bool
		n := 0
		_, err := pgx.ForEachRow(rows, []any{&x.id, &x.owner, &x.state, &x.rev, &deleted, &w.now}, func() error {
			n++
			err := h.compare(&x, deleted)
			if s := h.held[x.id]; err != nil && s != nil {
				h.wrong = append(h.wrong, s)
			}
			return err
		})
		w.now = w.now.UTC()
		if err == nil && n != len(h.ids) {
			err = errGrew
		}
		return err
	})
}

func (h *holding) compare(x *row, deleted bool) error {
	mine := x.owner != nil && *x.owner == h.m.me
	switch {
	case !deleted && !h.own && x.owner != nil && !mine:
		return ErrForeign
	case deleted || x.rev != h.rows[x.id].rev || x.state == StateRunning || h.own && !mine:
		if h.held[x.id] != nil {
			return errStale
		}
		return errGrew
	}
	return nil
}

// refused maps the error of a transaction that has not happened.
func (h *holding) refused(what string, err error) error {
	for _, s := range h.wrong {
		s.fence()
	}
	switch {
	case errors.Is(err, ErrForeign):
		return &Error{Code: CodeOverloaded, Message: "another server has a session of the subtree", cause: err}
	case errors.Is(err, errStale):
		return &Error{Code: CodeOverloaded, Message: "a session has just changed, try again", cause: err}
	case errors.Is(err, errGrew):
		return err
	}
	return ledgerError(what, err)
}

// forget takes all of them out of memory, those too that came there meanwhile.
// An operation may be under way on such a one, and open its timeline: it will be
// refused by the ledger, and the timeline is let go after it.
func (h *holding) forget(deleted bool) {
	for _, id := range h.ids {
		s := h.held[id]
		if s == nil {
			h.m.mu.Lock()
			s = h.m.live[liveKey{h.tenant, id}]
			h.m.mu.Unlock()
		}
		if s == nil {
			continue
		}
		<-s.loaded
		if deleted {
			s.mu.Lock()
			s.deleted = true
			s.mu.Unlock()
		}
		h.m.forget(s)
		if h.held[id] != nil {
			s.dropSeq()
			continue
		}
		h.m.wg.Go(func() {
			if s.ops.lock(h.m.ctx) == nil {
				s.dropSeq()
				s.ops.unlock()
			}
		})
	}
}
