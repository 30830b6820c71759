package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"rocket/internal/localpg"
	"rocket/internal/soak"
)

// soakCmd is hidden: it is for whoever changes or installs Rocket, and `make
// soak` runs it. It is a command and not a test so that its one line is all of
// standard output, and so that the binary that serves is the one that is
// killed, here and on any machine and database where it is to run.
type soakCmd struct {
	Kills       int           `help:"How often a server is killed." default:"50"`
	Servers     int           `help:"Servers on one ledger." default:"1"`
	Sessions    int           `help:"Sessions that live at once, about." default:"200"`
	Every       time.Duration `help:"A kill comes at a random moment within this much load." default:"4s"`
	Within      time.Duration `help:"Give up after this." default:"20m"`
	Seed        uint64        `help:"Of what clients do and of the moments." default:"1"`
	DatabaseURL string        `help:"An empty database to use as the ledger; default a private one." placeholder:"URL"`
}

func (s soakCmd) Run(c *console) (err error) {
	if s.Kills < 0 || s.Servers < 1 || s.Sessions < 1 || s.Every <= 0 {
		return usage("--kills, --servers, --sessions, --every: want more than 0")
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	dir, err := os.MkdirTemp("", "rocket-soak-")
	if err != nil {
		return fmt.Errorf("make a folder for data: %w", err)
	}
	defer func() {
		if err == nil {
			err = os.RemoveAll(dir)
			return
		}
		fmt.Fprintf(c.err, "What the servers had and logged is in %s\n", dir)
	}()
	if err := os.Chmod(dir, 0o755); err != nil { // as root, Postgres runs as another user
		return fmt.Errorf("open up the folder for data: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(c.ctx, s.Within, fmt.Errorf("it is not done after %v", s.Within))
	defer cancel()
	opts := soak.Options{
		Command: func(args ...string) *exec.Cmd { return quietCommand(exe, args...) },
		Dir:     dir, DatabaseURL: s.DatabaseURL, Servers: s.Servers, Sessions: s.Sessions, Kills: s.Kills, Every: s.Every, Seed: s.Seed, Log: c.err,
	}
	if s.Servers > 1 && s.DatabaseURL == "" {
		cluster, err := localpg.Start(ctx, localpg.Options{Dir: filepath.Join(dir, "ledger"), Log: slog.New(slog.DiscardHandler), DieWithParent: true})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, cluster.Stop(context.WithoutCancel(ctx))) }()
		opts.DatabaseURL = cluster.URL()
	}
	report, err := soak.Run(ctx, opts)
	return errors.Join(err, c.print(report))
}

// quietCommand is a command with nothing of this process's environment that
// could configure it.
func quietCommand(exe string, args ...string) *exec.Cmd {
	cmd := exec.Command(exe, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "ROCKET_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	return cmd
}
