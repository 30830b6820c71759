package kernels

import (
	"fmt"
	"math"
	"testing"
)

func refNorm(x []float64, w []float32, eps float64) []float64 {
	ss := 0.0
	for _, v := range x {
		ss += v * v
	}
	r := 1 / math.Sqrt(ss/float64(len(x))+eps)
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = v * r * float64(w[i])
	}
	return out
}

func wide(x []float32) []float64 {
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = float64(v)
	}
	return out
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

func refSwiGLU(gate, up float64, limit float64) float64 {
	if limit > 0 {
		gate, up = math.Min(gate, limit), math.Max(-limit, math.Min(up, limit))
	}
	return gate * sigmoid(gate) * up
}

// eachRow makes a want function of one output from a function of a row.
func eachRow(f func(g *rig, seq, pos int) []float64) func(g *rig, seq int) [][]float64 {
	return func(g *rig, seq int) [][]float64 {
		var out []float64
		for pos := range g.c.seqs[seq] {
			out = append(out, f(g, seq, pos)...)
		}
		return [][]float64{out}
	}
}

func linearCase(dt DType, n, k int, seqs []int) opCase {
	return opCase{
		name: fmt.Sprintf("linear/%d/%dx%d/%v", dt, n, k, seqs),
		seqs: seqs,
		build: func(g *rig) {
			w := g.weight(n, k, dt)
			in := g.in(k+3, 1)
			g.p.Linear(in, 2, w, g.out(n+5), 5)
		},
		want: eachRow(func(g *rig, seq, pos int) []float64 {
			return append(wide(fill(5, untouched)), g.matVec(g.weights[0], g.input(0, seq, pos)[2:])...)
		}),
		tol: [2]float64{3e-6, 3e-6},
	}
}

func TestLinear(t *testing.T) {
	var cases []opCase
	for _, dt := range []DType{F32, BF16, FP8, FP8Block, NVFP4} {
		shapes := [][2]int{{33, 130}, {16, 128}, {7, 1}, {100, 257}, {300, 384}}
		if dt == NVFP4 {
			shapes = [][2]int{{33, 144}, {16, 16}, {300, 384}}
		}
		for _, nk := range shapes {
			for _, seqs := range [][]int{{1}, {2, 1}, {5, 1}, {11, 8, 1}, {140, 60}} {
				if seqs[0] != 140 || nk[0] == 300 {
					cases = append(cases, linearCase(dt, nk[0], nk[1], seqs))
				}
			}
		}
	}
	runCases(t, cases)
}

func TestLinearHeads(t *testing.T) {
	var cases []opCase
	for _, c := range []struct{ heads, wout, win int }{{4, 32, 48}, {3, 20, 130}, {2, 5, 16}, {5, 64, 24}} {
		for _, round := range []bool{false, true} {
			cases = append(cases, opCase{
				name: fmt.Sprintf("heads/%v/%v", c, round), seqs: []int{1, 3, 30},
				build: func(g *rig) {
					g.p.LinearHeads(g.in(c.heads*c.win, 1), g.weight(c.heads*c.wout, c.win, BF16), c.heads, g.out(c.heads*c.wout), round)
				},
				want: eachRow(func(g *rig, seq, pos int) []float64 {
					x, w := g.input(0, seq, pos), g.weights[0]
					var out []float64
					for r := range c.heads * c.wout {
						sum := 0.0
						for j, v := range g.rowsOf(w)[r] {
							sum += float64(v) * float64(x[r/c.wout*c.win+j])
						}
						if round {
							sum = g.class.round(sum)
						}
						out = append(out, sum)
					}
					return out
				}),
				tol: [2]float64{2e-6, 5e-3},
			})
		}
	}
	runCases(t, cases)
}

func TestRowOps(t *testing.T) {
	var cases []opCase
	for _, width := range []int{16, 37, 256, 1030} {
		w := width
		add := func(name string, build func(g *rig), want func(g *rig, seq, pos int) []float64, f32, b16 float64) {
			cases = append(cases, opCase{name: fmt.Sprintf("%s/%d", name, w), seqs: []int{2, 9, 1}, build: build, want: eachRow(want), tol: [2]float64{f32, b16}})
		}
		var norm []float32
		for _, round := range []bool{false, true} {
			add(fmt.Sprintf("rmsnorm/%v", round), func(g *rig) {
				norm = g.around(w, 1, 0.2)
				g.p.RMSNorm(g.in(w, 3), norm, 1e-5, g.out(w+16), 16, round)
			}, func(g *rig, seq, pos int) []float64 {
				out := wide(fill(16, untouched))
				for _, v := range refNorm(wide(g.input(0, seq, pos)), norm, 1e-5) {
					if round {
						v = g.class.round(v)
					}
					out = append(out, v)
				}
				return out
			}, 1e-6, 5e-3)
		}
		add("swiglu", func(g *rig) { g.p.SwiGLU(g.in(2*w, 6), g.out(w), w, 10) }, func(g *rig, seq, pos int) []float64 {
			x := g.input(0, seq, pos)
			out := make([]float64, w)
			for i := range out {
				out[i] = g.class.round(refSwiGLU(float64(x[i]), float64(x[w+i]), 10))
			}
			return out
		}, 1e-6, 5e-3)
		add("swiglu_free", func(g *rig) { g.p.SwiGLU(g.in(2*w, 30), g.out(w), w, 0) }, func(g *rig, seq, pos int) []float64 {
			x := g.input(0, seq, pos)
			out := make([]float64, w)
			for i := range out {
				out[i] = g.class.round(refSwiGLU(float64(x[i]), float64(x[w+i]), 0))
			}
			return out
		}, 1e-6, 5e-3)
		add("add", func(g *rig) {
			a, b := g.in(w, 1), g.in(w, 1)
			g.also(a, w)
			g.p.Add(a, b, a)
		}, func(g *rig, seq, pos int) []float64 {
			a, b := g.input(0, seq, pos), g.input(1, seq, pos)
			out := make([]float64, w)
			for i := range out {
				out[i] = float64(a[i] + b[i])
			}
			return out
		}, 0, 0)
		add("repeat_mean", func(g *rig) {
			x, many := g.in(w, 1), g.p.Scratch(4*w)
			g.p.Repeat(x, many, 4)
			g.p.Barrier()
			g.p.Mean(many, g.out(w), 4)
		}, func(g *rig, seq, pos int) []float64 { return wide(g.input(0, seq, pos)) }, 0, 0)
	}
	runCases(t, cases)
}

