// Package pgtest gives tests a real database each, with the ledger's schema.
//
// One cluster per test process, started by the first test that asks, with
// durability off; one template database that the migrations made; one copy of
// it per test, dropped at its end. The cluster dies with the process; its
// directory under /tmp stays, for the next process to use again.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"rocket/internal/localpg"
	"rocket/migrations"
)

const (
	template  = "rocket_template"
	placesMax = 32 // test processes at once
)

var (
	once     sync.Once
	cluster  *localpg.Cluster
	startErr error
	serial   atomic.Int64
)

// New makes a database for t and returns its URL.
func New(t testing.TB) string {
	t.Helper()
	once.Do(start)
	if startErr != nil {
		t.Fatalf("start the test cluster: %v", startErr)
	}
	name := fmt.Sprintf("test_%d", serial.Add(1))
	admin(t, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template))
	t.Cleanup(func() { admin(t, fmt.Sprintf("DROP DATABASE IF EXISTS %s WITH (FORCE)", name)) })
	return cluster.DatabaseURL(name)
}

func admin(t testing.TB, sql string) {
	t.Helper()
	if err := exec("postgres", sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func exec(database, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, cluster.DatabaseURL(database))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// start takes the first place that no other test process has. What an earlier
// process left there is used again, which saves making a cluster, unless it
// does not start.
func start() {
	for place := range placesMax {
		dir := fmt.Sprintf("/tmp/rocket-pgtest-%d-%d", os.Getuid(), place)
		err := open(dir)
		if _, used := errors.AsType[*localpg.InUseError](err); used {
			continue
		}
		if err != nil {
			if err = os.RemoveAll(dir); err == nil {
				err = open(dir)
			}
		}
		startErr = err
		return
	}
	startErr = fmt.Errorf("%d other test processes have a cluster", placesMax)
}

func open(dir string) (err error) {
	cluster, err = localpg.Start(context.Background(), localpg.Options{
		Dir:           dir,
		DieWithParent: true,
		Settings: map[string]string{
			"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off",
			"shared_buffers": "32MB", "autovacuum": "off", "max_wal_size": "256MB",
		},
	})
	if err != nil {
		return err
	}
	if err = clear(); err == nil {
		err = exec("postgres", "CREATE DATABASE "+template)
	}
	if err == nil {
		err = migrations.Up(context.Background(), cluster.DatabaseURL(template))
	}
	if err != nil {
		cluster.Stop(context.Background()) // the first error counts
	}
	return err
}

// clear drops the databases of an earlier process, and its template: the
// migrations may be others now.
func clear() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, cluster.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, "SELECT datname FROM pg_database WHERE datname LIKE 'test\\_%' OR datname = $1", template)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := conn.Exec(ctx, fmt.Sprintf("DROP DATABASE %s WITH (FORCE)", name)); err != nil {
			return fmt.Errorf("drop %s: %w", name, err)
		}
	}
	return nil
}
