package model

import (
	"strings"
	"testing"

	"rocket/kernels"
)

// TestBenchConfig: the benchmark model validates, has every kind of layer, and is of the size that it says.
func TestBenchConfig(t *testing.T) {
	c := BenchConfig()
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	b := &builder{c: c, src: random{1}}
	b.all(&Model{layers: make([]layerWeights, len(c.Layers))})
	values := int64(0)
	for _, j := range b.jobs {
		values += j.values
	}
	if gib := float64(2*values) / (1 << 30); gib < 1.4 || gib > 1.6 {
		t.Errorf("%.2f GiB in BF16, want about 1.5", gib)
	}
	kinds := map[Layer]int{}
	for _, l := range c.Layers {
		kinds[l]++
	}
	if len(c.Layers) < 16 || kinds[Layer{Kind: LayerMLA, MLP: MLPSparse}] != len(c.Layers)/4 || kinds[Layer{Kind: LayerKDA, MLP: MLPDense}] != 1 || !c.MTP {
		t.Errorf("layers %v", kinds)
	}
	checkLayout(t, LayoutOf(c, kernels.ClassBF16))
	checkLayout(t, LayoutOf(c, kernels.ClassF32))
}

func TestStepCost(t *testing.T) {
	m := load(t, nanoDir, kernels.ClassBF16)
	one, two, many := m.StepCost(1, 100), m.StepCost(2, 100), m.StepCost(10_000, 100)
	if one.FMAs*2 != two.FMAs || one.StateBytes*2 != two.StateBytes || one.CacheBytes*2 != two.CacheBytes {
		t.Errorf("two rows do not cost twice one: %+v, %+v", one, two)
	}
	if one.WeightBytes >= two.WeightBytes || two.WeightBytes >= 2*one.WeightBytes {
		t.Errorf("weights are not shared between rows: %+v, %+v", one, two)
	}
	// Many rows touch all that the trunk has, and the embedding only by rows.
	trunk := m.WeightBytes() - int64(m.embed.Bytes())
	for _, w := range []*kernels.Weight{m.mtp.eh, m.mtp.mla.qa, m.mtp.mla.qb, m.mtp.mla.kva, m.mtp.mla.uk, m.mtp.mla.uv, m.mtp.mla.out,
		m.mtp.mla.index.q, m.mtp.mla.index.k, m.mtp.mla.index.gate, m.mtp.mla.index.heads, m.mtp.mlp.router, m.mtp.mlp.sharedUp, m.mtp.mlp.sharedDown} {
		trunk -= int64(w.Bytes())
	}
	for e := range m.mtp.mlp.expertsUp {
		trunk -= int64(m.mtp.mlp.expertsUp[e].Bytes() + m.mtp.mlp.expertsDown[e].Bytes())
	}
	if got := many.WeightBytes - 10_000*int64(m.embed.Bytes())/int64(m.Vocab()); got != trunk {
		t.Errorf("many rows touch %d bytes of weights, the trunk has %d", got, trunk)
	}
	if state := int64(2 * m.Layout().SlotBytes); one.StateBytes != state {
		t.Errorf("state %d, want %d", one.StateBytes, state)
	}
	// Above index_topk the selection's latents stop growing, the pooled keys do not.
	a, b := m.StepCost(1, 1024), m.StepCost(1, 2048)
	if want := int64(3 * 1024 / 4 * 32 * 2); b.CacheBytes-a.CacheBytes != want {
		t.Errorf("1024 tokens more cost %d bytes of caches, want %d", b.CacheBytes-a.CacheBytes, want)
	}
	// 27.4 M parameters, of which a row uses all but the draft layer, the embedding and 14 of 16 experts.
	if one.FMAs < 8_000_000 || one.FMAs > 12_000_000 {
		t.Errorf("%d FMAs a row", one.FMAs)
	}
	if one.Bytes() != one.WeightBytes+one.StateBytes+one.CacheBytes {
		t.Error("Bytes is not the sum")
	}
}

// TestRandomSeeds: the same seed gives the same model, another seed or config another digest.
func TestRandomSeeds(t *testing.T) {
	c, err := ReadConfig(fixtureDir)
	if err != nil {
		t.Fatal(err)
	}
	run := func(seed uint64) (string, [][]float32) {
		m, err := Random(openDevice(t), c, Options{ContextLimit: testLimit}, seed)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		h := newHarness(t, m, 4, 1, 1, 1)
		return m.Digest, h.prefill(h.seq(), []int32{1, 2, 3}, 3)
	}
	d1, r1 := run(1)
	d2, r2 := run(1)
	d3, r3 := run(2)
	if d1 != d2 || d1 == d3 {
		t.Errorf("digests %s %s %s", d1, d2, d3)
	}
	sameBits(t, "same seed", r2, r1)
	if worst(r3, r1) < 0.01 {
		t.Error("another seed gives the same logits")
	}
	for want, spoil := range map[string]func(*Config){
		"index_kpool 3":     func(c *Config) { c.IndexPool = 3 },
		"layer 0: the kern": func(c *Config) { c.KDADim = 20 },
	} {
		bad := c
		spoil(&bad)
		if _, err := Random(openDevice(t), bad, Options{}, 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}
