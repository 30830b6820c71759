package sessions

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// operation is a call's exclusive hold on a session: ops, wlock and alock.
type operation struct {
	*session
	handed bool // commit has taken over wlock and alock
}

// operate runs fn with the session held and standing still. fn commits at most
// once, as its last step.
func (m *Manager) operate(ctx context.Context, tenant, id string, fn func(o *operation) error) error {
	s, err := m.hold(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer s.ops.unlock()
	return s.still(ctx, fn)
}

// still is operate for who holds ops already.
func (s *session) still(ctx context.Context, fn func(o *operation) error) error {
	wait, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	if err := s.quiesce(wait); err != nil {
		return err
	}
	o := &operation{session: s}
	defer func() {
		if !o.handed {
			s.release()
		}
	}()
	if err := s.refresh(wait); err != nil {
		return err
	}
	return fn(o)
}

// refresh reads the row anew unless this server owns it: nobody told memory
// what another owner did. A server that stood still for longer than its lease
// does not know what it owns, and looks.
func (s *session) refresh(ctx context.Context) error {
	s.mu.Lock()
	mine, rev, epoch := s.mineLocked(), s.row.rev, s.row.epoch
	s.mu.Unlock()
	if mine && !s.m.lapsed() {
		return nil
	}
	x, err := selectRow(ctx, s.m.pool, s.key.tenant, s.key.id)
	switch {
	case err != nil:
		return s.refused(err)
	case mine: // memory is ahead of the ledger as long as it is this server's
		if x.owner == nil || *x.owner != s.m.me || x.epoch != epoch {
			return s.refused(errStale)
		}
		return nil
	case x.rev == rev:
		return nil
	}
	s.replace(x)
	return nil
}

// reload reads the row anew, whatever memory says. A session whose row cannot
// be read is forgotten, so that the next call reads it.
func (s *session) reload(ctx context.Context) error {
	x, err := selectRow(ctx, s.m.pool, s.key.tenant, s.key.id)
	if err != nil {
		s.m.forget(s)
		return err
	}
	s.replace(x)
	return nil
}

// replace puts the ledger's row in place of memory's, and wakes readers: the
// epoch may be another one.
func (s *session) replace(x row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(x)
	s.line, s.hasLine = nil, false
	s.wakeLocked()
}

// effect is one change of a session: its transaction and what it means in
// memory.
type effect struct {
	// write queues the statements and changes x, a copy of the row. It may be nil.
	write    func(ctx context.Context, w *work, x *row) error
	children int    // how many children write inserts
	tree     bool   // write changes other sessions of the tree
	apply    func() // after the commit, with mu held; the row is x by then
	after    func() // then, with mu free
	abort    func() // when it did not happen
}

// commit makes an effect true and releases the session.
//
// The caller's context ends neither the transaction nor its consequences: what
// was committed must be applied. A commit without an answer (a lost
// connection) is settled behind: the session's rows and log stand still until
// the ledger has said whether it happened.
func (o *operation) commit(ctx context.Context, e effect) error {
	o.handed = true
	s := o.session
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	s.mu.Lock()
	x := s.row
	s.mu.Unlock()
	began := time.Now()
	var f *flush
	err, unknown := s.m.transact(ctx, func(w *work) {
		if e.tree {
			lockTree(w, &x)
		}
		lockSession(w, s.m.me, &x)
	}, func(w *work) error {
		// what the writer has not come to yet goes first: rows follow the log's order
		s.mu.Lock()
		f = s.flushLocked()
		s.mu.Unlock()
		if f != nil {
			if err := f.queue(w.b); err != nil {
				return err
			}
			f.advance(&x)
		}
		if e.write != nil {
			if err := e.write(ctx, w, &x); err != nil {
				return err
			}
		}
		updateSession(w, s.m.me, &x, e.children)
		return nil
	})
	if unknown {
		s.settling(func() {
			if s.settle(x.epoch, x.rev) {
				s.apply(&x, f, e)
			} else if e.abort != nil {
				e.abort()
			}
		})
		return ledgerError("commit", err)
	}
	defer s.release()
	if err != nil {
		if e.abort != nil {
			e.abort()
		}
		return s.refused(err)
	}
	s.m.counts.committed(time.Since(began))
	s.apply(&x, f, e)
	return nil
}

// settling lets the session stand still, and calls that come wait (known), until
// find has found out whether a commit happened.
func (s *session) settling(find func()) {
	known := make(chan struct{})
	s.mu.Lock()
	s.unknown = known
	s.mu.Unlock()
	s.m.wg.Go(func() {
		defer s.release()
		find()
		s.mu.Lock()
		s.unknown = nil
		s.mu.Unlock()
		close(known)
	})
}

func (s *session) apply(x *row, f *flush, e effect) {
	s.mu.Lock()
	if f != nil {
		s.flushedLocked(f)
	}
	s.row = *x
	if e.apply != nil {
		e.apply()
	}
	s.log.commit(x.lastSeq)
	s.visibleLocked()
	s.mu.Unlock()
	if e.after != nil {
		e.after()
	}
}

// refused maps the errors of a transaction that has not happened. A row that
// is not what memory says is forgotten, the next call loads it anew.
func (s *session) refused(err error) error {
	switch {
	case errors.Is(err, ErrForeign):
		s.fence()
		return &Error{Code: CodeOverloaded, Message: "another server has this session", cause: err}
	case errors.Is(err, errStale):
		s.fence()
		return &Error{Code: CodeOverloaded, Message: "the session has just changed, try again", cause: err}
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Code == CodeNotFound && e.Field == "session_id" {
		s.fence() // deleted, by another server or as part of a subtree
		return err
	}
	if isUniqueViolation(err, "turns_one_open") {
		return fail(CodeTurnInProgress, "a turn is in progress")
	}
	return ledgerError("write session", err)
}

// fence gives up a session that the ledger says is another's, or not as this
// server believes: a running turn stops without a word, the next call loads
// what is true. If the ledger has the turn as this server's all the same, the
// keeper ends it there.
func (s *session) fence() {
	s.mu.Lock()
	t, seq := s.turn, s.seq
	s.turn, s.seq = nil, nil
	s.mu.Unlock()
	if t != nil {
		s.m.log.Error("turn given up, the session is not as this server believed", "session", sessionID(s.key.id), "turn", turnID(t.id))
		t.abandon()
	}
	s.m.forget(s)
	if seq != nil {
		s.m.eng.Release(seq)
	}
	if t != nil {
		signal(s.m.gaveUp)
	}
}

// settle asks the ledger, until it answers, whether the write that made rev
// happened. It says no if another epoch has begun, whoever wrote before that:
// the session is another server's. The write's transaction holds the row for as long as its backend
// has not noticed that nobody listens any more: the lock waits for its outcome.
func (s *session) settle(epoch, rev int64) bool {
	for delay := writerRetryMin; ; delay = min(2*delay, writerRetryMax) {
		var now, got int64
		ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
		err := s.m.pool.QueryRow(ctx, "SELECT epoch, rev FROM sessions WHERE tenant_id = $1 AND id = $2 FOR SHARE", s.key.tenant, s.key.id).Scan(&now, &got)
		cancel()
		switch {
		case err == nil:
			return now == epoch && got >= rev
		case errors.Is(err, pgx.ErrNoRows):
			return rev > 1 // a deletion that happened; of its first write: a creation that did not
		case !isUnavailable(err):
			s.m.log.Error("settle a commit", "session", sessionID(s.key.id), "error", err)
			return false
		}
		select {
		case <-time.After(delay):
		case <-s.m.ctx.Done():
			return false
		}
	}
}
