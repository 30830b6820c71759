package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// The model's parameters, as the graph wants them: projections of one input share a matrix, kv_b is split into the
// two matrices of absorbed attention. Small FP32 parameters stay in Go memory; ops copy them.
type (
	kdaWeights struct {
		qkv, fga, fb, gb, b, out    *kernels.Weight // fga: rows of f_a, then of g_a
		conv, aLog, dtBias, outNorm []float32
	}
	mlaWeights struct {
		qa, qb, kva, uk, uv, out *kernels.Weight // uk: per head [KVRank][NopeDim]; uv: per head [VDim][KVRank]
		ukScale                  float32         // what uk still has to be multiplied by: goes into the softmax scale
		qaNorm, kvNorm           []float32
		index                    *indexWeights // nil: shared
	}
	indexWeights struct {
		q, k, gate, heads     *kernels.Weight
		kNorm, kNormBias, ape []float32
	}
	mlpWeights struct {
		gateUp, down           *kernels.Weight // dense
		router                 *kernels.Weight // sparse from here on
		bias                   []float32
		expertsUp, expertsDown []*kernels.Weight
		sharedUp, sharedDown   *kernels.Weight
	}
	hyperWeights struct {
		fn          *kernels.Weight
		base, scale []float32
	}
	layerWeights struct {
		inNorm, postNorm []float32
		kda              *kdaWeights
		mla              *mlaWeights
		mlp              mlpWeights
		attnHC, ffnHC    hyperWeights // trunk layers only
	}
	mtpWeights struct {
		layerWeights
		eNorm, hNorm, outNorm []float32
		eh                    *kernels.Weight
	}
)

// part is some rows of a fused matrix.
type part struct {
	n    int
	load func(n, k int) (checkpoint.Weight, error)
}

// builder turns a source into packed weights. Methods note jobs; run does them in parallel.
type builder struct {
	c    Config
	dev  *kernels.Device // nil: nothing is packed
	src  source
	jobs []job

	mu     sync.Mutex
	packed []*kernels.Weight // guarded by mu
}

type job struct {
	values int64 // size, for progress
	do     func() error
}

func (b *builder) named(name string, n int) part {
	return part{n, func(n, k int) (checkpoint.Weight, error) { return b.src.weight(name, n, k) }}
}

func (b *builder) bare(name string, n int) part {
	return part{n, func(n, k int) (checkpoint.Weight, error) { return b.src.plain(name, n, k) }}
}

// linear notes that *dst becomes the parts' rows, one below the other.
func (b *builder) linear(dst **kernels.Weight, k int, parts ...part) {
	n := 0
	for _, p := range parts {
		n += p.n
	}
	b.jobs = append(b.jobs, job{int64(n) * int64(k), func() error {
		var ws []checkpoint.Weight
		for _, p := range parts {
			w, err := p.load(p.n, k)
			if err != nil {
				return err
			}
			ws = append(ws, w)
		}
		var err error
		*dst, err = b.pack(k, ws)
		return err
	}})
}

// pack makes one resident matrix. Where F32 parts meet others, all of them become F32.
func (b *builder) pack(k int, ws []checkpoint.Weight) (*kernels.Weight, error) {
	n, f32, mixed := 0, ws[0].Kind == checkpoint.KindF32, false
	for _, w := range ws {
		n += w.N
		mixed = mixed || (w.Kind == checkpoint.KindF32) != f32
	}
	if b.dev == nil { // reading and checking only
		return nil, nil
	}
	out, err := b.dev.NewWeight(n, k, f32 || mixed)
	if err != nil {
		return nil, fmt.Errorf("pack %s [%d][%d]: %w", ws[0].Name, n, k, err)
	}
	b.mu.Lock()
	b.packed = append(b.packed, out)
	b.mu.Unlock()
	row := 0
	for _, w := range ws {
		if mixed {
			w = widen(w)
		}
		if err := out.Fill(row, matrix(w)); err != nil {
			return nil, fmt.Errorf("pack %s: %w", w.Name, err)
		}
		row += w.N
	}
	return out, nil
}

