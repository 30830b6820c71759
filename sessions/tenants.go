package sessions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// LimitsFreshFor is how long a tenant's quotas are used without a new look:
	// changed ones hold after that.
	LimitsFreshFor = 5 * time.Second

	// sessionCountAge is how old a count of a tenant's sessions may be; what this
	// server made since is added. fullCountAge is for one that says that there are
	// too many already: somebody may have deleted some.
	sessionCountAge = 10 * time.Second
	fullCountAge    = time.Second
)

// Quotas are a tenant's own limits; nil: the server's default (SessionsPerTenantMax,
// TurnsPerTenantMax, tokens and memory without end). 0 allows nothing.
//
// They are kept by each server for itself, so a tenant that calls several of
// them may have as many turns, tokens and bytes from each.
type Quotas struct {
	Sessions        *int `json:"sessions"`
	ConcurrentTurns *int `json:"concurrent_turns"` // queued and running
	// TokensPerMinute counts prompts, imports and generated tokens. It refills all the
	// time and is full after a start. A turn begins while some of it is left
	// and is not cut when it is used up; what it took too much is owed first.
	TokensPerMinute *int `json:"tokens_per_minute"`
	// ResidentBytes bounds what the tenant's lines take in the device's and the
	// host's memory, see resident.go.
	ResidentBytes *int64 `json:"resident_bytes"`
}

// quotaColumns are a tenant's salt and quotas in the order of fields.
const quotaColumns = `salt, sessions, concurrent_turns, tokens_per_minute, resident_bytes`

// tenantInfo is a tenant's row.
type tenantInfo struct {
	salt   string // never changes
	quotas Quotas
	at     time.Time // when the quotas were read
}

func (x *tenantInfo) fields() []any {
	q := &x.quotas
	return []any{&x.salt, &q.Sessions, &q.ConcurrentTurns, &q.TokensPerMinute, &q.ResidentBytes}
}

// tenants is what is known about tenants without asking the ledger.
type tenants struct {
	mu      sync.Mutex
	rows    map[string]tenantInfo // guarded by mu
	buckets map[string]*bucket    // guarded by mu; of tenants with TokensPerMinute

	setting sync.Mutex       // one limit at a time goes to the engine; before mu
	set     map[string]int64 // guarded by mu; limits of resident bytes that the engine has
}

// bucket is what is left of a tenant's tokens.
type bucket struct {
	level float64 // negative: owed
	at    time.Time
}

// fill brings a bucket to now.
func (b *bucket) fill(perMinute int, now time.Time) {
	full := float64(perMinute)
	b.level = min(full, b.level+full*now.Sub(b.at).Minutes())
	b.at = now
}

// tenant reads a tenant's row unless it is known and fresh. While the ledger
// does not answer an old one serves.
func (m *Manager) tenant(ctx context.Context, id string) (tenantInfo, error) {
	t := &m.known
	t.mu.Lock()
	known, ok := t.rows[id]
	if ok && time.Since(known.at) < LimitsFreshFor {
		t.mu.Unlock()
		return known, nil
	}
	if ok { // the others need not ask too
		fresh := known
		fresh.at = time.Now()
		t.rows[id] = fresh
	}
	t.mu.Unlock()
	x := tenantInfo{at: time.Now()}
	err := m.pool.QueryRow(ctx, `SELECT `+quotaColumns+` FROM tenants WHERE id = $1`, id).Scan(x.fields()...)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return x, notFound("tenant", id)
	case err != nil && ok:
		return known, nil
	case err != nil:
		return x, ledgerError("read tenant", err)
	}
	t.know(id, x)
	return x, m.setResident(ctx, id)
}

// know remembers a tenant's row.
func (t *tenants) know(id string, x tenantInfo) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rows == nil {
		t.rows = map[string]tenantInfo{}
	}
	t.rows[id] = x
}

// namespace is the cache salt of a tenant: only lines of one tenant share
// pages, whatever their tokens are.
func (m *Manager) namespace(ctx context.Context, tenant string) (string, error) {
	m.known.mu.Lock()
	x, ok := m.known.rows[tenant]
	m.known.mu.Unlock()
	if ok {
		return x.salt, nil
	}
	x, err := m.tenant(ctx, tenant)
	return x.salt, err
}

func quota(own *int, def int) int {
	if own == nil {
		return def
	}
	return *own
}

// overQuota refuses what a tenant has too much of.
func overQuota(name string, after time.Duration, format string, args ...any) *Error {
	return &Error{Code: CodeLimit, Field: name, Message: fmt.Sprintf(format, args...), RetryAfter: after}
}

// tenantCount is how many sessions a tenant had when somebody last counted.
type tenantCount struct {
	n  int
	at time.Time
}

