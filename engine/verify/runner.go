package verify

import (
	"context"
	"errors"
	"fmt"
	"math"

	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/kernels"
)

// chunkRows is how many tokens of a text are run at once. A trace keeps every layer's rows, so it is small.
const chunkRows = 128

// MaxContext is the most tokens that a case or a text may take.
const MaxContext = 6144

// runner runs one sequence at a time on one model.
type runner struct {
	dev          *kernels.Device
	m            *model.Model
	pages, slots *kernels.Buffer
	plan         *kernels.Plan // nil until a case runs
	trace        *model.Trace  // nil until a text is measured
	table        []int32
	zero         []byte
}

func newRunner(dev *kernels.Device, m *model.Model) (*runner, error) {
	l := m.Layout()
	r := &runner{dev: dev, m: m, zero: make([]byte, l.SlotStride)}
	n := (min(MaxContext, m.ContextLimit()) + l.PageTokens - 1) / l.PageTokens
	for i := range n {
		r.table = append(r.table, int32(i))
	}
	var err error
	if r.pages, err = dev.NewBuffer(n * l.PageStride); err != nil {
		return nil, err
	}
	if r.slots, err = dev.NewBuffer(l.SlotStride); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *runner) close() {
	if r.trace != nil {
		r.trace.Free()
	}
	if r.plan != nil {
		r.plan.Free()
	}
	for _, b := range []*kernels.Buffer{r.pages, r.slots} {
		if b != nil {
			b.Free()
		}
	}
}

// reset starts a new sequence.
func (r *runner) reset() error { return r.slots.Write(0, r.zero) }

// batch is the next rows of the sequence; out says how many of the last rows' logits are wanted.
func (r *runner) batch(tokens []int32, pos, out int) *kernels.Batch {
	b := &kernels.Batch{Tokens: tokens, Segs: []kernels.Seg{{Rows: int32(len(tokens)), Pos0: int32(pos)}}, Pages: r.table,
		Logits: make([]float32, out*r.m.Vocab())}
	for i := len(tokens) - out; i < len(tokens); i++ {
		b.OutRows = append(b.OutRows, int32(i))
	}
	return b
}

// room tells whether a sequence of n tokens can be run.
func (r *runner) room(n int) error {
	if limit := min(MaxContext, r.m.ContextLimit()); n > limit {
		return fmt.Errorf("%d tokens, and at most %d can be run", n, limit)
	}
	return nil
}

// generate continues a prompt greedily until a token ends the turn, the limit is reached, or stop says so.
func (r *runner) generate(ctx context.Context, tok *tokenizer.Tokenizer, prompt []int32, limit int, stop func(text string) bool) (ids []int32, text string, err error) {
	if err := r.room(len(prompt) + limit); err != nil {
		return nil, "", err
	}
	if r.plan == nil {
		if r.plan, err = r.m.Plan(r.pages, r.slots, chunkRows, 1); err != nil {
			return nil, "", err
		}
	}
	if err := r.reset(); err != nil {
		return nil, "", err
	}
	pos, next := 0, prompt
	for len(ids) < limit {
		var last []float32
		for len(next) > 0 {
			if err := ctx.Err(); err != nil {
				return nil, "", err
			}
			n := min(len(next), chunkRows)
			out := 0
			if n == len(next) {
				out = 1
			}
			b := r.batch(next[:n], pos, out)
			if err := r.plan.Run(b); err != nil {
				return nil, "", err
			}
			pos, next, last = pos+n, next[n:], b.Logits
		}
		id := argmax(last)
		if id < 0 {
			return nil, "", errors.New("the logits are not numbers")
		}
		for _, e := range r.m.EOS() {
			if id == e {
				return ids, tok.Decode(ids), nil
			}
		}
		ids = append(ids, id)
		if stop != nil && stop(tok.Decode(ids)) {
			break
		}
		next = []int32{id}
	}
	return ids, tok.Decode(ids), nil
}

// argmax is the likeliest token, the lower one of two; -1 where a logit is not a finite number.
func argmax(v []float32) int32 {
	best := 0
	for i, x := range v {
		if x-x != 0 {
			return -1
		}
		if x > v[best] {
			best = i
		}
	}
	return int32(best)
}

// surprise is -log of the probability that the logits give to a token, in nats.
func surprise(logits []float32, id int32) float64 {
	top := math.Inf(-1)
	for _, x := range logits {
		top = math.Max(top, float64(x))
	}
	sum := 0.0
	for _, x := range logits {
		sum += math.Exp(float64(x) - top)
	}
	return math.Log(sum) + top - float64(logits[id])
}
