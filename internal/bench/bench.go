// Package bench measures the engine and the server, as ratios inside one run: against the measured roofs of the same
// machine, against a commit of the same database, against the same work without reuse. Nothing here asserts a time.
package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"rocket/engine"
)

// Progress is told how far a measurement is; nil is fine.
type Progress func(what string, done, total int)

func (p Progress) step(what string, done, total int) {
	if p != nil {
		p(what, done, total)
	}
}

// lineSeed makes runs of one command comparable: the same lines, offsets and token ids every time.
const lineSeed = 20260101

// randomLine is a line of n token ids below vocab. Ids below 8 (nano's special tokens) are left out.
func randomLine(r *rand.Rand, n, vocab int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(8 + r.IntN(vocab-8))
	}
	return out
}

// result is what one finished run left.
type result struct {
	run   *engine.Run
	ids   []int32
	state engine.RunState
}

// finish reads a run to its end.
func finish(r *engine.Run) (result, error) {
	for {
		toks, st := r.Read(0)
		r.Ack(len(toks))
		if st.Phase == engine.Done {
			out := result{run: r, state: st}
			for _, t := range toks {
				out.ids = append(out.ids, t.ID)
			}
			if st.Err != nil {
				return out, fmt.Errorf("run of %d tokens: %w", len(out.ids), st.Err)
			}
			return out, nil
		}
		<-r.Ready()
	}
}

// greedy starts n greedy tokens after line.
func greedy(ctx context.Context, e *engine.Engine, s *engine.Seq, line []int32, n int, logits bool) (*engine.Run, error) {
	return e.Start(ctx, s, engine.TurnRequest{Line: line, MaxTokens: n, IgnoreEOS: true, Logprobs: -1, KeepLogits: logits})
}

// decode runs n greedy tokens to the end.
func decode(ctx context.Context, e *engine.Engine, s *engine.Seq, line []int32, n int, logits bool) (result, error) {
	r, err := greedy(ctx, e, s, line, n, logits)
	if err != nil {
		return result{}, err
	}
	return finish(r)
}

// percentile of values, nearest rank; the values are sorted in place.
func percentile(v []float64, p float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[min(len(v)-1, int(p*float64(len(v))))]
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
