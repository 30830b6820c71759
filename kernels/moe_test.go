package kernels

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"
)

type routerShape struct {
	experts, topk, nGroup, topkGroup int
	norm                             bool
}

// refRoute chooses in float64; scores of the test data are far enough apart.
func refRoute(s routerShape, logits []float32, bias []float32, scaling float64) (ids []int, weights []float64) {
	score, choice := make([]float64, s.experts), make([]float64, s.experts)
	for e := range score {
		score[e] = sigmoid(float64(logits[e]))
		choice[e] = score[e] + float64(bias[e])
	}
	per := s.experts / s.nGroup
	best := func(v []float64, n int) []int {
		idx := make([]int, len(v))
		for i := range idx {
			idx[i] = i
		}
		slices.SortStableFunc(idx, func(a, b int) int { return cmp.Compare(v[b], v[a]) })
		return idx[:n]
	}
	group := make([]float64, s.nGroup)
	for g := range group {
		two := best(choice[g*per:(g+1)*per], min(2, per))
		for _, i := range two {
			group[g] += choice[g*per+i]
		}
	}
	kept := best(group, s.topkGroup)
	for g := range group {
		for e := g * per; e < (g+1)*per && !slices.Contains(kept, g); e++ {
			choice[e] = math.Inf(-1)
		}
	}
	ids = best(choice, s.topk)
	slices.Sort(ids)
	sum := 1e-20
	for _, e := range ids {
		sum += score[e]
	}
	for _, e := range ids {
		w := score[e]
		if s.norm {
			w /= sum
		}
		weights = append(weights, w*scaling)
	}
	return ids, weights
}

func moeCase(s routerShape, d, inter int, dt DType, shared bool, seqs []int) opCase {
	var a MoE
	var bias []float32
	const scaling, limit = 2.5, 10
	return opCase{
		name: fmt.Sprintf("moe/%+v/%dx%d/%d/%v/%v", s, d, inter, dt, shared, seqs), seqs: seqs,
		build: func(g *rig) {
			in, logits, sh := g.in(d, 1), g.in(s.experts, 2), g.in(d, 1)
			bias = g.vec(s.experts, 0.1)
			a = MoE{In: in, Shared: NoScratch, Out: g.out(d), Route: g.p.RouteScratch(s.topk), Experts: s.experts, TopK: s.topk, D: d, Inter: inter, Limit: limit}
			if shared {
				a.Shared = sh
			}
			for range s.experts {
				a.GateUp, a.Down = append(a.GateUp, g.weight(2*inter, d, dt)), append(a.Down, g.weight(d, inter, dt))
			}
			g.p.Route(Router{Logits: logits, Experts: s.experts, TopK: s.topk, NGroup: s.nGroup, TopKGroup: s.topkGroup, Norm: s.norm, Scaling: scaling, Bias: bias, Route: a.Route})
			g.p.Barrier()
			g.p.MoE(a)
		},
		want: eachRow(func(g *rig, seq, pos int) []float64 {
			out := make([]float64, d)
			ids, weights := refRoute(s, g.input(1, seq, pos), bias, scaling)
			for i, e := range ids {
				up := g.matVec(a.GateUp[e], g.input(0, seq, pos))
				act := make([]float32, inter)
				for j := range act {
					act[j] = float32(g.class.round(refSwiGLU(up[j], up[inter+j], limit)))
				}
				for j, v := range g.matVec(a.Down[e], act) {
					out[j] += weights[i] * v
				}
			}
			for j := range out {
				if shared {
					out[j] += float64(g.input(2, seq, pos)[j])
				}
			}
			return out
		}),
		tol: [2]float64{1e-5, 2e-2},
	}
}

func TestMoE(t *testing.T) {
	plain := routerShape{experts: 8, topk: 2, nGroup: 1, topkGroup: 1, norm: true}
	runCases(t, []opCase{
		moeCase(plain, 48, 32, BF16, true, []int{1}),
		moeCase(plain, 48, 32, BF16, false, []int{20, 3}),
		moeCase(routerShape{experts: 12, topk: 3, nGroup: 4, topkGroup: 2, norm: true}, 64, 24, BF16, true, []int{30, 1}),
		moeCase(routerShape{experts: 6, topk: 6, nGroup: 1, topkGroup: 1}, 32, 16, F32, true, []int{7}),
		moeCase(routerShape{experts: 2, topk: 1, nGroup: 2, topkGroup: 1, norm: true}, 33, 19, F32, true, []int{210}),
		moeCase(plain, 64, 48, NVFP4, true, []int{5, 12}),
		moeCase(plain, 130, 140, FP8Block, true, []int{5, 12}),
	})
}

// Equal choices go to the lower id, and a masked group never wins.
func TestRouteTies(t *testing.T) {
	d := open(t)
	p, err := d.NewPlan(ClassF32, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	// Experts double their input by id, so the output names the choice: d 16, inter 16.
	const experts, dim = 8, 16
	logits, in, out := p.Scratch(experts), p.Scratch(dim), p.Scratch(dim)
	a := MoE{In: in, Shared: NoScratch, Out: out, Route: p.RouteScratch(2), Experts: experts, TopK: 2, D: dim, Inter: dim}
	for e := range experts {
		gu, dn := constant(t, d, 2*dim, dim, 1), constant(t, d, dim, dim, float32(int(1)<<e))
		defer gu.Free()
		defer dn.Free()
		a.GateUp, a.Down = append(a.GateUp, gu), append(a.Down, dn)
	}
	p.Route(Router{Logits: logits, Experts: experts, TopK: 2, NGroup: 4, TopKGroup: 2, Norm: true, Scaling: 1, Bias: make([]float32, experts), Route: a.Route})
	p.Barrier()
	p.MoE(a)
	if p.Err() != nil {
		t.Fatal(p.Err())
	}
	unit := refSwiGLU(1, 1, 0) * dim // of an expert with factor 1
	for _, c := range []struct {
		name   string
		logits []float32
		mask   int // sum of 1<<id of the two choices
	}{
		{"all equal", []float32{0, 0, 0, 0, 0, 0, 0, 0}, 1 | 2},
		{"signed zeros", []float32{float32(math.Copysign(0, -1)), 0, 0, 0, 0, 0, 0, 0}, 1 | 2},
		{"last group", []float32{-9, -9, -9, -9, -9, -9, 1, 1}, 64 | 128},
		{"one strong expert does not save its group", []float32{3, -20, 1, 1, 1, 1, -9, -9}, 4 | 8},
	} {
		if err := p.Write(logits, 0, c.logits); err != nil {
			t.Fatal(err)
		}
		row := make([]float32, dim)
		row[0] = 1
		if err := p.Write(in, 0, row); err != nil {
			t.Fatal(err)
		}
		if err := p.Run(&Batch{Segs: []Seg{{Rows: 1}}}); err != nil {
			t.Fatal(err)
		}
		got := float64(p.Read(out, 0, 1)[0]) / unit
		w := 0.5
		if want := float64(c.mask) * w; math.Abs(got-want) > 1e-4*want {
			t.Errorf("%s: %v, want %v", c.name, got, want)
		}
	}
}

func constant(t testing.TB, d *Device, n, k int, v float32) *Weight {
	w, err := d.NewWeight(n, k, true)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 0, n*k*4)
	for range n * k {
		u := math.Float32bits(v)
		data = append(data, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
	}
	if err := w.Fill(0, Matrix{DType: F32, N: n, K: k, Data: data}); err != nil {
		t.Fatal(err)
	}
	return w
}
