package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"rocket/engine"
)

// LadderOptions size a ladder.
type LadderOptions struct {
	Streams        []int // streams at once, a rung each
	Prompt, Tokens int   // a stream
	Rounds         int   // measured rounds of each rung, after one that is not
}

// DefaultLadder is c1 to c16.
func DefaultLadder() LadderOptions {
	return LadderOptions{Streams: []int{1, 2, 4, 8, 16}, Prompt: 128, Tokens: 128, Rounds: 3}
}

// Rung is one row of a ladder. Rates count generated tokens after the first; TTFT includes the prompt's prefill, all
// streams starting at once.
type Rung struct {
	Streams      int     `json:"streams"`
	TokensPerSec float64 `json:"tokens_per_second"`
	PerStream    float64 `json:"tokens_per_second_per_stream"`
	TTFTP50      float64 `json:"ttft_ms_p50"`
	TTFTMax      float64 `json:"ttft_ms_max"`
	StepMS       float64 `json:"step_ms"`
}

// Ladder measures decoding at growing numbers of streams; each stream has a prompt of its own.
func Ladder(ctx context.Context, e *engine.Engine, o LadderOptions, progress Progress) ([]Rung, error) {
	rng := rand.New(rand.NewPCG(lineSeed, 2))
	var out []Rung
	for i, streams := range o.Streams {
		best, err := ladderBest(ctx, e, rng, streams, o)
		if err != nil {
			return out, fmt.Errorf("ladder c%d: %w", streams, err)
		}
		out = append(out, best)
		progress.step("rungs", i+1, len(o.Streams))
	}
	return out, nil
}

// ladderBest is the fastest of the measured rounds.
func ladderBest(ctx context.Context, e *engine.Engine, rng *rand.Rand, streams int, o LadderOptions) (Rung, error) {
	var best Rung
	for round := range o.Rounds + 1 {
		rung, err := ladderRound(ctx, e, rng, streams, o)
		if err != nil {
			return best, err
		}
		if round > 0 && rung.TokensPerSec > best.TokensPerSec {
			best = rung
		}
	}
	return best, nil
}

func ladderRound(ctx context.Context, e *engine.Engine, rng *rand.Rand, streams int, o LadderOptions) (Rung, error) {
	var mu sync.Mutex
	var ttft []float64
	var first, last time.Time
	var failed error
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for range streams {
		line := randomLine(rng, o.Prompt, e.Info().Vocab)
		wg.Go(func() {
			<-begin
			seen, res, err := ladderStream(ctx, e, line, o.Tokens)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = err
				return
			}
			ttft = append(ttft, ms(res.state.Usage.TTFT))
			start := seen.Add(-res.state.Usage.Decode)
			if first.Before(start) { // all streams decode from the latest first token on
				first = start
			}
			if seen.After(last) {
				last = seen
			}
		})
	}
	close(begin)
	wg.Wait()
	if failed != nil {
		return Rung{}, failed
	}
	seconds := last.Sub(first).Seconds()
	rate := float64(streams*(o.Tokens-1)) / seconds
	r := Rung{Streams: streams, TokensPerSec: rate, PerStream: rate / float64(streams), StepMS: seconds * 1e3 / float64(o.Tokens-1)}
	r.TTFTP50, r.TTFTMax = percentile(ttft, 0.5), percentile(ttft, 1)
	return r, nil
}

func ladderStream(ctx context.Context, e *engine.Engine, line []int32, tokens int) (time.Time, result, error) {
	s, _, err := e.Open(ctx, line, engine.OpenOptions{Lazy: true, Fresh: true})
	if err != nil {
		return time.Time{}, result{}, err
	}
	defer e.Release(s)
	res, err := decode(ctx, e, s, line, tokens, false)
	return time.Now(), res, err
}
