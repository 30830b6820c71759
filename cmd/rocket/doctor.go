package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"

	"rocket/engine/model"
	"rocket/internal/localpg"
	"rocket/kernels"
	"rocket/migrations"
)

// doctorTimeout bounds one check.
const doctorTimeout = time.Minute

type doctorCmd struct {
	DatabaseURL string `help:"Check this Postgres instead of a private one." env:"ROCKET_DATABASE_URL" placeholder:"URL"`
	Model       string `help:"Check this model." default:"nano" env:"ROCKET_MODEL" placeholder:"DIR"`
	Listen      string `help:"Check that this address is free." default:"127.0.0.1:8080" env:"ROCKET_LISTEN"`
	DataDir     string `help:"Check this data directory." env:"ROCKET_DATA_DIR" placeholder:"DIR"`
}

// finding is one line of the doctor's report.
type finding struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

func (d doctorCmd) Run(c *console) error {
	checks := []struct {
		name string
		run  func(context.Context) (string, error)
	}{
		{"kernels", d.kernels}, {"gpu", d.gpus}, {"model", d.model}, {"data directory", d.dataDir}, {"postgres", d.postgres}, {"address", d.address},
	}
	failed := 0
	var findings []finding
	for _, check := range checks {
		ctx, cancel := context.WithTimeout(c.ctx, doctorTimeout)
		detail, err := check.run(ctx)
		cancel()
		if err != nil {
			failed++
			detail = err.Error()
		}
		findings = append(findings, finding{check.name, err == nil, detail})
	}
	if c.json {
		if err := c.print(map[string]any{"ok": failed == 0, "checks": findings}); err != nil {
			return err
		}
	} else {
		w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
		for _, f := range findings {
			fmt.Fprintf(w, "%s\t%s\t%s\n", map[bool]string{true: "ok", false: "FAILED"}[f.OK], f.Check, strings.ReplaceAll(f.Detail, "\n", " "))
		}
		if err := w.Flush(); err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d checks failed", failed, len(checks))
	}
	return nil
}

func (d doctorCmd) kernels(context.Context) (string, error) {
	dev, err := kernels.Open("auto", 0)
	if err != nil {
		return "", err
	}
	defer dev.Close()
	return fmt.Sprintf("%s, %d threads, arithmetic %s", dev.ISA(), dev.Threads(), dev.Arithmetic()), nil
}

// gpus only tells: this version runs on the CPU.
func (d doctorCmd) gpus(context.Context) (string, error) {
	list, err := kernels.GPUs()
	if err != nil {
		return "", err
	}
	if len(list) == 0 {
		return "none found; none is needed", nil
	}
	names := make([]string, len(list))
	for i, g := range list {
		names[i] = fmt.Sprintf("%s, %d GiB, driver %s", g.Name, g.MemoryBytes>>30, g.Driver)
	}
	return strings.Join(names, "; ") + " (not used by this version)", nil
}

func (d doctorCmd) model(context.Context) (string, error) {
	dir, name, err := modelDir(d.Model)
	if err != nil {
		return "", err
	}
	r, err := model.Inspect(dir)
	if err != nil {
		return "", err
	}
	if r.Unread != "" {
		return "", errors.New(r.Unread)
	}
	return fmt.Sprintf("%s: %s, %d parameters", name, r.Config.Family, r.Parameters), nil
}

func (d doctorCmd) dataDir(context.Context) (string, error) {
	dir := dataDir(d.DataDir)
	// What is not there yet is made by serve: its nearest parent must let it.
	probe := dir
	for {
		if _, err := os.Stat(probe); err == nil {
			break
		}
		if probe == filepath.Dir(probe) {
			break
		}
		probe = filepath.Dir(probe)
	}
	f, err := os.CreateTemp(probe, ".rocket-doctor-*")
	if err != nil {
		return "", fmt.Errorf("%s cannot be written: %w", dir, err)
	}
	f.Close()
	return dir, os.Remove(f.Name())
}

// postgres starts a private cluster in a folder of its own, since binaries that
// are there may still not run; with a URL it connects.
func (d doctorCmd) postgres(ctx context.Context) (detail string, err error) {
	url := d.DatabaseURL
	kind := "given database"
	if url == "" {
		kind = "private cluster starts"
		dir, err := os.MkdirTemp("/tmp", "rocket-doctor-") // /tmp: reachable for the user who runs Postgres in place of root
		if err != nil {
			return "", fmt.Errorf("make a folder for postgres: %w", err)
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil {
			return "", fmt.Errorf("open the folder for postgres: %w", err)
		}
		cluster, err := localpg.Start(ctx, localpg.Options{Dir: filepath.Join(dir, "data"), DieWithParent: true})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, cluster.Stop(context.WithoutCancel(ctx))) }()
		url = cluster.URL()
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var number int
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&number); err != nil {
		return "", fmt.Errorf("ask for the version: %w", err)
	}
	if number/10000 < migrations.VersionMin {
		return "", fmt.Errorf("version %d, %d or newer is needed", number/10000, migrations.VersionMin)
	}
	return fmt.Sprintf("%s, version %d.%d", kind, number/10000, number%10000), nil
}

func (d doctorCmd) address(context.Context) (string, error) {
	ln, err := listen(d.Listen)
	if err != nil {
		return "", err
	}
	return ln.Addr().(*net.TCPAddr).String() + " is free", ln.Close()
}
