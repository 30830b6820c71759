package model

import (
	"strings"
	"testing"

	"rocket/engine/checkpoint"
)

// TestFamilies: every tensor that a model has is in the family that the documentation says, or in none.
func TestFamilies(t *testing.T) {
	c, err := ReadConfig(nanoDir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]Family{
		"embed_tokens": "", "lm_head": "", "norm": "",
		"layers.0.self_attn.q_proj": LinearAttention, "layers.0.self_attn.g_b_proj": LinearAttention, "layers.10.self_attn.o_proj": LinearAttention,
		"layers.0.self_attn.b_proj": "", "layers.0.self_attn.q_conv1d": "", "layers.0.self_attn.A_log": "", "layers.0.self_attn.q_a_proj": "",
		"layers.3.self_attn.q_a_proj": FullAttention, "layers.3.self_attn.kv_b_proj": FullAttention, "layers.11.self_attn.o_proj": FullAttention,
		"layers.3.self_attn.q_proj": "", "layers.3.self_attn.indexer.wq_b": "", "layers.3.self_attn.indexer.weights_proj": "",
		"layers.0.mlp.gate_proj": SharedExperts, "layers.0.mlp.gate": "", "layers.0.mlp.experts.1.up_proj": "", "layers.1.mlp.gate_proj": "",
		"layers.1.mlp.shared_experts.down_proj": SharedExperts, "layers.1.mlp.gate": BaseRouters, "layers.1.mlp.gate.e_score_correction_bias": "",
		"layers.1.mlp.experts.15.down_proj": RoutedExperts, "layers.1.mlp.experts.gate_up_proj": RoutedExperts, "layers.1.mlp.experts.down_proj": RoutedExperts,
		"layers.1.hc_attn_fn": "", "layers.1.input_layernorm": "",
		"layers.12.self_attn.o_proj": MTP, "layers.12.mlp.experts.3.up_proj": MTP, "layers.12.mlp.shared_experts.up_proj": MTP, "layers.12.eh_proj": MTP,
		"layers.12.mlp.gate": "", "layers.12.enorm": "", "layers.12.self_attn.indexer.wk": "", "layers.13.eh_proj": "", "layers.x.eh_proj": "", "layers.-1.eh_proj": "",
	} {
		if got := c.FamilyOf(name); got != want {
			t.Errorf("%s is in family %q, want %q", name, got, want)
		}
	}
	ck, err := checkpoint.Open(nanoDir)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	seen := map[Family]int{}
	for _, name := range ck.Names() {
		seen[c.FamilyOf(moduleOf(name, "model.language_model."))]++
	}
	for _, f := range Families {
		if seen[f] == 0 {
			t.Errorf("the nano model has no tensor of %s", f)
		}
		if got, err := ParseFamily(string(f)); got != f || err != nil {
			t.Error(got, err)
		}
	}
	c.MTP = false
	if f := c.FamilyOf("layers.12.eh_proj"); f != "" {
		t.Errorf("a model without a draft layer has %s", f)
	}
	if _, err := ParseFamily("router"); err == nil || !strings.Contains(err.Error(), `"router" is not known (known: linear_attention,`) {
		t.Error(err)
	}
}

// TestInspectFamilies: every byte and every matrix is in one family, and a step touches what StepCost says it does
// where weights are resident as they are stored.
func TestInspectFamilies(t *testing.T) {
	for _, dir := range []string{nanoDir, fixtureDir, "testdata/glm5-next"} {
		r, err := Inspect(dir)
		if err != nil {
			t.Fatal(err)
		}
		var bytes, all int64
		matrices, kinds, weights := 0, 0, 0
		for f, fr := range r.Families {
			bytes, matrices = bytes+fr.Bytes, matrices+fr.Matrices
			for _, n := range fr.Kinds {
				kinds += n
			}
			if f != "" && f != MTP && fr.Bytes == 0 {
				t.Errorf("%s: family %s has no bytes", dir, f)
			}
		}
		for _, n := range r.Bytes {
			all += n
		}
		for _, n := range r.Weights {
			weights += n
		}
		if bytes != all || matrices != weights || kinds != weights {
			t.Errorf("%s: families hold %d bytes and %d matrices (%d by kind) of %d and %d", dir, bytes, matrices, kinds, all, weights)
		}
		// Very many rows touch all but the draft layer, and of the embedding a row each.
		rows, c := 1_000_000, r.Config
		want := all - r.Families[MTP].Bytes - r.draftBytes - r.embedBytes + int64(rows)*r.embedBytes/int64(c.Vocab)
		if got := r.StepWeightBytes(rows); got != want {
			t.Errorf("%s: %d rows touch %d bytes, want %d", dir, rows, got, want)
		}
		// One row runs its own few experts.
		want += int64(1-rows)*r.embedBytes/int64(c.Vocab) - r.Families[RoutedExperts].Bytes*int64(c.Experts-c.TopK)/int64(c.Experts)
		if got := r.StepWeightBytes(1); got < want-1 || got > want+1 {
			t.Errorf("%s: one row touches %d bytes, want %d", dir, got, want)
		}
	}
	m := load(t, fixtureDir, 0) // BF16, resident as BF16
	r, _ := Inspect(fixtureDir)
	if stored, resident := r.StepWeightBytes(16), m.StepCost(16, 100).WeightBytes; float64(stored) < 0.85*float64(resident) || float64(stored) > 1.1*float64(resident) {
		t.Errorf("a step of a BF16 model touches %d bytes as stored and %d as resident", stored, resident)
	}
}