// admitSessions checks the quota of sessions and counts n more.
func (m *Manager) admitSessions(ctx context.Context, tenant string, n int) error {
	t, err := m.tenant(ctx, tenant)
	if err != nil {
		return err
	}
	most := quota(t.quotas.Sessions, SessionsPerTenantMax)
	for counted := false; ; counted = true {
		m.mu.Lock()
		c, ok := m.tenants[tenant]
		if ok && c.n+n <= most && (counted || time.Since(c.at) < sessionCountAge) {
			c.n += n
			m.tenants[tenant] = c
			m.mu.Unlock()
			return nil
		}
		m.mu.Unlock()
		if ok && (counted || c.n+n > most && time.Since(c.at) < fullCountAge) {
			return overQuota("sessions", 0, "%d sessions are allowed: delete some", most)
		}
		c = tenantCount{at: time.Now()}
		err := m.pool.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM sessions WHERE tenant_id = $1 AND deleted_at IS NULL LIMIT $2) s`,
			tenant, most+1).Scan(&c.n)
		if err != nil {
			return ledgerError("count sessions", err)
		}
		m.mu.Lock()
		m.tenants[tenant] = c
		m.mu.Unlock()
	}
}

// turnBegan counts a turn against its tenant's quota, as last read.
func (m *Manager) turnBegan(tenant string) error {
	m.known.mu.Lock()
	most := quota(m.known.rows[tenant].quotas.ConcurrentTurns, TurnsPerTenantMax)
	m.known.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.turns[tenant] >= most {
		return overQuota("concurrent_turns", 0, "%d turns are open, more are not allowed at once", m.turns[tenant])
	}
	m.turns[tenant]++
	return nil
}

func (m *Manager) turnEnded(tenant string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.turns[tenant]--; m.turns[tenant] <= 0 {
		delete(m.turns, tenant)
	}
}

// admitTokens refuses work of a tenant that has used up its tokens.
func (m *Manager) admitTokens(ctx context.Context, tenant string) error {
	x, err := m.tenant(ctx, tenant)
	if err != nil || x.quotas.TokensPerMinute == nil {
		return err
	}
	most := *x.quotas.TokensPerMinute
	m.known.mu.Lock()
	defer m.known.mu.Unlock()
	if most == 0 {
		return overQuota("tokens_per_minute", 0, "no tokens are allowed")
	}
	b := m.known.bucketLocked(tenant, most)
	if b.level > 0 {
		return nil
	}
	// until there is one whole token again
	wait := time.Duration((1 - b.level) / float64(most) * float64(time.Minute))
	return overQuota("tokens_per_minute", wait, "%d tokens a minute are allowed and used up", most)
}

// bucketLocked is a tenant's bucket at this moment.
func (t *tenants) bucketLocked(tenant string, perMinute int) *bucket {
	now := time.Now()
	b := t.buckets[tenant]
	if b == nil {
		if t.buckets == nil {
			t.buckets = map[string]*bucket{}
		}
		b = &bucket{level: float64(perMinute), at: now}
		t.buckets[tenant] = b
	}
	b.fill(perMinute, now)
	return b
}

// spend takes n tokens from what a tenant has left.
func (m *Manager) spend(tenant string, n int) {
	m.known.mu.Lock()
	defer m.known.mu.Unlock()
	if most := m.known.rows[tenant].quotas.TokensPerMinute; most != nil && *most > 0 {
		m.known.bucketLocked(tenant, *most).level -= float64(n)
	}
}

// SetQuotas gives a tenant its limits, all of them; servers follow within
// LimitsFreshFor.
func (k *Keys) SetQuotas(ctx context.Context, tenant string, q Quotas) error {
	if err := checkTenant(tenant); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		value *int
	}{{"sessions", q.Sessions}, {"concurrent_turns", q.ConcurrentTurns}, {"tokens_per_minute", q.TokensPerMinute}} {
		if f.value != nil && (*f.value < 0 || *f.value > QuotaMax) {
			return invalid(f.name, "want 0 to %d, not %d", QuotaMax, *f.value)
		}
	}
	if n := q.ResidentBytes; n != nil && (*n < 0 || *n > ResidentBytesMax) {
		return invalid("resident_bytes", "want 0 to %d, not %d", int64(ResidentBytesMax), *n)
	}
	return k.change(ctx, "set limits", func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE tenants SET sessions = $2, concurrent_turns = $3, tokens_per_minute = $4, resident_bytes = $5 WHERE id = $1`,
			tenant, q.Sessions, q.ConcurrentTurns, q.TokensPerMinute, q.ResidentBytes)
		if err == nil && tag.RowsAffected() == 0 {
			return notFound("tenant", tenant)
		}
		if err != nil {
			return err
		}
		return audit(ctx, tx, auditTenantLimits, tenant, tenant)
	})
}

// QuotaMax bounds every quota but ResidentBytes, ResidentBytesMax that one.
const (
	QuotaMax         = 1 << 30
	ResidentBytesMax = 1 << 60
)

// Quotas reads a tenant's limits.
func (k *Keys) Quotas(ctx context.Context, tenant string) (Quotas, error) {
	var x tenantInfo
	err := k.pool.QueryRow(ctx, `SELECT `+quotaColumns+` FROM tenants WHERE id = $1`, tenant).Scan(x.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		return x.quotas, notFound("tenant", tenant)
	}
	return x.quotas, ledgerError("read limits", err)
}
