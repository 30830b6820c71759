package main

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"rocket/engine"
	"rocket/engine/model"
	"rocket/internal/bench"
	"rocket/kernels"
)

// benchCmd measures. Results are ratios inside one run; docs/benchmarks.md keeps them.
type benchCmd struct {
	Fork     benchForkCmd     `cmd:"" help:"Forks: what they cost, and with --check whether they equal cold replays."`
	Ladder   benchLadderCmd   `cmd:"" help:"Decoding at 1 to 16 streams."`
	Sessions benchSessionsCmd `cmd:"" help:"Many idle sessions forked off one root: bytes a session, forks per second."`
	Stream   benchStreamCmd   `cmd:"" help:"One session's tokens to many readers: what the server adds, delays, bytes a socket. Linux only."`
	Disk     benchDiskCmd     `cmd:"" help:"Lines detached to the disk and brought back, beside the disk's own rate."`
	Roofline benchRooflineCmd `cmd:"" help:"A decode step against the machine's measured memory bandwidth and FMA rate."`
}

// benchFlags are the engine's, with a model of random weights as an alternative to a folder.
type benchFlags struct {
	engineFlags
	Geometry string `help:"bench: random weights of a glm5_next of about 1.5 GiB, instead of --model." enum:",bench" default:""`
}

// benchGeometry is the one model that needs no folder.
const benchGeometry = "bench"

func (f benchFlags) load(c *console, change ...func(*engine.Options)) (*loaded, error) {
	log := slog.New(slog.DiscardHandler)
	if f.Geometry != benchGeometry {
		return f.engineFlags.load(c, log, change...)
	}
	if f.Threads < 0 {
		return nil, usage("--threads: want 0 or more, not %d", f.Threads)
	}
	l := &loaded{name: "random " + benchGeometry}
	if err := f.loadRandom(c, log, l, change); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (f benchFlags) loadRandom(c *console, log *slog.Logger, l *loaded, change []func(*engine.Options)) (err error) {
	if l.device, err = kernels.Open("auto", f.Threads); err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	update, done := c.progress("making " + l.name)
	l.model, err = model.Random(l.device, model.BenchConfig(), model.Options{Class: numericClass(f.Class), Progress: update}, 1)
	done()
	if err != nil {
		return err
	}
	return f.start(l, log, change)
}

// counted makes a bench.Progress of a bar on the terminal.
func (c *console) counted() bench.Progress {
	if !c.errTerminal || c.json {
		return nil
	}
	return func(what string, done, total int) {
		fmt.Fprintf(c.err, "\r%s: %d of %d", what, done, total)
		if done == total {
			fmt.Fprintln(c.err)
		}
	}
}

type benchForkCmd struct {
	benchFlags
	Check bool  `help:"Compare forks at random offsets with cold replays, bit for bit."`
	Sizes []int `help:"Tokens of the forked lines." default:"1000,8000,30000"`
	Reps  int   `help:"Forks of each size and kind." default:"30"`
	Short int   `help:"With --check: offsets on lines of 1-2k tokens." default:"200"`
	Long  int   `help:"With --check: offsets on lines of 8k tokens." default:"5"`
	Seed  int64 `help:"With --check: seed of lines and offsets." default:"20260101"`
}

func (b benchForkCmd) Run(c *console) (err error) {
	for _, n := range b.Sizes {
		if n < 16 {
			return usage("--sizes: want 16 or more, not %d", n)
		}
	}
	if b.Reps < 1 || b.Short < 0 || b.Long < 0 || b.Short+b.Long == 0 {
		return usage("--reps, --short, --long: want something to do")
	}
	l, err := b.load(c)
	if err != nil {
		return err
	}
	defer l.close()
	if b.Check {
		return b.check(c, l)
	}
	o := bench.DefaultFork()
	o.Sizes, o.Reps = b.Sizes, b.Reps
	if b.Geometry == "" { // random weights have no tokenizer, a server needs one
		srv, startErr := startServer(c.ctx, l)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, srv.stop()) }()
		o.REST = srv.rest(l)
	}
	rows, err := bench.Forks(c.ctx, l.engine, o, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": l.name, "forks": rows})
	}
	c.say("%7s %-9s %10s %10s %8s %9s %11s %9s %9s", "tokens", "kind", "engine_us", "p99_us", "replay", "ttft_ms", "cold_ms", "request", "commit")
	for _, r := range rows {
		c.say("%7d %-9s %10.1f %10.1f %8.0f %9.2f %11.1f %9.2f %9.2f", r.Tokens, r.Kind, r.EngineUS, r.EngineUSP99, r.ReplayTokens, r.TTFTMS, r.ColdTTFTMS, r.RequestMS, r.CommitMS)
	}
	return nil
}

