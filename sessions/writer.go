package sessions

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// flushDelay is how long the first tokens of a batch wait for more, of
	// their own session and of others. Readers have them already; a crash costs
	// that much recomputation. Starts and ends of turns do not wait.
	// Of a fast model's tokens a commit costs more than sending them.
	flushDelay = 100 * time.Millisecond

	// While the ledger does not answer, turns decode on for ledgerHoldAfter
	// (or to engine.MaxUncommitted tokens), then stand still, and fail after
	// ledgerAwayMax.
	ledgerHoldAfter = 5 * time.Second
	ledgerAwayMax   = 60 * time.Second

	writerRetryMin = 20 * time.Millisecond
	writerRetryMax = time.Second
)

// writer is the one goroutine that appends tokens to the ledger: what all
// sessions have seen since its last commit goes into one transaction.
type writer struct {
	m    *Manager
	rush chan struct{} // capacity 1; do not wait for more

	mu    sync.Mutex
	list  []*session  // guarded by mu; sessions with something pending
	delay *time.Timer // runs from the first session on the list on

	downSince atomic.Int64 // Unix nanoseconds; 0: the last batch was committed
	awayMax   time.Duration
	holdAfter time.Duration
}

func newWriter(m *Manager) *writer {
	delay := time.NewTimer(flushDelay)
	delay.Stop()
	return &writer{m: m, rush: make(chan struct{}, 1), delay: delay, awayMax: ledgerAwayMax, holdAfter: ledgerHoldAfter}
}

