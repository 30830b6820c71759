package kernels

// #include <stdlib.h>
// #include "kernels.h"
import "C"

import (
	"fmt"
	"runtime"
	"unsafe"
)

// Scratch names an FP32 [maxRows][width] matrix of a plan, or a selection or route scratch.
type Scratch int32

// NoScratch stands for an absent optional scratch.
const NoScratch Scratch = -1

// Plan is a fixed list of ops. Op methods record the first failure inside the plan: see Err.
type Plan struct {
	c      *C.rk_plan
	err    error
	widths []int // by scratch id; 0 for selections and routes
	vocab  int   // outputs of the logits op, 0 without one
	rows   int
}

// NewPlan starts a plan for at most maxRows rows of maxSegs sequences; positions stay below maxPos.
func (d *Device) NewPlan(class Class, maxRows, maxSegs, maxPos int) (*Plan, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := C.rk_plan_new(d.c, C.rk_class(class), C.int(maxRows), C.int(maxSegs), C.int(maxPos))
	if p == nil {
		return nil, statusError(C.RK_EINVAL)
	}
	return &Plan{c: p, rows: maxRows}, nil
}

// Err is the first error of the ops added so far.
func (p *Plan) Err() error { return p.err }

// Bytes is the memory that the plan holds: scratches and worker space.
func (p *Plan) Bytes() int { return int(C.rk_plan_bytes(p.c)) }

// Free releases the plan and its references to weights and buffers.
func (p *Plan) Free() {
	if p.c != nil {
		C.rk_plan_free(p.c)
		p.c = nil
	}
}

// op runs one builder call unless an earlier one failed.
func (p *Plan) op(f func() C.rk_status) {
	if p.err == nil {
		p.err = call(f)
	}
}

// need records an error when a parameter slice has the wrong length.
func (p *Plan) need(op, arg string, s []float32, n int) {
	if p.err == nil && len(s) != n {
		p.err = fmt.Errorf("kernels: %w: %s: %s has %d values, want %d", ErrInvalid, op, arg, len(s), n)
	}
}

// weight guards against nil and freed weights.
func (p *Plan) weight(op string, w *Weight) *C.rk_weight {
	if w == nil || w.c == nil {
		p.fail(op, "weight is nil or freed")
		return nil
	}
	return w.c
}

func (p *Plan) buffer(op string, b *Buffer) *C.rk_buffer {
	if b == nil || b.c == nil {
		p.fail(op, "buffer is nil or freed")
		return nil
	}
	return b.c
}

func (p *Plan) fail(op, why string) {
	if p.err == nil {
		p.err = fmt.Errorf("kernels: %w: %s: %s", ErrInvalid, op, why)
	}
}

// width is the width of a scratch, or -1 for an id that is none.
func (p *Plan) width(s Scratch) int {
	if s < 0 || int(s) >= len(p.widths) {
		return -1
	}
	return p.widths[s]
}

