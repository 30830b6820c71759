package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"text/tabwriter"

	"rocket/internal/localpg"
	"rocket/migrations"
	"rocket/sessions"
)

// keyCmd works on the ledger itself, not through a server: who can reach the
// database needs no key.
type keyCmd struct {
	DataDir     string `help:"Data folder of a server with a private Postgres; it need not run." env:"ROCKET_DATA_DIR" placeholder:"DIR"`
	DatabaseURL string `help:"The ledger's Postgres; default the private one." env:"ROCKET_DATABASE_URL" placeholder:"URL"`

	Create keyCreate `cmd:"" help:"Make a key and print its secret, which is kept nowhere."`
	Ls     keyLs     `cmd:"" help:"List keys."`
	Revoke keyRevoke `cmd:"" help:"End a key for good."`
	Limits keyLimits `cmd:"" help:"Show or set what a tenant may have."`
}

// with opens the ledger's keys for fn.
func (k keyCmd) with(c *console, fn func(*sessions.Keys) error) (err error) {
	url, stop, err := k.ledger(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := migrations.Up(c.ctx, url); err != nil {
		return err
	}
	keys, err := sessions.OpenKeys(c.ctx, url)
	if err != nil {
		return err
	}
	defer keys.Close()
	return fn(keys)
}

// ledger finds the database, and runs a private one that nobody runs.
func (k keyCmd) ledger(c *console) (url string, stop func() error, err error) {
	nothing := func() error { return nil }
	if k.DatabaseURL != "" {
		return k.DatabaseURL, nothing, nil
	}
	dir := dataDir(k.DataDir)
	cluster, err := localpg.Start(c.ctx, localpg.Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if _, ok := errors.AsType[*localpg.InUseError](err); ok { // a server's, which has it running
		url, err = localpg.RunningURL(dir)
		return url, nothing, err
	}
	if err != nil {
		return "", nil, err
	}
	return cluster.URL(), func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), shutdownTimeout)
		defer cancel()
		if err := cluster.Stop(ctx); err != nil {
			return fmt.Errorf("stop the private postgres: %w", err)
		}
		return nil
	}, nil
}

type keyCreate struct {
	Name   string `arg:"" optional:"" help:"What it is for."`
	Tenant string `help:"Whose sessions it reaches; made if new." default:"local" placeholder:"NAME"`
	Admin  bool   `help:"May read /metrics and /v1/stats and run check-cache; no other tenant's sessions."`
}

func (k keyCreate) Run(c *console, cmds *commands) error {
	return cmds.Key.with(c, func(keys *sessions.Keys) error {
		key, err := keys.Create(c.ctx, sessions.KeyRequest{Tenant: k.Tenant, Name: k.Name, Admin: k.Admin})
		if err != nil {
			return plain(err)
		}
		if c.json {
			return c.print(key)
		}
		c.say("%s", key.Secret)
		fmt.Fprintf(c.err, "%s of tenant %s. The secret above is not shown again; give it to commands as ROCKET_API_KEY.\n"+
			"Servers that start from now on want a key; one that runs without goes on so until its restart.\n", key.ID, key.Tenant)
		return nil
	})
}

type keyLs struct {
	Tenant string `help:"Only this tenant's." placeholder:"NAME"`
}

func (k keyLs) Run(c *console, cmds *commands) error {
	return cmds.Key.with(c, func(keys *sessions.Keys) error {
		list, err := keys.List(c.ctx, k.Tenant)
		if err != nil {
			return plain(err)
		}
		if c.json {
			if list == nil {
				list = []sessions.Key{}
			}
			return c.print(map[string]any{"data": list})
		}
		w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(w, "ID\tTENANT\tADMIN\tCREATED\tLAST USED\tREVOKED\tNAME")
		for _, key := range list {
			used, revoked := "-", "-"
			if key.LastUsedAt != nil {
				used = ago(*key.LastUsedAt)
			}
			if key.RevokedAt != nil {
				revoked = ago(*key.RevokedAt)
			}
			fmt.Fprintf(w, "%s\t%s\t%t\t%s\t%s\t%s\t%s\n", key.ID, key.Tenant, key.Admin, ago(key.CreatedAt), used, revoked, key.Name)
		}
		if err := w.Flush(); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		return nil
	})
}

