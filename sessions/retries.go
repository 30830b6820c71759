package sessions

import (
	"context"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	// What failed is tried again after retryFirst, then after twice as long each
	// time, up to retryMost.
	retryFirst = leaseRenew
	retryMost  = 10 * time.Minute

	// retriesMax bounds what is remembered as failed. What does not fit in takes
	// the place of any other, which is tried again at once.
	retriesMax = 10_000
)

// retries remembers what failed and when it is worth another try: something
// that fails for good must neither keep a server busy nor take the places of
// others.
type retries[K comparable] struct {
	mu sync.Mutex
	by map[K]retry // guarded by mu
}

type retry struct {
	next time.Time
	wait time.Duration
}

// due tells whether k may be tried.
func (r *retries[K]) due(k K) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !time.Now().Before(r.by[k].next)
}

// failed notes that k failed, and tells after what time it may be tried again.
func (r *retries[K]) failed(k K) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	x, known := r.by[k]
	if x.wait = min(2*x.wait, retryMost); !known {
		x.wait = retryFirst
	}
	x.next = time.Now().Add(x.wait)
	if !known && len(r.by) >= retriesMax {
		for other := range r.by {
			delete(r.by, other)
			break
		}
	}
	if r.by == nil {
		r.by = map[K]retry{}
	}
	r.by[k] = x
	return x.wait
}

// done forgets k.
func (r *retries[K]) done(k K) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.by, k)
}

// resting lists what may not be tried yet.
func (r *retries[K]) resting() []K {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	out := []K{}
	for k, x := range r.by {
		if now.Before(x.next) {
			out = append(out, k)
		}
	}
	return out
}

// resting are the sessions that a keeper failed with and leaves alone for a
// while.
func (m *Manager) resting() []uuid.UUID {
	keys := m.ailing.resting()
	ids := make([]uuid.UUID, len(keys))
	for i, k := range keys {
		ids[i] = k.id
	}
	return ids
}

// passOver notes that a keeper failed with a session, whose fault that is: the
// others get their turn. It returns err if it is the ledger that is away, or ctx
// that is over: then nobody's turn has come.
func (m *Manager) passOver(ctx context.Context, k liveKey, what string, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if isUnavailable(err) { // a row that somebody keeps locked looks like that too
		ping, cancel := context.WithTimeout(ctx, pingTimeMax)
		defer cancel()
		if m.pool.Ping(ping) != nil {
			return err
		}
	}
	again := m.ailing.failed(k)
	m.log.Error(what, "session", sessionID(k.id), "again_in", again.String(), "error", err)
	return nil
}