func widen(w checkpoint.Weight) checkpoint.Weight {
	out := checkpoint.Weight{Name: w.Name, Kind: checkpoint.KindF32, N: w.N, K: w.K, Data: make([]byte, 0, 4*w.N*w.K)}
	row := make([]float32, w.K)
	for i := range w.N {
		w.Row(i, row)
		for _, v := range row {
			out.Data = binary.LittleEndian.AppendUint32(out.Data, math.Float32bits(v))
		}
	}
	return out
}

// matrix is the checkpoint's weight in the kernels' words.
func matrix(w checkpoint.Weight) kernels.Matrix {
	m := kernels.Matrix{N: w.N, K: w.K, Data: w.Data, Scale8: w.Scale8, Scale: w.Scale, ScaleRows: w.ScaleRows}
	switch w.Kind {
	case checkpoint.KindF32:
		m.DType = kernels.F32
	case checkpoint.KindBF16:
		m.DType = kernels.BF16
	case checkpoint.KindFP8:
		m.DType = kernels.FP8
	case checkpoint.KindFP8Block:
		m.DType = kernels.FP8Block
	case checkpoint.KindNVFP4:
		m.DType = kernels.NVFP4
	}
	return m
}

// vector notes that *dst becomes the named parameters, one list after the other, each of n values.
func (b *builder) vector(dst *[]float32, n int, names ...string) {
	b.jobs = append(b.jobs, job{int64(n), func() error {
		for _, name := range names {
			v, err := b.src.vector(name, n)
			if err != nil {
				return err
			}
			*dst = append(*dst, v...)
		}
		return nil
	}})
}

// run does the jobs on as many goroutines as there are processors. progress, when not nil, hears of values done.
func (b *builder) run(progress func(done, total int64)) error {
	var total, done int64
	for _, j := range b.jobs {
		total += j.values
	}
	var g errgroup.Group
	var mu sync.Mutex // guards done, and progress itself
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, j := range b.jobs {
		g.Go(func() error {
			if err := j.do(); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			done += j.values
			if progress != nil {
				progress(done, total)
			}
			return nil
		})
	}
	return g.Wait()
}

// runOne does the jobs one after the other.
func (b *builder) runOne() error {
	for _, j := range b.jobs {
		if err := j.do(); err != nil {
			return err
		}
	}
	return nil
}

// free drops everything that was packed.
func (b *builder) free() {
	for _, w := range b.packed {
		w.Free()
	}
	b.packed = nil
}

func (b *builder) layer(w *layerWeights, i int, l Layer) {
	at := fmt.Sprintf("layers.%d.", i)
	b.block(w, at, l)
	b.hyper(&w.attnHC, at+"hc_attn_")
	b.hyper(&w.ffnHC, at+"hc_ffn_")
}

// block notes the parts of a layer that trunk and draft layers share.
func (b *builder) block(w *layerWeights, at string, l Layer) {
	b.vector(&w.inNorm, b.c.Hidden, at+"input_layernorm.weight")
	b.vector(&w.postNorm, b.c.Hidden, at+"post_attention_layernorm.weight")
	if l.Kind == LayerKDA {
		w.kda = &kdaWeights{}
		b.kda(w.kda, at+"self_attn.")
	} else {
		w.mla = &mlaWeights{}
		b.mla(w.mla, at+"self_attn.", l.Shared)
	}
	b.mlp(&w.mlp, at+"mlp.", l.MLP)
}

func (b *builder) hyper(w *hyperWeights, at string) {
	mix := (2 + b.c.Streams) * b.c.Streams
	b.linear(&w.fn, b.c.Streams*b.c.Hidden, b.bare(at+"fn", mix))
	b.vector(&w.base, mix, at+"base")
	b.vector(&w.scale, 3, at+"scale")
}

