package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"rocket/engine"
)

// ForkOptions size the measurement of forks.
type ForkOptions struct {
	Sizes []int // tokens of the parent's line
	Reps  int   // forks a size and kind
	Colds int   // cold runs of the same prompt
	REST  *REST // nil: the engine alone
}

// DefaultFork is 1k, 8k and 30k tokens.
func DefaultFork() ForkOptions {
	return ForkOptions{Sizes: []int{1000, 8000, 30000}, Reps: 30, Colds: 2}
}

// ForkRow is one size and kind of fork. Kinds: "tip" (the end of the line), "turn_end" (the end of an earlier turn),
// "random" (anywhere).
type ForkRow struct {
	Tokens       int     `json:"tokens"`
	Kind         string  `json:"kind"`
	EngineUS     float64 `json:"engine_us"` // median of mark + attach, n = 1
	EngineUSP99  float64 `json:"engine_us_p99"`
	ReplayTokens float64 `json:"replay_tokens_mean"`
	TTFTMS       float64 `json:"ttft_ms"`      // median: start of the child's turn to its first token
	ColdTTFTMS   float64 `json:"cold_ttft_ms"` // the same prompt, nothing reused
	Speedup      float64 `json:"cold_over_ttft"`
	RequestMS    float64 `json:"request_ms_p50,omitempty"` // POST …/fork
	CommitMS     float64 `json:"commit_ms_p50,omitempty"`  // an empty commit of the same database
}

// Forks measures forks of idle lines.
func Forks(ctx context.Context, e *engine.Engine, o ForkOptions, progress Progress) ([]ForkRow, error) {
	rng := rand.New(rand.NewPCG(lineSeed, 4))
	var out []ForkRow
	for i, size := range o.Sizes {
		rows, err := forksOfSize(ctx, e, rng, size, o)
		if err != nil {
			return out, fmt.Errorf("forks of %d tokens: %w", size, err)
		}
		out = append(out, rows...)
		progress.step("sizes", i+1, len(o.Sizes))
	}
	return out, nil
}

// forksOfSize opens one line whose last quarter belongs to a second and a third turn.
func forksOfSize(ctx context.Context, e *engine.Engine, rng *rand.Rand, size int, o ForkOptions) ([]ForkRow, error) {
	line := randomLine(rng, size, e.Info().Vocab)
	cold, err := coldTTFT(ctx, e, line, o.Colds)
	if err != nil {
		return nil, err
	}
	parent, _, err := e.Open(ctx, line[:size*3/4], engine.OpenOptions{Lazy: true})
	if err != nil {
		return nil, err
	}
	defer e.Release(parent)
	var ends []int
	for _, at := range []int{size * 3 / 4, size * 7 / 8, size} { // random continuations would do as well as sampled ones
		res, err := decode(ctx, e, parent, line[:at], 1, false)
		if err != nil {
			return nil, err
		}
		line = append(line[:at:at], append(res.ids, line[min(len(line), at+1):]...)...)
		ends = append(ends, at+1)
	}
	var rows []ForkRow
	for _, kind := range []string{"tip", "turn_end", "random"} {
		row, err := forkKind(ctx, e, rng, parent, line, ends, kind, o)
		if err != nil {
			return nil, err
		}
		row.ColdTTFTMS = cold
		row.Speedup = cold / row.TTFTMS
		rows = append(rows, row)
	}
	return rows, o.REST.measure(ctx, size, rows)
}

func coldTTFT(ctx context.Context, e *engine.Engine, line []int32, reps int) (float64, error) {
	var v []float64
	for range reps {
		s, _, err := e.Open(ctx, line, engine.OpenOptions{Fresh: true, Lazy: true})
		if err != nil {
			return 0, err
		}
		res, err := decode(ctx, e, s, line, 1, false)
		e.Release(s)
		if err != nil {
			return 0, err
		}
		v = append(v, ms(res.state.Usage.TTFT))
	}
	return percentile(v, 0), nil // the best: what reuse has to beat
}

func forkKind(ctx context.Context, e *engine.Engine, rng *rand.Rand, parent *engine.Seq, line []int32, ends []int, kind string, o ForkOptions) (ForkRow, error) {
	row := ForkRow{Tokens: len(line), Kind: kind}
	var took, ttft []float64
	for i := range o.Reps {
		at := len(line)
		switch kind {
		case "turn_end":
			at = ends[i%2]
		case "random":
			at = 2 + rng.IntN(len(line)-2)
		}
		began := time.Now()
		m, err := e.Mark(ctx, parent, at)
		if err != nil {
			return row, err
		}
		child, err := e.Fork(ctx, m)
		took = append(took, us(time.Since(began)))
		m.Drop()
		if err != nil {
			return row, err
		}
		res, err := decode(ctx, e, child, line[:at], 1, false)
		e.Release(child)
		if err != nil {
			return row, err
		}
		ttft = append(ttft, ms(res.state.Usage.TTFT))
		row.ReplayTokens += float64(m.Replay) / float64(o.Reps)
	}
	row.EngineUS, row.EngineUSP99, row.TTFTMS = percentile(took, 0.5), percentile(took, 0.99), percentile(ttft, 0.5)
	return row, nil
}
