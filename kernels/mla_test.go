package kernels

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"
)

type mlaShape struct{ latent, indexDim, pool, indexHeads, topk, heads int }

// mlaGraph is one MLA layer from the raw rows to the attended latents.
type mlaGraph struct {
	mlaShape
	cache       Cache
	kvW, kW, kB []float32
	ape         []float32
	eps, kEps   float32
	scale       float32
}

const pageHead, pageTail = 64, 128

func mlaPage(s mlaShape) int {
	n := pageHead + MLASlabBytes(s.latent, s.indexDim, s.pool, ClassF32) + pageTail
	return (n + 63) / 64 * 64
}

// build appends store, pool, index and attention; inputs are 0 kv, 1 key, 2 gate, 3 index q, 4 index weights, 5 q.
func (m *mlaGraph) build(g *rig) {
	s := m.mlaShape
	m.cache = Cache{Pages: g.pages, PageStride: mlaPage(s), LayerOff: pageHead, Latent: s.latent, IndexDim: s.indexDim, Pool: s.pool}
	m.eps, m.kEps, m.scale = 1e-5, 1e-6, 0.3
	m.kvW, m.kW, m.kB, m.ape = g.around(s.latent, 1, 0.2), g.around(s.indexDim, 1, 0.2), g.vec(s.indexDim, 0.2), g.vec(s.pool*s.indexDim, 0.5)
	kv, key, gate := g.in(s.latent, 2), g.in(s.indexDim, 1), g.in(s.indexDim, 1)
	iq, iw, q := g.in(s.indexHeads*s.indexDim, 1), g.in(s.indexHeads, 1), g.in(s.heads*s.latent, 0.3)
	sel := g.p.Selection(s.topk, s.pool)
	g.p.MLAStore(MLAStore{Cache: m.cache, KV: kv, Key: key, Gate: gate, KVW: m.kvW, Eps: m.eps, KW: m.kW, KB: m.kB, KEps: m.kEps})
	g.p.Barrier()
	g.p.MLAPool(m.cache, m.ape)
	g.p.Barrier()
	g.p.MLAIndex(m.cache, iq, iw, s.indexHeads, s.topk, true, sel)
	g.p.Barrier()
	g.p.MLAAttend(m.cache, q, s.heads, m.scale, sel, g.out(s.heads*s.latent))
}

func (m *mlaGraph) latentRow(g *rig, seq, pos int) []float64 {
	row := refNorm(wide(g.input(0, seq, pos)), m.kvW, float64(m.eps))
	for i := range row {
		row[i] = g.class.round(row[i])
	}
	return row
}

func (m *mlaGraph) keyRow(g *rig, seq, pos int) []float64 {
	x, mean, ss := wide(g.input(1, seq, pos)), 0.0, 0.0
	for _, v := range x {
		mean += v / float64(len(x))
	}
	for _, v := range x {
		ss += (v - mean) * (v - mean) / float64(len(x))
	}
	for i := range x {
		x[i] = g.class.round((x[i]-mean)/math.Sqrt(ss+float64(m.kEps))*float64(m.kW[i]) + float64(m.kB[i]))
	}
	return x
}

func (m *mlaGraph) pooled(g *rig, seq, pool int) []float64 {
	out := make([]float64, m.indexDim)
	for c := range out {
		sum := 0.0
		for t := range m.pool {
			pos := pool*m.pool + t
			w := math.Exp(g.class.round(float64(g.input(2, seq, pos)[c])) + float64(m.ape[t*m.indexDim+c]))
			sum += w
			out[c] += w * m.keyRow(g, seq, pos)[c]
		}
		out[c] = g.class.round(out[c] / sum)
	}
	return out
}

// selection is models.md 1.6: every complete pool while they fit, else the best ones, and the incomplete tail.
func (m *mlaGraph) selection(g *rig, seq, pos int, pooled [][]float64) []int {
	pools, best := (pos+1)/m.pool, m.topk/m.pool
	chosen := make([]int, pools)
	for i := range chosen {
		chosen[i] = i
	}
	if pools > best {
		q, w, score := g.input(3, seq, pos), g.input(4, seq, pos), make([]float64, pools)
		for j := range score {
			for h := range m.indexHeads {
				dot := 0.0
				for c := range m.indexDim {
					dot += float64(q[h*m.indexDim+c]) * pooled[j][c]
				}
				score[j] += float64(w[h]) / math.Sqrt(float64(m.indexHeads)) * math.Max(0, dot/math.Sqrt(float64(m.indexDim)))
			}
		}
		slices.SortStableFunc(chosen, func(a, b int) int {
			if score[a] > score[b] {
				return -1
			}
			if score[a] < score[b] {
				return 1
			}
			return a - b
		})
		chosen = chosen[:best]
		slices.Sort(chosen)
	}
	var list []int
	for _, j := range chosen {
		for t := range m.pool {
			list = append(list, j*m.pool+t)
		}
	}
	for p := pools * m.pool; p <= pos; p++ {
		list = append(list, p)
	}
	return list
}