func (b *builder) kda(w *kdaWeights, at string) {
	d, h, p := b.c.KDADim, b.c.KDAHeads, b.c.KDAHeads*b.c.KDADim
	b.linear(&w.qkv, b.c.Hidden, b.named(at+"q_proj", p), b.named(at+"k_proj", p), b.named(at+"v_proj", p))
	b.linear(&w.fga, b.c.Hidden, b.named(at+"f_a_proj", d), b.named(at+"g_a_proj", d))
	b.linear(&w.fb, d, b.named(at+"f_b_proj", p))
	b.linear(&w.gb, d, b.named(at+"g_b_proj", p))
	b.linear(&w.b, b.c.Hidden, b.named(at+"b_proj", h))
	b.linear(&w.out, p, b.named(at+"o_proj", b.c.Hidden))
	if b.src.has(at + "q_conv1d.weight") {
		b.vector(&w.conv, p*b.c.KDAConv, at+"q_conv1d.weight", at+"k_conv1d.weight", at+"v_conv1d.weight")
	} else {
		b.vector(&w.conv, 3*p*b.c.KDAConv, at+"conv1d.weight")
	}
	b.vector(&w.aLog, h, at+"A_log")
	b.vector(&w.dtBias, p, at+"dt_bias")
	b.vector(&w.outNorm, d, at+"o_norm.weight")
}

func (b *builder) mla(w *mlaWeights, at string, shared bool) {
	c := &b.c
	b.linear(&w.qa, c.Hidden, b.named(at+"q_a_proj", c.QRank))
	b.linear(&w.qb, c.QRank, b.named(at+"q_b_proj", c.Heads*c.NopeDim))
	b.linear(&w.kva, c.Hidden, b.named(at+"kv_a_proj_with_mqa", c.KVRank))
	b.linear(&w.out, c.Heads*c.VDim, b.named(at+"o_proj", c.Hidden))
	b.vector(&w.qaNorm, c.QRank, at+"q_a_layernorm.weight")
	b.vector(&w.kvNorm, c.KVRank, at+"kv_a_layernorm.weight")
	b.absorbed(w, at+"kv_b_proj")
	if shared {
		return
	}
	w.index = &indexWeights{}
	at += "indexer."
	b.linear(&w.index.q, c.QRank, b.named(at+"wq_b", c.IndexHeads*c.IndexDim))
	b.linear(&w.index.k, c.Hidden, b.named(at+"wk", c.IndexDim))
	b.linear(&w.index.gate, c.Hidden, b.bare(at+"index_kpool_compress_gate", c.IndexDim))
	b.linear(&w.index.heads, c.Hidden, b.named(at+"weights_proj", c.IndexHeads))
	b.vector(&w.index.kNorm, c.IndexDim, at+"k_norm.weight")
	b.vector(&w.index.kNormBias, c.IndexDim, at+"k_norm.bias")
	b.vector(&w.index.ape, c.IndexPool*c.IndexDim, at+"index_kpool_compress_ape")
}

// absorbed splits kv_b [head][nope | v][rank]: the key rows of a head are transposed, so that a query meets the cached
// latent directly, the value rows stay as they are.
func (b *builder) absorbed(w *mlaWeights, name string) {
	c := &b.c
	n := c.Heads * (c.NopeDim + c.VDim)
	b.jobs = append(b.jobs, job{int64(n) * int64(c.KVRank), func() error {
		kv, err := b.src.weight(name, n, c.KVRank)
		if err != nil {
			return err
		}
		var keys, values []checkpoint.Weight
		for h := range c.Heads {
			row := h * (c.NopeDim + c.VDim)
			rows := kv.Rows(row, row+c.NopeDim)
			if len(rows) > 1 { // block scales that start inside the head: transpose what they come to
				rows = []checkpoint.Weight{merge(rows)}
			}
			if b.dev == nil {
				return nil
			}
			t, scale := rows[0].Transposed()
			w.ukScale = scale
			keys = append(keys, t)
			values = append(values, kv.Rows(row+c.NopeDim, row+c.NopeDim+c.VDim)...)
		}
		if w.uk, err = b.pack(c.NopeDim, keys); err != nil {
			return err
		}
		w.uv, err = b.pack(c.KVRank, values)
		return err
	}})
}

