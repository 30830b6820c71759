package sessions

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// KeyFreshFor is for how long a key that was looked up is good without
	// another look, so the time after which every server refuses a revoked key
	// and has ended the streams that were opened with it.
	KeyFreshFor = 5 * time.Second

	// KeyStaleMax is for how long a key stays good while the ledger does not
	// answer: streams of running turns go on over a restart of Postgres.
	KeyStaleMax = time.Minute

	keyRetry       = time.Second     // until an unknown key, or a ledger that is away, is asked for again
	keyLookupTime  = 3 * time.Second // of one look into the ledger, and of waiting for one
	keyLookupsMax  = 4               // looks for unknown keys at once: a flood of guesses must leave connections to others
	keyDoubtsMax   = 1               // of them, beside these, for addresses with too many failures (failures.go)
	keyCacheMax    = 4096            // keys in memory; one more takes the place of an unknown or any other one
	keyEvictLook   = 32              // entries that are looked at for one to give up
	keyTouchMinute = "1 minute"      // last_used_at is not written more often
)

// errNoKey is one answer for unknown, malformed and revoked keys: which of them
// it was is nobody's business.
func errNoKey() *Error {
	return &Error{Code: CodeUnauthenticated, Message: "the API key is not valid"}
}

type keyHash = [sha256.Size]byte

// keyEntry is what the ledger last said about a key.
type keyEntry struct {
	who       Identity
	err       error         // instead of who
	until     time.Time     // the answer holds until then
	confirmed time.Time     // when the ledger last said that the key is good
	loading   chan struct{} // not nil: somebody asks; closed when the answer is there
}

// keyCache remembers answers by the hash of the secret.
type keyCache struct {
	fresh   time.Duration
	mu      sync.Mutex
	entries map[keyHash]*keyEntry // guarded by mu
	lookups chan struct{}         // cap keyLookupsMax: looks for keys that nobody knows yet
	doubts  chan struct{}         // cap keyDoubtsMax: such looks for addresses with too many failures
}

func newKeys(pool *pgxpool.Pool, fresh time.Duration) *Keys {
	if fresh <= 0 {
		fresh = KeyFreshFor
	}
	return &Keys{pool: pool, log: slog.New(slog.DiscardHandler),
		cache: keyCache{fresh: fresh, entries: map[keyHash]*keyEntry{}, lookups: make(chan struct{}, keyLookupsMax), doubts: make(chan struct{}, keyDoubtsMax)},
		holds: keyHolds{by: map[string]map[*hold]struct{}{}}}
}

// Authenticate says whose a secret is that came from an address:
// CodeUnauthenticated if nobody's, CodeTooManyFailures if nobody's and the
// address has tried too many, CodeLedgerUnavailable if that cannot be told.
func (k *Keys) Authenticate(ctx context.Context, from netip.Addr, secret string) (Identity, error) {
	wait := k.addresses.wait(from, time.Now())
	who, err := k.authenticate(ctx, secret, wait > 0)
	if ErrorCode(err) == CodeUnauthenticated {
		k.fails.add(from)
		k.addresses.add(from, time.Now())
		if wait > 0 {
			err = tooManyFailures(wait)
		}
	}
	return who, err
}

// authenticate looks in memory and then in the ledger; doubted is for an
// address with too many failures.
func (k *Keys) authenticate(ctx context.Context, secret string, doubted bool) (Identity, error) {
	if len(secret) != keySecretLen || !strings.HasPrefix(secret, KeySecretPrefix) {
		return Identity{}, errNoKey()
	}
	hash := sha256.Sum256([]byte(secret))
	e, err := k.cache.take(ctx, hash)
	if err != nil {
		return Identity{}, err
	}
	if e.loading != nil {
		e = k.look(ctx, hash, e, doubted)
	}
	return e.who, e.err
}

// take returns what is known about a key. With loading set the caller must
// look the key up, and others wait for it.
func (c *keyCache) take(ctx context.Context, hash keyHash) (keyEntry, error) {
	for {
		c.mu.Lock()
		e := c.entries[hash]
		if e == nil {
			c.makeRoomLocked()
			e = &keyEntry{}
			c.entries[hash] = e
		}
		if e.loading == nil {
			if time.Now().Before(e.until) {
				defer c.mu.Unlock()
				return *e, nil
			}
			e.loading = make(chan struct{})
			defer c.mu.Unlock()
			return *e, nil
		}
		done := e.loading
		c.mu.Unlock()
		select {
		case <-done:
		case <-ctx.Done():
			return keyEntry{}, ctx.Err()
		}
	}
}

// makeRoomLocked gives up an entry when there are too many; rather one that
// says no than a good one.
func (c *keyCache) makeRoomLocked() {
	if len(c.entries) < keyCacheMax {
		return
	}
	var victim *keyHash
	seen := 0
	for hash, e := range c.entries { // in no order, which is good enough
		if e.loading != nil {
			continue
		}
		if victim = &hash; e.err != nil || seen >= keyEvictLook {
			break
		}
		seen++
	}
	if victim != nil {
		delete(c.entries, *victim)
	}
}

