package kernels

import (
	"errors"
	"math"
	"strings"
	"testing"
)

// bench is a device with one weight, one buffer and a plan with scratches of several widths.
type bench struct {
	d   *Device
	p   *Plan
	w   *Weight // [32][16]
	buf *Buffer // 64 KiB
	s   map[int]Scratch
	sel Scratch // topk 16, pool 4
	rt  Scratch // top 2
}

func newBench(t *testing.T) *bench {
	d := open(t)
	b := &bench{d: d, w: constant(t, d, 32, 16, 1), s: map[int]Scratch{}}
	var err error
	if b.buf, err = d.NewBuffer(1 << 16); err != nil {
		t.Fatal(err)
	}
	if b.p, err = d.NewPlan(ClassBF16, 8, 4, 256); err != nil {
		t.Fatal(err)
	}
	for _, w := range []int{1, 2, 4, 8, 16, 32, 48, 64} {
		b.s[w] = b.p.Scratch(w)
	}
	b.sel, b.rt = b.p.Selection(16, 4), b.p.RouteScratch(2)
	t.Cleanup(func() { b.p.Free(); b.w.Free(); b.buf.Free() })
	return b
}

func (b *bench) cache() Cache {
	return Cache{Pages: b.buf, PageStride: 1 << 14, LayerOff: 0, Latent: 16, IndexDim: 16, Pool: 4}
}

func (b *bench) kda() KDA {
	return KDA{QKV: b.s[48], F: b.s[16], B: b.s[1], G: b.s[16], Out: b.p.Scratch(16), Heads: 1, D: 16, Conv: 4, ConvW: make([]float32, 192),
		ALog: make([]float32, 1), DtBias: make([]float32, 16), LowerBound: -5, NormEps: 1e-5, NormW: make([]float32, 16), Slots: b.buf, SlotStride: 4096}
}

func (b *bench) moe() MoE {
	return MoE{In: b.s[16], Shared: NoScratch, Out: b.p.Scratch(16), Route: b.rt, Experts: 2, TopK: 2, D: 16, Inter: 16,
		GateUp: []*Weight{b.w, b.w}, Down: []*Weight{b.w, b.w}} // down has the wrong shape: see the table
}

