package model

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"rocket/kernels"
)

// randomTolerance is on logits relative to the largest, between class F32 and the float64 reference on random small
// models. It is wider than nano's: these weights are wild, and gates and norms amplify.
const randomTolerance = 5e-5

// drawConfig draws a small model: every size apart, no two equal by habit, so that a swapped dimension shows.
func drawConfig(t *rapid.T) Config {
	pick := func(name string, of ...int) int { return rapid.SampledFrom(of).Draw(t, name) }
	c := Config{
		Family: "glm5_next", Vocab: pick("vocab", 61, 96), Hidden: pick("hidden", 32, 48, 80), ContextLimit: testLimit, NormEps: 1e-5,
		TiedHead: rapid.Bool().Draw(t, "tied"), MTP: rapid.Bool().Draw(t, "mtp"),
		KDAHeads: pick("kda heads", 1, 2, 3), KDADim: pick("kda dim", 16, 32, 64), KDAConv: pick("conv", 2, 3, 4),
		KDALowerBound: float32(pick("bound", -5, -2, 0)),
		Heads:         pick("heads", 1, 2, 3), QRank: pick("q rank", 24, 40), KVRank: pick("kv rank", 16, 32, 48), NopeDim: pick("nope", 16, 24), VDim: pick("v dim", 8, 32),
		IndexHeads: pick("index heads", 1, 2, 5), IndexDim: pick("index dim", 16, 32), IndexPool: pick("pool", 1, 2, 4, 8, 16, 32),
		Inter: pick("inter", 40, 64), SwigluLimit: float32(pick("limit", 1, 10)),
		Experts: pick("experts", 4, 6, 8), TopK: pick("top-k", 1, 2), MoEInter: pick("moe inter", 24, 32), SharedExperts: pick("shared", 0, 1, 2),
		Groups: pick("groups", 1, 2), TopKGroups: 1, NormTopK: rapid.Bool().Draw(t, "norm"), RoutedScaling: 1.5,
		Streams: pick("streams", 1, 2, 4), SinkhornIters: pick("iters", 1, 3, 20), HCEps: 1e-6,
	}
	c.IndexTopK = c.IndexPool * pick("pools", 1, 2, 5)
	full := false
	for i := range pick("layers", 2, 3, 4) {
		l := Layer{Kind: LayerKDA, MLP: MLPSparse}
		if rapid.Bool().Draw(t, "mla") {
			l.Kind = LayerMLA
			l.Shared = full && rapid.Bool().Draw(t, "reuse")
			full = full || !l.Shared
		}
		if i == 0 || rapid.IntRange(0, 3).Draw(t, "dense") == 0 {
			l.MLP = MLPDense
		}
		c.Layers = append(c.Layers, l)
	}
	return c
}

func drawModel(rt *rapid.T, t *testing.T, class kernels.Class) *Model {
	m, _ := drawSeeded(rt, t, class)
	return m
}

func drawSeeded(rt *rapid.T, t *testing.T, class kernels.Class) (*Model, uint64) {
	seed := rapid.Uint64().Draw(rt, "weights")
	m, err := Random(openDevice(t), drawConfig(rt), Options{Class: class}, seed)
	if err != nil {
		rt.Fatal(err)
	}
	return m, seed
}

func drawRNG(rt *rapid.T) *rand.Rand {
	return rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "draws"), 1))
}

// chunks cuts n tokens into random pieces of at most most.
func chunks(rng *rand.Rand, n, most int) (out []int) {
	for n > 0 {
		c := min(n, 1+rng.IntN(most))
		if rng.IntN(3) == 0 {
			c = 1
		}
		out, n = append(out, c), n-c
	}
	return out
}

// rapidHarness frees its arenas when the case ends, not the test.
func rapidHarness(rt *rapid.T, m *Model, maxRows, maxSegs, pages, slots int) (*harness, func()) {
	h := &harness{t: rt, m: m, layout: m.Layout()}
	var err error
	if h.pages, err = m.dev.NewBuffer(pages * h.layout.PageStride); err != nil {
		rt.Fatal(err)
	}
	if h.slots, err = m.dev.NewBuffer(slots * h.layout.SlotStride); err != nil {
		rt.Fatal(err)
	}
	if h.plan, err = m.Plan(h.pages, h.slots, maxRows, maxSegs); err != nil {
		rt.Fatal(err)
	}
	return h, func() { h.plan.Free(); h.pages.Free(); h.slots.Free(); m.Close() }
}

// TestRandomModels: the trunk against the float64 reference, over page edges, in random chunks.
func TestRandomModels(t *testing.T) {
	worstSeen := 0.0
	rapid.Check(t, func(rt *rapid.T) {
		m, seed := drawSeeded(rt, t, kernels.ClassF32)
		h, free := rapidHarness(rt, m, 64, 1, 8, 2)
		defer free()
		rng := drawRNG(rt)
		ids := randomTokens(rng, m.Vocab(), rapid.SampledFrom([]int{1, 40, 128, 150, 290}).Draw(rt, "length"))
		ref := newReference(rt, m.Config, random{seed})
		hidden, want := ref.forward(ids)
		s := h.seq()
		got := h.prefill(s, ids, chunks(rng, len(ids), 64)...)
		n := min(ref.unsure, len(ids))
		if n == 0 {
			return
		}
		e := worst(got[:n], narrow(want[:n]))
		worstSeen = max(worstSeen, e)
		if e > randomTolerance {
			rt.Fatalf("logits of %d rows differ by %.2e of the largest\n%+v", n, e, m.Config)
		}
		if !m.Config.MTP || n < 2 {
			return
		}
		ref.unsure = n - 1
		_, want = ref.draft(ids[1:n], hidden[:n-1])
		got = h.draft(ids[1:n], narrow(hidden[:n-1]))
		if n = ref.unsure; n > 0 && worst(got[:n], narrow(want[:n])) > randomTolerance {
			rt.Fatalf("draft logits of %d rows differ by %.2e of the largest\n%+v", n, worst(got[:n], narrow(want[:n])), m.Config)
		}
	})
	t.Logf("worst difference %.2e", worstSeen)
}

