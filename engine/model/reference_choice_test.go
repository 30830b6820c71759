package model

import (
	"fmt"
	"math"
	"slices"

	"rocket/engine/checkpoint"
)

// The float64 reference, second half: what chooses (indexer, router), the feed-forward blocks, and the draft layer.

// index chooses, for every position, the best complete pools and always the incomplete one.
func (r *reference) index(x, res mat, at string) {
	c := r.c
	wq, wk := r.mat(at+"wq_b", c.IndexHeads*c.IndexDim, c.QRank), r.mat(at+"wk", c.IndexDim, c.Hidden)
	gate, wh := r.plain(at+"index_kpool_compress_gate", c.IndexDim, c.Hidden), r.mat(at+"weights_proj", c.IndexHeads, c.Hidden)
	kw, kb, ape := r.vec(at+"k_norm.weight", c.IndexDim), r.vec(at+"k_norm.bias", c.IndexDim), r.vec(at+"index_kpool_compress_ape", c.IndexPool*c.IndexDim)
	var pooled mat
	for p := range len(x) / c.IndexPool {
		key := make(vec, c.IndexDim)
		var keys, gates mat
		for i := range c.IndexPool {
			row := x[p*c.IndexPool+i]
			keys, gates = append(keys, layerNorm(wk.apply(row), kw, kb, 1e-6)), append(gates, gate.apply(row))
		}
		for ch := range key {
			var z vec
			for i := range c.IndexPool {
				z = append(z, gates[i][ch]+ape[i*c.IndexDim+ch])
			}
			for i, w := range softmax(z) {
				key[ch] += w * keys[i][ch]
			}
		}
		pooled = append(pooled, key)
	}
	for t, row := range x {
		q, heads := wq.apply(res[t]), wh.apply(row)
		complete := (t + 1) / c.IndexPool
		type scored struct {
			score float64
			pool  int
		}
		var all []scored
		for p := range complete {
			s := 0.0
			for h := range c.IndexHeads {
				s += heads[h] / math.Sqrt(float64(c.IndexHeads)) * max(0, dot(q[h*c.IndexDim:(h+1)*c.IndexDim], pooled[p])/math.Sqrt(float64(c.IndexDim)))
			}
			all = append(all, scored{s + 0, p})
		}
		slices.SortStableFunc(all, func(a, b scored) int {
			switch {
			case a.score > b.score:
				return -1
			case a.score < b.score:
				return 1
			}
			return a.pool - b.pool
		})
		if n := c.IndexTopK / c.IndexPool; len(all) > n {
			// Equal scores are sure (they are zeros of the ReLU, exact in any precision); near ones are not.
			if gap := all[n-1].score - all[n].score; gap > 0 && gap < chooseGap*(1e-3+math.Abs(all[n].score)) {
				r.unsure = min(r.unsure, t)
			}
			all = all[:n]
		}
		var picks []int
		for _, s := range all {
			for i := range c.IndexPool {
				picks = append(picks, s.pool*c.IndexPool+i)
			}
		}
		for p := complete * c.IndexPool; p <= t; p++ {
			picks = append(picks, p)
		}
		slices.Sort(picks)
		r.picks[t] = picks
	}
}

func (r *reference) swiglu(g, u float64) float64 {
	limit := float64(r.c.SwigluLimit)
	if limit > 0 {
		g, u = min(g, limit), max(-limit, min(u, limit))
	}
	return silu(g) * u
}

func (r *reference) ffn(gate, up, down mat, x vec) vec {
	g, u := gate.apply(x), up.apply(x)
	for i := range g {
		g[i] = r.swiglu(g[i], u[i])
	}
	return down.apply(g)
}

