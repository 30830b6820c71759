package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"rocket/engine"
	"rocket/internal/bench"
)

type benchSessionsCmd struct {
	engineFlags
	Count   int `help:"Idle sessions, forked off one root." default:"10000"`
	Tokens  int `help:"Tokens of the root." default:"2000"`
	Clients int `help:"Clients that fork at once." default:"4"`
}

func (b benchSessionsCmd) Run(c *console) (err error) {
	if b.Count < 1 || b.Tokens < 16 || b.Clients < 1 {
		return usage("--count, --clients: want 1 or more; --tokens: want 16 or more")
	}
	l, err := benchFlags{engineFlags: b.engineFlags}.load(c)
	if err != nil {
		return err
	}
	defer l.close()
	srv, err := startServer(c.ctx, l)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, srv.stop()) }()
	res, err := bench.Idle(c.ctx, bench.IdleServer{
		REST: *srv.rest(l), Engine: l.engine,
		LedgerBytes: func(ctx context.Context) (n int64, err error) {
			err = srv.db.QueryRow(ctx, `SELECT pg_database_size(current_database())`).Scan(&n)
			return n, err
		},
	}, bench.IdleOptions{Sessions: b.Count, Tokens: b.Tokens, Clients: b.Clients}, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(res)
	}
	c.say("%d sessions off a root of %d tokens: %.0f forks/s from %d clients, %.2f ms p50, %.2f ms p99, an empty commit %.2f ms", res.Sessions, res.Tokens, res.ForksPerSec, res.Clients, res.P50MS, res.P99MS, res.CommitMS)
	c.say("a session: %.0f B in memory, %.0f B on the device, %.0f B in the ledger", res.HeapBytes, res.DeviceBytes, res.LedgerBytes)
	return nil
}

type benchDiskCmd struct {
	benchFlags
	Dir    string `help:"Folder on the disk to measure; a folder in it is made and removed." default:"." type:"existingdir"`
	Tokens int    `help:"Tokens of a line." default:"4000"`
	Lines  int    `help:"Lines." default:"8"`
}

func (b benchDiskCmd) Run(c *console) (err error) {
	if b.Tokens < 16 || b.Lines < 1 {
		return usage("--tokens: want 16 or more; --lines: want 1 or more")
	}
	dir, err := os.MkdirTemp(b.Dir, "rocket-bench-")
	if err != nil {
		return fmt.Errorf("make a folder to measure in: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	l, err := b.load(c, func(o *engine.Options) { o.DiskDir = dir })
	if err != nil {
		return err
	}
	defer l.close()
	res, err := bench.Disk(c.ctx, l.engine, bench.DiskOptions{Dir: dir, Tokens: b.Tokens, Lines: b.Lines}, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": l.name, "disk": res})
	}
	how := "direct I/O"
	if !res.Direct {
		how = "buffered I/O: the file system has no direct I/O"
	}
	c.say("%d lines of %d tokens, %.1f MiB each (%s): detach %.2f GB/s (%.1f ms), resume %.2f GB/s (%.1f ms)", res.Lines, res.Tokens,
		float64(res.LineBytes)/(1<<20), how, res.WriteBPS/1e9, res.DetachMS, res.ReadBPS/1e9, res.ResumeMS)
	c.say("the disk itself reads %.2f GB/s: resume is at %.0f%% of that; a cold prefill takes %.0f ms", res.RoofBytesPS/1e9, res.Fraction*100, res.ColdMS)
	return nil
}