// newID keeps the widths list in step with C's ids.
func (p *Plan) newID(width int, f func() C.int) Scratch {
	if p.err != nil {
		return NoScratch
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	id := f()
	if id < 0 {
		p.err = statusError(int(id))
		return NoScratch
	}
	for len(p.widths) <= int(id) {
		p.widths = append(p.widths, 0)
	}
	p.widths[id] = width
	return Scratch(id)
}

// Scratch adds a [maxRows][width] matrix.
func (p *Plan) Scratch(width int) Scratch {
	return p.newID(width, func() C.int { return C.rk_plan_scratch(p.c, C.int(width)) })
}

// Selection adds a scratch for selection lists of at most topk positions plus an incomplete pool.
func (p *Plan) Selection(topk, pool int) Scratch {
	return p.newID(0, func() C.int { return C.rk_plan_selection(p.c, C.int(topk), C.int(pool)) })
}

// RouteScratch adds a scratch for the ids and weights of topk experts a row.
func (p *Plan) RouteScratch(topk int) Scratch {
	return p.newID(0, func() C.int { return C.rk_plan_route_scratch(p.c, C.int(topk)) })
}

// Barrier separates ops that depend on each other.
func (p *Plan) Barrier() { p.op(func() C.rk_status { return C.rk_plan_barrier(p.c) }) }

// Embed sets out[row] to the table's row of the row's token.
func (p *Plan) Embed(table *Weight, out Scratch) {
	w := p.weight("embed", table)
	p.op(func() C.rk_status { return C.rk_plan_embed(p.c, w, C.int(out)) })
}

// Repeat sets out to in, times times side by side.
func (p *Plan) Repeat(in, out Scratch, times int) {
	p.op(func() C.rk_status { return C.rk_plan_repeat(p.c, C.int(in), C.int(out), C.int(times)) })
}

// Mean is the mean of the times streams side by side in in.
func (p *Plan) Mean(in, out Scratch, times int) {
	p.op(func() C.rk_status { return C.rk_plan_mean(p.c, C.int(in), C.int(out), C.int(times)) })
}

// Add sets out to a + b; out may be a or b.
func (p *Plan) Add(a, b, out Scratch) {
	p.op(func() C.rk_status { return C.rk_plan_add(p.c, C.int(a), C.int(b), C.int(out)) })
}

// RMSNorm normalises the whole width of in and writes it at outCol of out; w has in's width.
// round rounds to the class's operand type.
func (p *Plan) RMSNorm(in Scratch, w []float32, eps float32, out Scratch, outCol int, round bool) {
	p.need("rmsnorm", "w", w, p.width(in))
	p.op(func() C.rk_status {
		return C.rk_plan_rmsnorm(p.c, C.int(in), (*C.float)(unsafe.SliceData(w)), C.float(eps), C.int(out), C.int(outCol), flag(round))
	})
}

// Linear is out[outCol:] = in[inCol:inCol+k] W^T.
func (p *Plan) Linear(in Scratch, inCol int, w *Weight, out Scratch, outCol int) {
	cw := p.weight("linear", w)
	p.op(func() C.rk_status {
		return C.rk_plan_linear(p.c, C.int(in), C.int(inCol), cw, C.int(out), C.int(outCol))
	})
}

// LinearHeads applies rows [h*wout, (h+1)*wout) of w to in[h*k:(h+1)*k] for each head; wout = w.N()/heads.
func (p *Plan) LinearHeads(in Scratch, w *Weight, heads int, out Scratch, round bool) {
	cw := p.weight("linear_heads", w)
	p.op(func() C.rk_status {
		return C.rk_plan_linear_heads(p.c, C.int(in), cw, C.int(heads), C.int(out), flag(round))
	})
}

// SwiGLU is silu(min(gate, limit)) * clamp(up, ±limit) of in = [gate | up]; limit <= 0 clamps nothing.
func (p *Plan) SwiGLU(in, out Scratch, width int, limit float32) {
	p.op(func() C.rk_status {
		return C.rk_plan_swiglu(p.c, C.int(in), C.int(out), C.int(width), C.float(limit))
	})
}

// HCPre are the arguments of rk_plan_hc_pre. Base has (2+Mult)*Mult values, Scale 3, W D.
type HCPre struct {
	Streams, Mix, Post, Comb, Out Scratch
	Mult, D                       int
	Base, Scale                   []float32
	Iters                         int
	HCEps, NormEps                float32
	W                             []float32
}

// HCPre makes post and comb and the normalised collapsed row.
func (p *Plan) HCPre(a HCPre) {
	p.need("hc_pre", "base", a.Base, (2+a.Mult)*a.Mult)
	p.need("hc_pre", "scale", a.Scale, 3)
	p.need("hc_pre", "w", a.W, a.D)
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_hc_pre{streams: C.int(a.Streams), mix: C.int(a.Mix), post: C.int(a.Post), comb: C.int(a.Comb), out: C.int(a.Out),
		mult: C.int(a.Mult), d: C.int(a.D), base: floats(&pin, a.Base), scale: floats(&pin, a.Scale),
		iters: C.int(a.Iters), hc_eps: C.float(a.HCEps), norm_eps: C.float(a.NormEps), w: floats(&pin, a.W)}
	p.op(func() C.rk_status { return C.rk_plan_hc_pre(p.c, &c) })
}

// HCPost sets streams to post (x) y + comb^T streams, in place.
func (p *Plan) HCPost(streams, post, comb, y Scratch, mult, d int) {
	p.op(func() C.rk_status {
		return C.rk_plan_hc_post(p.c, C.int(streams), C.int(post), C.int(comb), C.int(y), C.int(mult), C.int(d))
	})
}

// KDA are the arguments of rk_plan_kda. QKV is [3*Heads*D] wide, F and G [Heads*D], B [Heads], Out [Heads*D].
// ConvW is [3*Heads*D][Conv], ALog [Heads], DtBias [Heads*D], NormW [D]. LowerBound 0 is the softplus gate.
type KDA struct {
	QKV, F, B, G, Out   Scratch
	Heads, D, Conv      int
	ConvW, ALog, DtBias []float32
	LowerBound, NormEps float32
	NormW               []float32
	Slots               *Buffer
	SlotStride, SlotOff int
}

// KDA appends one layer's recurrence.
func (p *Plan) KDA(a KDA) {
	hd := a.Heads * a.D
	p.need("kda", "conv_w", a.ConvW, 3*hd*a.Conv)
	p.need("kda", "a_log", a.ALog, a.Heads)
	p.need("kda", "dt_bias", a.DtBias, hd)
	p.need("kda", "norm_w", a.NormW, a.D)
	slots := p.buffer("kda", a.Slots)
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_kda{qkv: C.int(a.QKV), f: C.int(a.F), b: C.int(a.B), g: C.int(a.G), out: C.int(a.Out),
		heads: C.int(a.Heads), d: C.int(a.D), conv: C.int(a.Conv), conv_w: floats(&pin, a.ConvW),
		a_log: floats(&pin, a.ALog), dt_bias: floats(&pin, a.DtBias), lower_bound: C.float(a.LowerBound),
		norm_eps: C.float(a.NormEps), norm_w: floats(&pin, a.NormW), slots: slots,
		slot_stride: C.size_t(a.SlotStride), slot_off: C.size_t(a.SlotOff)}
	p.op(func() C.rk_status { return C.rk_plan_kda(p.c, &c) })
}

// Cache names one MLA layer's part of the page arena. IndexDim 0: no indexer part.
type Cache struct {
	Pages                  *Buffer
	PageStride, LayerOff   int
	Latent, IndexDim, Pool int
}

func (p *Plan) cache(op string, c Cache) C.rk_mla_cache {
	return C.rk_mla_cache{pages: p.buffer(op, c.Pages), page_stride: C.size_t(c.PageStride), layer_off: C.size_t(c.LayerOff),
		latent: C.int(c.Latent), index_dim: C.int(c.IndexDim), pool: C.int(c.Pool)}
}

// MLAStore are the arguments of rk_plan_mla_store. KV is Latent wide, Key and Gate IndexDim (NoScratch without indexer).
type MLAStore struct {
	Cache         Cache
	KV, Key, Gate Scratch
	KVW           []float32
	Eps           float32
	KW, KB        []float32
	KEps          float32
}

// MLAStore writes the rows' latents (and indexer keys and gates) to their pages.
func (p *Plan) MLAStore(a MLAStore) {
	p.need("mla_store", "kv_w", a.KVW, a.Cache.Latent)
	if a.Key != NoScratch {
		p.need("mla_store", "k_w", a.KW, a.Cache.IndexDim)
		p.need("mla_store", "k_b", a.KB, a.Cache.IndexDim)
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_mla_store{cache: p.cache("mla_store", a.Cache), kv: C.int(a.KV), key: C.int(a.Key), gate: C.int(a.Gate),
		kv_w: floats(&pin, a.KVW), eps: C.float(a.Eps), k_w: floats(&pin, a.KW), k_b: floats(&pin, a.KB), k_eps: C.float(a.KEps)}
	p.op(func() C.rk_status { return C.rk_plan_mla_store(p.c, &c) })
}

// MLAPool pools the keys of the pools that rows of the batch complete; ape is [Pool][IndexDim].
func (p *Plan) MLAPool(c Cache, ape []float32) {
	p.need("mla_pool", "ape", ape, c.Pool*c.IndexDim)
	cc := p.cache("mla_pool", c)
	p.op(func() C.rk_status { return C.rk_plan_mla_pool(p.c, &cc, (*C.float)(unsafe.SliceData(ape))) })
}

// MLAIndex fills sel with each row's selection. q is [heads*IndexDim], weights [heads].
func (p *Plan) MLAIndex(c Cache, q, weights Scratch, heads, topk int, tailAlways bool, sel Scratch) {
	cc := p.cache("mla_index", c)
	p.op(func() C.rk_status {
		return C.rk_plan_mla_index(p.c, &cc, C.int(q), C.int(weights), C.int(heads), C.int(topk), flag(tailAlways), C.int(sel))
	})
}

// MLAAttend is absorbed attention over the selection; q and out are [heads*Latent].
func (p *Plan) MLAAttend(c Cache, q Scratch, heads int, scale float32, sel, out Scratch) {
	cc := p.cache("mla_attend", c)
	p.op(func() C.rk_status {
		return C.rk_plan_mla_attend(p.c, &cc, C.int(q), C.int(heads), C.float(scale), C.int(sel), C.int(out))
	})
}

// Router are the arguments of rk_plan_route. Bias has Experts values.
type Router struct {
	Logits                           Scratch
	Experts, TopK, NGroup, TopKGroup int
	Norm                             bool
	Scaling                          float32
	Bias                             []float32
	Route                            Scratch
}

// Route chooses the experts of each row.
func (p *Plan) Route(a Router) {
	p.need("route", "bias", a.Bias, a.Experts)
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_router{logits: C.int(a.Logits), experts: C.int(a.Experts), topk: C.int(a.TopK), n_group: C.int(a.NGroup),
		topk_group: C.int(a.TopKGroup), norm: flag(a.Norm), scaling: C.float(a.Scaling), bias: floats(&pin, a.Bias), route: C.int(a.Route)}
	p.op(func() C.rk_status { return C.rk_plan_route(p.c, &c) })
}

// MoE are the arguments of rk_plan_moe. GateUp[e] is [2*Inter][D], Down[e] [D][Inter]. Shared may be NoScratch.
type MoE struct {
	In, Shared, Out, Route  Scratch
	Experts, TopK, D, Inter int
	Limit                   float32
	GateUp, Down            []*Weight
}

// MoE runs the routed experts and adds the shared rows last.
func (p *Plan) MoE(a MoE) {
	if len(a.GateUp) != a.Experts || len(a.Down) != a.Experts {
		p.fail("moe", fmt.Sprintf("%d gate_up and %d down weights for %d experts", len(a.GateUp), len(a.Down), a.Experts))
	}
	if p.err != nil {
		return
	}
	gu, dn := make([]*C.rk_weight, a.Experts), make([]*C.rk_weight, a.Experts)
	for i := range gu {
		gu[i], dn[i] = p.weight("moe", a.GateUp[i]), p.weight("moe", a.Down[i])
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_moe{in: C.int(a.In), shared: C.int(a.Shared), out: C.int(a.Out), route: C.int(a.Route), experts: C.int(a.Experts),
		topk: C.int(a.TopK), d: C.int(a.D), inter: C.int(a.Inter), limit: C.float(a.Limit)}
	if a.Experts > 0 {
		pin.Pin(&gu[0])
		pin.Pin(&dn[0])
		c.gate_up, c.down = &gu[0], &dn[0]
	}
	p.op(func() C.rk_status { return C.rk_plan_moe(p.c, &c) })
}

// KeepLast stores each sequence's last row of in (width FP32 values) in its slot.
func (p *Plan) KeepLast(in Scratch, width int, slots *Buffer, slotStride, slotOff int) {
	b := p.buffer("keep_last", slots)
	p.op(func() C.rk_status {
		return C.rk_plan_keep_last(p.c, C.int(in), C.int(width), b, C.size_t(slotStride), C.size_t(slotOff))
	})
}

// Logits is logits[i] = in[outRows[i]] W^T; a plan has at most one.
func (p *Plan) Logits(in Scratch, w *Weight) {
	cw := p.weight("logits", w)
	p.op(func() C.rk_status { return C.rk_plan_logits(p.c, C.int(in), cw) })
	if p.err == nil {
		p.vocab = w.n
	}
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// Seg is one sequence's rows in a batch (rk_seg in kernels.h).
type Seg struct{ Row0, Rows, Pos0, Slot, Table, WriteFrom int32 }

// Batch is the input of one step. Logits holds len(OutRows) rows of the vocabulary.
type Batch struct {
	Tokens  []int32
	Segs    []Seg
	Pages   []int32
	OutRows []int32
	Logits  []float32
}

// The two declarations must stay the same memory.
var _ [unsafe.Sizeof(Seg{})]byte = [unsafe.Sizeof(C.rk_seg{})]byte{}

// Run executes the plan on one batch. The number of rows is len(Tokens), or the segments' sum when Tokens is nil
// (plans without Embed).
func (p *Plan) Run(b *Batch) error {
	if p.err != nil {
		return p.err
	}
	if len(b.Logits) < len(b.OutRows)*p.vocab {
		return fmt.Errorf("kernels: %w: run: logits has room for %d values, want %d", ErrInvalid, len(b.Logits), len(b.OutRows)*p.vocab)
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	var c C.rk_batch
	c.n_rows = C.int32_t(len(b.Tokens))
	if b.Tokens == nil {
		for _, s := range b.Segs {
			c.n_rows += C.int32_t(s.Rows)
		}
	}
	c.tokens = ints(&pin, b.Tokens)
	c.n_segs = C.int32_t(len(b.Segs))
	if len(b.Segs) > 0 {
		pin.Pin(&b.Segs[0])
		c.segs = (*C.rk_seg)(unsafe.Pointer(&b.Segs[0]))
	}
	c.n_pages, c.pages = C.int32_t(len(b.Pages)), ints(&pin, b.Pages)
	c.n_out, c.out_rows = C.int32_t(len(b.OutRows)), ints(&pin, b.OutRows)
	c.logits = floats(&pin, b.Logits)
	return call(func() C.rk_status { return C.rk_plan_run(p.c, &c) })
}

func ints(pin *runtime.Pinner, s []int32) *C.int32_t {
	if len(s) == 0 {
		return nil
	}
	pin.Pin(&s[0])
	return (*C.int32_t)(unsafe.Pointer(&s[0]))
}

// Write sets rows of a scratch from row0 on; src holds whole rows. Only between runs.
func (p *Plan) Write(s Scratch, row0 int, src []float32) error {
	w := p.width(s)
	if w <= 0 || len(src)%w != 0 {
		return fmt.Errorf("kernels: %w: plan_write: scratch %d has width %d, source %d values", ErrInvalid, s, w, len(src))
	}
	return call(func() C.rk_status {
		return C.rk_plan_write(p.c, C.int(s), C.int(row0), C.int(len(src)/w), (*C.float)(unsafe.SliceData(src)))
	})
}

// Read returns rows [row0, row0+rows) of a scratch, or nil when they do not exist. Only between runs.
func (p *Plan) Read(s Scratch, row0, rows int) []float32 {
	w := p.width(s)
	if w <= 0 || rows < 0 || row0 < 0 || row0+rows > p.rows {
		return nil
	}
	dst := make([]float32, rows*w)
	if call(func() C.rk_status {
		return C.rk_plan_read(p.c, C.int(s), C.int(row0), C.int(rows), (*C.float)(unsafe.SliceData(dst)))
	}) != nil {
		return nil
	}
	return dst
}