// Every wrong argument is an error that names the op, and the plan stays usable for freeing.
func TestInvalidOps(t *testing.T) {
	nan := float32(math.NaN())
	for op, adds := range map[string][]func(b *bench){
		"embed":        {func(b *bench) { b.p.Embed(b.w, b.s[8]) }, func(b *bench) { b.p.Embed(nil, b.s[16]) }, func(b *bench) { b.p.Embed(b.w, b.sel) }},
		"repeat":       {func(b *bench) { b.p.Repeat(b.s[8], b.s[16], 3) }, func(b *bench) { b.p.Repeat(b.s[8], b.s[16], 0) }, func(b *bench) { b.p.Repeat(b.s[8], b.s[8], 1) }, func(b *bench) { b.p.Repeat(99, b.s[8], 1) }},
		"mean":         {func(b *bench) { b.p.Mean(b.s[16], b.s[8], 3) }, func(b *bench) { b.p.Mean(b.s[16], b.s[4], 2) }},
		"add":          {func(b *bench) { b.p.Add(b.s[16], b.s[8], b.s[16]) }, func(b *bench) { b.p.Add(b.s[8], b.s[8], NoScratch) }},
		"rmsnorm":      {func(b *bench) { b.p.RMSNorm(b.s[16], make([]float32, 15), 1e-5, b.s[16], 0, true) }, func(b *bench) { b.p.RMSNorm(b.s[16], make([]float32, 16), nan, b.s[32], 0, true) }, func(b *bench) { b.p.RMSNorm(b.s[16], make([]float32, 16), 1e-5, b.s[32], 17, true) }, func(b *bench) { b.p.RMSNorm(b.s[16], make([]float32, 16), 1e-5, b.s[32], -1, true) }},
		"linear":       {func(b *bench) { b.p.Linear(b.s[16], 1, b.w, b.s[32], 0) }, func(b *bench) { b.p.Linear(b.s[16], 0, b.w, b.s[32], 1) }, func(b *bench) { b.p.Linear(b.s[32], 0, b.w, b.s[32], 0) }, func(b *bench) { b.p.Linear(b.s[16], math.MinInt32, b.w, b.s[32], 0) }},
		"linear_heads": {func(b *bench) { b.p.LinearHeads(b.s[48], b.w, 3, b.s[32], true) }, func(b *bench) { b.p.LinearHeads(b.s[16], b.w, 2, b.s[32], true) }, func(b *bench) { b.p.LinearHeads(b.s[16], b.w, 0, b.s[32], true) }},
		"swiglu":       {func(b *bench) { b.p.SwiGLU(b.s[32], b.s[16], 17, 1) }, func(b *bench) { b.p.SwiGLU(b.s[32], b.s[16], 16, nan) }, func(b *bench) { b.p.SwiGLU(b.s[32], b.s[16], 0, 1) }},
		"hc_post":      {func(b *bench) { b.p.HCPost(b.s[32], b.s[2], b.s[4], b.s[8], 2, 16) }, func(b *bench) { b.p.HCPost(b.s[32], b.s[2], b.s[2], b.s[16], 2, 16) }, func(b *bench) { b.p.HCPost(b.s[32], b.s[16], b.s[64], b.s[16], 99, 1) }},
		"hc_pre": {func(b *bench) {
			b.p.HCPre(HCPre{Streams: b.s[32], Mix: b.s[8], Post: b.s[2], Comb: b.s[4], Out: b.s[16], Mult: 2, D: 16, Base: make([]float32, 8), Scale: make([]float32, 3), W: make([]float32, 16)})
		}, func(b *bench) {
			b.p.HCPre(HCPre{Streams: b.s[32], Mix: b.s[8], Post: b.s[2], Comb: b.s[4], Out: b.s[16], Mult: 2, D: 16, Base: make([]float32, 7), Scale: make([]float32, 3), W: make([]float32, 16), Iters: 20})
		}},
		"kda": {
			func(b *bench) {
				a := b.kda()
				a.D = 8
				a.ConvW = make([]float32, 96)
				a.DtBias, a.NormW = a.DtBias[:8], a.NormW[:8]
				b.p.KDA(a)
			},
			func(b *bench) { a := b.kda(); a.SlotOff = 4; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.SlotStride = 1024; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.ConvW = a.ConvW[1:]; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.Out = a.G; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.Slots = nil; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.LowerBound = nan; b.p.KDA(a) },
			func(b *bench) { a := b.kda(); a.Conv = 1; a.ConvW = make([]float32, 48); b.p.KDA(a) },
		},
		"mla_store": {
			func(b *bench) {
				b.p.MLAStore(MLAStore{Cache: b.cache(), KV: b.s[16], Key: b.s[16], Gate: b.s[8], KVW: make([]float32, 16), KW: make([]float32, 16), KB: make([]float32, 16)})
			},
			func(b *bench) {
				b.p.MLAStore(MLAStore{Cache: b.cache(), KV: b.s[16], Key: NoScratch, KVW: make([]float32, 15)})
			},
			func(b *bench) {
				c := b.cache()
				c.Pool = 3
				b.p.MLAStore(MLAStore{Cache: c, KV: b.s[16], Key: NoScratch, KVW: make([]float32, 16)})
			},
			func(b *bench) {
				c := b.cache()
				c.PageStride = 4096
				b.p.MLAStore(MLAStore{Cache: c, KV: b.s[16], Key: NoScratch, KVW: make([]float32, 16)})
			},
			func(b *bench) {
				c := b.cache()
				c.LayerOff = 8
				b.p.MLAStore(MLAStore{Cache: c, KV: b.s[16], Key: NoScratch, KVW: make([]float32, 16)})
			},
		},
		"mla_pool": {
			func(b *bench) { b.p.MLAPool(b.cache(), make([]float32, 63)) },
			func(b *bench) { c := b.cache(); c.IndexDim = 0; b.p.MLAPool(c, []float32{}) },
		},
		"mla_index": {
			func(b *bench) { b.p.MLAIndex(b.cache(), b.s[16], b.s[2], 2, 16, true, b.sel) },
			func(b *bench) { b.p.MLAIndex(b.cache(), b.s[32], b.s[2], 2, 20, true, b.sel) },
			func(b *bench) { b.p.MLAIndex(b.cache(), b.s[32], b.s[2], 2, 3, true, b.sel) },
			func(b *bench) { b.p.MLAIndex(b.cache(), NoScratch, NoScratch, 0, 16, true, b.sel) },
			func(b *bench) { b.p.MLAIndex(b.cache(), b.s[32], b.s[2], 2, 16, true, b.rt) },
		},
		"mla_attend": {
			func(b *bench) { b.p.MLAAttend(b.cache(), b.s[32], 3, 1, b.sel, b.s[64]) },
			func(b *bench) { b.p.MLAAttend(b.cache(), b.s[32], 2, nan, b.sel, b.s[64]) },
			func(b *bench) { b.p.MLAAttend(b.cache(), b.s[32], 2, 1, b.sel, b.s[32]) },
			func(b *bench) { b.p.MLAAttend(b.cache(), b.s[32], 2, 1, b.s[16], b.s[64]) },
		},
		"route": {
			func(b *bench) {
				b.p.Route(Router{Logits: b.s[8], Experts: 8, TopK: 9, NGroup: 1, TopKGroup: 1, Bias: make([]float32, 8), Route: b.rt})
			},
			func(b *bench) {
				b.p.Route(Router{Logits: b.s[8], Experts: 8, TopK: 2, NGroup: 3, TopKGroup: 1, Bias: make([]float32, 8), Route: b.rt})
			},
			func(b *bench) {
				b.p.Route(Router{Logits: b.s[8], Experts: 8, TopK: 2, NGroup: 8, TopKGroup: 1, Bias: make([]float32, 8), Route: b.rt})
			},
			func(b *bench) {
				b.p.Route(Router{Logits: b.s[8], Experts: 8, TopK: 1, NGroup: 1, TopKGroup: 1, Bias: make([]float32, 8), Route: b.rt})
			},
		},
		"moe": {
			func(b *bench) { b.p.MoE(b.moe()) },
			func(b *bench) { a := b.moe(); a.Down = a.Down[:1]; b.p.MoE(a) },
			func(b *bench) { a := b.moe(); a.Down = []*Weight{nil, nil}; b.p.MoE(a) },
			func(b *bench) { a := b.moe(); a.TopK = 65; b.p.MoE(a) },
		},
		"keep_last":          {func(b *bench) { b.p.KeepLast(b.s[16], 16, b.buf, 64, 4) }, func(b *bench) { b.p.KeepLast(b.s[16], 17, b.buf, 128, 0) }, func(b *bench) { b.p.KeepLast(b.s[16], 16, nil, 128, 0) }},
		"logits":             {func(b *bench) { b.p.Logits(b.s[8], b.w) }, func(b *bench) { b.p.Logits(b.s[16], b.w); b.p.Logits(b.s[16], b.w) }},
		"plan_scratch":       {func(b *bench) { b.p.Scratch(0) }, func(b *bench) { b.p.Scratch(-1) }},
		"plan_selection":     {func(b *bench) { b.p.Selection(0, 4) }, func(b *bench) { b.p.Selection(16, 500) }},
		"plan_route_scratch": {func(b *bench) { b.p.RouteScratch(65) }},
	} {
		for i, add := range adds {
			b := newBench(t)
			add(b)
			err := b.p.Err()
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), " "+op+":") {
				t.Errorf("%s %d: error %v", op, i, err)
			}
			if run := b.p.Run(&Batch{Segs: []Seg{{Rows: 1}}}); run != err {
				t.Errorf("%s %d: run gave %v", op, i, run)
			}
		}
	}
}

