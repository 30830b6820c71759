package localpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// postmaster is one running server process, a child or an adopted one.
type postmaster struct {
	pid  int
	gone chan struct{} // closed when it has ended
	err  atomic.Pointer[error]
}

// command prepares a program of the cluster: as its account, with nothing of
// this process's environment, in its own session, so that a terminal's Ctrl-C
// reaches the server only, which then stops the cluster in order.
func (c *Cluster) command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = c.dir
	cmd.Env = []string{"PATH=" + filepath.Dir(path) + ":/usr/bin:/bin", "LC_ALL=C", "TZ=UTC", "HOME=" + c.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if c.owner != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(c.owner.uid), Gid: uint32(c.owner.gid)}
	}
	return cmd
}

func (c *Cluster) launch() (*postmaster, error) {
	args := []string{"-D", c.pgdata(), "-k", c.sock,
		"-c", "listen_addresses=", "-c", "unix_socket_permissions=0700", "-c", "logging_collector=off",
		// the delay that batching needs is the ledger writer's own
		"-c", "max_connections=100", "-c", "shared_buffers=64MB"}
	names := make([]string, 0, len(c.opts.Settings))
	for name := range c.opts.Settings {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		args = append(args, "-c", name+"="+c.opts.Settings[name])
	}
	cmd := c.command(context.Background(), c.bin.postgres, args...)
	log, err := c.openLog()
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log

	pm := &postmaster{gone: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		if c.opts.DieWithParent {
			// the kernel watches the starting thread, so that one must stay
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			dieWithParent(cmd.SysProcAttr)
		}
		err := cmd.Start()
		if err == nil {
			pm.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		if err := cmd.Wait(); err != nil {
			pm.err.Store(&err)
		}
		close(pm.gone)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	return pm, nil
}

func (c *Cluster) openLog() (*os.File, error) {
	path := filepath.Join(c.dir, "postgres.log")
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if fi, err := os.Stat(path); err == nil && fi.Size() > logBytesMax {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of postgres: %w", err)
	}
	return f, nil
}

func (c *Cluster) waitReady(ctx context.Context, pm *postmaster) error {
	for {
		err := c.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-pm.gone:
			log, _ := os.ReadFile(filepath.Join(c.dir, "postgres.log"))
			return fmt.Errorf("postgres ended at its start: %s", lastLines(log))
		case <-ctx.Done():
			return fmt.Errorf("wait for postgres: %w: %w", ctx.Err(), err)
		case <-time.After(pollEvery):
		}
	}
}

// ping tells whether the server on our socket answers and serves our cluster.
func (c *Cluster) ping(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, c.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var dir string
	if err := conn.QueryRow(ctx, "SHOW data_directory").Scan(&dir); err != nil {
		return err
	}
	real, err := filepath.EvalSymlinks(c.pgdata())
	if err != nil {
		return err
	}
	if dir != real && dir != c.pgdata() {
		return fmt.Errorf("the server on %s serves %s", c.sock, dir)
	}
	return nil
}

// adopt finds a postmaster that outlived its server and waits until it
// answers. It clears the pid file of one that is gone and returns nil then:
// its number may have been given to another process, at which Postgres itself
// would refuse to start.
func (c *Cluster) adopt(ctx context.Context) (*postmaster, error) {
	path := filepath.Join(c.pgdata(), "postmaster.pid")
	for {
		pid, err := readPID(path)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if !c.isPostmaster(pid) {
			c.log.Warn("clearing the files of a postgres that is gone", "pid", pid)
			for _, p := range []string{path, filepath.Join(c.sock, ".s.PGSQL.5432"), filepath.Join(c.sock, ".s.PGSQL.5432.lock")} {
				if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
					return nil, fmt.Errorf("clear files of a postgres that is gone: %w", err)
				}
			}
			return nil, nil
		}
		err = c.ping(ctx)
		if err == nil {
			pm := &postmaster{pid: pid, gone: make(chan struct{})}
			go pm.watch()
			return pm, nil
		}
		select { // it is starting, recovering or on its way down
		case <-ctx.Done():
			return nil, fmt.Errorf("postgres (process %d) runs on %s but does not answer: %w", pid, c.pgdata(), err)
		case <-time.After(pollEvery):
		}
	}
}

func readPID(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read pid of postgres: %w", err)
	}
	return parsePID(string(text)), nil
}

// parsePID reads the first line of postmaster.pid; 0: a crash cut it off, and
// it is nobody's.
func parsePID(text string) int {
	line, _, _ := strings.Cut(text, "\n")
	pid, err := strconv.ParseInt(strings.TrimSpace(line), 10, 32)
	if err != nil || pid <= 1 {
		return 0
	}
	return int(pid)
}

// isPostmaster tells whether process pid is a server on our cluster.
func (c *Cluster) isPostmaster(pid int) bool {
	if !alive(pid) || zombie(pid) {
		return false
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		args, err = exec.Command("ps", "-o", "args=", "-p", strconv.Itoa(pid)).Output()
	}
	return err == nil && strings.Contains(string(args), c.pgdata())
}

func alive(pid int) bool {
	if pid <= 1 {
		return false
	}
	err := syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// watch waits for an adopted process, which cannot be waited for as a child.
func (pm *postmaster) watch() {
	for alive(pm.pid) && !zombie(pm.pid) {
		time.Sleep(5 * pollEvery)
	}
	close(pm.gone)
}

// zombie tells whether a process has ended but nobody has collected it: an
// orphan's new parent may not care, as in a container without an init.
func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, ok := strings.Cut(string(stat), ") ")
	return ok && strings.HasPrefix(rest, "Z")
}

func (pm *postmaster) signal(sig syscall.Signal) {
	select {
	case <-pm.gone:
	default:
		syscall.Kill(pm.pid, sig) // an error means that it is gone by now
	}
}

func (pm *postmaster) kill() {
	pm.signal(syscall.SIGQUIT)
	<-pm.gone
}

// stop is a fast shutdown, after stopTimeout or the end of ctx an immediate
// one, from which the next start recovers.
func (pm *postmaster) stop(ctx context.Context) error {
	pm.signal(syscall.SIGINT)
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	select {
	case <-pm.gone:
		return nil
	case <-ctx.Done():
		pm.kill()
		return fmt.Errorf("postgres did not stop in time and was ended at once: %w", ctx.Err())
	}
}
