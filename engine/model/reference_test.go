package model

import (
	"fmt"
	"math"
	"slices"

	"pgregory.net/rapid"

	"rocket/engine/checkpoint"
)

// The float64 reference: the whole forward pass, written from the formulas with plain loops over full sequences. It
// shares no code with the graph or the kernels: attention is not absorbed, nothing is cached, the recurrence is a loop
// over tokens. It reads weights through the same source, dequantised in Go.

// vec and mat are a row and rows.
type (
	vec []float64
	mat []vec
)

// reference computes one model. unsure is the first position at which a discrete choice (selection or router) was
// decided by less than chooseGap, so that FP32 may rightly choose otherwise from there on.
type reference struct {
	t      rapid.TB
	c      Config
	src    source
	mats   map[string]mat
	unsure int
	picks  map[int][]int // by position: what the last full indexer selected
}

// chooseGap is the relative difference of two scores below which FP32 may order them the other way.
const chooseGap = 2e-5

func newReference(t rapid.TB, c Config, src source) *reference {
	return &reference{t: t, c: c, src: src, mats: map[string]mat{}, unsure: math.MaxInt, picks: map[int][]int{}}
}

func (r *reference) keep(name string, n, k int, load func() (checkpoint.Weight, error)) mat {
	if m := r.mats[name]; m != nil {
		return m
	}
	w, err := load()
	if err != nil {
		r.t.Fatal(err)
	}
	m, row := make(mat, n), make([]float32, k)
	for i := range m {
		w.Row(i, row)
		m[i] = wide(row)
	}
	r.mats[name] = m
	return m
}

func (r *reference) mat(name string, n, k int) mat {
	return r.keep(name, n, k, func() (checkpoint.Weight, error) { return r.src.weight(name, n, k) })
}

func (r *reference) plain(name string, n, k int) mat {
	return r.keep(name, n, k, func() (checkpoint.Weight, error) { return r.src.plain(name, n, k) })
}

func (r *reference) vec(name string, n int) vec {
	v, err := r.src.vector(name, n)
	if err != nil {
		r.t.Fatal(err)
	}
	return wide(v)
}

func wide(v []float32) vec {
	out := make(vec, len(v))
	for i, x := range v {
		out[i] = float64(x)
	}
	return out
}

func dot(a, b vec) float64 {
	s := 0.0
	for i := range a {
		s += a[i] * b[i]
	}
	return s
}

func (m mat) apply(x vec) vec {
	y := make(vec, len(m))
	for i := range m {
		y[i] = dot(m[i], x)
	}
	return y
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
func silu(x float64) float64    { return x * sigmoid(x) }

func rms(x, w vec, eps float64) vec {
	inv := 1 / math.Sqrt(dot(x, x)/float64(len(x))+eps)
	y := make(vec, len(x))
	for i := range x {
		y[i] = x[i] * inv
		if w != nil {
			y[i] *= w[i]
		}
	}
	return y
}

func layerNorm(x, w, b vec, eps float64) vec {
	mean, sq := 0.0, 0.0
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		sq += (v - mean) * (v - mean) / float64(len(x))
	}
	y := make(vec, len(x))
	for i := range x {
		y[i] = (x[i]-mean)/math.Sqrt(sq+eps)*w[i] + b[i]
	}
	return y
}

func softmax(x vec) vec {
	y, sum, top := make(vec, len(x)), 0.0, slices.Max(x)
	for i := range x {
		y[i] = math.Exp(x[i] - top)
		sum += y[i]
	}
	for i := range y {
		y[i] /= sum
	}
	return y
}

// forward gives the final normed hidden rows and logits of every position.
func (r *reference) forward(tokens []int32) (hidden, logits mat) {
	c := r.c
	embed := r.mat("embed_tokens", c.Vocab, c.Hidden)
	streams := make([]mat, len(tokens)) // [position][stream]
	for t, id := range tokens {
		for range c.Streams {
			streams[t] = append(streams[t], slices.Clone(embed[id]))
		}
	}
	for i, l := range c.Layers {
		at := fmt.Sprintf("layers.%d.", i)
		r.half(streams, at+"hc_attn_", r.vec(at+"input_layernorm.weight", c.Hidden), func(x mat) mat { return r.mix(x, at, l) })
		r.half(streams, at+"hc_ffn_", r.vec(at+"post_attention_layernorm.weight", c.Hidden), func(x mat) mat { return r.mlp(x, at+"mlp.", l.MLP) })
	}
	norm := r.vec("norm.weight", c.Hidden)
	for t := range tokens {
		mean := make(vec, c.Hidden)
		for _, s := range streams[t] {
			for j := range mean {
				mean[j] += s[j] / float64(c.Streams)
			}
		}
		hidden = append(hidden, rms(mean, norm, float64(c.NormEps)))
	}
	return hidden, r.head(hidden)
}

