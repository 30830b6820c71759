package model

import (
	"math"

	"rocket/kernels"
)

// indexKeyEps is the epsilon of the indexer's key LayerNorm, fixed by the family (not rms_norm_eps).
const indexKeyEps = 1e-6

// graph appends a model's ops to one plan. Scratches are shared by all layers; sel holds the selection of the last MLA
// layer that has an indexer, for the layers that share it.
type graph struct {
	m      *Model
	c      *Config
	p      *kernels.Plan
	pages  *kernels.Buffer
	slots  *kernels.Buffer
	layout Layout
	page   int    // next MLA layer's entry of layout.Page
	slot   int    // next KDA layer's entry of layout.Slot
	trace  *Trace // nil: the layers share their scratches

	emb, streams, mix, post, comb     kernels.Scratch // rows of the residual
	x, y, hidden                      kernels.Scratch // a block's input and output; the final hidden row
	qkv, fga, f, g, b, o              kernels.Scratch // KDA
	qa, qn, q, kv, key, gate, iq, iw  kernels.Scratch // MLA projections
	qAbs, ctx, v, sel                 kernels.Scratch // MLA attention
	gateUp, act, route, logits, shAct kernels.Scratch // MLP
	shGateUp, shared                  kernels.Scratch
}

func newGraph(m *Model, p *kernels.Plan, pages, slots *kernels.Buffer) *graph {
	return &graph{m: m, c: &m.Config, p: p, pages: pages, slots: slots, layout: m.Layout()}
}

// scratches makes the scratch matrices that the given layers need.
func (g *graph) scratches(layers []Layer) {
	c, p := g.c, g.p
	g.emb, g.x, g.y, g.hidden = p.Scratch(c.Hidden), p.Scratch(c.Hidden), p.Scratch(c.Hidden), p.Scratch(c.Hidden)
	var kda, mla, dense, sparse bool
	for _, l := range layers {
		kda, mla = kda || l.Kind == LayerKDA, mla || l.Kind == LayerMLA
		dense, sparse = dense || l.MLP == MLPDense, sparse || l.MLP == MLPSparse
	}
	if kda {
		hd := c.KDAHeads * c.KDADim
		g.qkv, g.fga = p.Scratch(3*hd), p.Scratch(2*c.KDADim)
		g.f, g.g, g.o, g.b = p.Scratch(hd), p.Scratch(hd), p.Scratch(hd), p.Scratch(c.KDAHeads)
	}
	if mla {
		g.qa, g.qn, g.q = p.Scratch(c.QRank), p.Scratch(c.QRank), p.Scratch(c.Heads*c.NopeDim)
		g.kv, g.key, g.gate = p.Scratch(c.KVRank), p.Scratch(c.IndexDim), p.Scratch(c.IndexDim)
		g.iq, g.iw, g.sel = p.Scratch(c.IndexHeads*c.IndexDim), p.Scratch(c.IndexHeads), p.Selection(c.IndexTopK, c.IndexPool)
		g.qAbs, g.ctx, g.v = p.Scratch(c.Heads*c.KVRank), p.Scratch(c.Heads*c.KVRank), p.Scratch(c.Heads*c.VDim)
	}
	if dense {
		g.gateUp, g.act = p.Scratch(2*c.Inter), p.Scratch(c.Inter)
	}
	if sparse {
		g.logits, g.route = p.Scratch(c.Experts), p.RouteScratch(c.TopK)
		if g.shared = kernels.NoScratch; c.SharedExperts > 0 {
			n := c.SharedExperts * c.MoEInter
			g.shGateUp, g.shAct, g.shared = p.Scratch(2*n), p.Scratch(n), p.Scratch(c.Hidden)
		}
	}
}

// trunk is the whole model but the draft layer.
func (g *graph) trunk() {
	c, p := g.c, g.p
	g.scratches(c.Layers)
	g.streams, g.mix = p.Scratch(c.Streams*c.Hidden), p.Scratch((2+c.Streams)*c.Streams)
	g.post, g.comb = p.Scratch(c.Streams), p.Scratch(c.Streams*c.Streams)

	p.Embed(g.m.embed, g.emb)
	p.Barrier()
	p.Repeat(g.emb, g.streams, c.Streams)
	p.Barrier()
	for i, l := range c.Layers {
		w := &g.m.layers[i]
		g.ownScratches(l)
		g.enter(&w.attnHC, w.inNorm)
		g.attention(w)
		g.leave()
		g.tapAttention(i, w)
		g.enter(&w.ffnHC, w.postNorm)
		g.mlp(&w.mlp)
		g.leave()
		g.tapMLP(i, w)
	}
	p.Mean(g.streams, g.emb, c.Streams)
	p.Barrier()
	p.RMSNorm(g.emb, g.m.norm, c.NormEps, g.hidden, 0, true)
	p.Barrier()
	p.KeepLast(g.hidden, c.Hidden, g.slots, g.layout.SlotStride, g.layout.HiddenOff)
	p.Logits(g.hidden, g.m.head)
}

// enter collapses the streams into the block's normed input x; leave puts its output y back into them.
func (g *graph) enter(hc *hyperWeights, norm []float32) {
	c, p := g.c, g.p
	p.Linear(g.streams, 0, hc.fn, g.mix, 0)
	p.Barrier()
	p.HCPre(kernels.HCPre{Streams: g.streams, Mix: g.mix, Post: g.post, Comb: g.comb, Out: g.x, Mult: c.Streams, D: c.Hidden,
		Base: hc.base, Scale: hc.scale, Iters: c.SinkhornIters, HCEps: c.HCEps, NormEps: c.NormEps, W: norm})
	p.Barrier()
}