func TestInvalidBatches(t *testing.T) {
	b := newBench(t)
	b.p.Embed(b.w, b.s[16])
	b.p.Barrier()
	b.p.KeepLast(b.s[16], 16, b.buf, 1<<14, 0) // 4 slots
	b.p.MLAStore(MLAStore{Cache: b.cache(), KV: b.s[16], Key: NoScratch, Gate: NoScratch, KVW: make([]float32, 16)})
	b.p.Logits(b.s[16], b.w)
	good := func() *Batch {
		return &Batch{Tokens: []int32{1, 2, 3}, Segs: []Seg{{Rows: 2, Pos0: 127, Slot: 1}, {Row0: 2, Rows: 1, Slot: 3, Table: 2}}, Pages: []int32{0, 1, 2},
			OutRows: []int32{2}, Logits: make([]float32, 32)}
	}
	if err := b.p.Run(good()); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Batch){
		"no rows":              func(b *Batch) { b.Tokens, b.Segs = []int32{}, nil },
		"too many rows":        func(b *Batch) { b.Tokens, b.Segs[1].Rows = make([]int32, 9), 7 },
		"no segments":          func(b *Batch) { b.Segs = nil },
		"rows left over":       func(b *Batch) { b.Tokens = make([]int32, 4) },
		"rows missing":         func(b *Batch) { b.Tokens = make([]int32, 2) },
		"overlap":              func(b *Batch) { b.Segs[1].Row0 = 1 },
		"gap":                  func(b *Batch) { b.Segs[1].Row0 = 3 },
		"empty segment":        func(b *Batch) { b.Segs[0].Rows = 0 },
		"negative position":    func(b *Batch) { b.Segs[0].Pos0 = -1 },
		"position past bound":  func(b *Batch) { b.Segs[0].Pos0 = 255 },
		"huge position":        func(b *Batch) { b.Segs[0].Pos0 = math.MaxInt32 },
		"negative slot":        func(b *Batch) { b.Segs[0].Slot = -1 },
		"slot past the arena":  func(b *Batch) { b.Segs[0].Slot = 4 },
		"slot twice":           func(b *Batch) { b.Segs[0].Slot = 3 },
		"page past the arena":  func(b *Batch) { b.Pages[0] = 4 },
		"negative page":        func(b *Batch) { b.Pages[2] = -1 },
		"page written twice":   func(b *Batch) { b.Pages[2] = 1 },
		"table too short":      func(b *Batch) { b.Segs[0].Table = 2 },
		"negative table":       func(b *Batch) { b.Segs[1].Table = -1 },
		"huge table":           func(b *Batch) { b.Segs[1].Table = math.MaxInt32 },
		"no pages":             func(b *Batch) { b.Pages = nil },
		"negative write_from":  func(b *Batch) { b.Segs[1].WriteFrom = -1 },
		"token out of range":   func(b *Batch) { b.Tokens[1] = 32 },
		"negative token":       func(b *Batch) { b.Tokens[1] = -1 },
		"output row too large": func(b *Batch) { b.OutRows[0] = 3 },
		"negative output row":  func(b *Batch) { b.OutRows[0] = -1 },
		"logits too short":     func(b *Batch) { b.Logits = b.Logits[:31] },
		"no tokens":            func(b *Batch) { b.Tokens = nil },
	} {
		batch := good()
		spoil(batch)
		if err := b.p.Run(batch); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "run:") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	shared := good() // a page below write_from may be shared
	shared.Segs[0].WriteFrom, shared.Pages[2] = 128, 0
	if err := b.p.Run(shared); err != nil {
		t.Errorf("shared page that only one sequence writes: %v", err)
	}
	if err := b.p.Run(good()); err != nil {
		t.Errorf("after the errors: %v", err)
	}
}

