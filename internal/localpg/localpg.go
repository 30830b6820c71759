// Package localpg runs a private Postgres cluster from the system's own
// binaries: the ledger of a server that was given no database.
//
// Invariants:
//   - One server per data directory: a lock on it is held from Start to Stop,
//     and a second Start fails at once with an error that says who has it.
//   - One postmaster per cluster: one that outlived its server (kill -9) is
//     adopted, never doubled; files of one that is gone are cleared away.
//   - Nobody else can connect: no TCP, and the socket lies in a directory of
//     mode 0700, outside the data directory since socket paths are limited to
//     107 bytes.
//   - Postgres never runs as root: started by root, it runs as another user.
//   - Stop is clean and may be called again; no Stop at all (a crash) leaves a
//     directory that starts again.
package localpg

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// Database is the name of the ledger's database, User of its only role.
	Database = "rocket"
	User     = "rocket"

	// RootDir is where root keeps the data: it is not root who runs Postgres,
	// and root's home is closed to others.
	RootDir = "/var/lib/rocket"

	startTimeout = 2 * time.Minute  // crash recovery included
	stopTimeout  = 30 * time.Second // of a fast shutdown, before an immediate one
	pollEvery    = 20 * time.Millisecond

	restartDelay = time.Second // between an unexpected end of the postmaster and the next start
	logBytesMax  = 8 << 20     // postgres.log is cut at a start beyond this
)

// Options configure a cluster.
type Options struct {
	Dir      string            // data directory, made if absent
	Settings map[string]string // more server settings, by name
	Log      *slog.Logger      // nil: none

	// DieWithParent makes the kernel stop the postmaster when this process
	// dies (Linux only). For tests; a server's cluster is adopted instead.
	DieWithParent bool
}

// Cluster is a running private cluster.
type Cluster struct {
	opts   Options
	dir    string // absolute
	sock   string // the socket's directory
	bin    binaries
	owner  *account // nil: this process's own user
	log    *slog.Logger
	unlock func()

	mu       sync.Mutex
	pm       *postmaster // guarded by mu
	stopping bool        // guarded by mu
	done     chan struct{}
	stopOnce sync.Once
	stopErr  error
}

// DefaultDir is the data directory for a user whose home is home.
func DefaultDir(home string) string {
	if os.Geteuid() == 0 || home == "" {
		return RootDir
	}
	return filepath.Join(home, ".local", "share", "rocket")
}

// Start locks the data directory, makes a cluster in it if there is none, and
// runs it. The cluster is restarted when its postmaster ends unasked.
func Start(ctx context.Context, opts Options) (*Cluster, error) {
	c := &Cluster{opts: opts, log: opts.Log, done: make(chan struct{})}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("find data directory %s: %w", opts.Dir, err)
	}
	c.dir = dir
	if c.owner, err = serviceAccount(); err != nil {
		return nil, err
	}
	if err := c.makeDir(); err != nil {
		return nil, err
	}
	if c.unlock, err = lockDir(filepath.Join(dir, "lock")); err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		c.unlock()
		return nil, err
	}
	go c.supervise()
	return c, nil
}

// URL is a connection string for the ledger's database.
func (c *Cluster) URL() string { return c.DatabaseURL(Database) }

// DatabaseURL is a connection string for another database of the cluster.
func (c *Cluster) DatabaseURL(name string) string {
	q := url.Values{"host": {c.sock}, "sslmode": {"disable"}}
	return fmt.Sprintf("postgres://%s@/%s?%s", User, name, q.Encode())
}

// PID is the postmaster's process id.
func (c *Cluster) PID() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pm.pid
}

// Stop ends the cluster: open transactions are rolled back, everything
// committed is on disk. Further calls return the first one's result.
func (c *Cluster) Stop(ctx context.Context) error {
	c.stopOnce.Do(func() {
		c.mu.Lock()
		c.stopping = true
		pm := c.pm
		c.mu.Unlock()
		c.stopErr = pm.stop(ctx)
		<-c.done
		os.RemoveAll(c.sock)
		c.unlock()
	})
	return c.stopErr
}

func (c *Cluster) pgdata() string { return filepath.Join(c.dir, "pg") }

func (c *Cluster) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	bin, err := findBinaries(c.pgdata())
	if err != nil {
		return err
	}
	c.bin = bin
	if c.sock, err = c.makeSocketDir(); err != nil {
		return err
	}
	if err := c.initdb(ctx); err != nil {
		return err
	}
	pm, err := c.adopt(ctx)
	if err != nil {
		return err
	}
	if pm == nil {
		if pm, err = c.launch(); err != nil {
			return err
		}
		if err := c.waitReady(ctx, pm); err != nil {
			pm.kill()
			return err
		}
	} else {
		c.log.Info("adopted a running postgres", "pid", pm.pid)
	}
	if err := c.createDatabase(ctx); err != nil {
		pm.stop(context.WithoutCancel(ctx))
		return err
	}
	c.mu.Lock()
	c.pm = pm
	c.mu.Unlock()
	return nil
}