// add puts a session on the list. urgent cuts the delay short.
func (w *writer) add(s *session, urgent bool) {
	w.mu.Lock()
	if !s.queued {
		s.queued = true
		if w.list = append(w.list, s); len(w.list) == 1 {
			w.delay.Reset(flushDelay)
		}
	}
	w.mu.Unlock()
	if urgent {
		signal(w.rush)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (w *writer) loop() {
	for {
		select {
		case <-w.delay.C:
		case <-w.rush:
		case <-w.m.ctx.Done():
			return
		}
		w.write(w.take())
	}
}

// take collects a flush of every listed session, whose wlock it then holds. A
// session that an operation holds stays listed; the operation's own
// transaction will write what is pending, or its release lists it again.
func (w *writer) take() []*flush {
	w.mu.Lock()
	list := w.list
	w.list = nil
	for _, s := range list {
		s.queued = false
	}
	w.mu.Unlock()
	var out []*flush
	for _, s := range list {
		if !s.wlock.tryLock() {
			s.mu.Lock()
			s.relist = true
			s.mu.Unlock()
			if !s.wlock.tryLock() { // else it was released in between
				continue
			}
		}
		s.mu.Lock()
		var f *flush
		if s.turn != nil {
			f = s.flushLocked()
		}
		s.mu.Unlock()
		if f == nil {
			s.wlock.unlock()
			continue
		}
		out = append(out, f)
	}
	return out
}

// write commits the flushes, trying for as long as the ledger is away. If it
// refuses the batch, each session is written by itself, so that one session's
// fault is its own.
func (w *writer) write(batch []*flush) {
	if len(batch) == 0 {
		return
	}
	began := time.Now()
	defer w.holdLater()()
	for delay := writerRetryMin; ; delay = min(2*delay, writerRetryMax) {
		err := w.commit(batch)
		if err == nil {
			w.downSince.Store(0)
			w.m.counts.batch(time.Since(began))
			return
		}
		if !isUnavailable(err) {
			w.downSince.Store(0)
			if len(batch) > 1 {
				for _, f := range batch {
					w.write([]*flush{f})
				}
				return
			}
			w.m.log.Error("the ledger refuses a session's tokens", "session", sessionID(batch[0].key.id), "error", err)
			batch[0].s.fence()
			batch[0].s.wlock.unlock()
			return
		}
		w.away(began, batch, err)
		select {
		case <-time.After(delay):
		case <-w.m.ctx.Done():
			for _, f := range batch {
				f.s.wlock.unlock()
			}
			return
		}
	}
}

// holdLater makes turns stand still after a while, in the middle of a commit
// too: one over a connection that swallows it takes its time to fail. The
// returned function lets them go on.
func (w *writer) holdLater() (release func()) {
	var mu sync.Mutex
	held, over := false, false
	timer := time.AfterFunc(w.holdAfter, func() {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			held = true
			w.m.holdTurns(true)
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		over = true
		if held {
			w.m.holdTurns(false)
		}
	}
}

// away notes that the ledger does not answer, and fails the turns that have
// waited too long. Their ends are written when it is back.
func (w *writer) away(since time.Time, batch []*flush, err error) {
	if w.downSince.CompareAndSwap(0, since.UnixNano()) {
		w.m.log.Error("the ledger does not answer", "error", err)
	}
	if time.Since(since) < w.awayMax {
		return
	}
	for _, f := range batch {
		f.t.fail(CodeLedgerUnavailable, "the ledger did not answer")
	}
	w.m.failWaiting()
}

// commit writes a batch in one transaction and makes it true in memory.
func (w *writer) commit(batch []*flush) error {
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	known := make(map[liveKey]int64, len(batch)) // what is still this server's, by rev
	err, _ := w.m.transact(ctx, func(tx *work) { w.lock(tx, batch, known) }, func(tx *work) error {
		for _, f := range batch {
			if rev, ok := known[f.key]; !ok || rev != f.rev {
				continue // fenced, or already written by an earlier try
			}
			if err := f.queue(tx.b); err != nil {
				return err
			}
			f.s.mu.Lock()
			x := f.s.row
			f.s.mu.Unlock()
			f.queueSession(tx.b, x)
		}
		return nil
	})
	for _, f := range batch {
		f.tries++
	}
	if err != nil {
		return err
	}
	for _, f := range batch {
		rev, ok := known[f.key]
		// a try before this one may have been committed without an answer
		if !ok || rev != f.rev && (f.tries == 1 || rev != f.rev+1) {
			f.s.fence()
			f.s.wlock.unlock()
			continue
		}
		f.s.mu.Lock()
		f.s.row.rev++
		f.s.flushedLocked(f)
		f.s.mu.Unlock()
		f.s.wlock.unlock()
		f.s.again()
	}
	return nil
}

// lock selects the sessions that are still this server's, and their revs. The
// rows are locked in the order of their keys, as every transaction does.
func (w *writer) lock(tx *work, batch []*flush, known map[liveKey]int64) {
	tenants, ids, epochs := make([]string, len(batch)), make([]uuid.UUID, len(batch)), make([]int64, len(batch))
	for i, f := range batch {
		tenants[i], ids[i], epochs[i] = f.key.tenant, f.key.id, f.epoch
	}
	tx.queue(`SELECT s.tenant_id, s.id, s.rev
		FROM unnest($1::text[], $2::uuid[], $3::bigint[]) AS k (tenant_id, id, epoch)
		JOIN sessions s ON s.tenant_id = k.tenant_id AND s.id = k.id AND s.epoch = k.epoch
		WHERE s.owner_server = $4 AND s.deleted_at IS NULL
		ORDER BY s.tenant_id, s.id FOR UPDATE OF s`, tenants, ids, epochs, w.m.me).Query(func(rows pgx.Rows) error {
		var k liveKey
		var rev int64
		_, err := pgx.ForEachRow(rows, []any{&k.tenant, &k.id, &rev}, func() error {
			known[k] = rev
			return nil
		})
		return err
	})
}

// again lists the session once more if it has something pending.
func (s *session) again() {
	s.mu.Lock()
	s.relist = false
	more := s.turn != nil && len(s.log.pending()) > 0
	urgent := more && s.turn.final != nil
	s.mu.Unlock()
	if more {
		s.m.writer.add(s, urgent)
	}
}

// holdTurns makes every open turn stand still, or go on.
func (m *Manager) holdTurns(on bool) {
	for _, s := range m.sessions() {
		s.mu.Lock()
		t := s.turn
		s.mu.Unlock()
		if t != nil {
			t.run.Hold(on)
		}
	}
}

// failWaiting fails the turns whose tokens wait behind a batch that the ledger
// does not take.
func (m *Manager) failWaiting() {
	for _, s := range m.sessions() {
		s.mu.Lock()
		t, pending := s.turn, len(s.log.pending()) > 0
		s.mu.Unlock()
		if t != nil && pending {
			t.fail(CodeLedgerUnavailable, "the ledger did not answer")
		}
	}
}

// sessions lists the live sessions.
func (m *Manager) sessions() []*session {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*session, 0, len(m.live))
	for _, s := range m.live {
		select {
		case <-s.loaded:
			out = append(out, s)
		default:
		}
	}
	return out
}
