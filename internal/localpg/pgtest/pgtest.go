// Package pgtest gives tests a real database each, with the ledger's schema.
//
// One cluster per test process, started by the first test that asks, with
// durability off; one template database that the migrations made; one copy of
// it per test, dropped at its end. The cluster dies with the process, and its
// directory is swept by the next process that comes along.
package pgtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"rocket/internal/localpg"
	"rocket/migrations"
)

const (
	template  = "rocket_template"
	dirPrefix = "rocket-pgtest-"
	sweepAge  = time.Minute // a younger directory may not have its lock yet
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

func start() {
	sweep()
	dir, err := os.MkdirTemp("/tmp", dirPrefix)
	if err != nil {
		startErr = err
		return
	}
	cluster, startErr = localpg.Start(context.Background(), localpg.Options{
		Dir:           dir,
		DieWithParent: true,
		Settings: map[string]string{
			"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off",
			"shared_buffers": "32MB", "autovacuum": "off", "max_wal_size": "256MB",
		},
	})
	if startErr != nil {
		return
	}
	if startErr = exec("postgres", "CREATE DATABASE "+template); startErr != nil {
		return
	}
	startErr = migrations.Up(context.Background(), cluster.DatabaseURL(template))
}

// sweep removes what earlier test processes left behind: a directory whose
// lock is free belongs to nobody.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join("/tmp", dirPrefix+"*"))
	for _, dir := range dirs {
		if fi, err := os.Stat(dir); err != nil || time.Since(fi.ModTime()) < sweepAge {
			continue
		}
		f, err := os.Open(filepath.Join(dir, "lock"))
		if err != nil {
			os.RemoveAll(dir)
			continue
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			os.RemoveAll(dir)
			os.RemoveAll(localpg.SocketDir(dir))
		}
		f.Close()
	}
}