// supervise restarts the postmaster when it ends and nobody asked it to.
func (c *Cluster) supervise() {
	defer close(c.done)
	for {
		c.mu.Lock()
		pm := c.pm
		c.mu.Unlock()
		<-pm.gone
		for {
			c.mu.Lock()
			stopping := c.stopping
			c.mu.Unlock()
			if stopping {
				return
			}
			c.log.Error("postgres ended unexpectedly, starting it again", "pid", pm.pid)
			err := c.start(context.Background())
			if err == nil {
				break
			}
			c.log.Error("postgres does not start", "err", err)
			time.Sleep(restartDelay)
		}
		c.mu.Lock()
		stopping, pm := c.stopping, c.pm
		c.mu.Unlock()
		if stopping { // Stop saw the old postmaster
			pm.stop(context.Background())
			return
		}
	}
}

func (c *Cluster) createDatabase(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, c.DatabaseURL("postgres"))
	if err != nil {
		return fmt.Errorf("connect to the private postgres: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var there bool
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", Database).Scan(&there)
	if err == nil && !there {
		_, err = conn.Exec(ctx, "CREATE DATABASE "+Database)
	}
	if err != nil {
		return fmt.Errorf("create database %s: %w", Database, err)
	}
	return nil
}

// makeDir makes the data directory, owned by whoever runs Postgres, and checks
// that this account can reach it.
func (c *Cluster) makeDir() error {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if c.owner == nil {
		return nil
	}
	// only the last directory changes hands; what lies above must be open
	if err := os.Chown(c.dir, c.owner.uid, c.owner.gid); err != nil {
		return fmt.Errorf("give %s to user %s: %w", c.dir, c.owner.name, err)
	}
	for p := filepath.Dir(c.dir); ; p = filepath.Dir(p) {
		fi, err := os.Stat(p)
		if err != nil {
			return fmt.Errorf("check data directory: %w", err)
		}
		st := fi.Sys().(*syscall.Stat_t)
		mine := int(st.Uid) == c.owner.uid && fi.Mode()&0o100 != 0
		if !mine && fi.Mode()&0o001 == 0 {
			return fmt.Errorf("data directory %s cannot be reached by user %s, who runs postgres in place of root: %s is closed to it (mode %#o); choose another directory, such as %s",
				c.dir, c.owner.name, p, fi.Mode().Perm(), RootDir)
		}
		if p == filepath.Dir(p) {
			return nil
		}
	}
}

// SocketDir names the directory of the socket of the cluster in dir, an
// absolute path. It follows from dir, so that a later server finds an orphan.
func SocketDir(dir string) string {
	h := fnv.New64a()
	h.Write([]byte(dir))
	return fmt.Sprintf("/tmp/rocket-pg-%016x", h.Sum64())
}

func (c *Cluster) makeSocketDir() (string, error) {
	dir := SocketDir(c.dir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make socket directory: %w", err)
	} else if err == nil && c.owner != nil {
		if err := os.Chown(dir, c.owner.uid, c.owner.gid); err != nil {
			return "", fmt.Errorf("give socket directory to user %s: %w", c.owner.name, err)
		}
	}
	// /tmp is everybody's: the name may have been taken by somebody else
	fi, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("check socket directory: %w", err)
	}
	want := os.Geteuid()
	if c.owner != nil {
		want = c.owner.uid
	}
	st := fi.Sys().(*syscall.Stat_t)
	if !fi.IsDir() || fi.Mode().Perm() != 0o700 || int(st.Uid) != want {
		return "", fmt.Errorf("socket directory %s exists but is not a private directory of this server's user; remove it", dir)
	}
	return dir, nil
}

// initdb makes the cluster once. It works beside the final name, so that a
// crash in the middle leaves nothing that looks like a cluster.
func (c *Cluster) initdb(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(c.pgdata(), "PG_VERSION")); err == nil {
		return nil
	}
	tmp := c.pgdata() + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("clear %s: %w", tmp, err)
	}
	cmd := c.command(ctx, c.bin.initdb, "-D", tmp, "-U", User, "-E", "UTF8", "--locale=C",
		"--auth-local=trust", "--auth-host=reject", "--no-instructions")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("initdb: %w: %s", err, lastLines(out))
	}
	if err := os.Rename(tmp, c.pgdata()); err != nil {
		return fmt.Errorf("move new cluster into place: %w", err)
	}
	return nil
}

func lastLines(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) > 5 {
		lines = lines[len(lines)-5:]
	}
	return strings.Join(lines, "; ")
}
