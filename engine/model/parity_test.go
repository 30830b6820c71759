package model

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

const nanoDir = "../../models/nano"

// fixtures are tiny checkpoints with transformers' outputs; see testdata/golden.py. Both select sparsely from position
// 20 or 40 on, the second with shared indexers, wider pools, two streams, expert groups and a biting SwiGLU clamp.
var fixtures = []string{"glm5-next", "glm5-next-shared"}

// transformersTolerance is on logits, relative to the largest: transformers computes in FP32 too, in another order.
const transformersTolerance = 1e-4

// openStored reads a checkpoint's tensors without packing them.
func openStored(t testing.TB, dir string) (Config, source) {
	t.Helper()
	c, err := ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	ck, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ck.Close() })
	src, err := newStored(ck)
	if err != nil {
		t.Fatal(err)
	}
	return c, src
}

// TestReferenceFixtures ties our own float64 reference to transformers, so that it is an oracle for what the fixtures
// do not cover.
func TestReferenceFixtures(t *testing.T) {
	for _, name := range fixtures {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata", name)
			c, src := openStored(t, dir)
			want := readOutputs(t, dir)
			hidden, logits := newReference(t, c, src).forward(want.ints("input_ids"))
			if e := worst(narrow(logits), want.rows("logits")); e > 1e-5 {
				t.Errorf("logits differ by %.2e of the largest", e)
			}
			last := want.rows(fmt.Sprintf("hidden.%d", len(c.Layers)))
			if e := worst(narrow(hidden), last); e > 1e-5 {
				t.Errorf("final hidden rows differ by %.2e of the largest", e)
			}
		})
	}
}

// TestReferenceNano ties it to what models/nano/reference.py computes of the nano weights, drafts included.
func TestReferenceNano(t *testing.T) {
	if testing.Short() {
		t.Skip("a float64 pass over the nano model takes seconds")
	}
	c, src := openStored(t, nanoDir)
	want := readOutputs(t, nanoDir)
	r := newReference(t, c, src)
	ids := want.ints("chat.input_ids")
	hidden, logits := r.forward(ids)
	if e := worst(narrow(logits), want.rows("chat.logits")); e > 1e-6 {
		t.Errorf("logits differ by %.2e of the largest", e)
	}
	for depth := 1; depth <= 3; depth++ {
		next, logits := r.draft(ids[depth:], hidden[:len(ids)-depth])
		if e := worst(narrow(logits), want.rows(fmt.Sprintf("chat.mtp%d.logits", depth))); e > 1e-6 {
			t.Errorf("draft logits at depth %d differ by %.2e of the largest", depth, e)
		}
		hidden = next
	}
}

// TestFixtures: transformers' logits and greedy tokens, and the same bits in one prefill, ragged chunks, token by token.
func TestFixtures(t *testing.T) {
	for _, name := range fixtures {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata", name)
			m, want := load(t, dir, kernels.ClassF32), readOutputs(t, dir)
			ids := want.ints("input_ids")
			h := newHarness(t, m, len(ids), 1, 8, 8)
			one := h.seq()
			rows := h.prefill(one, ids, len(ids))
			e := worst(rows, want.rows("logits"))
			t.Logf("logits differ by %.2e of the largest", e)
			if e > transformersTolerance {
				t.Errorf("logits differ by %.2e of the largest, at most %.0e is allowed", e, transformersTolerance)
			}
			if got := h.greedy(one, rows[len(rows)-1], 24); !slices.Equal(got, want.ints("greedy")) {
				t.Errorf("greedy tokens %v, want %v", got, want.ints("greedy"))
			}
			sameBits(t, "ragged chunks", h.prefill(h.seq(), ids, 1, 2, 13, 3, 40, 5, 7), rows)
			sameBits(t, "token by token", h.prefill(h.seq(), ids, 1), rows)
		})
	}
}

