package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"rocket/engine"
)

// CheckResult is what CheckForks found. A mismatch is a token or a bit of a logit that differs.
type CheckResult struct {
	Mismatched int      `json:"mismatched"`
	Checked    int      `json:"checked"`
	Short      int      `json:"checked_short"` // on lines of 1-2k tokens
	Long       int      `json:"checked_long"`  // on lines of 8k tokens
	Resumed    int      `json:"detached_and_resumed"`
	Replayed   int      `json:"replayed_tokens"` // recomputed by children between their state and their offset
	Cold       int      `json:"cold_tokens"`     // recomputed by the replays that they are compared with
	Failures   []string `json:"failures,omitempty"`
}

// CheckOptions size a check.
type CheckOptions struct {
	Short, Long        int // random offsets on lines of 1-2k and of 8k tokens
	ShortMin, ShortMax int
	LongLen            int
	Tokens             int // greedy tokens compared after each offset, logits bit for bit
	Seed               uint64
}

// DefaultCheck is the check that the project promises.
func DefaultCheck() CheckOptions {
	return CheckOptions{Short: 200, Long: 5, ShortMin: 1000, ShortMax: 2000, LongLen: 8000, Tokens: 4, Seed: lineSeed}
}

// offsetsPerLine is how many children one line gets: they decode together with their cold replays, so that the
// batches are ragged.
const offsetsPerLine = 10

// CheckForks compares forks with cold replays: for random offsets of random lines, the child's tokens and logits must
// equal, bit for bit, those of a run that shares nothing. Every second line is detached to the host and resumed before
// its forks, and every third child before it goes on.
func CheckForks(ctx context.Context, e *engine.Engine, o CheckOptions, progress Progress) (CheckResult, error) {
	rng := rand.New(rand.NewPCG(o.Seed, 1))
	var res CheckResult
	total := o.Short + o.Long
	for n := 0; res.Checked < total; n++ {
		length, count := o.ShortMin+rng.IntN(o.ShortMax-o.ShortMin+1), min(offsetsPerLine, o.Short-res.Short)
		long := count == 0
		if long {
			length, count = o.LongLen, o.Long-res.Long
		}
		c := checkLine{e: e, res: &res, tokens: o.Tokens, rng: rng}
		if err := c.run(ctx, randomLine(rng, length, e.Info().Vocab), count, n%2 == 1); err != nil {
			return res, fmt.Errorf("check line %d of %d tokens: %w", n, length, err)
		}
		res.Checked += count
		if long {
			res.Long += count
		} else {
			res.Short += count
		}
		progress.step("forks checked", res.Checked, total)
	}
	return res, nil
}

// checkLine checks one line.
type checkLine struct {
	e      *engine.Engine
	res    *CheckResult
	tokens int
	rng    *rand.Rand
	mu     sync.Mutex // guards res while children run
}

func (c *checkLine) run(ctx context.Context, line []int32, count int, detach bool) error {
	parent, _, err := c.e.Open(ctx, line[:len(line)*3/4], engine.OpenOptions{})
	if err != nil {
		return err
	}
	defer func() { c.e.Release(parent) }()
	if _, err := decode(ctx, c.e, parent, line, 1, false); err != nil { // a second turn, so that there is a turn end inside
		return err
	}
	if detach {
		if parent, err = c.bounce(ctx, parent, line); err != nil {
			return err
		}
	}
	errs := make(chan error, count)
	var wg sync.WaitGroup
	for i := range count {
		at := 1 + c.rng.IntN(len(line))
		child, replay, err := c.fork(ctx, parent, at)
		if err != nil {
			return err
		}
		c.mu.Lock()
		c.res.Replayed += replay
		c.res.Cold += at - 1
		c.mu.Unlock()
		wg.Go(func() { errs <- c.compare(ctx, child, line[:at], i%3 == 2) })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// bounce detaches a timeline to the host and resumes it.
func (c *checkLine) bounce(ctx context.Context, s *engine.Seq, line []int32) (*engine.Seq, error) {
	if _, err := c.e.Detach(ctx, s, engine.TierHost); err != nil {
		return s, err
	}
	c.mu.Lock()
	c.res.Resumed++
	c.mu.Unlock()
	back, _, err := c.e.Open(ctx, line, engine.OpenOptions{})
	return back, err
}

func (c *checkLine) fork(ctx context.Context, parent *engine.Seq, at int) (*engine.Seq, int, error) {
	m, err := c.e.Mark(ctx, parent, at)
	if err != nil {
		return nil, 0, err
	}
	defer m.Drop()
	child, err := c.e.Fork(ctx, m)
	return child, m.Replay, err
}

// compare runs the child and a cold replay at the same time and compares them.
func (c *checkLine) compare(ctx context.Context, child *engine.Seq, line []int32, detach bool) error {
	if detach {
		var err error
		if child, err = c.bounce(ctx, child, line); err != nil {
			return err
		}
	}
	defer c.e.Release(child)
	cold, _, err := c.e.Open(ctx, line, engine.OpenOptions{Fresh: true, Lazy: true})
	if err != nil {
		return err
	}
	defer c.e.Release(cold)
	a, err := greedy(ctx, c.e, child, line, c.tokens, true)
	if err != nil {
		return err
	}
	b, err := greedy(ctx, c.e, cold, line, c.tokens, true)
	if err != nil {
		return err
	}
	got, err := finish(a)
	if err != nil {
		return err
	}
	want, err := finish(b)
	if err != nil {
		return err
	}
	if text := difference(got, want, c.tokens); text != "" {
		c.mu.Lock()
		c.res.Mismatched++
		c.res.Failures = append(c.res.Failures, fmt.Sprintf("fork at %d: %s", len(line), text))
		c.mu.Unlock()
	}
	return nil
}

func difference(got, want result, n int) string {
	if !slices.Equal(got.ids, want.ids) || len(got.ids) != n {
		return fmt.Sprintf("tokens %v, replay %v", got.ids, want.ids)
	}
	for i := range n {
		if a, b := got.run.Logits(i), want.run.Logits(i); len(a) == 0 || !slices.Equal(a, b) {
			return fmt.Sprintf("logits of token %d differ", i)
		}
	}
	return ""
}