func TestInvalidWeights(t *testing.T) {
	d := open(t)
	for name, c := range map[string]struct {
		f32  bool
		row0 int
		m    Matrix
	}{
		"f32 into bf16":     {false, 0, Matrix{DType: F32, N: 1, K: 32, Data: make([]byte, 128)}},
		"scaled into f32":   {true, 0, Matrix{DType: FP8, N: 1, K: 32, Data: make([]byte, 32), Scale: []float32{1}, ScaleRows: 1}},
		"rows past the end": {false, 7, Matrix{DType: BF16, N: 2, K: 32, Data: make([]byte, 128)}},
		"negative row":      {false, -1, Matrix{DType: BF16, N: 1, K: 32, Data: make([]byte, 64)}},
		"other k":           {false, 0, Matrix{DType: BF16, N: 1, K: 16, Data: make([]byte, 32)}},
		"short data":        {false, 0, Matrix{DType: BF16, N: 1, K: 32, Data: make([]byte, 63)}},
		"no scale":          {false, 0, Matrix{DType: FP8, N: 1, K: 32, Data: make([]byte, 32), ScaleRows: 1}},
		"odd scale rows":    {false, 0, Matrix{DType: FP8, N: 3, K: 32, Data: make([]byte, 96), Scale: []float32{1, 1}, ScaleRows: 2}},
		"no e4m3 scales":    {false, 0, Matrix{DType: NVFP4, N: 1, K: 32, Data: make([]byte, 16), Scale: []float32{1}}},
		"unknown type":      {false, 0, Matrix{DType: 9, N: 1, K: 32}},
		"nothing":           {false, 0, Matrix{DType: BF16}},
	} {
		w, err := d.NewWeight(8, 32, c.f32)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Fill(c.row0, c.m); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: error %v", name, err)
		}
		w.Free()
	}
	w, err := d.NewWeight(8, 32, false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Free()
	if err := w.Fill(0, Matrix{DType: BF16, N: 7, K: 32, Data: make([]byte, 448)}); err != nil {
		t.Fatal(err)
	}
	p, err := d.NewPlan(ClassF32, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	if p.Linear(p.Scratch(32), 0, w, p.Scratch(8), 0); !errors.Is(p.Err(), ErrInvalid) {
		t.Errorf("a weight with an unfilled row: error %v", p.Err())
	}
	if w.Row(8) != nil || w.Row(-1) != nil {
		t.Error("rows outside the weight were given")
	}
	if _, err := d.NewWeight(0, 4, false); err == nil {
		t.Error("a weight without rows")
	}
	for _, c := range [][3]int{{0, 1, 1}, {1, 0, 1}, {1, 2, 1}, {1, 1, 0}, {1 << 20, 1, 1}} {
		if _, err := d.NewPlan(ClassF32, c[0], c[1], c[2]); err == nil {
			t.Errorf("plan %v was made", c)
		}
	}
	if _, err := d.NewPlan(7, 1, 1, 1); err == nil {
		t.Error("a plan of class 7")
	}
}
