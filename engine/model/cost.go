package model

import (
	"math"

	"rocket/kernels"
)

// Cost is what one decode step must move and compute at least. Activations are left out: they live in the processor's
// cache. Bytes are as resident (padding of packed weights included).
type Cost struct {
	WeightBytes int64 // matrices touched; of the experts, as many as rows of random routing would touch on average
	StateBytes  int64 // recurrent states and conv rows, read and written
	CacheBytes  int64 // latents of the selection, pooled keys of the context, and the rows' own entries
	FMAs        int64 // fused multiply-adds, of matrices, recurrence, indexer and attention
}

// Bytes is all that a step moves.
func (c Cost) Bytes() int64 { return c.WeightBytes + c.StateBytes + c.CacheBytes }

// StepCost is the cost of one step of rows sequences, one row each with logits, at a context of ctx tokens.
func (m *Model) StepCost(rows, ctx int) Cost {
	c, t := &m.Config, tally{rows: int64(rows)}
	t.cost.WeightBytes += int64(rows) * int64(m.embed.Bytes()) / int64(c.Vocab)
	for i := range c.Layers {
		w := &m.layers[i]
		t.weights(w.attnHC.fn, w.ffnHC.fn)
		m.blockCost(&t, w, ctx)
	}
	t.weights(m.head)
	t.cost.StateBytes = int64(rows) * int64(2*m.Layout().SlotBytes)
	return t.cost
}

type tally struct {
	rows int64
	cost Cost
}

// weights counts matrices that every row uses.
func (t *tally) weights(ws ...*kernels.Weight) {
	for _, w := range ws {
		if w != nil {
			t.cost.WeightBytes += int64(w.Bytes())
			t.cost.FMAs += t.rows * int64(w.N()) * int64(w.K())
		}
	}
}

func (m *Model) blockCost(t *tally, w *layerWeights, ctx int) {
	c, elem := &m.Config, int64(m.Class.ElemBytes())
	if k := w.kda; k != nil {
		t.weights(k.qkv, k.fga, k.fb, k.gb, k.b, k.out)
		// Per state element: decay, S^T k, the outer product, S^T q; then the convolution.
		t.cost.FMAs += t.rows * int64(c.KDAHeads*(4*c.KDADim*c.KDADim+3*c.KDADim*c.KDAConv))
	}
	if a := w.mla; a != nil {
		t.weights(a.qa, a.qb, a.kva, a.uk, a.uv, a.out)
		picked := int64(min(ctx, c.IndexTopK+ctx%c.IndexPool))
		t.cost.CacheBytes += t.rows * (picked + 1) * int64(c.KVRank) * elem
		t.cost.FMAs += t.rows * picked * int64(2*c.Heads*c.KVRank)
		// linear_heads runs each head's own block of uk and uv: their n*k is counted by weights already.
		if ix := a.index; ix != nil {
			t.weights(ix.q, ix.k, ix.gate, ix.heads)
			pools := int64(ctx / c.IndexPool)
			if ctx <= c.IndexTopK {
				pools = 0 // everything is selected, nothing is scored
			}
			t.cost.CacheBytes += t.rows * (pools + 2) * int64(c.IndexDim) * elem
			t.cost.FMAs += t.rows * pools * int64(c.IndexHeads*c.IndexDim)
		}
	}
	f := &w.mlp
	t.weights(f.gateUp, f.down, f.router, f.sharedUp, f.sharedDown)
	if len(f.expertsUp) == 0 {
		return
	}
	up, down := f.expertsUp[0], f.expertsDown[0]
	t.cost.WeightBytes += int64(math.Round(c.expertsTouched(int(t.rows)) * float64(up.Bytes()+down.Bytes())))
	t.cost.FMAs += t.rows * int64(c.TopK) * (int64(up.N())*int64(up.K()) + int64(down.N())*int64(down.K()))
}

// expertsTouched is how many experts of a layer rows of random routing touch on average.
func (c Config) expertsTouched(rows int) float64 {
	if c.Experts == 0 {
		return 0
	}
	return float64(c.Experts) * (1 - math.Pow(1-float64(c.TopK)/float64(c.Experts), float64(rows)))
}