func (r *reference) head(hidden mat) (logits mat) {
	name := "lm_head"
	if r.c.TiedHead {
		name = "embed_tokens"
	}
	head := r.mat(name, r.c.Vocab, r.c.Hidden)
	for _, h := range hidden {
		logits = append(logits, head.apply(h))
	}
	return logits
}

// half is one block behind hyper-connections: X' = post (x) F(norm(pre . X)) + comb^T X.
func (r *reference) half(streams []mat, at string, norm vec, f func(mat) mat) {
	c := r.c
	s := c.Streams
	fn := r.plain(at+"fn", (2+s)*s, s*c.Hidden)
	base, scale := r.vec(at+"base", (2+s)*s), r.vec(at+"scale", 3)
	eps := float64(c.HCEps)
	posts, combs, in := make(mat, len(streams)), make([]mat, len(streams)), make(mat, len(streams))
	for t, x := range streams {
		mix := fn.apply(rms(slices.Concat(x...), nil, float64(c.NormEps)))
		one := make(vec, c.Hidden)
		for i := range s {
			pre := sigmoid(mix[i]*scale[0]+base[i]) + eps
			for j := range one {
				one[j] += pre * x[i][j]
			}
			posts[t] = append(posts[t], 2*sigmoid(mix[s+i]*scale[1]+base[s+i]))
		}
		in[t] = rms(one, norm, float64(c.NormEps))
		combs[t] = sinkhorn(mix[2*s:], base[2*s:], scale[2], s, c.SinkhornIters, eps)
	}
	out := f(in)
	for t, x := range streams {
		next := make(mat, s)
		for i := range s {
			next[i] = make(vec, c.Hidden)
			for j := range next[i] {
				next[i][j] = posts[t][i] * out[t][j]
				for k := range s {
					next[i][j] += combs[t][k][i] * x[k][j]
				}
			}
		}
		streams[t] = next
	}
}

func sinkhorn(mix, base vec, scale float64, s, iters int, eps float64) mat {
	m := make(mat, s)
	for i := range m {
		row := make(vec, s)
		for j := range row {
			row[j] = mix[i*s+j]*scale + base[i*s+j]
		}
		m[i] = softmax(row)
		for j := range m[i] {
			m[i][j] += eps
		}
	}
	columns := func() {
		for j := range s {
			sum := eps
			for i := range s {
				sum += m[i][j]
			}
			for i := range s {
				m[i][j] /= sum
			}
		}
	}
	columns()
	for range iters - 1 {
		for i := range s {
			sum := eps
			for _, v := range m[i] {
				sum += v
			}
			for j := range m[i] {
				m[i][j] /= sum
			}
		}
		columns()
	}
	return m
}

func (r *reference) mix(x mat, at string, l Layer) mat {
	if l.Kind == LayerKDA {
		return r.kda(x, at+"self_attn.")
	}
	return r.mla(x, at+"self_attn.", l.Shared)
}