func (m *mlaGraph) want(g *rig, seq int) [][]float64 {
	var latents, pooled [][]float64
	var out []float64
	for pos := range g.c.seqs[seq] {
		latents = append(latents, m.latentRow(g, seq, pos))
		if (pos+1)%m.pool == 0 {
			pooled = append(pooled, m.pooled(g, seq, pos/m.pool))
		}
		q, list := g.input(5, seq, pos), m.selection(g, seq, pos, pooled)
		for h := range m.heads {
			sum, acc := 0.0, make([]float64, m.latent)
			top := math.Inf(-1)
			scores := make([]float64, len(list))
			for i, p := range list {
				for c, v := range latents[p] {
					scores[i] += float64(q[h*m.latent+c]) * v * float64(m.scale)
				}
				top = math.Max(top, scores[i])
			}
			for i, p := range list {
				e := math.Exp(scores[i] - top)
				sum += e
				for c, v := range latents[p] {
					acc[c] += e * v
				}
			}
			for c := range acc {
				out = append(out, g.class.round(acc[c]/sum))
			}
		}
	}
	return [][]float64{out}
}

func mlaCase(s mlaShape, seqs []int) opCase {
	m := &mlaGraph{mlaShape: s}
	return opCase{name: fmt.Sprintf("mla/%+v/%v", s, seqs), seqs: seqs, pageBytes: mlaPage(s), build: m.build, want: m.want, tol: [2]float64{1e-5, 1e-2}}
}

func TestMLA(t *testing.T) {
	runCases(t, []opCase{
		mlaCase(mlaShape{latent: 32, indexDim: 16, pool: 4, indexHeads: 2, topk: 512, heads: 4}, []int{140, 3}), // dense
		mlaCase(mlaShape{latent: 48, indexDim: 32, pool: 4, indexHeads: 3, topk: 16, heads: 5}, []int{70, 9, 1}),
		mlaCase(mlaShape{latent: 144, indexDim: 144, pool: 16, indexHeads: 2, topk: 32, heads: 2}, []int{150}),
		mlaCase(mlaShape{latent: 40, indexDim: 24, pool: 2, indexHeads: 1, topk: 20, heads: 70}, []int{45}),
		mlaCase(mlaShape{latent: 16, indexDim: 16, pool: 1, indexHeads: 4, topk: 150, heads: 2}, []int{300}),
	})
}

// Without an indexer the selection is every position and keys need no room.
func TestMLADense(t *testing.T) {
	m := &mlaGraph{mlaShape: mlaShape{latent: 32, pool: 1, topk: 200, heads: 3}}
	build := func(g *rig) {
		m.cache = Cache{Pages: g.pages, PageStride: mlaPage(m.mlaShape), LayerOff: pageHead, Latent: 32, Pool: 1}
		m.eps, m.scale, m.kvW = 1e-5, 0.3, g.around(32, 1, 0.2)
		kv := g.in(32, 2)
		for range 4 {
			g.in(1, 1)
		}
		q, sel := g.in(3*32, 0.3), g.p.Selection(200, 1)
		g.p.MLAStore(MLAStore{Cache: m.cache, KV: kv, Key: NoScratch, Gate: NoScratch, KVW: m.kvW, Eps: m.eps})
		g.p.Barrier()
		g.p.MLAIndex(m.cache, NoScratch, NoScratch, 0, 200, true, sel)
		g.p.Barrier()
		g.p.MLAAttend(m.cache, q, 3, m.scale, sel, g.out(3*32))
	}
	runCases(t, []opCase{{name: "dense", seqs: []int{150, 20}, pageBytes: mlaPage(m.mlaShape), build: build, want: m.want, tol: [2]float64{1e-5, 1e-2}}})
}

