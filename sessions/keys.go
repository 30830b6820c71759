package sessions

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// KeySecretPrefix begins every API key, so that people and scanners know one
	// when they see it.
	KeySecretPrefix = "rk_"

	// KeyNameBytesMax bounds a key's name.
	KeyNameBytesMax = 256

	keyPrefix    = "key_"
	keySecretLen = len(KeySecretPrefix) + 52 // two times 130 bits in base32
)

// tenantName is what a tenant may be called: it is an id, not a title.
var tenantName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)

// Identity is who a call comes from. The zero Identity is nobody: no session
// is its tenant's.
type Identity struct {
	Tenant string
	KeyID  string // "" on a server without keys
	Admin  bool   // may read what is about the whole server
}

// Key is an API key as it is kept: its secret is not among it.
type Key struct {
	ID         string     `json:"id"`
	Tenant     string     `json:"tenant"`
	Name       string     `json:"name"`
	Admin      bool       `json:"admin"`
	CreatedAt  time.Time  `json:"created_at"`
	RevokedAt  *time.Time `json:"revoked_at"`
	LastUsedAt *time.Time `json:"last_used_at"` // to about a minute
}

// NewKey is a key that was just made, with its secret, which is told once.
type NewKey struct {
	Key
	Secret string `json:"secret"`
}

// KeyRequest is what a new key shall be.
type KeyRequest struct {
	Tenant string // made if there is none; "": DefaultTenant
	Name   string
	Admin  bool
}

// Keys are the API keys of a ledger: made, listed and revoked by operators,
// and looked up by a server for each call (authenticate.go).
type Keys struct {
	pool  *pgxpool.Pool
	owns  bool // Close closes the pool
	log   *slog.Logger
	cache keyCache
	holds keyHolds
	fails failures

	addresses addressFailures
}

// OpenKeys connects to a ledger for its keys alone. The database must have the
// newest schema.
func OpenKeys(ctx context.Context, url string) (*Keys, error) {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("connect to the ledger: %w", err)
	}
	k := newKeys(pool, 0)
	k.owns = true
	return k, nil
}

// Close drops the connections of OpenKeys.
func (k *Keys) Close() {
	if k.owns {
		k.pool.Close()
	}
}

// Create makes a key, and its tenant if there is none.
func (k *Keys) Create(ctx context.Context, req KeyRequest) (NewKey, error) {
	if req.Tenant == "" {
		req.Tenant = DefaultTenant
	}
	if err := checkTenant(req.Tenant); err != nil {
		return NewKey{}, err
	}
	if err := checkText("name", req.Name, KeyNameBytesMax); err != nil {
		return NewKey{}, err
	}
	id := newID()
	out := NewKey{Secret: KeySecretPrefix + rand.Text() + rand.Text()}
	hash := sha256.Sum256([]byte(out.Secret))
	err := k.change(ctx, "create key", func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO tenants (id) VALUES ($1) ON CONFLICT DO NOTHING`, req.Tenant); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `INSERT INTO api_keys (tenant_id, id, name, hash, admin) VALUES ($1, $2, $3, $4, $5)
			RETURNING `+keyColumns, req.Tenant, id, req.Name, hash[:], req.Admin)
		if err != nil {
			return err
		}
		if out.Key, err = pgx.CollectExactlyOneRow(rows, scanKey); err != nil {
			return err
		}
		return audit(ctx, tx, auditKeyCreated, req.Tenant, out.ID)
	})
	return out, err
}

// List returns the keys of a tenant, of all of them with "", oldest first.
// Revoked ones stay in it.
func (k *Keys) List(ctx context.Context, tenant string) ([]Key, error) {
	rows, err := k.pool.Query(ctx, `SELECT `+keyColumns+` FROM api_keys WHERE $1 = '' OR tenant_id = $1 ORDER BY id`, tenant)
	if err != nil {
		return nil, ledgerError("list keys", err)
	}
	list, err := pgx.CollectRows(rows, scanKey)
	if err != nil {
		return nil, ledgerError("list keys", err)
	}
	return list, nil
}

// Revoke ends a key for good: this process refuses it at once, other servers
// within KeyFreshFor. Revoking it again changes nothing.
func (k *Keys) Revoke(ctx context.Context, id string) (Key, error) {
	u, ok := parseID(keyPrefix, id)
	if !ok {
		return Key{}, notFound("key", id)
	}
	var out Key
	err := k.change(ctx, "revoke key", func(tx pgx.Tx) error {
		var already bool
		err := tx.QueryRow(ctx, `SELECT revoked_at IS NOT NULL FROM api_keys WHERE id = $1 FOR UPDATE`, u).Scan(&already)
		if errors.Is(err, pgx.ErrNoRows) {
			return notFound("key", id)
		}
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = $1 RETURNING `+keyColumns, u)
		if err != nil {
			return err
		}
		if out, err = pgx.CollectExactlyOneRow(rows, scanKey); err != nil || already {
			return err
		}
		return audit(ctx, tx, auditKeyRevoked, out.Tenant, out.ID)
	})
	if err == nil {
		k.cache.drop(id)
		k.holds.end(func(held string) bool { return held == id })
	}
	return out, err
}

// Exist tells whether a key was ever made. Revoked ones count: taking the last
// key away must not open a server to everybody.
func (k *Keys) Exist(ctx context.Context) (bool, error) {
	var there bool
	if err := k.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM api_keys)`).Scan(&there); err != nil {
		return false, ledgerError("look for keys", err)
	}
	return there, nil
}

// change runs one transaction of a person at the command line.
func (k *Keys) change(ctx context.Context, what string, fn func(tx pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	return ledgerError(what, pgx.BeginFunc(ctx, k.pool, fn))
}

const keyColumns = `id, tenant_id, name, admin, created_at, revoked_at, last_used_at`

func scanKey(r pgx.CollectableRow) (Key, error) {
	var key Key
	var id uuid.UUID
	err := r.Scan(&id, &key.Tenant, &key.Name, &key.Admin, &key.CreatedAt, &key.RevokedAt, &key.LastUsedAt)
	key.ID, key.CreatedAt = keyPrefix+id.String(), key.CreatedAt.UTC()
	for _, t := range []*time.Time{key.RevokedAt, key.LastUsedAt} {
		if t != nil {
			*t = t.UTC()
		}
	}
	return key, err
}

func checkTenant(name string) error {
	if !tenantName.MatchString(name) {
		return invalid("tenant", "want 1 to 64 of a-z, 0-9, dot, dash and underscore, not %q", name)
	}
	return nil
}
