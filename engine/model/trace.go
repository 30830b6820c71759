package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"rocket/kernels"
)

// TapKind says what is read at a tap.
type TapKind string

// The kinds of taps, in the order of reports.
const (
	TapLinear    TapKind = "linear_attention_projection" // q, k, v, gate and output-gate pre-activations, o_proj's output
	TapLinearOut TapKind = "linear_attention_output"     // what the recurrence gives, normed and gated: o_proj's input
	TapFull      TapKind = "full_attention_projection"   // q_a, q_b, kv_a and o_proj outputs
	TapFullOut   TapKind = "full_attention_output"       // o_proj's input
	TapRouter    TapKind = "router_logits"
	TapMLP       TapKind = "mlp_output"
)

// Tap is a place of the graph whose rows a trace keeps: Width columns from Col on of a scratch.
type Tap struct {
	Name    string // "layers.3.self_attn.q_b_proj"
	Kind    TapKind
	Layer   int
	Width   int
	col     int
	scratch kernels.Scratch
}

// Trace is the trunk's plan with scratches of their own for every layer, so that what passed through can be read after
// a run. It computes the same bits as Plan, in more memory.
type Trace struct {
	*kernels.Plan
	Taps   []Tap
	Hidden kernels.Scratch // the final normed hidden rows
}

// Rows reads rows [0, n) of a tap after a run, one after the other.
func (t *Trace) Rows(tap Tap, n int) ([]float32, error) {
	all := t.Read(tap.scratch, 0, n)
	if all == nil {
		return nil, fmt.Errorf("trace %s: %d rows cannot be read", tap.Name, n)
	}
	width := len(all) / max(n, 1)
	if width == tap.Width {
		return all, nil
	}
	out := make([]float32, 0, n*tap.Width)
	for i := range n {
		out = append(out, all[i*width+tap.col:i*width+tap.col+tap.Width]...)
	}
	return out, nil
}

// Trace builds the trunk as Plan does, with taps.
func (m *Model) Trace(pages, slots *kernels.Buffer, maxRows, maxSegs int) (*Trace, error) {
	if m.weights.packed == nil {
		return nil, errors.New("trace: the model is closed")
	}
	p, err := m.dev.NewPlan(m.Class, maxRows, maxSegs, m.limit)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	g := newGraph(m, p, pages, slots)
	g.trace = &Trace{Plan: p}
	g.trunk()
	if err := p.Err(); err != nil {
		p.Free()
		return nil, fmt.Errorf("trace: %w", err)
	}
	g.trace.Hidden = g.hidden
	return g.trace, nil
}

// ownScratches gives a layer of a trace scratches that no other layer writes.
func (g *graph) ownScratches(l Layer) {
	if g.trace == nil {
		return
	}
	emb, hidden, sel := g.emb, g.hidden, g.sel
	g.scratches([]Layer{l})
	g.emb, g.hidden = emb, hidden
	if l.Shared {
		g.sel = sel
	}
}

func (g *graph) tap(layer int, kind TapKind, name string, s kernels.Scratch, col, width int) {
	g.trace.Taps = append(g.trace.Taps, Tap{Name: fmt.Sprintf("layers.%d.%s", layer, name), Kind: kind, Layer: layer, Width: width, col: col, scratch: s})
}

// tapAttention notes the attention half of a layer, and gives the MLP another input and output than it had.
func (g *graph) tapAttention(i int, w *layerWeights) {
	if g.trace == nil {
		return
	}
	c := g.c
	if w.kda != nil {
		hd := c.KDAHeads * c.KDADim
		for j, name := range []string{"q_proj", "k_proj", "v_proj"} {
			g.tap(i, TapLinear, "self_attn."+name, g.qkv, j*hd, hd)
		}
		g.tap(i, TapLinear, "self_attn.f_b_proj", g.f, 0, hd)
		g.tap(i, TapLinear, "self_attn.g_b_proj", g.g, 0, hd)
		g.tap(i, TapLinearOut, "self_attn.o_norm", g.o, 0, hd)
		g.tap(i, TapLinear, "self_attn.o_proj", g.y, 0, c.Hidden)
	} else {
		g.tap(i, TapFull, "self_attn.q_a_proj", g.qa, 0, c.QRank)
		g.tap(i, TapFull, "self_attn.q_b_proj", g.q, 0, c.Heads*c.NopeDim)
		g.tap(i, TapFull, "self_attn.kv_a_proj_with_mqa", g.kv, 0, c.KVRank)
		g.tap(i, TapFullOut, "self_attn.attention", g.v, 0, c.Heads*c.VDim)
		g.tap(i, TapFull, "self_attn.o_proj", g.y, 0, c.Hidden)
	}
	g.x, g.y = g.p.Scratch(c.Hidden), g.p.Scratch(c.Hidden)
}

func (g *graph) tapMLP(i int, w *layerWeights) {
	if g.trace == nil {
		return
	}
	if w.mlp.router != nil {
		g.tap(i, TapRouter, "mlp.gate", g.logits, 0, g.c.Experts)
	}
	g.tap(i, TapMLP, "mlp", g.y, 0, g.c.Hidden)
}

// RouterBias is the correction that a sparse trunk layer adds to its scores before it chooses experts; nil in a dense one.
func (m *Model) RouterBias(layer int) []float32 { return m.layers[layer].mlp.bias }

// StateLayers are the layers that have a recurrent state, ascending.
func (m *Model) StateLayers() (layers []int) {
	for i, l := range m.Config.Layers {
		if l.Kind == LayerKDA {
			layers = append(layers, i)
		}
	}
	return layers
}

// RecurrentState reads the state of the i-th of StateLayers from a slot: [head][key][value].
func (m *Model) RecurrentState(slots *kernels.Buffer, slot, i int) ([]float32, error) {
	c, l := &m.Config, m.Layout()
	b := make([]byte, 4*c.KDAHeads*c.KDADim*c.KDADim)
	if err := slots.Read(slot*l.SlotStride+l.Slot[i].Off, b); err != nil {
		return nil, fmt.Errorf("read recurrent state: %w", err)
	}
	out := make([]float32, len(b)/4)
	for j := range out {
		out[j] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*j:]))
	}
	return out, nil
}
