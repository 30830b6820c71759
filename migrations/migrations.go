// Package migrations holds the ledger's schema and applies it.
//
// Invariants:
//   - Files are applied in order of their number, each in a transaction, and
//     never changed once released.
//   - Servers that start together do not race: an advisory lock lets one
//     migrate while the others wait.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// VersionMin is the oldest Postgres that the schema is made for.
const VersionMin = 15

// Up brings the database at url to the newest schema. It is safe to call from
// several servers at once.
func Up(ctx context.Context, url string) error { return UpTo(ctx, url, math.MaxInt64) }

// UpTo is Up as far as a version, for tests that write what an older server
// would have written.
func UpTo(ctx context.Context, url string, version int64) error {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return fmt.Errorf("parse database url: %w", err)
	}
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if err := checkVersion(ctx, db); err != nil {
		return err
	}
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300))
	if err != nil {
		return fmt.Errorf("make migration lock: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithSessionLocker(locker))
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	if _, err := p.UpTo(ctx, version); err != nil {
		return fmt.Errorf("migrate the ledger: %w", err)
	}
	return nil
}

func checkVersion(ctx context.Context, db *sql.DB) error {
	var n int
	if err := db.QueryRowContext(ctx, "SELECT current_setting('server_version_num')::int").Scan(&n); err != nil {
		return fmt.Errorf("connect to the ledger: %w", err)
	}
	if n/10000 < VersionMin {
		return fmt.Errorf("the ledger's Postgres is version %d, %d or newer is needed", n/10000, VersionMin)
	}
	return nil
}
