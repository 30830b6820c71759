package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"rocket/engine/model"
	"rocket/internal/replay"
)

// replayCmd walks a trace through the radix code without a model.
type replayCmd struct {
	Format   string   `help:"Form of the trace: mooncake, kvct (kv-cache-tester), bailian, tot; or c32, which is made and not read." enum:"mooncake,kvct,bailian,tot,c32" required:""`
	Files    []string `arg:"" optional:"" name:"file" help:"Files of the trace, gzip or plain; a folder means what lies in it. Several are one trace, their clocks start together."`
	Geometry string   `help:"Whose pages and states: glm-5.3-flash, kimi-linear or nano." enum:"glm-5.3-flash,kimi-linear,nano" default:"glm-5.3-flash"`
	State    string   `help:"What recurrent states are kept in: f32 or bf16." enum:"f32,bf16" default:"f32"`
	Budget   float64  `name:"budget-gib" help:"Device memory for pages and states together, in GiB; 0: no bound." default:"0" placeholder:"GIB"`
	Policy   string   `help:"What is evicted first." enum:"value,lru" default:"value"`
	Root     int      `help:"c32: tokens of the prompt that all sessions begin with." default:"212000"`
	Sessions int      `help:"c32: sessions, forks included." default:"555"`
	Seed     uint64   `help:"c32: seed." default:"1"`
	Waiting  float64  `help:"c32: part of the forks that have not run yet." default:"0"`
	Shed     bool     `name:"shed-states" help:"Without room, idle sessions give up their states before their pages."`
	Sweep    bool     `help:"Walk without a bound, then at 10 to 100 percent of that peak; one line each."`
	SVG      string   `name:"svg" help:"With --sweep: draw the hit rates into this file." placeholder:"FILE"`
	Play     int      `name:"run" help:"Play so many requests on nano with real tokens, and compare what the engine reuses with what the walk predicts." default:"0" placeholder:"N"`
	Check    int      `help:"Check the whole tree after every so many requests; it is checked at the end in any case." default:"0"`
}

func (r replayCmd) Run(c *console) error {
	if !(r.Budget >= 0 && r.Budget <= 1<<20) { // NaN too
		return usage("--budget-gib: want 0 to %d, not %v", 1<<20, r.Budget)
	}
	switch {
	case r.Check < 0:
		return usage("--check: want 0 or more, not %d", r.Check)
	case r.Play < 0:
		return usage("--run: want 0 or more, not %d", r.Play)
	case r.Play > 0 && (r.Sweep || r.Budget > 0):
		return usage("--run: has room for everything, so neither --sweep nor --budget-gib")
	case r.Sweep && r.Budget > 0:
		return usage("--sweep: finds its budgets itself, so no --budget-gib")
	case r.SVG != "" && !r.Sweep:
		return usage("--svg: draws a --sweep")
	case r.Play > 0:
		r.Geometry = nanoName
	}
	g, err := replay.GeometryOf(r.Geometry, r.State)
	if err != nil {
		return usageError{err}
	}
	t, err := r.trace()
	if err != nil {
		return err
	}
	o := replay.Options{Geometry: g, Budget: int64(r.Budget * (1 << 30)), Policy: r.Policy, ShedStates: r.Shed, CheckEvery: r.Check, Progress: c.walked()}
	switch {
	case r.Play > 0:
		return r.play(c, t, g)
	case r.Sweep:
		return r.sweep(c, t, o)
	}
	res, err := replay.Measure(c.ctx, t, o)
	if err != nil {
		return err
	}
	return c.walk(res)
}

// sweep walks at all budgets and draws them.
func (r replayCmd) sweep(c *console, t *replay.Trace, o replay.Options) error {
	var all []replay.Result
	err := replay.Sweep(c.ctx, t, o, replay.Policies, func(res replay.Result) error {
		all = append(all, res)
		return c.walk(res)
	})
	if err != nil || r.SVG == "" {
		return err
	}
	f, err := os.Create(r.SVG)
	if err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	return errors.Join(replay.SVG(f, all), f.Close())
}

