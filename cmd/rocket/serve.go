package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"rocket/engine"
	"rocket/internal/localpg"
	"rocket/migrations"
	"rocket/server"
	"rocket/sessions"
	"rocket/web"
)

// shutdownTimeout bounds what comes after the drain: giving sessions back to
// the ledger, stopping a private Postgres.
const shutdownTimeout = 30 * time.Second

type serveCmd struct {
	Listen          string        `help:"Address to listen on; one that other machines reach needs API keys." default:"127.0.0.1:8080" env:"ROCKET_LISTEN"`
	Auth            string        `help:"Whether calls need an API key: required, off, or auto: required if a key was ever made (rocket key create) or --listen is not loopback." enum:"auto,required,off" default:"auto" env:"ROCKET_AUTH"`
	TLSCert         string        `name:"tls-cert" help:"Certificate chain (PEM) to serve HTTPS with; read again when it changes." env:"ROCKET_TLS_CERT" placeholder:"FILE"`
	TLSKey          string        `name:"tls-key" help:"Its private key (PEM)." env:"ROCKET_TLS_KEY" placeholder:"FILE"`
	Advertise       string        `help:"Base URL by which other servers on the same --database-url reach this one, as http://10.0.0.5:8080; default the listen address, unless that is 0.0.0.0 or [::]." env:"ROCKET_ADVERTISE" placeholder:"URL"`
	PeerCA          string        `name:"peer-ca" help:"Certificates (PEM) to trust, beside the system's, when calling those servers over HTTPS." env:"ROCKET_PEER_CA" placeholder:"FILE"`
	AllowHost       []string      `help:"Host name under which clients reach the server, beside localhost. With keys and none named, any." env:"ROCKET_ALLOW_HOST" placeholder:"HOST"`
	TrustedProxy    []string      `name:"trusted-proxy" help:"Address or range (CIDR) of a reverse proxy: failed authentications of calls through it count for the last address in its X-Forwarded-For or Forwarded that is no such proxy. May be repeated; headers of anybody else are not believed." env:"ROCKET_TRUSTED_PROXY" placeholder:"CIDR"`
	DataDir         string        `help:"Where the private Postgres and the disk tier keep their files. With a --database-url too: a server that was killed and starts with its own again has its sessions at once." env:"ROCKET_DATA_DIR" placeholder:"DIR"`
	DiskDir         string        `help:"Folder of the disk tier; default tier in the data folder. What another model or class left in it is removed." env:"ROCKET_DISK_DIR" placeholder:"DIR"`
	DiskBytes       byteSize      `help:"Room on disk for caches of detached and old sessions, which outlive a restart; 0: none." default:"8GiB" env:"ROCKET_DISK_BYTES" placeholder:"SIZE"`
	DatabaseURL     string        `help:"Postgres 15 or newer to use as the ledger; default a private one." env:"ROCKET_DATABASE_URL" placeholder:"URL"`
	EventsRetention time.Duration `help:"Drop events older than this of sessions without an open turn, not their lineage and tokens; 0s: keep all." default:"0s" env:"ROCKET_EVENTS_RETENTION" placeholder:"DURATION"`
	DrainTimeout    time.Duration `help:"What running turns get at shutdown; 0s: nothing." default:"30s" env:"ROCKET_DRAIN_TIMEOUT"`
	LogFormat       string        `help:"text or json." enum:"text,json" default:"text" env:"ROCKET_LOG_FORMAT"`
	LogLevel        string        `help:"debug, info, warn or error." enum:"debug,info,warn,error" default:"info" env:"ROCKET_LOG_LEVEL"`
	engineFlags
}

func (s serveCmd) Run(c *console) (err error) {
	log := newLog(c.err, s.LogFormat, s.LogLevel)
	if err := s.checkDurations(); err != nil {
		return err
	}
	// What is wrong most often first: it should show before minutes of loading.
	if _, _, err := modelDir(s.Model); err != nil {
		return err
	}
	reach, err := s.checkAccess(log)
	if err != nil {
		return err
	}
	ln, err := listen(s.Listen)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := ln.Close(); err == nil && closeErr != nil && !errors.Is(closeErr, net.ErrClosed) {
			err = fmt.Errorf("close listener: %w", closeErr)
		}
	}()
	url, stopLedger, err := s.ledger(c.ctx, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopLedger()) }()
	if err := migrations.Up(c.ctx, url); err != nil {
		return err
	}
	l, err := s.load(c, log, func(o *engine.Options) { o.DiskDir, o.DiskBytes = s.diskDir(), int64(s.DiskBytes) })
	if err != nil {
		return err
	}
	defer l.close()
	defer s.save(c, l, log)
	home, leave := s.home(log)
	defer leave()
	address := s.advertised(ln.Addr())
	manager, err := sessions.Open(c.ctx, sessions.Options{DatabaseURL: url, Engine: l.engine, Template: l.template, Log: log, Address: address, Home: home, EventsRetention: s.EventsRetention})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), shutdownTimeout)
		defer cancel()
		if stopErr := manager.Shutdown(ctx); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("give sessions back to the ledger: %w", stopErr))
		}
	}()
	if err := noticePeers(c.ctx, manager, address, log); err != nil {
		return err
	}
	keys, err := s.needKeys(c.ctx, manager.Keys(), log)
	if err != nil {
		return err
	}
	srv, err := server.New(server.Options{
		Sessions: manager, Log: log, Version: buildVersion(), Web: web.Handler(),
		Address: address, PeerCA: reach.peers, TrustedProxies: reach.proxies, AllowedHosts: s.AllowHost, RequireKeys: keys, TLS: reach.tls,
		DrainTimeout:   max(s.DrainTimeout, 1), // 0 is the default's name there
		ConnectionsMax: connectionsMax(log),
	})
	if err != nil {
		return err
	}
	s.announce(c, ln.Addr(), l, keys)
	return srv.Serve(c.ctx, ln)
}