func (b benchForkCmd) check(c *console, l *loaded) error {
	o := bench.DefaultCheck()
	o.Short, o.Long, o.Seed = b.Short, b.Long, uint64(b.Seed)
	res, err := bench.CheckForks(c.ctx, l.engine, o, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		err = c.print(res)
	} else {
		c.say("%d of %d forks differ from their cold replays (%d on lines of 1-2k tokens, %d on lines of 8k; %d detached and resumed; %d tokens replayed against %d cold)",
			res.Mismatched, res.Checked, res.Short, res.Long, res.Resumed, res.Replayed, res.Cold)
	}
	if err == nil && res.Mismatched > 0 {
		return fmt.Errorf("%d forks differ from their replays: %s", res.Mismatched, strings.Join(res.Failures, "; "))
	}
	return err
}

type benchLadderCmd struct {
	benchFlags
	Streams []int `help:"Streams at once, a rung each." default:"1,2,4,8,16"`
	Prompt  int   `help:"Prompt tokens of a stream." default:"128"`
	Tokens  int   `help:"Generated tokens of a stream." default:"128"`
}

func (b benchLadderCmd) Run(c *console) error {
	if b.Prompt < 1 || b.Tokens < 2 {
		return usage("--prompt: want 1 or more; --tokens: want 2 or more")
	}
	for _, n := range b.Streams {
		if n < 1 || n > engine.DefaultMaxSeqs {
			return usage("--streams: want 1 to %d, not %d", engine.DefaultMaxSeqs, n)
		}
	}
	l, err := b.load(c)
	if err != nil {
		return err
	}
	defer l.close()
	o := bench.DefaultLadder()
	o.Streams, o.Prompt, o.Tokens = b.Streams, b.Prompt, b.Tokens
	rungs, err := bench.Ladder(c.ctx, l.engine, o, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": l.name, "class": b.Class, "isa": l.device.ISA(), "threads": l.device.Threads(),
			"prompt_tokens": o.Prompt, "tokens": o.Tokens, "rungs": rungs})
	}
	c.say("%7s %10s %12s %10s %12s %12s", "streams", "tok/s", "per stream", "step ms", "ttft p50 ms", "ttft max ms")
	for _, r := range rungs {
		c.say("%7d %10.1f %12.1f %10.2f %12.1f %12.1f", r.Streams, r.TokensPerSec, r.PerStream, r.StepMS, r.TTFTP50, r.TTFTMax)
	}
	return nil
}

type benchRooflineCmd struct {
	benchFlags
	Streams []int `help:"Streams at once." default:"1,4,16"`
	Context int   `help:"Tokens before the measured ones." default:"128"`
	Tokens  int   `help:"Measured tokens of a stream." default:"64"`
}

func (b benchRooflineCmd) Run(c *console) error {
	if b.Context < 1 || b.Tokens < 2 {
		return usage("--context: want 1 or more; --tokens: want 2 or more")
	}
	l, err := b.load(c)
	if err != nil {
		return err
	}
	defer l.close()
	res, err := bench.Roofline(c.ctx, l.device, l.model, l.engine, b.Streams, b.Context, b.Tokens, c.counted())
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"model": l.name, "class": b.Class, "roofline": res})
	}
	c.say("%s, %d threads: memory %.1f GB/s, %.1f GB/s over the step's own %d MiB, %.1f GFMA/s", res.ISA, res.Threads,
		res.MemoryRoof/1e9, res.ReadRoof/1e9, res.WorkingSet>>20, res.FMARoof/1e9)
	c.say("%7s %12s %10s %10s %10s %10s %9s %8s", "streams", "weights MiB", "state KiB", "MFMA", "roof ms", "step ms", "fraction", "bound")
	for _, s := range res.Steps {
		c.say("%7d %12.1f %10.1f %10.1f %10.2f %10.2f %8.0f%% %8s", s.Streams, float64(s.WeightBytes)/(1<<20), float64(s.StateBytes)/1024,
			float64(s.FMAs)/1e6, s.RoofMS, s.StepMS, s.Fraction*100, s.Bound)
	}
	return nil
}