type keyRevoke struct {
	ID string `arg:"" help:"Key, as ls shows it."`
}

func (k keyRevoke) Run(c *console, cmds *commands) error {
	return cmds.Key.with(c, func(keys *sessions.Keys) error {
		key, err := keys.Revoke(c.ctx, k.ID)
		if err != nil {
			return plain(err)
		}
		if c.json {
			return c.print(key)
		}
		c.say("revoked %s; servers refuse it within %s", key.ID, sessions.KeyFreshFor)
		return nil
	})
}

type keyLimits struct {
	Tenant          string  `arg:"" help:"Tenant."`
	Sessions        *string `help:"Sessions that may exist; default: the server's." placeholder:"N|default"`
	ConcurrentTurns *string `help:"Turns that may be open at once; default: the server's." placeholder:"N|default"`
	TokensPerMinute *string `help:"Tokens of prompts and answers a minute; default: no limit." placeholder:"N|default"`
	ResidentBytes   *string `help:"What its lines may take of a server's device and host memory; default: no limit. At the limit its own least valuable caches go first." placeholder:"SIZE|default"`
}

func (k keyLimits) Run(c *console, cmds *commands) error {
	return cmds.Key.with(c, func(keys *sessions.Keys) error {
		q, err := keys.Quotas(c.ctx, k.Tenant)
		if err != nil {
			return plain(err)
		}
		changed := false
		for _, f := range []struct {
			name string
			text *string
			to   **int
		}{{"sessions", k.Sessions, &q.Sessions}, {"concurrent-turns", k.ConcurrentTurns, &q.ConcurrentTurns}, {"tokens-per-minute", k.TokensPerMinute, &q.TokensPerMinute}} {
			if f.text == nil {
				continue
			}
			changed = true
			if *f.text == "default" {
				*f.to = nil
				continue
			}
			n, err := strconv.Atoi(*f.text)
			if err != nil {
				return usage("--%s: want a number or default, not %q", f.name, *f.text)
			}
			*f.to = &n
		}
		if k.ResidentBytes != nil {
			changed = true
			if q.ResidentBytes, err = bytesOrDefault(*k.ResidentBytes); err != nil {
				return usage("--resident-bytes: %v", err)
			}
		}
		if changed {
			if err := keys.SetQuotas(c.ctx, k.Tenant, q); err != nil {
				return plain(err)
			}
		}
		if c.json {
			return c.print(q)
		}
		show := func(n *int) string {
			if n == nil {
				return "default"
			}
			return strconv.Itoa(*n)
		}
		resident := "default"
		if q.ResidentBytes != nil {
			resident = strconv.FormatInt(*q.ResidentBytes, 10)
		}
		c.say("sessions %s, concurrent turns %s, tokens a minute %s, resident bytes %s",
			show(q.Sessions), show(q.ConcurrentTurns), show(q.TokensPerMinute), resident)
		return nil
	})
}

// bytesOrDefault reads a size, or nil for "default".
func bytesOrDefault(text string) (*int64, error) {
	if text == "default" {
		return nil, nil
	}
	var size byteSize
	if err := size.UnmarshalText([]byte(text)); err != nil {
		return nil, fmt.Errorf("%w or default", err)
	}
	n := int64(size)
	return &n, nil
}

// plain takes the code away that stands before a message for programs; with
// --json it is told by itself.
func plain(err error) error {
	if e, ok := errors.AsType[*sessions.Error](err); ok && e.Unwrap() == nil {
		text := e.Message
		if e.Field != "" && e.Code == sessions.CodeInvalid {
			text = e.Field + ": " + e.Message
		}
		return plainError{text, e}
	}
	return err
}

type plainError struct {
	text  string
	cause error
}

func (e plainError) Error() string { return e.text }

// Unwrap gives the error with its code.
func (e plainError) Unwrap() error { return e.cause }
