package verify

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"rocket/engine/checkpoint"
	"rocket/engine/model"
	"rocket/engine/quant"
	"rocket/kernels"
	"rocket/models/nano"
)

func openDevice(t *testing.T) *kernels.Device {
	t.Helper()
	dev, err := kernels.Open("auto", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	return dev
}

// randomRunner runs a random model with every kind of layer, draft layer included.
func randomRunner(t *testing.T, dev *kernels.Device, seed uint64) *runner {
	t.Helper()
	c, err := model.ReadConfig("../model/testdata/glm5-next-shared")
	if err != nil {
		t.Fatal(err)
	}
	c.MTP = true
	m, err := model.Random(dev, c, model.Options{ContextLimit: 512}, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	r, err := newRunner(dev, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func randomTexts(n ...int) (texts [][]int32) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, k := range n {
		ids := make([]int32, k)
		for i := range ids {
			ids[i] = rng.Int32N(384)
		}
		texts = append(texts, ids)
	}
	return texts
}

// TestMeasureItself: against itself a model is the same in every number; against another it is not.
func TestMeasureItself(t *testing.T) {
	dev := openDevice(t)
	a, b := randomRunner(t, dev, 1), randomRunner(t, dev, 2)
	texts, seen := randomTexts(300, 20, 150), 0
	m, err := measure(t.Context(), a, a, texts[1:], nil)
	if err == nil {
		twin := randomRunner(t, dev, 1)
		m, err = measure(t.Context(), a, twin, texts, func(n int) { seen += n })
	}
	if err != nil {
		t.Fatal(err)
	}
	if m.Tokens != 467 || seen != 467 || m.Parity != 1 || m.Perplexity.Ratio != 1 || m.Perplexity.Baseline < 2 || m.Perplexity.Baseline != math.Exp(m.Perplexity.CandidateLoss) {
		t.Errorf("%d tokens, %d seen, parity %v, perplexity %+v", m.Tokens, seen, m.Parity, m.Perplexity)
	}
	if got := regressions("", m); len(got) != 0 {
		t.Errorf("regressions against itself: %q", got)
	}
	for _, c := range m.Channels {
		if c.RMSRatio != 1 || c.TV != 0 || *c.Error != 0 || c.Agreement != nil && *c.Agreement != 1 {
			t.Errorf("%+v", c)
		}
	}
	var kinds []model.TapKind
	for _, k := range m.Kinds {
		kinds = append(kinds, k.Kind)
	}
	want := []model.TapKind{model.TapLinear, model.TapLinearOut, model.TapMLP, model.TapRouter, model.TapFull, model.TapFullOut, KindState}
	if slices.Sort(kinds); !slices.Equal(kinds, slices.Sorted(slices.Values(want))) {
		t.Errorf("kinds %v", kinds)
	}
	if d := m.Drafts; d == nil || !slices.Equal(d.Baseline.Agreement, d.Candidate.Agreement) || d.Baseline.AcceptedLength < 1 {
		t.Errorf("drafts %+v", d)
	}
	m, err = measure(t.Context(), a, b, texts, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := regressions("x: ", m); len(got) < 4 || !strings.HasPrefix(got[0], "x: ") || m.Parity > 0.5 {
		t.Errorf("another model: parity %v, regressions %q", m.Parity, got)
	}
}

// TestMeasureChunks: what is measured does not depend on where chunks end, and the loss is the logits' own.
func TestMeasureChunks(t *testing.T) {
	dev := openDevice(t)
	r := randomRunner(t, dev, 5)
	text := randomTexts(200)[0]
	p, err := newPass(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.reset(); err != nil {
		t.Fatal(err)
	}
	for pos := 0; pos < 199; {
		n := min(1+pos/3, 199-pos, chunkRows)
		if err := p.chunk(text, text[pos:pos+n], pos); err != nil {
			t.Fatal(err)
		}
		pos += n
	}
	m, err := measure(t.Context(), r, randomRunner(t, dev, 5), [][]int32{text}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := p.loss / 199; got != m.Perplexity.BaselineLoss {
		t.Errorf("loss %v in other chunks, %v in whole ones", got, m.Perplexity.BaselineLoss)
	}
	if math.Abs(surprise([]float32{0, float32(math.Log(3))}, 1)-math.Log(4.0/3)) > 1e-6 {
		t.Error("surprise of 3 in 4 is wrong")
	}
}

func TestNumbersThatAreNone(t *testing.T) {
	nan := float32(math.NaN())
	if argmax([]float32{1, nan, 2}) != -1 || argmax([]float32{1, 3, 3}) != 1 || argmax([]float32{float32(math.Inf(1))}) != -1 {
		t.Error("argmax")
	}
	base, cand, diff := observed{name: "layers.0.x", kind: model.TapMLP}, observed{name: "layers.0.x", kind: model.TapMLP}, math.NaN()
	base.add([]float32{1, 2})
	cand.add([]float32{1, nan})
	c := cand.against(&base, 1, &diff)
	m := Measured{Parity: math.NaN(), Perplexity: Perplexity{Ratio: finite(math.NaN())}, Channels: []Channel{c},
		Drafts: &Drafts{DraftSide{AcceptedLength: 2}, DraftSide{AcceptedLength: math.NaN()}}}
	if got := regressions("", m); len(got) < 4 {
		t.Errorf("regressions %q", got)
	}
	if _, err := json.Marshal(m.Channels); err != nil {
		t.Error(err)
	}
}

// TestBounds: just inside passes, just outside is named.
func TestBounds(t *testing.T) {
	good := 0.9
	inside := Measured{Parity: minTokenParity, Perplexity: Perplexity{Ratio: maxPerplexityRatio}, Drafts: &Drafts{DraftSide{AcceptedLength: 2}, DraftSide{AcceptedLength: 2 * (1 - maxAcceptedDrop)}}}
	for kind, b := range bounds {
		inside.Channels = append(inside.Channels, Channel{Name: "x", Kind: kind, RMSRatio: b.ratio, TV: b.tv, Agreement: &good})
	}
	if got := regressions("", inside); len(got) != 0 {
		t.Errorf("at the bounds: %q", got)
	}
	for name, spoil := range map[string]func(*Measured){
		"perplexity":      func(m *Measured) { m.Perplexity.Ratio += 1e-6 },
		"token parity":    func(m *Measured) { m.Parity -= 1e-6 },
		"accepted length": func(m *Measured) { m.Drafts = &Drafts{DraftSide{AcceptedLength: 2}, DraftSide{AcceptedLength: 1.5}} },
		"RMS ratio":       func(m *Measured) { m.Channels[0].RMSRatio = 0.5 },
		"histograms":      func(m *Measured) { m.Channels[0].TV = 0.5 },
		"experts":         func(m *Measured) { bad := 0.5; m.Channels[0].Agreement = &bad },
	} {
		m := inside
		m.Channels = slices.Clone(inside.Channels)
		spoil(&m)
		if got := regressions("", m); len(got) != 1 || !strings.Contains(got[0], name) {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestHistogram(t *testing.T) {
	last := -1
	for _, x := range []float64{math.Inf(-1), -1e9, -3, -2, -1.5, -1, -1e-3, -1e-20, 0, 1e-42, 1e-20, 1e-3, 1, 1.5, 2, 3, 1e9, math.Inf(1)} {
		b := histBin(float32(x))
		if b < 0 || b >= histBins || b < last {
			t.Errorf("%g is in bin %d, the one before in %d of %d", x, b, last, histBins)
		}
		last = b
	}
	if histBin(1) == histBin(1.5) || histBin(1) != histBin(1.4) || histBin(1e-20) != histBin(0) {
		t.Error("bins are not half octaves")
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20_000 { // bins are half octaves of the logarithm
		x := float32(math.Exp(rng.NormFloat64() * 4))
		if want := histHalf + 1 + int(math.Floor(2*math.Log2(float64(x)))) + 2*histSpan; histBin(x) != want || histBin(-x) != 2*histHalf-want {
			t.Fatalf("%g is in bin %d, want %d", x, histBin(x), want)
		}
	}
	var base, cand observed
	base.add([]float32{1, 1, 1, 1})
	cand.add([]float32{1, 1, 2, 4})
	diff := 10.0
	r := cand.against(&base, 4, &diff)
	if r.TV != 0.5 || math.Abs(r.RMSRatio-math.Sqrt(22.0/4)) > 1e-12 || math.Abs(*r.Error-math.Sqrt(10.0/4)) > 1e-12 {
		t.Errorf("%+v", r)
	}
	base.experts, cand.experts = []int64{0, 1, 2, 3}, []int64{1, 2, 2, 3}
	if r = cand.against(&base, 2, nil); *r.Agreement != 0.75 || r.Error != nil {
		t.Errorf("%+v", r)
	}
}

func TestChoose(t *testing.T) {
	c := model.Config{Experts: 4, TopK: 2, Groups: 1, TopKGroups: 1}
	zero := make([]float32, 4)
	for _, tc := range []struct {
		groups, open int
		logits, bias []float32
		want         []int
	}{
		{1, 1, []float32{0, 3, -1, 2}, zero, []int{1, 3}},
		{1, 1, []float32{1, 1, 1, 1}, zero, []int{0, 1}},
		{1, 1, []float32{0, 3, -1, 2}, []float32{1, 0, 1, 0}, []int{0, 2}},
		{2, 1, []float32{5, -9, 1, 1}, zero, []int{2, 3}}, // the group of the two ones is better than that of the five
	} {
		c.Groups, c.TopKGroups = tc.groups, tc.open
		if got := choose(c, tc.logits, tc.bias); !slices.Equal(got, tc.want) {
			t.Errorf("%v with %v in %d groups: %v, want %v", tc.logits, tc.bias, tc.groups, got, tc.want)
		}
	}
}

// smallModel writes a tiny random model with the nano model's tokenizer.
func smallModel(t *testing.T) string {
	t.Helper()
	const from = "../model/testdata/glm5-next-shared"
	ck, err := checkpoint.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	l := checkpoint.Layout{Files: map[string][]byte{}}
	rng := rand.New(rand.NewPCG(1, 1))
	for _, name := range ck.Names() {
		x, _ := ck.Tensor(name)
		info, data := checkpoint.TensorInfo{Name: name, DType: x.DType, Shape: slices.Clone(x.Shape)}, slices.Clone(x.Data)
		if info.Shape[0] == 384 {
			info.Shape[0] = 4096
			data = nil
			for range 4096 * info.Shape[1] {
				b := checkpoint.ToBF16(float32(rng.NormFloat64() * 0.3))
				data = append(data, byte(b), byte(b>>8))
			}
		}
		l.Groups = append(l.Groups, checkpoint.TensorGroup{Tensors: []checkpoint.TensorInfo{info}, Make: func() ([][]byte, error) { return [][]byte{data}, nil }})
	}
	text, err := os.ReadFile(filepath.Join(from, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	l.Files["config.json"] = []byte(strings.Replace(string(text), `"vocab_size": 384`, `"vocab_size": 4096`, 1))
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if l.Files[name], err = nano.FS.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(t.TempDir(), "small")
	if err := checkpoint.Write(t.Context(), dir, l); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestRun verifies a small model's FP8 form. It knows no Go, so the cases prove nothing, and that is said; what is
// measured passes.
func TestRun(t *testing.T) {
	base := smallModel(t)
	made, err := quant.Run(t.Context(), quant.Options{Source: base, Out: t.TempDir(), Map: quant.Map{model.RoutedExperts: quant.FP8, model.LinearAttention: quant.NVFP4}})
	if err != nil {
		t.Fatal(err)
	}
	docs, err := nano.HeldOut()
	if err != nil {
		t.Fatal(err)
	}
	var done, all int64
	r, err := Run(t.Context(), Options{Device: openDevice(t), Baseline: base, Candidate: made.Dir, HeldOut: docs[:2], Progress: func(d, a int64) { done, all = d, a }})
	if err != nil {
		t.Fatal(err)
	}
	if r.Total != 12 || len(r.Cases) != 12 || r.Passed == 12 {
		t.Errorf("%d of %d cases, %d listed", r.Passed, r.Total, len(r.Cases))
	}
	failed := 0
	for _, s := range r.Regressions {
		if strings.Contains(s, "the baseline itself fails") {
			failed++
		}
	}
	if failed+r.Passed != 12 {
		t.Errorf("%d cases that prove nothing and %d passed: %q", failed, r.Passed, r.Regressions)
	}
	if len(r.Families) != 2 || r.Families[0].Family != model.LinearAttention || r.Families[1].Family != model.RoutedExperts {
		t.Fatalf("families %+v", r.Families)
	}
	// Eight bits of the experts are nearer to the baseline than four of the attention, and both together farther.
	lin, exp := r.Families[0].Perplexity, r.Families[1].Perplexity
	off := func(p Perplexity) float64 { return math.Abs(math.Log(p.Ratio)) }
	if r.Families[1].Parity < r.Families[0].Parity || r.Combined.Parity > r.Families[1].Parity || off(exp) > 0.05 || off(lin) > 0.2 {
		t.Errorf("parity %v combined, %v and %v alone; perplexity %+v, %+v", r.Combined.Parity, r.Families[0].Parity, r.Families[1].Parity, lin, exp)
	}
	if r.Candidate.StepBytes >= r.Baseline.StepBytes || r.Candidate.Formats[model.RoutedExperts]["FP8 block"] == 0 || r.Baseline.Digest == r.Candidate.Digest {
		t.Errorf("sides %+v and %+v", r.Baseline, r.Candidate)
	}
	if done < all*9/10 || all == 0 {
		t.Errorf("progress ended at %d of %d", done, all)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestRunRefuses(t *testing.T) {
	dev, base := openDevice(t), smallModel(t)
	docs, _ := nano.HeldOut()
	for name, tc := range map[string]struct {
		o    Options
		want string
	}{
		"another model": {Options{Baseline: base, Candidate: "../../models/nano", HeldOut: docs}, "different models"},
		"no text":       {Options{Baseline: base, Candidate: base}, "no held-out text"},
		"no folder":     {Options{Baseline: base, Candidate: t.TempDir(), HeldOut: docs}, "tokenizer.json"},
	} {
		tc.o.Device = dev
		if _, err := Run(t.Context(), tc.o); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, tc.want)
		}
	}
}