// kda is Kimi delta attention, token by token.
func (r *reference) kda(x mat, at string) (out mat) {
	c := r.c
	H, D, P, W := c.KDAHeads, c.KDADim, c.KDAHeads*c.KDADim, c.KDAConv
	var raw, taps [3]mat
	for i, n := range []string{"q", "k", "v"} {
		w := r.mat(at+n+"_proj", P, c.Hidden)
		for _, row := range x {
			raw[i] = append(raw[i], w.apply(row))
		}
		flat := r.vec(at+n+"_conv1d.weight", P*W)
		for ch := range P {
			taps[i] = append(taps[i], flat[ch*W:(ch+1)*W])
		}
	}
	conv := func(i, t, ch int) float64 { // the last tap meets the newest token
		s := 0.0
		for j := range W {
			if p := t - (W - 1) + j; p >= 0 {
				s += taps[i][ch][j] * raw[i][p][ch]
			}
		}
		return silu(s)
	}
	fa, fb := r.mat(at+"f_a_proj", D, c.Hidden), r.mat(at+"f_b_proj", P, D)
	ga, gb := r.mat(at+"g_a_proj", D, c.Hidden), r.mat(at+"g_b_proj", P, D)
	bp, op := r.mat(at+"b_proj", H, c.Hidden), r.mat(at+"o_proj", c.Hidden, P)
	aLog, dt, norm := r.vec(at+"A_log", H), r.vec(at+"dt_bias", P), r.vec(at+"o_norm.weight", D)
	state := make([]mat, H)
	for h := range state {
		for range D {
			state[h] = append(state[h], make(vec, D)) // [key][value]
		}
	}
	for t, row := range x {
		f, gate, b := fb.apply(fa.apply(row)), gb.apply(ga.apply(row)), bp.apply(row)
		var all vec
		for h := range H {
			q, k, v, decay := make(vec, D), make(vec, D), make(vec, D), make(vec, D)
			for j := range D {
				ch := h*D + j
				q[j], k[j], v[j] = conv(0, t, ch), conv(1, t, ch), conv(2, t, ch)
				z := f[ch] + dt[ch]
				if c.KDALowerBound != 0 {
					decay[j] = math.Exp(float64(c.KDALowerBound) * sigmoid(math.Exp(aLog[h])*z))
				} else {
					decay[j] = math.Exp(-math.Exp(aLog[h]) * math.Log1p(math.Exp(z)))
				}
			}
			o := delta(state[h], q, k, v, decay, sigmoid(b[h]))
			o = rms(o, norm, float64(c.NormEps))
			for j := range o {
				o[j] *= sigmoid(gate[h*D+j])
			}
			all = append(all, o...)
		}
		out = append(out, op.apply(all))
	}
	return out
}

// delta is one step of the recurrence: S <- diag(decay) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q.
func delta(s mat, q, k, v, decay vec, beta float64) vec {
	d := len(q)
	unit := func(x vec) vec {
		n, y := math.Sqrt(dot(x, x)+1e-6), make(vec, d)
		for i := range x {
			y[i] = x[i] / n
		}
		return y
	}
	q, k = unit(q), unit(k)
	o := make(vec, d)
	for i := range d {
		for j := range d {
			s[i][j] *= decay[i]
		}
	}
	for j := range d {
		held := 0.0
		for i := range d {
			held += s[i][j] * k[i]
		}
		u := beta * (v[j] - held)
		for i := range d {
			s[i][j] += k[i] * u
			o[j] += s[i][j] * q[i] / math.Sqrt(float64(d))
		}
	}
	return o
}

// mla is attention over the indexer's selection, keys and values expanded from the latents.
func (r *reference) mla(x mat, at string, shared bool) (out mat) {
	c := r.c
	qa, qb := r.mat(at+"q_a_proj", c.QRank, c.Hidden), r.mat(at+"q_b_proj", c.Heads*c.NopeDim, c.QRank)
	kva, kvb := r.mat(at+"kv_a_proj_with_mqa", c.KVRank, c.Hidden), r.mat(at+"kv_b_proj", c.Heads*(c.NopeDim+c.VDim), c.KVRank)
	op := r.mat(at+"o_proj", c.Hidden, c.Heads*c.VDim)
	qn, kvn := r.vec(at+"q_a_layernorm.weight", c.QRank), r.vec(at+"kv_a_layernorm.weight", c.KVRank)
	var res, kv mat
	for _, row := range x {
		res = append(res, rms(qa.apply(row), qn, float64(c.NormEps)))
		kv = append(kv, kvb.apply(rms(kva.apply(row), kvn, float64(c.NormEps))))
	}
	if !shared {
		r.index(x, res, at+"indexer.")
	}
	for t := range x {
		q := qb.apply(res[t])
		var all vec
		for h := range c.Heads {
			key := h * (c.NopeDim + c.VDim)
			var scores vec
			for _, p := range r.picks[t] {
				scores = append(scores, dot(q[h*c.NopeDim:(h+1)*c.NopeDim], kv[p][key:key+c.NopeDim])/math.Sqrt(float64(c.NopeDim)))
			}
			weights, o := softmax(scores), make(vec, c.VDim)
			for i, p := range r.picks[t] {
				for j := range o {
					o[j] += weights[i] * kv[p][key+c.NopeDim+j]
				}
			}
			all = append(all, o...)
		}
		out = append(out, op.apply(all))
	}
	return out
}
