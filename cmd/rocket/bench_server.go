package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/internal/bench"
	"rocket/internal/localpg"
	"rocket/migrations"
	"rocket/server"
	"rocket/sessions"
)

// benchServer is a whole server on a private database in a folder that is removed afterwards.
type benchServer struct {
	client *client.Client
	db     *pgx.Conn
	stops  []func() error // undone in reverse
}

// startServer serves l on a free loopback port.
func startServer(ctx context.Context, l *loaded) (_ *benchServer, err error) {
	b := &benchServer{}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.stop())
		}
	}()
	log := slog.New(slog.DiscardHandler)
	dir, err := os.MkdirTemp("", "rocket-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the ledger: %w", err)
	}
	b.stops = append(b.stops, func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // as root, Postgres runs as another user
		return nil, fmt.Errorf("open up the ledger's folder: %w", err)
	}
	cluster, err := localpg.Start(ctx, localpg.Options{Dir: filepath.Join(dir, "ledger"), Log: log, DieWithParent: true})
	if err != nil {
		return nil, err
	}
	b.stops = append(b.stops, func() error { return cluster.Stop(context.WithoutCancel(ctx)) })
	if err := migrations.Up(ctx, cluster.URL()); err != nil {
		return nil, err
	}
	manager, err := sessions.Open(ctx, sessions.Options{DatabaseURL: cluster.URL(), Engine: l.engine, Template: l.template, Log: log})
	if err != nil {
		return nil, err
	}
	b.stops = append(b.stops, func() error { return manager.Shutdown(context.WithoutCancel(ctx)) })
	srv, err := server.New(server.Options{Sessions: manager, Log: log, Version: buildVersion()})
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen on loopback: %w", err)
	}
	serving, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- srv.Serve(serving, ln) }()
	b.stops = append(b.stops, func() error { cancel(); return <-done })
	if b.client, err = client.New("http://"+ln.Addr().String(), client.Options{}); err != nil {
		return nil, err
	}
	b.stops = append(b.stops, func() error { b.client.Close(); return nil })
	if b.db, err = pgx.Connect(ctx, cluster.URL()); err != nil {
		return nil, fmt.Errorf("connect to the ledger: %w", err)
	}
	b.stops = append(b.stops, func() error { return b.db.Close(context.WithoutCancel(ctx)) })
	return b, nil
}

func (b *benchServer) stop() error {
	var err error
	for i := len(b.stops) - 1; i >= 0; i-- {
		err = errors.Join(err, b.stops[i]())
	}
	b.stops = nil
	return err
}

// rest is the server as bench sees it.
func (b *benchServer) rest(l *loaded) *bench.REST {
	return &bench.REST{
		Session: func(ctx context.Context, n int) (string, int, error) { return b.session(ctx, l, n) },
		Fork: func(ctx context.Context, id string, at int) error {
			_, err := b.client.Fork(ctx, id, client.ForkRequest{At: &at}, client.CallOptions{})
			return err
		},
		Commit: func(ctx context.Context) error {
			// One record in the log, so that the commit is flushed; no table, no lock.
			_, err := b.db.Exec(ctx, `SELECT pg_logical_emit_message(true, 'rocket', '')`)
			return err
		},
	}
}

// sampleText is what sessions of a given length are made of.
const sampleText = "func add(a, b int) int {\n\treturn a + b\n}\n\n"

// pollEvery is how often a prefill that runs behind is looked at.
const pollEvery = 50 * time.Millisecond

// session makes a session of about n tokens and waits until it is prefilled.
func (b *benchServer) session(ctx context.Context, l *loaded, n int) (string, int, error) {
	text := strings.Repeat(sampleText, n/len(l.tok.Encode(sampleText))+1)
	s, err := b.client.Create(ctx, client.CreateRequest{Input: &text}, client.CallOptions{})
	if err != nil {
		return "", 0, err
	}
	for s.Residency.Device < s.Length-1 {
		select {
		case <-ctx.Done():
			return "", 0, ctx.Err()
		case <-time.After(pollEvery):
		}
		if s, err = b.client.Get(ctx, s.ID); err != nil {
			return "", 0, err
		}
	}
	return s.ID, s.Length, nil
}
