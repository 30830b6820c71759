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
	Readers []int `help:"WebSockets that follow one session, a row each." default:"1,100,1000,5000"`
	Tokens  int   `help:"Tokens that it generates." default:"512"`
	Idle    int   `help:"Idle sockets whose memory is measured; 0: none." default:"5000"`
}

// Run measures a server that is a process of its own, so that the readers' work is not counted as the server's.
func (b benchStreamCmd) Run(c *console) (err error) {
	most := b.Idle
	for _, n := range b.Readers {
		if n < 1 {
			return usage("--readers: want 1 or more, not %d", n)
		}
		most = max(most, n)
	}
	if b.Tokens < 2 || b.Idle < 0 {
		return usage("--tokens: want 2 or more; --idle: want 0 or more")
	}
	if err := allowFiles(uint64(most + 200)); err != nil {
		return err
	}
	child, err := b.serve(c.ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, child.stop()) }()
	api, err := client.New(child.url, client.Options{})
	if err != nil {
		return err
	}
	defer api.Close()
	text := sampleText
	res, err := bench.Streams(c.ctx, bench.StreamOptions{
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
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": b.Model, "stream": res})
	}
	c.say("%7s %7s %12s %12s %14s %9s %9s %6s", "readers", "events", "tok/s", "us/token", "us/token/rdr", "p50 ms", "p99 ms", "wrong")
	for _, r := range res.Rows {
		c.say("%7d %7d %12.0f %12.1f %14.2f %9.1f %9.1f %6d", r.Readers, r.Events, r.TokensPerSec, r.ServerUS, r.DeliveryUS, r.DelayMSP50, r.DelayMSP99, r.LostOrTwice)
	}
	c.say("an idle socket: %.1f KiB of the server's resident memory (%d sockets)", res.IdleSocketBytes/1024, res.IdleSockets)
	return nil
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