// Rows below write_from leave every byte of the pages alone and still give the same outputs; bytes that no position
// of the batch owns stay untouched.
func TestMLAWrites(t *testing.T) {
	s := mlaShape{latent: 32, indexDim: 16, pool: 4, indexHeads: 2, topk: 16, heads: 2}
	for _, class := range []Class{ClassF32, ClassBF16} {
		c := mlaCase(s, []int{141, 30})
		d := open(t)
		g := c.open(t, d, class)
		whole := g.run(schedules(c.seqs)["ragged"])
		elem := class.ElemBytes()
		pad := func(n int) int { return (n + 63) / 64 * 64 }
		keyOff := pad(PageTokens * s.latent * elem)
		gateOff := keyOff + pad(PageTokens*s.indexDim*elem)
		poolOff := gateOff + pad(PageTokens*s.indexDim*elem)
		owned := make([]bool, len(whole.pages))
		own := func(seq, pos, off, n int) {
			at := int(g.pageOf(seq, pos/PageTokens))*c.pageBytes + pageHead + off
			for i := range n {
				owned[at+i] = true
			}
		}
		for seq, n := range c.seqs {
			for pos := range n {
				in := pos % PageTokens
				own(seq, pos, in*s.latent*elem, s.latent*elem)
				own(seq, pos, keyOff+in*s.indexDim*elem, s.indexDim*elem)
				own(seq, pos, gateOff+in*s.indexDim*elem, s.indexDim*elem)
				if pos%s.pool == s.pool-1 {
					for ch := range s.indexDim {
						own(seq, pos, poolOff+(ch*PageTokens/s.pool+in/s.pool)*elem, elem)
					}
				}
			}
		}
		for i, b := range whole.pages {
			if !owned[i] && b != sentinel {
				t.Fatalf("%v: byte %d belongs to no position of the batch and was written", class, i)
			}
		}
		// Replay over the stored pages, writing nothing, then writing from the middle of a page on.
		for _, from := range []int32{1000, 133} {
			g.writeFrom = []int32{from, 1000}
			again := g.run(schedules(c.seqs)["together"])
			if err := whole.equal(again); err != nil {
				t.Errorf("%v: write_from %d: %v", class, from, err)
			}
		}
		// Shared pages with other content: only rows from write_from on may change them.
		g.writeFrom = []int32{133, 1000}
		if err := g.pages.Write(0, bytes.Repeat([]byte{0}, g.pages.Size())); err != nil {
			t.Fatal(err)
		}
		part := g.run(schedules(c.seqs)["ragged"])
		first := int(g.pageOf(0, 0)) * c.pageBytes
		if !bytes.Equal(part.pages[first:first+c.pageBytes], make([]byte, c.pageBytes)) {
			t.Errorf("%v: the page below write_from was written", class)
		}
		at := int(g.pageOf(0, 1))*c.pageBytes + pageHead
		if !bytes.Equal(part.pages[at+5*s.latent*elem:at+13*s.latent*elem], whole.pages[at+5*s.latent*elem:at+13*s.latent*elem]) {
			t.Errorf("%v: latents from write_from on differ", class)
		}
		if !bytes.Equal(part.pages[at:at+5*s.latent*elem], make([]byte, 5*s.latent*elem)) {
			t.Errorf("%v: latents below write_from were written", class)
		}
		g.close()
	}
}

// Ties go to the lower pool, -0 equals +0: all scores are zero here, so the first pools win.
func TestIndexTies(t *testing.T) {
	s := mlaShape{latent: 16, indexDim: 16, pool: 4, indexHeads: 2, topk: 8, heads: 1}
	c := mlaCase(s, []int{40})
	d := open(t)
	m := &mlaGraph{mlaShape: s}
	c.build = m.build
	g := c.open(t, d, ClassF32)
	defer g.close()
	b := g.batch([]step{{0, 0, 40}})
	weights := make([]float32, 40*2)
	for i := range weights {
		weights[i] = float32(math.Copysign(0, float64(i%3-1)))
	}
	if err := g.p.Write(g.ins[4].s, 0, weights); err != nil {
		t.Fatal(err)
	}
	if err := g.p.Run(b); err != nil {
		t.Fatal(err)
	}
	// Row 38 sees 9 pools: the list must be pools 0 and 1, then the tail 36, 37, 38.
	var got float64
	q := g.input(5, 0, 38)
	list := []int{0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38}
	sum, acc := 0.0, 0.0
	for _, p := range list {
		row, dot := m.latentRow(g, 0, p), 0.0
		for i, v := range row {
			dot += v * float64(q[i]) * float64(m.scale)
		}
		sum += math.Exp(dot)
		acc += math.Exp(dot) * row[0]
	}
	got = float64(g.p.Read(g.outs[0].s, 38, 1)[0])
	if math.Abs(got-acc/sum) > 1e-5 {
		t.Errorf("attended %v, want %v from positions %v", got, acc/sum, list)
	}
}

func f32s(p []byte) []float32 {
	out := make([]float32, len(p)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(p[4*i:]))
	}
	return out
}