// checkDurations refuses what would be taken for something else.
func (s serveCmd) checkDurations() error {
	switch {
	case s.EventsRetention != 0 && s.EventsRetention < time.Second:
		return usage("--events-retention: want 1s or more, or 0s for all, not %v", s.EventsRetention)
	case s.DrainTimeout < 0:
		return usage("--drain-timeout: want 0s or more, not %v", s.DrainTimeout)
	}
	return nil
}

// diskDir is the disk tier's folder, "" when there is none.
func (s serveCmd) diskDir() string {
	switch {
	case s.DiskBytes == 0:
		return ""
	case s.DiskDir != "":
		return s.DiskDir
	}
	return filepath.Join(dataDir(s.DataDir), "tier")
}

// save puts what is cached on disk for the next start.
func (s serveCmd) save(c *console, l *loaded, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), shutdownTimeout)
	defer cancel()
	if saved, err := l.engine.Save(ctx); err != nil {
		log.Warn("not all caches were saved to disk", "saved", saved, "error", err)
	} else if saved > 0 {
		log.Info("caches saved to disk", "entries", saved)
	}
}

// announce says where the server is and what to try first.
func (s serveCmd) announce(c *console, addr net.Addr, l *loaded, keys bool) {
	url := "http://" + addr.String()
	if s.TLSCert != "" {
		url = "https://" + addr.String()
	}
	if c.json {
		_ = c.print(map[string]any{"url": url, "model": l.name, "class": s.Class, "auth": keys}) // nobody reads it; the server serves all the same
		return
	}
	c.say("rocket serves %s (%s, %s) at %s", l.name, s.Class, l.device.ISA(), url)
	c.say("  dashboard %s/   API docs %s/docs   metrics %s/metrics", url, url, url)
	if keys {
		c.say("Calls need an API key: %s key create makes one, ROCKET_API_KEY gives it to these commands.", os.Args[0])
	}
	flag := ""
	if url != "http://127.0.0.1:8080" {
		flag = " --server " + url
	}
	c.say("Try, in another terminal:")
	c.say("  id=$(%s session new%s --input 'func main() {')", os.Args[0], flag)
	c.say("  %s session turn%s \"$id\" --max-tokens 60", os.Args[0], flag)
	c.say("  %s session fork%s \"$id\" -n 3 && %s session tree%s \"$id\"", os.Args[0], flag, os.Args[0], flag)
}

// ledger gives the database's URL and what stops a private one.
func (s serveCmd) ledger(ctx context.Context, log *slog.Logger) (url string, stop func() error, err error) {
	if s.DatabaseURL != "" {
		return s.DatabaseURL, func() error { return nil }, nil
	}
	cluster, err := localpg.Start(ctx, localpg.Options{Dir: dataDir(s.DataDir), Log: log})
	if err != nil {
		return "", nil, err
	}
	return cluster.URL(), func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if err := cluster.Stop(ctx); err != nil {
			return fmt.Errorf("stop the private postgres: %w", err)
		}
		return nil
	}, nil
}

// dataDir is the given directory or the default one.
func dataDir(given string) string {
	if given != "" {
		return given
	}
	home, _ := os.UserHomeDir() // none: DefaultDir knows what then
	return localpg.DefaultDir(home)
}

// listen opens the address; what goes wrong most often is said plainly.
func listen(addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("listen address %s is in use: is another rocket running? Choose another one with --listen", addr)
	case err != nil:
		return nil, fmt.Errorf("listen address %s: %w", addr, err)
	}
	return ln, nil
}

func newLog(w io.Writer, format, level string) *slog.Logger {
	var at slog.Level
	_ = at.UnmarshalText([]byte(level)) // the flag's enum has checked it
	opts := &slog.HandlerOptions{Level: at}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.String(a.Key, a.Value.Time().Format("15:04:05.000"))
		}
		return a
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
