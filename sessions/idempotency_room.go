package sessions

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Idempotency keys of a tenant are rows with answers, so their number is
// bounded. A key is kept for idempotencyTTL. When a tenant has more than
// IdempotencyKeysMax, its oldest go before that, but none that is younger than
// IdempotencyKeptMin; when all are, calls with a new key are CodeLimit. Calls
// whose key has an answer get it, and those without a key are not concerned.
//
// Each server counts the ledger's rows once in keyCountAge and adds what it
// writes, so a tenant may have more by what all servers write in that time.
const (
	IdempotencyKeysMax = 1_000_000
	IdempotencyKeptMin = time.Hour

	keyCountAge   = time.Minute
	keyFullAge    = time.Second // of a count that says that there is no room
	keyRetryAfter = time.Minute // what a refused caller is told

	// expiredAtOnce is how many expired keys one statement drops: one that has
	// more to do than its time would never get anywhere.
	expiredAtOnce = 20_000
)

// keyRoom counts tenants' keys.
type keyRoom struct {
	most   int // IdempotencyKeysMax; tests have less
	mu     sync.Mutex
	counts map[string]*keyCount // guarded by mu
}

type keyCount struct {
	n    int
	at   time.Time // when it was counted
	busy bool      // somebody counts
}

// spare is how much is dropped at once, and how far a tenant may get over the
// limit while that is done.
func (r *keyRoom) spare() int { return max(1, r.most/20) }

// take counts one key more. look says that the caller must count first.
func (r *keyRoom) take(tenant string, now time.Time) (ok, look bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[tenant]
	if c == nil {
		if r.counts == nil {
			r.counts = map[string]*keyCount{}
		}
		c = &keyCount{}
		r.counts[tenant] = c
	}
	age := now.Sub(c.at)
	switch {
	case c.n < r.most && age < keyCountAge, c.busy && c.n < r.most+r.spare():
		c.n++
		return true, false
	case c.busy, c.n >= r.most && age < keyFullAge:
		return false, false
	}
	c.busy = true
	return false, true
}

// counted ends a look that take has asked for.
func (r *keyRoom) counted(tenant string, n int, now time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[tenant]
	c.busy = false
	if err == nil {
		c.n, c.at = n, now
	}
}

// admitKey makes sure that a tenant may have one more idempotency key.
func (m *Manager) admitKey(ctx context.Context, tenant string) error {
	ok, look := m.keyRoom.take(tenant, time.Now())
	if look {
		n, err := m.makeKeyRoom(ctx, tenant)
		m.keyRoom.counted(tenant, n, time.Now(), err)
		if err != nil {
			return err
		}
		ok, _ = m.keyRoom.take(tenant, time.Now())
	}
	if !ok {
		return overQuota("idempotency_keys", keyRetryAfter, "%d idempotency keys are kept, all of the last %v: more are not allowed", m.keyRoom.most, IdempotencyKeptMin)
	}
	return nil
}

// makeKeyRoom counts a tenant's keys, and drops its oldest if there are too
// many.
func (m *Manager) makeKeyRoom(ctx context.Context, tenant string) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	err = m.pool.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM idempotency WHERE tenant_id = $1 LIMIT $2) k`,
		tenant, m.keyRoom.most+m.keyRoom.spare()).Scan(&n)
	if err != nil || n < m.keyRoom.most {
		return n, ledgerError("count idempotency keys", err)
	}
	tag, err := m.pool.Exec(ctx, `DELETE FROM idempotency WHERE ctid = ANY (ARRAY(SELECT ctid FROM idempotency
		WHERE tenant_id = $1 AND expires_at < now() + $2::interval ORDER BY expires_at LIMIT $3))`,
		tenant, idempotencyTTL-IdempotencyKeptMin, n-m.keyRoom.most+m.keyRoom.spare())
	return n - int(tag.RowsAffected()), ledgerError("drop idempotency keys", err)
}

// dropExpiredKeys drops the keys of all tenants whose time is up.
func (m *Manager) dropExpiredKeys(ctx context.Context) error {
	for {
		tag, err := m.pool.Exec(ctx, `DELETE FROM idempotency WHERE ctid = ANY (ARRAY(SELECT ctid FROM idempotency
			WHERE expires_at <= now() ORDER BY expires_at LIMIT $1))`, expiredAtOnce)
		if err != nil {
			return fmt.Errorf("sweep idempotency keys: %w", err)
		}
		if tag.RowsAffected() < expiredAtOnce {
			return nil
		}
	}
}