func (g *graph) leave() {
	g.p.Barrier()
	g.p.HCPost(g.streams, g.post, g.comb, g.y, g.c.Streams, g.c.Hidden)
	g.p.Barrier()
}

func (g *graph) attention(w *layerWeights) {
	if w.kda != nil {
		g.kda(w.kda)
	} else {
		g.mla(w.mla)
	}
}

func (g *graph) kda(w *kdaWeights) {
	c, p := g.c, g.p
	p.Linear(g.x, 0, w.qkv, g.qkv, 0)
	p.Linear(g.x, 0, w.fga, g.fga, 0)
	p.Linear(g.x, 0, w.b, g.b, 0)
	p.Barrier()
	p.Linear(g.fga, 0, w.fb, g.f, 0)
	p.Linear(g.fga, c.KDADim, w.gb, g.g, 0)
	p.Barrier()
	p.KDA(kernels.KDA{QKV: g.qkv, F: g.f, B: g.b, G: g.g, Out: g.o, Heads: c.KDAHeads, D: c.KDADim, Conv: c.KDAConv,
		ConvW: w.conv, ALog: w.aLog, DtBias: w.dtBias, LowerBound: c.KDALowerBound, NormEps: c.NormEps, NormW: w.outNorm,
		Slots: g.slots, SlotStride: g.layout.SlotStride, SlotOff: g.layout.Slot[g.slot].Off})
	g.slot++
	p.Barrier()
	p.Linear(g.o, 0, w.out, g.y, 0)
}

func (g *graph) mla(w *mlaWeights) {
	c, p := g.c, g.p
	cache := kernels.Cache{Pages: g.pages, PageStride: g.layout.PageStride, LayerOff: g.layout.Page[g.page].Off, Latent: c.KVRank, Pool: c.IndexPool}
	g.page++
	store := kernels.MLAStore{KV: g.kv, Key: kernels.NoScratch, Gate: kernels.NoScratch, KVW: w.kvNorm, Eps: c.NormEps}
	p.Linear(g.x, 0, w.qa, g.qa, 0)
	p.Linear(g.x, 0, w.kva, g.kv, 0)
	if ix := w.index; ix != nil {
		cache.IndexDim = c.IndexDim
		store.Key, store.Gate, store.KW, store.KB, store.KEps = g.key, g.gate, ix.kNorm, ix.kNormBias, indexKeyEps
		p.Linear(g.x, 0, ix.k, g.key, 0)
		p.Linear(g.x, 0, ix.gate, g.gate, 0)
		p.Linear(g.x, 0, ix.heads, g.iw, 0)
	}
	store.Cache = cache
	p.Barrier()
	p.RMSNorm(g.qa, w.qaNorm, c.NormEps, g.qn, 0, true)
	p.MLAStore(store)
	p.Barrier()
	p.Linear(g.qn, 0, w.qb, g.q, 0)
	if w.index != nil {
		p.Linear(g.qn, 0, w.index.q, g.iq, 0)
		p.MLAPool(cache, w.index.ape)
	}
	p.Barrier()
	p.LinearHeads(g.q, w.uk, c.Heads, g.qAbs, true)
	if w.index != nil {
		p.MLAIndex(cache, g.iq, g.iw, c.IndexHeads, c.IndexTopK, true, g.sel)
	}
	p.Barrier()
	scale := float32(float64(w.ukScale) / math.Sqrt(float64(c.NopeDim)))
	p.MLAAttend(cache, g.qAbs, c.Heads, scale, g.sel, g.ctx)
	p.Barrier()
	p.LinearHeads(g.ctx, w.uv, c.Heads, g.v, true)
	p.Barrier()
	p.Linear(g.v, 0, w.out, g.y, 0)
}

func (g *graph) mlp(w *mlpWeights) {
	c, p := g.c, g.p
	if w.gateUp != nil {
		p.Linear(g.x, 0, w.gateUp, g.gateUp, 0)
		p.Barrier()
		p.SwiGLU(g.gateUp, g.act, c.Inter, c.SwigluLimit)
		p.Barrier()
		p.Linear(g.act, 0, w.down, g.y, 0)
		return
	}
	p.Linear(g.x, 0, w.router, g.logits, 0)
	if w.sharedUp != nil {
		p.Linear(g.x, 0, w.sharedUp, g.shGateUp, 0)
	}
	p.Barrier()
	p.Route(kernels.Router{Logits: g.logits, Experts: c.Experts, TopK: c.TopK, NGroup: c.Groups, TopKGroup: c.TopKGroups,
		Norm: c.NormTopK, Scaling: c.RoutedScaling, Bias: w.bias, Route: g.route})
	if w.sharedUp != nil {
		p.SwiGLU(g.shGateUp, g.shAct, c.SharedExperts*c.MoEInter, c.SwigluLimit)
		p.Barrier()
		p.Linear(g.shAct, 0, w.sharedDown, g.shared, 0)
	}
	p.Barrier()
	p.MoE(kernels.MoE{In: g.x, Shared: g.shared, Out: g.y, Route: g.route, Experts: c.Experts, TopK: c.TopK, D: c.Hidden,
		Inter: c.MoEInter, Limit: c.SwigluLimit, GateUp: w.expertsUp, Down: w.expertsDown})
}