// merge puts the parts of one matrix together again as F32.
func merge(parts []checkpoint.Weight) checkpoint.Weight {
	out := checkpoint.Weight{Name: parts[0].Name, Kind: checkpoint.KindF32, K: parts[0].K}
	for _, p := range parts {
		out.Data = append(out.Data, widen(p).Data...)
		out.N += p.N
	}
	return out
}

func (b *builder) mlp(w *mlpWeights, at string, kind MLPKind) {
	c := &b.c
	if kind == MLPDense {
		b.linear(&w.gateUp, c.Hidden, b.named(at+"gate_proj", c.Inter), b.named(at+"up_proj", c.Inter))
		b.linear(&w.down, c.Inter, b.named(at+"down_proj", c.Hidden))
		return
	}
	b.linear(&w.router, c.Hidden, b.named(at+"gate", c.Experts))
	b.vector(&w.bias, c.Experts, at+"gate.e_score_correction_bias")
	w.expertsUp, w.expertsDown = make([]*kernels.Weight, c.Experts), make([]*kernels.Weight, c.Experts)
	for e := range c.Experts {
		of := func(which string, n int) part {
			return part{n, func(n, k int) (checkpoint.Weight, error) { return b.src.expert(at, e, c.Experts, which, n, k) }}
		}
		b.linear(&w.expertsUp[e], c.Hidden, of("gate_proj", c.MoEInter), of("up_proj", c.MoEInter))
		b.linear(&w.expertsDown[e], c.MoEInter, of("down_proj", c.Hidden))
	}
	if c.SharedExperts > 0 {
		n := c.SharedExperts * c.MoEInter
		b.linear(&w.sharedUp, c.Hidden, b.named(at+"shared_experts.gate_proj", n), b.named(at+"shared_experts.up_proj", n))
		b.linear(&w.sharedDown, n, b.named(at+"shared_experts.down_proj", c.Hidden))
	}
}

// mtp notes the draft layer, which checkpoints number right after the trunk: plain residual, full indexer.
func (b *builder) mtp(w *mtpWeights) {
	at := fmt.Sprintf("layers.%d.", len(b.c.Layers))
	b.block(&w.layerWeights, at, b.c.mtpLayer())
	b.vector(&w.eNorm, b.c.Hidden, at+"enorm.weight")
	b.vector(&w.hNorm, b.c.Hidden, at+"hnorm.weight")
	b.vector(&w.outNorm, b.c.Hidden, at+"shared_head.norm.weight")
	b.linear(&w.eh, 2*b.c.Hidden, b.named(at+"eh_proj", b.c.Hidden))
}

// mtpLayer is the draft layer's kind: sparse MLA with its own indexer, and experts where the model has them.
func (c Config) mtpLayer() Layer {
	l := Layer{Kind: LayerMLA, MLP: MLPSparse}
	if c.Experts == 0 {
		l.MLP = MLPDense
	}
	return l
}

// all notes every weight of a model.
func (b *builder) all(m *Model) {
	c := &b.c
	b.linear(&m.embed, c.Hidden, b.named("embed_tokens", c.Vocab))
	if !c.TiedHead {
		b.linear(&m.head, c.Hidden, b.named("lm_head", c.Vocab))
	}
	b.vector(&m.norm, c.Hidden, "norm.weight")
	for i, l := range c.Layers {
		b.layer(&m.layers[i], i, l)
	}
	if c.MTP {
		m.mtp = &mtpWeights{}
		b.mtp(m.mtp)
	}
}
