package localpg

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func testDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "rocket-localpg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func mustStart(t *testing.T, dir string) *Cluster {
	t.Helper()
	c, err := Start(t.Context(), Options{Dir: dir, DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Stop(context.Background()) })
	return c
}

func query(t *testing.T, c *Cluster, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var out string
	if err := conn.QueryRow(t.Context(), sql).Scan(&out); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return out
}

func execute(t *testing.T, c *Cluster, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), c.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// abandon makes c behave like a cluster whose server was killed: the lock is
// free again, the postmaster lives on.
func abandon(c *Cluster) {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.unlock()
}

func TestStartStopAgain(t *testing.T) {
	dir := testDir(t)
	c := mustStart(t, dir)
	if got := query(t, c, "SHOW fsync"); got != "on" {
		t.Errorf("fsync = %q, want on", got)
	}
	if got := query(t, c, "SHOW listen_addresses"); got != "" {
		t.Errorf("listen_addresses = %q, want none", got)
	}
	execute(t, c, "CREATE TABLE kept AS SELECT 'yes' AS v")
	fi, err := os.Stat(c.sock)
	if err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("socket directory: %v, %v, want mode 0700", fi.Mode(), err)
	}

	if _, err := Start(t.Context(), Options{Dir: dir}); err == nil {
		t.Fatal("a second server started on the same directory")
	} else if _, ok := errors.AsType[*InUseError](err); !ok || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("second start: %v, want an InUseError naming process %d", err, os.Getpid())
	}

	for range 2 {
		if err := c.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "pg", "postmaster.pid")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("postmaster.pid after a clean stop: %v", err)
	}
	if _, err := os.Stat(c.sock); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket directory after a clean stop: %v", err)
	}

	c = mustStart(t, dir)
	if got := query(t, c, "SELECT v FROM kept"); got != "yes" {
		t.Errorf("table after a restart: %q", got)
	}
}

func TestOrphanIsAdopted(t *testing.T) {
	dir := testDir(t)
	first := mustStart(t, dir)
	execute(t, first, "CREATE TABLE kept AS SELECT 'yes' AS v")
	abandon(first)

	second := mustStart(t, dir)
	if second.PID() != first.PID() {
		t.Errorf("second server runs postmaster %d beside orphan %d", second.PID(), first.PID())
	}
	if got := query(t, second, "SELECT v FROM kept"); got != "yes" {
		t.Errorf("table in the adopted cluster: %q", got)
	}
	if err := second.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-first.pm.gone
}

func TestCrashLeavesADirectoryThatStarts(t *testing.T) {
	dir := testDir(t)
	c := mustStart(t, dir)
	execute(t, c, "CREATE TABLE kept AS SELECT 'yes' AS v")
	abandon(c)
	syscall.Kill(c.PID(), syscall.SIGKILL)
	<-c.pm.gone

	c = mustStart(t, dir)
	if got := query(t, c, "SELECT v FROM kept"); got != "yes" {
		t.Errorf("committed table after kill -9: %q", got)
	}
}

// A machine or container that starts anew hands out old process numbers again.
func TestPIDFileOfAnotherProcess(t *testing.T) {
	for _, text := range []string{strconv.Itoa(os.Getpid()) + "\n/elsewhere\n", "", "1\n", "not a number\n"} {
		dir := testDir(t)
		c := mustStart(t, dir)
		if err := c.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "pg", "postmaster.pid")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c = mustStart(t, dir)
		if got := query(t, c, "SELECT 'up'"); got != "up" {
			t.Errorf("pid file %q: %q", text, got)
		}
		c.Stop(t.Context())
		if testing.Short() {
			return
		}
	}
}

func TestRestartsWhenPostgresDies(t *testing.T) {
	c := mustStart(t, testDir(t))
	execute(t, c, "CREATE TABLE kept AS SELECT 'yes' AS v")
	old := c.PID()
	syscall.Kill(old, syscall.SIGKILL)
	deadline := time.Now().Add(time.Minute)
	for c.PID() == old {
		if time.Now().After(deadline) {
			t.Fatal("postgres was not started again")
		}
		time.Sleep(pollEvery)
	}
	if got := query(t, c, "SELECT v FROM kept"); got != "yes" {
		t.Errorf("table after the restart: %q", got)
	}
}

func TestChoose(t *testing.T) {
	empty := t.TempDir()
	old := t.TempDir()
	for _, name := range []string{"initdb", "postgres"} {
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) 12.3 (Debian 12.3-1)'\n"
		if err := os.WriteFile(filepath.Join(old, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	data := t.TempDir()
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte("12\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "PG_VERSION"), []byte("11\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		dirs   []string
		pgdata string
		want   string // part of the error; "": found
	}{
		{"none", []string{empty, "/no/such/place"}, empty, "install the postgresql package"},
		{"too old", []string{empty, old}, empty, "version 12, 15 or newer"},
		{"same version as the cluster", []string{old}, data, ""},
		{"another version than the cluster", []string{old}, foreign, "cluster in " + foreign + " is of PostgreSQL 11"},
	} {
		_, err := choose(test.dirs, test.pgdata)
		if test.want == "" && err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		}
	}
}

func TestClosedDirectoryIsRefusedByName(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root runs postgres as another user")
	}
	closed, err := os.MkdirTemp("/tmp", "rocket-localpg-closed-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(closed) })
	_, err = Start(t.Context(), Options{Dir: filepath.Join(closed, "data")})
	if err == nil || !strings.Contains(err.Error(), closed) || !strings.Contains(err.Error(), RootDir) {
		t.Fatalf("error %v, want one that names %s and proposes %s", err, closed, RootDir)
	}
}
