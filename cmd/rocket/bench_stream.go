package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"rocket/client"
	"rocket/internal/bench"
)

type benchStreamCmd struct {
	engineFlags
	Readers  []int `help:"WebSockets that follow one session, a row each." default:"1,100,1000,5000"`
	Tokens   int   `help:"Tokens that it generates." default:"2048"`
	Idle     int   `help:"Idle sockets whose memory is measured; 0: none." default:"5000"`
	Sessions int   `help:"Idle detached sessions whose memory is measured; 0: none." default:"500"`
}

func (b benchStreamCmd) Run(c *console) error {
	most := b.Idle
	for _, n := range b.Readers {
		if n < 1 {
			return usage("--readers: want 1 or more, not %d", n)
		}
		most = max(most, n)
	}
	if b.Tokens < 2 || b.Idle < 0 || b.Sessions < 0 {
		return usage("--tokens: want 2 or more; --idle, --sessions: want 0 or more")
	}
	if err := allowFiles(uint64(most + 200)); err != nil {
		return err
	}
	res, err := b.streams(c)
	if err == nil && b.Sessions > 0 {
		res.DetachedResult, err = b.detached(c)
	}
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": b.Model, "stream": res})
	}
	c.say("%7s %7s %12s %12s %8s %14s %9s %9s %9s %6s", "readers", "events", "tok/s", "us/token", "monitor", "us/token/rdr", "p50 ms", "p99 ms", "gap p99", "wrong")
	for _, r := range res.Rows {
		c.say("%7d %7d %12.0f %12.1f %8.1f %14.2f %9.1f %9.1f %9.1f %6d", r.Readers, r.Events, r.TokensPerSec, r.ServerUS, r.MonitorUS, r.DeliveryUS,
			r.DelayMSP50, r.DelayMSP99, r.GapMSP99, r.LostOrTwice)
	}
	c.say("an idle socket: %.1f KiB of the server's resident memory (%d sockets)", res.IdleSocketBytes/1024, res.IdleSockets)
	if d := res.DetachedResult; d != nil {
		c.say("an idle detached session: %.1f KiB in memory, %.1f KiB with the cache's bookkeeping of a turn of its own (%d of each)", d.HeapBytes/1024, d.OwnBytes/1024, d.Sessions)
	}
	return nil
}

// streams measures a server that is a process of its own, so that the readers' work is not counted as the server's.
func (b benchStreamCmd) streams(c *console) (res bench.StreamResult, err error) {
	child, err := b.serve(c.ctx)
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, child.stop()) }()
	api, err := client.New(child.url, client.Options{})
	if err != nil {
		return res, err
	}
	defer api.Close()
	text := sampleText
	return bench.Streams(c.ctx, bench.StreamOptions{
		URL: child.url, PID: child.cmd.Process.Pid, Readers: b.Readers, Tokens: b.Tokens, Idle: b.Idle,
		Session: func(ctx context.Context) (string, error) {
			s, err := api.Create(ctx, client.CreateRequest{Input: &text}, client.CallOptions{})
			return s.ID, err
		},
		Turn: func(ctx context.Context, id string, n int) error {
			_, err := api.RunTurn(ctx, id, client.TurnRequest{MaxTokens: &n, IgnoreEOS: true}, client.CallOptions{})
			return err
		},
	}, c.counted())
}

// detachedTokens are of the root's line, and of each session's own turn.
const detachedTokens = 200

// detached measures sessions in a server in this process, whose heap can be looked at.
func (b benchStreamCmd) detached(c *console) (_ *bench.DetachedResult, err error) {
	l, err := benchFlags{engineFlags: b.engineFlags}.load(c)
	if err != nil {
		return nil, err
	}
	defer l.close()
	srv, err := startServer(c.ctx, l)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, srv.stop()) }()
	res, err := bench.Detached(c.ctx, bench.IdleServer{REST: *srv.rest(l), Engine: l.engine, LedgerBytes: srv.ledgerBytes}, bench.DetachedOptions{
		Sessions: b.Sessions, Tokens: detachedTokens,
		Root: func(ctx context.Context, n int) (string, error) {
			id, _, err := srv.session(ctx, l, n)
			return id, err
		},
		Child: srv.detachedChild,
		Live:  srv.live,
	}, c.counted())
	return &res, err
}

func (b *benchServer) ledgerBytes(ctx context.Context) (n int64, err error) {
	err = b.db.QueryRow(ctx, `SELECT pg_database_size(current_database())`).Scan(&n)
	return n, err
}

// detachedChild makes a child of root with a turn of n tokens, unless that is 0, and detaches it.
func (b *benchServer) detachedChild(ctx context.Context, root string, n int) error {
	f, err := b.client.Fork(ctx, root, client.ForkRequest{}, client.CallOptions{})
	if err != nil {
		return err
	}
	id := f.Sessions[0].ID
	if n > 0 {
		text := id // so that its line is like no other's
		if _, err := b.client.RunTurn(ctx, id, client.TurnRequest{Input: &text, MaxTokens: &n, IgnoreEOS: true}, client.CallOptions{}); err != nil {
			return err
		}
	}
	_, err = b.client.Detach(ctx, id, client.DetachRequest{Tier: "host"}, client.CallOptions{})
	return err
}

func (b *benchServer) live(ctx context.Context) (int, error) {
	text, err := b.client.Stats(ctx)
	if err != nil {
		return 0, err
	}
	var st struct{ Sessions struct{ Live int } }
	err = json.Unmarshal(text, &st)
	return st.Sessions.Live, err
}

// allowFiles raises this process's limit of open files, which children inherit.
func allowFiles(n uint64) error {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	if l.Cur >= n {
		return nil
	}
	if l.Max < n {
		return fmt.Errorf("%d open files are needed, this machine allows %d: ask for fewer readers", n, l.Max)
	}
	l.Cur = n
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("raise the limit of open files: %w", err)
	}
	return nil
}

// childServer is `rocket serve` as a process of its own on a data folder that is removed afterwards.
type childServer struct {
	cmd *exec.Cmd
	url string
	dir string
}

func (b benchStreamCmd) serve(ctx context.Context) (_ *childServer, err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	s := &childServer{}
	if s.dir, err = os.MkdirTemp("", "rocket-bench-"); err != nil {
		return nil, fmt.Errorf("make a folder for the ledger: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	if err := os.Chmod(s.dir, 0o755); err != nil { // as root, Postgres runs as another user
		return nil, fmt.Errorf("open up the ledger's folder: %w", err)
	}
	s.cmd = exec.CommandContext(ctx, exe, "--json", "serve", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(s.dir, "data"), "--disk-bytes", "0",
		"--model", b.Model, "--class", b.Class, "--threads", fmt.Sprint(b.Threads))
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGTERM) }
	s.cmd.WaitDelay = shutdownTimeout
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start a server: %w", err)
	}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a server: %w", err)
	}
	var hello struct{ URL string }
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&hello); err != nil {
		return nil, fmt.Errorf("start a server: %w", err)
	}
	s.url = hello.URL
	return s, nil
}

func (s *childServer) stop() error {
	if s.cmd != nil && s.cmd.Process != nil {
		late := time.AfterFunc(shutdownTimeout, func() { _ = s.cmd.Process.Kill() })
		defer late.Stop()
		_ = s.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		_ = s.cmd.Wait()                          // what it had to say it has said on stderr
	}
	return os.RemoveAll(s.dir)
}