// TestArithmetic: plain C on one thread gives the bits of the fast code on all of them wherever their arithmetic ids
// are equal, and they are on processors.
func TestArithmetic(t *testing.T) {
	slow, err := kernels.Open("portable", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	fast := openDevice(t)
	if slow.Arithmetic() != fast.Arithmetic() {
		t.Fatalf("arithmetic ids %q and %q", slow.Arithmetic(), fast.Arithmetic())
	}
	ids := readOutputs(t, fixtureDir).ints("input_ids")
	for _, class := range classes {
		var rows [2][][]float32
		for i, dev := range []*kernels.Device{fast, slow} {
			m, err := Load(dev, fixtureDir, Options{Class: class, ContextLimit: testLimit})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			h := newHarness(t, m, len(ids), 1, 1, 1)
			rows[i] = h.prefill(h.seq(), ids, len(ids))
		}
		sameBits(t, class.String(), rows[1], rows[0])
	}
}

// Tolerances against the float64 outputs of the nano weights, relative to the largest value of the same kind. Class F32
// is held to the design's bound (measured: 1.1e-6 and less). Class BF16 pays for rounding operands and caches: three
// rows of four are within 4e-3, and the few far beyond are those whose choice of experts is nearly tied, and those that read
// them. In the float64 pass the worst row of all, of "long", decides by a score difference of 2e-4; row 8 of "code"
// decides by 1.8e-7 and falls the other way, which rows 9 and 10 still feel at 1.0e-2 and 1.6e-2. No tolerance can be
// tight there.
const (
	nanoToleranceF32    = 1e-5
	nanoBF16NineOfTen   = 1.5e-2 // measured: 9.4e-3, all rows of "code"
	nanoBF16Worst       = 4e-2   // logits; measured: 2.7e-2
	nanoBF16WorstHidden = 6e-2   // measured: 3.7e-2, the row of the worst logits
	nanoBF16WorstDraft  = 2e-2   // measured: 1.2e-2
)

// nanoCheck compares rows with the reference's under the class's tolerance.
func nanoCheck(t *testing.T, class kernels.Class, what string, got, want [][]float32, worstBF16 float64) {
	t.Helper()
	errs := rowErrors(got, want)
	slices.Sort(errs)
	nine, worst := errs[len(errs)*9/10], errs[len(errs)-1]
	t.Logf("%s %s: nine of ten rows within %.1e, worst %.1e", class, what, nine, worst)
	if class == kernels.ClassF32 && worst > nanoToleranceF32 {
		t.Errorf("%s %s: differs by %.2e of the largest, at most %.0e is allowed", class, what, worst, nanoToleranceF32)
	}
	if class == kernels.ClassBF16 && (worst > worstBF16 || nine > nanoBF16NineOfTen) {
		t.Errorf("%s %s: rows differ by %.2e (nine of ten) and %.2e (worst) of the largest, at most %.0e and %.0e is allowed", class, what, nine, worst, nanoBF16NineOfTen, worstBF16)
	}
}

// rowErrors is each row's largest difference over the largest value of all.
func rowErrors(got, want [][]float32) (errs []float64) {
	top := 0.0
	for i := range want {
		diff := 0.0
		for j, w := range want[i] {
			d := math.Abs(float64(got[i][j]) - float64(w))
			if math.IsNaN(d) {
				d = math.Inf(1)
			}
			diff, top = max(diff, d), max(top, math.Abs(float64(w)))
		}
		errs = append(errs, diff)
	}
	for i := range errs {
		errs[i] /= top
	}
	return errs
}

var classes = []kernels.Class{kernels.ClassF32, kernels.ClassBF16}

func TestNano(t *testing.T) {
	for _, class := range classes {
		t.Run(class.String(), func(t *testing.T) {
			m, want := load(t, nanoDir, class), readOutputs(t, nanoDir)
			h := newHarness(t, m, 256, 1, 64, 8)
			for _, prompt := range []string{"code", "chat"} {
				ids := want.ints(prompt + ".input_ids")
				s := h.seq()
				rows := h.prefill(s, ids, len(ids))
				nanoCheck(t, class, prompt, rows, want.rows(prompt+".logits"), nanoBF16Worst)
				// Greedy tokens are exact in both classes here, though class BF16 promises them only away from ties.
				if got, ref := h.greedy(s, rows[len(rows)-1], 32), want.ints(prompt+".greedy"); !slices.Equal(got, ref) {
					t.Errorf("%s: greedy tokens %v, want %v", prompt, got, ref)
				}
			}
			ids := want.ints("long.input_ids")
			const tail = 32
			rows := h.prefill(h.seq(), ids, 256)[len(ids)-tail:]
			nanoCheck(t, class, "long", rows, want.rows("long.logits_last32"), nanoBF16Worst)
			s := h.seq()
			h.prefill(s, ids[:len(ids)-tail], 200, 1, 77, 255)
			var single, hidden [][]float32
			for i := len(ids) - tail; i < len(ids); i++ {
				single = append(single, h.step(span{s: s, tokens: ids[i : i+1]})...)
				hidden = append(hidden, h.hidden(s))
			}
			sameBits(t, "long, decoded", single, rows)
			nanoCheck(t, class, "long, kept hidden rows", hidden, want.rows("long.hidden_last32"), nanoBF16WorstHidden)
		})
	}
}

// TestNanoDrafts: the teacher-forced draft pass at depths 1 to 3.
func TestNanoDrafts(t *testing.T) {
	for _, class := range classes {
		m, want := load(t, nanoDir, class), readOutputs(t, nanoDir)
		for _, prompt := range []string{"code", "chat"} {
			for i, rows := range drafts(t, m, want.ints(prompt+".input_ids")) {
				what := fmt.Sprintf("%s.mtp%d.logits", prompt, i+1)
				nanoCheck(t, class, what, rows, want.rows(what), nanoBF16WorstDraft)
			}
		}
	}
}

// drafts runs the trunk token by token, for its hidden rows, and then three depths, each with a page of its own.
func drafts(t *testing.T, m *Model, ids []int32) (depths [][][]float32) {
	h := newHarness(t, m, 1, 1, 2, 1)
	s := h.seq()
	var hidden []float32
	for i := range ids {
		h.step(span{s: s, tokens: ids[i : i+1]})
		hidden = append(hidden, h.hidden(s)...)
	}
	for depth := 1; depth <= 3; depth++ {
		pages, err := m.dev.NewBuffer(m.Layout().PageStride)
		if err != nil {
			t.Fatal(err)
		}
		p, err := m.MTPPlan(pages, len(ids), 1)
		if err != nil {
			t.Fatal(err)
		}
		rows := len(ids) - depth
		if err := p.Write(p.Hidden, 0, hidden[:rows*m.Config.Hidden]); err != nil {
			t.Fatal(err)
		}
		b := kernels.Batch{Tokens: ids[depth:], Segs: []kernels.Seg{{Rows: int32(rows)}}, Pages: []int32{0}, Logits: make([]float32, rows*m.Vocab())}
		var got [][]float32
		for i := range rows {
			b.OutRows = append(b.OutRows, int32(i))
			got = append(got, b.Logits[i*m.Vocab():(i+1)*m.Vocab()])
		}
		if err := p.Run(&b); err != nil {
			t.Fatal(err)
		}
		depths = append(depths, got)
		hidden = p.Read(p.Out, 0, rows)
		p.Free()
		pages.Free()
	}
	return depths
}

// randomTokens draws n token ids.
func randomTokens(rng *rand.Rand, vocab, n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(rng.IntN(vocab))
	}
	return ids
}

// TestNanoForks: on a line where the selection is active, children forked at random offsets and advanced together in
// ragged batches give their parent's bits.
func TestNanoForks(t *testing.T) {
	for _, class := range classes {
		t.Run(class.String(), func(t *testing.T) {
			m := load(t, nanoDir, class)
			h := newHarness(t, m, 256, 4, 48, 8)
			ids := readOutputs(t, nanoDir).ints("long.input_ids")
			whole := h.prefill(h.seq(), ids, 256)
			rng := rand.New(rand.NewPCG(7, uint64(class)))
			parent := h.seq()
			var children []*seq
			for i := range 4 {
				cut := 520 + 80*i + rng.IntN(80)
				h.prefill(parent, ids[parent.n:cut], 111)
				children = append(children, h.fork(parent))
			}
			for range 6 {
				var spans []span
				var want [][]float32
				for _, s := range children {
					n := min(1+rng.IntN(20), len(ids)-s.n)
					spans = append(spans, span{s: s, tokens: ids[s.n : s.n+n]})
					want = append(want, whole[s.n:s.n+n]...)
				}
				sameBits(t, "children", h.step(spans...), want)
			}
		})
	}
}