const hcRMSEps = 1e-5

// hcCase is one residual junction: mapping, collapse, and the branch's way back.
func hcCase(m, d int) opCase {
	var a HCPre
	return opCase{
		name: fmt.Sprintf("hc/%dx%d", m, d), seqs: []int{3, 12, 1},
		build: func(g *rig) {
			streams, y := g.in(m*d, 2), g.in(d, 1)
			fn := g.weight((2+m)*m, m*d, F32)
			a = HCPre{Streams: streams, Mix: g.p.Scratch((2 + m) * m), Post: g.out(m), Comb: g.out(m * m), Out: g.out(d), Mult: m, D: d,
				Base: g.vec((2+m)*m, 0.5), Scale: g.around(3, 1, 0.2), Iters: 20, HCEps: 1e-6, NormEps: hcRMSEps, W: g.around(d, 1, 0.1)}
			g.also(streams, m*d)
			g.p.Linear(streams, 0, fn, a.Mix, 0)
			g.p.Barrier()
			g.p.HCPre(a)
			g.p.Barrier()
			g.p.HCPost(streams, a.Post, a.Comb, y, m, d)
		},
		want: func(g *rig, seq int) [][]float64 {
			out := make([][]float64, 4)
			for pos := range g.c.seqs[seq] {
				x, y := g.input(0, seq, pos), g.input(1, seq, pos)
				post, comb, collapsed := refHC(wide(x), g.matVec(g.weights[0], x), a, hcRMSEps)
				row := refNorm(collapsed, a.W, hcRMSEps)
				for i := range row {
					row[i] = g.class.round(row[i])
				}
				mixed := make([]float64, m*d)
				for j := range m {
					for k := range d {
						v := post[j] * float64(y[k])
						for i := range m {
							v += comb[i*m+j] * float64(x[i*d+k])
						}
						mixed[j*d+k] = v
					}
				}
				out[0], out[1], out[2], out[3] = append(out[0], post...), append(out[1], comb...), append(out[2], row...), append(out[3], mixed...)
			}
			return out
		},
		tol: [2]float64{3e-6, 5e-3},
	}
}

func TestHyperConnections(t *testing.T) {
	runCases(t, []opCase{hcCase(4, 48), hcCase(2, 37), hcCase(1, 16)})
}

// refHC is models.md 1.4: the mapping is of the RMS-scaled streams.
func refHC(x, mix []float64, a HCPre, eps float64) (post, comb, collapsed []float64) {
	m, d, ss := a.Mult, a.D, 0.0
	for _, v := range x {
		ss += v * v
	}
	r := 1 / math.Sqrt(ss/float64(len(x))+eps)
	at := func(i, part int) float64 { return mix[i]*r*float64(a.Scale[part]) + float64(a.Base[i]) }
	collapsed, comb = make([]float64, d), make([]float64, m*m)
	for s := range m {
		pre := sigmoid(at(s, 0)) + float64(a.HCEps)
		post = append(post, 2*sigmoid(at(m+s, 1)))
		for k := range d {
			collapsed[k] += pre * x[s*d+k]
		}
	}
	for i := range m {
		sum := 0.0
		for j := range m {
			comb[i*m+j] = math.Exp(at(2*m+i*m+j, 2))
			sum += comb[i*m+j]
		}
		for j := range m {
			comb[i*m+j] = comb[i*m+j]/sum + float64(a.HCEps)
		}
	}
	normalise := func(stride, step int) {
		for i := range m {
			sum := float64(a.HCEps)
			for j := range m {
				sum += comb[i*stride+j*step]
			}
			for j := range m {
				comb[i*stride+j*step] /= sum
			}
		}
	}
	normalise(1, m) // columns
	for range a.Iters - 1 {
		normalise(m, 1)
		normalise(1, m)
	}
	return post, comb, collapsed
}