// TestRandomBatches: several sequences in ragged batches give the bits that each gives alone.
func TestRandomBatches(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := drawModel(rt, t, rapid.SampledFrom(classes).Draw(rt, "class"))
		const seqs, maxRows = 4, 96
		h, free := rapidHarness(rt, m, maxRows, seqs, 24, 2*seqs)
		defer free()
		rng := drawRNG(rt)
		var lines, got [seqs]struct {
			ids  []int32
			rows [][]float32
			s    *seq
		}
		for i := range lines {
			lines[i].ids = randomTokens(rng, m.Vocab(), 1+rng.IntN(200))
			lines[i].s = h.seq()
			lines[i].rows = h.prefill(lines[i].s, lines[i].ids, maxRows)
			got[i].s = h.seq()
		}
		for {
			var spans []span
			var who []int
			room := maxRows
			for _, i := range rng.Perm(seqs) {
				s := got[i].s
				if n := min(len(lines[i].ids)-s.n, 1+rng.IntN(40), room); n > 0 && rng.IntN(4) > 0 {
					spans, who, room = append(spans, span{s: s, tokens: lines[i].ids[s.n : s.n+n]}), append(who, i), room-n
				}
			}
			if len(spans) == 0 {
				done := true
				for i := range got {
					done = done && got[i].s.n == len(lines[i].ids)
				}
				if done {
					break
				}
				continue
			}
			rows := h.step(spans...)
			for j, i := range who {
				n := len(spans[j].tokens)
				got[i].rows, rows = append(got[i].rows, rows[:n]...), rows[n:]
			}
		}
		for i := range lines {
			sameBits(rt, "batched", got[i].rows, lines[i].rows)
			sameBits(rt, "kept hidden row", [][]float32{h.hidden(got[i].s)}, [][]float32{h.hidden(lines[i].s)})
		}
	})
}

// TestRandomForks: a copy of slot and partial page goes on bit for bit; a replay from an older state over pages that
// hold its entries already gives the same bits and leaves those pages alone.
func TestRandomForks(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := drawModel(rt, t, rapid.SampledFrom(classes).Draw(rt, "class"))
		h, free := rapidHarness(rt, m, 64, 2, 32, 8)
		defer free()
		rng := drawRNG(rt)
		ids := randomTokens(rng, m.Vocab(), 2+rng.IntN(280))
		old := rng.IntN(len(ids) - 1)             // where the older state was taken
		cut := old + 1 + rng.IntN(len(ids)-old-1) // where the fork happens
		whole := h.prefill(h.seq(), ids, 64)

		parent := h.seq()
		h.prefill(parent, ids[:old], 64)
		older := h.fork(parent)
		older.table = parent.table // it will read the parent's pages: only the state is its own
		h.prefill(parent, ids[old:cut], chunks(rng, cut-old, 30)...)
		child := h.fork(parent)
		sameBits(rt, "parent", h.prefill(parent, ids[cut:], 64), whole[cut:])
		sameBits(rt, "fork", h.prefill(child, ids[cut:], chunks(rng, len(ids)-cut, 9)...), whole[cut:])

		// The replay starts at old with the parent's table of cut tokens.
		older.table = append([]int32{}, parent.table[:(cut+pageTokens-1)/pageTokens]...)
		before := h.page(older.table)
		tokens, row := ids[old:cut], old
		for _, n := range chunks(rng, len(tokens), 20) {
			sameBits(rt, "replay", h.step(span{s: older, tokens: tokens[:n], writeFrom: cut}), whole[row:row+n])
			tokens, row = tokens[n:], row+n
		}
		if !bytes.Equal(h.page(older.table), before) {
			rt.Fatal("a replay below write_from wrote to shared pages")
		}
	})
}

// draft is one teacher-forced depth over pages of its own.
func (h *harness) draft(ids []int32, hidden [][]float32) [][]float32 {
	h.t.Helper()
	n := len(ids)
	pages, err := h.m.dev.NewBuffer((n + pageTokens - 1) / pageTokens * h.layout.PageStride)
	if err != nil {
		h.t.Fatal(err)
	}
	defer pages.Free()
	p, err := h.m.MTPPlan(pages, n, 1)
	if err != nil {
		h.t.Fatal(err)
	}
	defer p.Free()
	b := kernels.Batch{Tokens: ids, Segs: []kernels.Seg{{Rows: int32(n)}}, Logits: make([]float32, n*h.m.Vocab())}
	rows := make([][]float32, n)
	for i := range rows {
		b.OutRows = append(b.OutRows, int32(i))
		rows[i] = b.Logits[i*h.m.Vocab() : (i+1)*h.m.Vocab()]
		if i%pageTokens == 0 {
			b.Pages = append(b.Pages, int32(i/pageTokens))
		}
		if err := p.Write(p.Hidden, i, hidden[i]); err != nil {
			h.t.Fatal(err)
		}
	}
	if err := p.Run(&b); err != nil {
		h.t.Fatal(err)
	}
	return rows
}

// page reads whole pages.
func (h *harness) page(ids []int32) []byte {
	out := make([]byte, 0, len(ids)*h.layout.PageStride)
	for _, id := range ids {
		b := make([]byte, h.layout.PageStride)
		if err := h.pages.Read(int(id)*h.layout.PageStride, b); err != nil {
			h.t.Fatal(err)
		}
		out = append(out, b...)
	}
	return out
}