// play runs the beginning of the trace on the built-in model, with room for all of it.
func (r replayCmd) play(c *console, t *replay.Trace, g replay.Geometry) error {
	dir, _, err := modelDir(nanoName)
	if err != nil {
		return err
	}
	config, err := model.ReadConfig(dir)
	if err != nil {
		return err
	}
	part := t.Prefix(r.Play, config.ContextLimit)
	if len(part.Requests) == 0 {
		return fmt.Errorf("play: no request fits the model's context of %d tokens", config.ContextLimit)
	}
	need, err := replay.Walk(c.ctx, part, replay.Options{Geometry: g})
	if err != nil {
		return err
	}
	const spare = 64 << 20 // both arenas are this much larger than what the walk needed
	flags := engineFlags{Model: nanoName, Class: "bf16",
		PageBytes:     byteSize(int64(need.PeakPages)*g.PageBytes + spare),
		SnapshotBytes: byteSize(int64(need.PeakStates)*g.SlotBytes + spare)}
	l, err := flags.load(c, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer l.close()
	res, err := replay.Run(c.ctx, l.engine, part, g, c.walked())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(res)
	}
	c.say("%d requests of %d prompt tokens: %d cached, %d predicted; %d snapshots, %d predicted; %d copies on extend, %d predicted; %d requests differ",
		res.Requests, res.PromptTokens, res.Cached, res.Predicted, res.Snapshots, res.WalkCaptures, res.CopyOnExtend, res.WalkCopies, len(res.Differences))
	return nil
}

// trace reads the files.
func (r replayCmd) trace() (*replay.Trace, error) {
	if r.Format == "c32" {
		if len(r.Files) > 0 {
			return nil, usage("c32 is made, it takes no files")
		}
		t, err := replay.C32{Root: r.Root, Lanes: min(replay.DefaultLanes, r.Sessions), Sessions: r.Sessions, Seed: r.Seed, Waiting: r.Waiting}.Trace()
		if err != nil {
			return nil, usageError{err}
		}
		return t, nil
	}
	var sources []replay.Source
	for _, name := range r.Files {
		names := []string{name}
		if info, err := os.Stat(name); err == nil && info.IsDir() {
			if names, err = traceFiles(name); err != nil {
				return nil, err
			}
		}
		for _, name := range names {
			f, err := os.Open(name)
			if err != nil {
				return nil, fmt.Errorf("open trace: %w", err)
			}
			defer f.Close()
			sources = append(sources, replay.Source{Name: name, Data: io.Reader(f)})
		}
	}
	if len(sources) == 0 {
		return nil, usage("want the trace's files")
	}
	return replay.Parse(r.Format, sources...)
}

// traceFiles lists a folder's traces in the order of their names.
func traceFiles(dir string) ([]string, error) {
	var names []string
	for _, pattern := range []string{"*.json", "*.jsonl", "*.json.gz", "*.jsonl.gz"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, fmt.Errorf("list traces: %w", err)
		}
		names = append(names, found...)
	}
	slices.Sort(names)
	return names, nil
}

// walked makes a progress report on standard error: on a terminal a line that changes, else one every few seconds.
func (c *console) walked() func(done, total int) {
	every, next := 5*time.Second, time.Now().Add(5*time.Second)
	if c.errTerminal {
		every = 200 * time.Millisecond
	}
	return func(done, total int) {
		now := time.Now()
		if done < total && now.Before(next) {
			return
		}
		next = now.Add(every)
		switch {
		case c.errTerminal:
			fmt.Fprintf(c.err, "\r%d of %d events", done, total)
			if done == total {
				fmt.Fprintln(c.err)
			}
		case done < total:
			fmt.Fprintf(c.err, "%d of %d events\n", done, total)
		}
	}
}

// walk prints a result.
func (c *console) walk(r replay.Result) error {
	if c.json {
		return c.print(r)
	}
	c.say("%s on %s (%s state), policy %s, %s: hit %.2f%% of %d prompt tokens (ideal %.2f%%), peak %.2f GiB, %d snapshots, evicted %d pages and %d states, %d copies on extend",
		r.Format, r.Geometry, r.State, r.Policy, budgetText(r.Budget), r.HitRate*100, r.PromptTokens, r.IdealRate*100, gib(r.PeakBytes),
		r.Snapshots, r.EvictedPages, r.EvictedSnapshots, r.CopyOnExtend)
	if s := r.Sessions; s != nil && s.FitUnshared > 0 {
		c.say("  %d sessions at most, %.4f GiB each shared and %.4f unshared; in the budget fit %d with what all share counted once (%d with it spread over all), %d unshared",
			s.Live, gib(s.SharedBytes)/float64(s.Live), gib(s.UnsharedBytes)/float64(s.Live), s.FitShared, s.FitSpread, s.FitUnshared)
		if s.FitResident > 0 {
			c.say("  resident, measured: %d when first one had to give something up, %d at most; replay before a next turn %.0f tokens (at most %d)",
				s.FitResident, s.ResidentMax, s.ReplayMean, s.ReplayMax)
		}
	}
	return nil
}

func budgetText(b int64) string {
	if b == 0 {
		return "no bound"
	}
	return fmt.Sprintf("%.2f GiB", gib(b))
}

func gib(b int64) float64 { return float64(b) / (1 << 30) }
