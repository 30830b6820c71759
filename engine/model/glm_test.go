package model

import (
	"fmt"
	"strings"
	"testing"

	"rocket/kernels"
)

// glmFlash is GLM-5.3-Flash's geometry in the words of its own config, NVFP4 as ModelOpt writes it.
func glmFlash() string {
	list := func(f func(i int) string) string {
		var s []string
		for i := range 45 {
			s = append(s, fmt.Sprintf("%q", f(i)))
		}
		return "[" + strings.Join(s, ",") + "]"
	}
	kinds := list(func(i int) string {
		return map[bool]string{true: "deepseek_sparse_attention", false: "linear_attention"}[i%4 == 3]
	})
	mlps := list(func(i int) string { return map[bool]string{true: "dense", false: "sparse"}[i == 0] })
	return `{"architectures":["Glm5NextForConditionalGeneration"],"model_type":"glm5_next","image_token_id":154854,"vision_config":{"depth":24},
	"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4","group_size":16,"ignore":["lm_head"]},
	"text_config":{"model_type":"glm5_next_text","vocab_size":154880,"hidden_size":4096,"intermediate_size":12288,"moe_intermediate_size":2048,
	"num_hidden_layers":45,"num_attention_heads":64,"num_key_value_heads":64,"n_shared_experts":1,"n_routed_experts":288,"routed_scaling_factor":2.5,
	"kv_lora_rank":512,"q_lora_rank":1536,"qk_rope_head_dim":0,"v_head_dim":256,"qk_nope_head_dim":256,"mla_use_nope":true,"n_group":1,"topk_group":1,
	"num_experts_per_tok":8,"norm_topk_prob":true,"hidden_act":"silu","max_position_embeddings":1048576,"rms_norm_eps":1e-5,"eos_token_id":[154820],
	"attention_bias":false,"index_topk":2048,"index_head_dim":128,"index_n_heads":32,"index_kpool":4,"index_kpool_compress":true,
	"index_kpool_always_select_tail":true,"index_share_for_mtp_iteration":true,"swiglu_limit":10.0,"linear_head_dim":128,"linear_num_heads":64,
	"linear_conv_kernel_dim":4,"linear_lower_bound":-5.0,"hc_mult":4,"hc_eps":1e-6,"hc_sinkhorn_iters":20,"num_nextn_predict_layers":1,
	"scoring_func":"sigmoid","topk_method":"noaux_tc","first_k_dense_replace":1,"layer_types":` + kinds + `,"mlp_layer_types":` + mlps + `}}`
}

// TestGLMFlash: the big model's config is understood, and its sizes are the known ones.
func TestGLMFlash(t *testing.T) {
	c, err := ParseConfig([]byte(glmFlash()))
	if err != nil {
		t.Fatal(err)
	}
	trunk := c
	trunk.MTP = false // "320B" leaves the draft layer out
	b := &builder{c: trunk, src: random{1}}
	b.all(&Model{layers: make([]layerWeights, len(c.Layers))})
	values := int64(0)
	for _, j := range b.jobs {
		values += j.values
	}
	if g := float64(values) / 1e9; g < 310 || g > 335 {
		t.Errorf("%.0f G parameters, want about 320", g)
	}
	l := LayoutOf(c, kernels.ClassBF16)
	checkLayout(t, l)
	// Latents and indexer rows of a page are 33 blocks of 64 KiB in the 11 trunk layers; the draft layer and the pooled
	// keys come on top.
	if rows, all := 11*128*(512+2*128)*2, 12*(128*(512+2*128)+128/4*128)*2; rows != 33<<16 || l.SlabBytes != all {
		t.Errorf("slab of %d bytes, want %d (trunk rows %d)", l.SlabBytes, all, rows)
	}
	if state := 34 * 64 * 128 * 128 * 4; l.SlotBytes < state || l.SlotBytes > state+state/16 {
		t.Errorf("slot of %d bytes, the states alone take %d", l.SlotBytes, state)
	}
}