func (r *reference) mlp(x mat, at string, kind MLPKind) (out mat) {
	c := r.c
	ffn := func(at string, n int) (mat, mat, mat) {
		return r.mat(at+"gate_proj", n, c.Hidden), r.mat(at+"up_proj", n, c.Hidden), r.mat(at+"down_proj", c.Hidden, n)
	}
	if kind == MLPDense {
		g, u, d := ffn(at, c.Inter)
		for _, row := range x {
			out = append(out, r.ffn(g, u, d, row))
		}
		return out
	}
	router, bias := r.mat(at+"gate", c.Experts, c.Hidden), r.vec(at+"gate.e_score_correction_bias", c.Experts)
	expert := func(e int, which string, n, k int) mat {
		return r.keep(fmt.Sprintf("%sexperts.%d.%s", at, e, which), n, k, func() (checkpoint.Weight, error) {
			return r.src.expert(at, e, c.Experts, which, n, k)
		})
	}
	for t, row := range x {
		y := make(vec, c.Hidden)
		for e, w := range r.route(router.apply(row), bias, t) {
			g, u := expert(e, "gate_proj", c.MoEInter, c.Hidden), expert(e, "up_proj", c.MoEInter, c.Hidden)
			for j, v := range r.ffn(g, u, expert(e, "down_proj", c.Hidden, c.MoEInter), row) {
				y[j] += w * v
			}
		}
		if c.SharedExperts > 0 {
			g, u, d := ffn(at+"shared_experts.", c.SharedExperts*c.MoEInter)
			for j, v := range r.ffn(g, u, d, row) {
				y[j] += v
			}
		}
		out = append(out, y)
	}
	return out
}

// route gives the chosen experts' weights.
func (r *reference) route(logits, bias vec, t int) map[int]float64 {
	c := r.c
	per := c.Experts / c.Groups
	choice := make(vec, c.Experts)
	for e := range choice {
		choice[e] = sigmoid(logits[e]) + bias[e]
	}
	order := func(score vec, n int) []int {
		ids := make([]int, len(score))
		for i := range ids {
			ids[i] = i
		}
		slices.SortStableFunc(ids, func(a, b int) int {
			if score[a] != score[b] {
				return map[bool]int{true: -1, false: 1}[score[a] > score[b]]
			}
			return a - b
		})
		if n < len(ids) && score[ids[n-1]]-score[ids[n]] < chooseGap {
			r.unsure = min(r.unsure, t)
		}
		return ids[:n]
	}
	if c.Groups > 1 {
		groups := make(vec, c.Groups)
		for g := range groups {
			s := slices.Sorted(slices.Values(choice[g*per : (g+1)*per]))
			groups[g] = s[per-1] + s[per-2]
		}
		kept := order(groups, c.TopKGroups)
		for e := range choice {
			if !slices.Contains(kept, e/per) {
				choice[e] = math.Inf(-1)
			}
		}
	}
	weights, sum := map[int]float64{}, 1e-20
	for _, e := range order(choice, c.TopK) {
		weights[e] = sigmoid(logits[e])
		sum += weights[e]
	}
	for e := range weights {
		if c.NormTopK {
			weights[e] /= sum
		}
		weights[e] *= float64(c.RoutedScaling)
	}
	return weights
}

// draft is one depth of the draft layer over all rows: the token each row embeds, and the hidden row beside it.
func (r *reference) draft(tokens []int32, hidden mat) (next, logits mat) {
	c := r.c
	at := fmt.Sprintf("layers.%d.", len(c.Layers))
	embed := r.mat("embed_tokens", c.Vocab, c.Hidden)
	en, hn, eh := r.vec(at+"enorm.weight", c.Hidden), r.vec(at+"hnorm.weight", c.Hidden), r.mat(at+"eh_proj", c.Hidden, 2*c.Hidden)
	eps := float64(c.NormEps)
	norm := func(x mat, name string) (y mat) {
		w := r.vec(at+name, c.Hidden)
		for _, row := range x {
			y = append(y, rms(row, w, eps))
		}
		return y
	}
	add := func(x, y mat) mat {
		for t := range x {
			for j := range x[t] {
				x[t][j] += y[t][j]
			}
		}
		return x
	}
	var x mat
	for t, id := range tokens {
		x = append(x, eh.apply(slices.Concat(rms(embed[id], en, eps), rms(hidden[t], hn, eps))))
	}
	l := c.mtpLayer()
	x = add(x, r.mix(norm(x, "input_layernorm.weight"), at, l))
	x = add(x, r.mlp(norm(x, "post_attention_layernorm.weight"), at+"mlp.", l.MLP))
	next = norm(x, "shared_head.norm.weight")
	return next, r.head(next)
}
