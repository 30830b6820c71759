package sessions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"

	"rocket/engine"
)

const (
	// idleLiveMax is how long an idle session that nobody waits on stays in
	// memory. What its timeline holds stays in the engine's tree.
	idleLiveMax = 30 * time.Minute
)

type liveKey struct {
	tenant string
	id     uuid.UUID
}

// gate is a mutex whose waiters can give up.
type gate chan struct{}

func newGate() gate { return make(gate, 1) }

func (g gate) lock(ctx context.Context) error {
	select {
	case g <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g gate) tryLock() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

func (g gate) unlock() { <-g }

// session is a session in memory.
type session struct {
	m      *Manager
	key    liveKey
	loaded chan struct{} // closed when row is there, or loadErr

	loadErr error // before loaded is closed: the loader's

	ops   gate // one operation at a time: held over a whole call
	wlock gate // the right to write the ledger's rows: the writer's during its batch, an operation's during its transaction
	alock gate // the right to append to the log and the line: the turn goroutine's, an operation's during its transaction

	mu       sync.Mutex
	row      row           // guarded by mu; as committed, but see log.next and line
	gone     bool          // guarded by mu; no longer in the live map: look again
	deleted  bool          // guarded by mu
	line     []int32       // guarded by mu; nil until loadLine; with uncommitted tokens
	hasLine  bool          // guarded by mu
	seq      *engine.Seq   // guarded by mu; nil: nothing on the device
	turn     *turn         // guarded by mu; the open one
	log      window        // guarded by mu
	readers  int           // guarded by mu; Tails
	waiting  []*Tail       // guarded by mu; those that have all there is
	lastUsed time.Time     // guarded by mu
	unknown  chan struct{} // guarded by mu; closed when it is known whether the last commit happened; nil: it is

	relist bool // guarded by mu; the writer met a held wlock

	queued bool // guarded by writer.mu; in the writer's list
}

// acquire finds a session in memory or loads its row.
func (m *Manager) acquire(ctx context.Context, tenant string, id uuid.UUID) (*session, error) {
	k := liveKey{tenant, id}
	for {
		m.mu.Lock()
		s, ok := m.live[k]
		if !ok {
			s = m.newSession(k)
			m.live[k] = s
		}
		m.mu.Unlock()
		if !ok {
			x, err := selectRow(ctx, m.pool, tenant, id)
			if err != nil {
				s.loadErr = err
				m.forget(s)
				close(s.loaded)
				return nil, err
			}
			s.set(x)
			if s.foreignLocked() { // nobody else has it yet; others find it anew, since this memory of it will not be told
				m.forgetForeign(s)
			}
			close(s.loaded)
			return s, nil
		}
		select {
		case <-s.loaded:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if s.loadErr == nil {
			return s, nil
		}
		if ErrorCode(s.loadErr) == CodeNotFound {
			return nil, s.loadErr
		} // another caller's deadline is not ours: try again
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

func (m *Manager) newSession(k liveKey) *session {
	return &session{m: m, key: k, loaded: make(chan struct{}), ops: newGate(), wlock: newGate(), alock: newGate(), lastUsed: time.Now()}
}

// reserve puts a session that is about to be made into the live map, with its
// ops held: whoever finds its row in the ledger before this server has said so
// in memory waits for fill or unmade, rather than loading a second one.
func (m *Manager) reserve(tenant string, id uuid.UUID) *session {
	s := m.newSession(liveKey{tenant, id})
	s.ops <- struct{}{}
	m.mu.Lock()
	m.live[s.key] = s
	m.mu.Unlock()
	return s
}

// fill makes a reserved session what was committed, with its first events. Its
// ops stay held.
func (s *session) fill(x row, line []int32, events []Event) {
	s.mu.Lock()
	s.row = x
	s.line, s.hasLine = line, true
	s.log.init(0)
	s.appendLocked(events)
	s.log.commit(x.lastSeq)
	s.visibleLocked()
	s.mu.Unlock()
	close(s.loaded)
}

// unmade gives up a reserved session whose commit did not happen, or whose
// outcome nobody learns any more. Who waits for it asks the ledger.
func (s *session) unmade(err error) {
	s.loadErr = err
	s.m.forget(s)
	close(s.loaded)
	s.ops.unlock()
}

func (s *session) set(x row) {
	s.row = x
	s.log.init(x.lastSeq)
}

// forget takes a session out of the live map. Whoever has it looks again.
func (m *Manager) forget(s *session) {
	s.mu.Lock()
	s.gone = true
	s.wakeLocked()
	s.mu.Unlock()
	m.mu.Lock()
	if m.live[s.key] == s {
		delete(m.live, s.key)
	}
	m.mu.Unlock()
}

// mineLocked tells whether this server has the session, as far as it knows.
func (s *session) mineLocked() bool { return s.row.owner != nil && *s.row.owner == s.m.me }

// foreignLocked tells whether another server has the session.
func (s *session) foreignLocked() bool { return s.row.owner != nil && *s.row.owner != s.m.me }

// forgetForeign takes a session out of the live map for which there will be no
// news. Who reads it may go on with what it has.
func (m *Manager) forgetForeign(s *session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.live[s.key] == s {
		delete(m.live, s.key)
	}
}

// hold acquires a session and the right to operate on it. The caller unlocks
// s.ops.
func (m *Manager) hold(ctx context.Context, tenant, id string) (*session, error) {
	u, err := parseSession(id)
	if err != nil {
		return nil, err
	}
	return m.holdID(ctx, tenant, u)
}

func (m *Manager) holdID(ctx context.Context, tenant string, id uuid.UUID) (*session, error) {
	for {
		s, err := m.acquire(ctx, tenant, id)
		if err != nil {
			return nil, err
		}
		if err := s.ops.lock(ctx); err != nil {
			return nil, err
		}
		if err := s.known(ctx); err != nil {
			s.ops.unlock()
			return nil, err
		}
		s.mu.Lock()
		gone, foreign := s.gone, s.foreignLocked()
		s.lastUsed = time.Now()
		s.mu.Unlock()
		switch {
		case foreign:
			s.ops.unlock()
			return nil, s.refused(ErrForeign)
		case !gone:
			return s, nil
		}
		s.ops.unlock()
	}
}

// known waits until it is known whether the last commit happened: before that
// nobody can tell whether a turn is open, or the session there.
func (s *session) known(ctx context.Context) error {
	s.mu.Lock()
	unknown := s.unknown
	s.mu.Unlock()
	if unknown == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	select {
	case <-unknown:
		return nil
	case <-ctx.Done():
		return ledgerError("wait for the ledger", ctx.Err())
	}
}

// quiesce takes wlock and alock: the session's rows, log and line stand still.
func (s *session) quiesce(ctx context.Context) error {
	if err := s.wlock.lock(ctx); err != nil {
		return ledgerError("wait for the ledger", err)
	}
	if err := s.alock.lock(ctx); err != nil {
		s.unlockRows()
		return ledgerError("wait for the turn", err)
	}
	return nil
}

func (s *session) release() {
	s.alock.unlock()
	s.unlockRows()
}

// unlockRows lets the writer at the session again, and lists it anew if the
// writer passed it over meanwhile.
func (s *session) unlockRows() {
	s.wlock.unlock()
	s.mu.Lock()
	relist := s.relist
	s.mu.Unlock()
	if relist {
		s.again()
	}
}

// loadLine makes s.line there. The caller holds ops.
func (s *session) loadLine(ctx context.Context) error {
	s.mu.Lock()
	has, length := s.hasLine, s.row.length
	s.mu.Unlock()
	if has {
		return nil
	}
	line, err := selectLine(ctx, s.m.pool, s.key.tenant, s.key.id, 0, length)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.line, s.hasLine = line, true
	s.mu.Unlock()
	return nil
}

// coldStart opens s's timeline if there is none, in the tenant's namespace. The
// caller holds ops and has the line loaded.
func (s *session) coldStart(ctx context.Context, opts engine.OpenOptions) (engine.Restored, error) {
	s.mu.Lock()
	seq, line := s.seq, s.line
	s.mu.Unlock()
	if seq != nil {
		r := seq.Residency()
		return engine.Restored{Device: r.Device, Recomputed: max(0, len(line)-1-r.Device)}, nil // the rest is being prefilled
	}
	var err error
	if opts.Namespace, err = s.m.namespace(ctx, s.key.tenant); err != nil {
		return engine.Restored{}, err
	}
	seq, got, err := s.m.eng.Open(ctx, line, opts)
	if err != nil {
		return got, engineError("open timeline", err, "")
	}
	s.mu.Lock()
	s.seq = seq
	pin := s.row.pin
	s.mu.Unlock()
	if pin {
		s.m.eng.Pin(seq, true)
	}
	return got, nil
}

// dropSeq lets go of the timeline. The caller holds ops; no turn is open.
func (s *session) dropSeq() {
	s.mu.Lock()
	seq := s.seq
	s.seq = nil
	s.mu.Unlock()
	if seq != nil {
		s.m.eng.Release(seq)
	}
}

// view is the session as clients see it, with where its bytes are now.
func (s *session) view() Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.viewLocked(&s.row)
}

func (s *session) viewLocked(x *row) Session {
	v := x.session()
	if s.seq != nil {
		v.Residency = Residency(s.seq.Residency())
	}
	return v
}

// engineError gives an engine's error its code. field is the request's part
// that brought the tokens.
func engineError(what string, err error, field string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, engine.ErrQueueFull):
		return &Error{Code: CodeQueueFull, Message: "the queue of waiting turns is full", cause: err}
	case errors.Is(err, engine.ErrContextLimit):
		return &Error{Code: CodeContextLimit, Field: field, Message: "the line would be longer than the model's context", cause: err}
	case errors.Is(err, engine.ErrPoolFull):
		return &Error{Code: CodeOverloaded, Message: "device memory is full", cause: err}
	case errors.Is(err, engine.ErrQuota):
		return overQuota("resident_bytes", 0, "the open turns fill the memory that is allowed, further ones wait for their ends")
	case errors.Is(err, engine.ErrClosed):
		return &Error{Code: CodeOverloaded, Message: "the engine is shutting down", cause: err}
	case errors.Is(err, engine.ErrBusy):
		return &Error{Code: CodeTurnInProgress, Message: "a turn is in progress", cause: err}
	}
	return &Error{Code: CodeInternal, Message: what + " failed", cause: fmt.Errorf("%s: %w", what, err)}
}