// look asks the ledger about a key that take gave out for it.
func (k *Keys) look(ctx context.Context, hash keyHash, e keyEntry, doubted bool) keyEntry {
	done := e.loading
	e.loading = nil
	// what is learnt is for all who wait, so it does not end with one of them
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keyLookupTime)
	defer cancel()
	asked := time.Now()
	who, err := k.find(ctx, hash, e.confirmed.IsZero(), doubted)
	switch {
	case err == nil:
		e.who, e.err, e.confirmed, e.until = who, nil, asked, asked.Add(k.cache.fresh)
	case ErrorCode(err) == CodeUnauthenticated:
		e.who, e.err, e.confirmed, e.until = Identity{}, err, time.Time{}, time.Now().Add(keyRetry)
	case time.Since(e.confirmed) < KeyStaleMax:
		e.err, e.until = nil, time.Now().Add(keyRetry)
	default:
		e.who, e.err, e.until = Identity{}, err, time.Now().Add(keyRetry)
	}
	k.cache.mu.Lock()
	defer k.cache.mu.Unlock()
	close(done)
	if kept := k.cache.entries[hash]; kept != nil && kept.loading == done {
		*kept = e
		return e
	}
	// dropped meanwhile: revoked after the ledger was asked, perhaps
	if e.err == nil {
		e.who, e.err = Identity{}, errNoKey()
	}
	return e
}

// find reads a key from the ledger and notes that it is used.
func (k *Keys) find(ctx context.Context, hash keyHash, unknown, doubted bool) (Identity, error) {
	if unknown {
		lane := k.cache.lookups
		if doubted {
			lane = k.cache.doubts
		}
		select {
		case lane <- struct{}{}:
			defer func() { <-lane }()
		case <-ctx.Done():
			return Identity{}, fail(CodeOverloaded, "too many unknown API keys are being looked up")
		}
	}
	var who Identity
	var id uuid.UUID
	var touch bool
	err := k.pool.QueryRow(ctx, `SELECT tenant_id, id, admin, last_used_at IS NULL OR last_used_at < now() - $2::interval
		FROM api_keys WHERE hash = $1 AND revoked_at IS NULL`, hash[:], keyTouchMinute).Scan(&who.Tenant, &id, &who.Admin, &touch)
	if errors.Is(err, pgx.ErrNoRows) {
		return Identity{}, errNoKey()
	}
	if err == nil && touch {
		_, err = k.pool.Exec(ctx, `UPDATE api_keys SET last_used_at = now() WHERE tenant_id = $1 AND id = $2`, who.Tenant, id)
	}
	if err != nil {
		return Identity{}, ledgerError("look up key", err)
	}
	who.KeyID = keyPrefix + id.String()
	return who, nil
}

// drop forgets a key. One that is being looked up is forgotten too: whoever
// asks may have asked before it was revoked.
func (c *keyCache) drop(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for hash, e := range c.entries {
		if e.who.KeyID == id || e.loading != nil {
			delete(c.entries, hash)
		}
	}
}

// keyHolds are the contexts of what goes on for longer than a call: sockets
// and event streams. They end when their key is revoked.
type keyHolds struct {
	mu sync.Mutex
	by map[string]map[*hold]struct{} // guarded by mu; by key
}

type hold struct{ cancel context.CancelFunc }

// Hold derives a context that ends when the caller's key is revoked, within
// KeyFreshFor. release must be called.
func (k *Keys) Hold(ctx context.Context, who Identity) (held context.Context, release func()) {
	held, cancel := context.WithCancel(ctx)
	if who.KeyID == "" {
		return held, cancel
	}
	h := &hold{cancel}
	k.holds.mu.Lock()
	defer k.holds.mu.Unlock()
	if k.holds.by[who.KeyID] == nil {
		k.holds.by[who.KeyID] = map[*hold]struct{}{}
	}
	k.holds.by[who.KeyID][h] = struct{}{}
	return held, func() {
		cancel()
		k.holds.mu.Lock()
		defer k.holds.mu.Unlock()
		delete(k.holds.by[who.KeyID], h)
		if len(k.holds.by[who.KeyID]) == 0 {
			delete(k.holds.by, who.KeyID)
		}
	}
}

// end ends what is held with keys that are gone.
func (h *keyHolds) end(gone func(id string) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, holds := range h.by {
		if gone(id) {
			for one := range holds {
				one.cancel()
			}
		}
	}
}

// keep ends streams of revoked keys and writes failed authentications, until
// ctx ends; also is done as often.
func (k *Keys) keep(ctx context.Context, kept func(error), also func(context.Context) error) {
	tick := time.NewTicker(k.cache.fresh)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), keyLookupTime)
			kept(k.writeFailures(last, true))
			cancel()
			return
		case <-tick.C:
		}
		limited, cancel := context.WithTimeout(ctx, keyLookupTime)
		kept(errors.Join(k.endRevoked(limited), k.writeFailures(limited, false), also(limited)))
		cancel()
	}
}

// endRevoked looks in the ledger for keys that streams are held with. While it
// is away they go on.
func (k *Keys) endRevoked(ctx context.Context) error {
	k.holds.mu.Lock()
	var ids []uuid.UUID
	for text := range k.holds.by {
		if id, ok := parseID(keyPrefix, text); ok {
			ids = append(ids, id)
		}
	}
	k.holds.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	rows, err := k.pool.Query(ctx, `SELECT id FROM api_keys WHERE id = ANY($1) AND revoked_at IS NOT NULL`, ids)
	if err != nil {
		return ledgerError("look for revoked keys", err)
	}
	gone, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return ledgerError("look for revoked keys", err)
	}
	revoked := map[string]bool{}
	for _, id := range gone {
		revoked[keyPrefix+id.String()] = true
	}
	k.holds.end(func(id string) bool { return revoked[id] })
	return nil
}
