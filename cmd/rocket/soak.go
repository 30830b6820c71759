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
// standard output, and so that the binary that is to serve is the one that is
// killed, here and on any other machine.
type soakCmd struct {
	Servers  []int         `help:"How many servers share a ledger; one run for each number." default:"1,2"`
	Kills    int           `help:"How often a server is killed in each run." default:"30"`
	Sessions int           `help:"Sessions that live at once, about." default:"200"`
	Every    time.Duration `help:"A kill comes at a random moment within this much load." default:"4s"`
	Within   time.Duration `help:"Give up after this." default:"20m"`
	Seed     uint64        `help:"Of what clients do and of the moments." default:"1"`
}

func (s soakCmd) Run(c *console) (err error) {
	if s.Kills < 0 || s.Sessions < 1 || s.Every <= 0 || s.Within <= 0 {
		return usage("--kills: want 0 or more; --sessions, --every, --within: want more than 0")
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
	ctx, cancel := context.WithTimeoutCause(c.ctx, s.Within, fmt.Errorf("it is not done after %v", s.Within))
	defer cancel()
	var sum soak.Report
	for i, n := range s.Servers {
		if n < 1 {
			return usage("--servers: want 1 or more, not %d", n)
		}
		fmt.Fprintf(c.err, "run %d of %d: servers on the ledger: %d, sessions: %d, seed: %d\n", i+1, len(s.Servers), n, s.Sessions, s.Seed)
		report, runErr := s.run(ctx, c, filepath.Join(dir, fmt.Sprintf("run%d", i)), n)
		sum.Acknowledged += report.Acknowledged
		sum.Lost += report.Lost
		sum.Duplicated += report.Duplicated
		sum.Kills += report.Kills
		if runErr != nil {
			err = runErr
			break
		}
	}
	if err != nil {
		err = errReported{err}
	}
	return errors.Join(err, c.print(sum))
}

// run is one run on n servers with a ledger of their own: a single one brings
// its private Postgres, which outlives it, as a user's does.
func (s soakCmd) run(ctx context.Context, c *console, dir string, n int) (_ soak.Report, err error) {
	exe, err := os.Executable()
	if err != nil {
		return soak.Report{}, fmt.Errorf("find this program: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return soak.Report{}, fmt.Errorf("make a folder for data: %w", err)
	}
	for _, d := range []string{filepath.Dir(dir), dir} { // as root, Postgres runs as another user
		if err := os.Chmod(d, 0o755); err != nil {
			return soak.Report{}, fmt.Errorf("open up the folder for data: %w", err)
		}
	}
	opts := soak.Options{
		Command: func(args ...string) *exec.Cmd { return quietCommand(exe, args...) },
		Dir:     dir, Servers: n, Sessions: s.Sessions, Kills: s.Kills, Every: s.Every, Seed: s.Seed, Log: c.err,
	}
	if n > 1 {
		cluster, startErr := localpg.Start(ctx, localpg.Options{Dir: filepath.Join(dir, "ledger"), Log: slog.New(slog.DiscardHandler), DieWithParent: true})
		if startErr != nil {
			return soak.Report{}, startErr
		}
		defer func() { err = errors.Join(err, cluster.Stop(context.WithoutCancel(ctx))) }()
		opts.DatabaseURL = cluster.URL()
	}
	return soak.Run(ctx, opts)
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
