package model

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// edited is the nano config with keys set (nil: deleted), flat or below text_config.
func edited(t testing.TB, nested bool, set map[string]any) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(nanoDir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	for k, v := range set {
		if keys[k] = v; v == nil {
			delete(keys, k)
		}
	}
	if nested {
		keys = map[string]any{"model_type": "glm5_next", "text_config": keys, "vision_config": map[string]any{"depth": 1}, "image_token_id": 7}
	}
	out, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestParseConfig(t *testing.T) {
	flat, err := ParseConfig(edited(t, false, nil))
	if err != nil {
		t.Fatal(err)
	}
	if flat.Hidden != 256 || len(flat.Layers) != 12 || !flat.MTP || flat.Layers[3].Kind != LayerMLA || flat.Layers[4].Kind != LayerKDA ||
		flat.Layers[0].MLP != MLPDense || flat.ContextLimit != 32768 || flat.KDALowerBound != -5 || flat.QuantAlgo != "W4A16_NVFP4" ||
		!cmp.Equal(flat.EOS, []int32{0, 5}) {
		t.Fatalf("%+v", flat)
	}
	nested, err := ParseConfig(edited(t, true, nil))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(flat, nested); d != "" {
		t.Fatal("nested differs:", d)
	}
	kimi, err := ParseConfig(edited(t, false, map[string]any{
		"linear_attn_config": map[string]any{"head_dim": 64, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}, "linear_num_heads": 99}))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(flat, kimi); d != "" {
		t.Fatal("linear_attn_config differs:", d)
	}
	soft, err := ParseConfig([]byte(strings.Replace(string(edited(t, false, map[string]any{"linear_lower_bound": "null"})), `"null"`, "null", 1)))
	if err != nil || soft.KDALowerBound != 0 {
		t.Fatal(soft.KDALowerBound, err)
	}
	shared, err := ParseConfig(edited(t, false, map[string]any{"indexer_types": nil, "index_topk_pattern": "FFFFFFFSFFFF", "first_k_dense_replace": 1, "eos_token_id": 3}))
	if err != nil || !shared.Layers[7].Shared || shared.Layers[3].Shared || shared.Layers[11].Shared || !cmp.Equal(shared.EOS, []int32{3}) {
		t.Fatalf("%+v %v", shared.Layers, err)
	}
	freq, err := ParseConfig(edited(t, false, map[string]any{"indexer_types": nil, "index_topk_freq": 4, "index_skip_topk_offset": 0}))
	if err != nil || freq.Layers[3].Shared || freq.Layers[7].Shared {
		t.Fatalf("%+v %v", freq.Layers, err)
	}
}

// TestParseConfigRefuses: every refusal names its key, flat and nested.
func TestParseConfigRefuses(t *testing.T) {
	bad := func(key string, v any) map[string]any { return map[string]any{key: v} }
	layers := func(key string, i int, v string) map[string]any {
		c, _ := ReadConfig(nanoDir)
		var list []string
		for j, l := range c.Layers {
			s := map[string]string{"layer_types": string(l.Kind), "mlp_layer_types": string(l.MLP), "indexer_types": "full"}[key]
			if j == i {
				s = v
			}
			list = append(list, s)
		}
		return map[string]any{key: list}
	}
	for _, tc := range []struct {
		set  map[string]any
		want string
	}{
		{bad("model_type", "llama"), `"llama"`},
		{bad("index_kpool", nil), "index_kpool: missing"},
		{bad("mlp_layer_types", nil), "mlp_layer_types: missing"},
		{bad("layer_types", nil), "layer_types: missing"},
		{bad("linear_lower_bound", nil), "linear_lower_bound: missing"},
		{bad("qk_rope_head_dim", nil), "qk_rope_head_dim"},
		{bad("qk_rope_head_dim", 64), "qk_rope_head_dim: 64"},
		{bad("q_lora_rank", nil), "q_lora_rank: missing"},
		{bad("hidden_act", "gelu"), `hidden_act: "gelu"`},
		{bad("attention_bias", true), "attention_bias: true"},
		{bad("index_kpool_always_select_tail", false), "index_kpool_always_select_tail: false"},
		{bad("index_kpool_compress", false), "index_kpool_compress: false"},
		{bad("mla_use_nope", false), "mla_use_nope"},
		{bad("scoring_func", "softmax"), "scoring_func"},
		{bad("topk_method", "greedy"), "topk_method"},
		{bad("num_key_value_heads", 2), "num_key_value_heads"},
		{bad("num_nextn_predict_layers", 2), "num_nextn_predict_layers"},
		{bad("attn_res_block_size", 12), "attn_res_block_size"},
		{bad("hidden_size", -1), "hidden_size"},
		{bad("hidden_size", 1.5), "hidden_size"},
		{bad("hidden_size", 1<<30), "hidden_size"},
		{bad("hidden_size", "256"), "hidden_size"},
		{bad("index_topk", 510), "index_topk 510"},
		{map[string]any{"index_kpool": 3, "index_topk": 510}, "index_kpool 3"},
		{map[string]any{"index_kpool": 256}, "index_kpool 256"},
		{bad("hc_mult", 64), "hc_mult 64"},
		{bad("rms_norm_eps", 0), "rms_norm_eps"},
		{bad("rms_norm_eps", nil), "rms_norm_eps: missing"},
		{bad("linear_lower_bound", 5), "linear_lower_bound"},
		{bad("linear_conv_kernel_dim", 1), "linear_conv_kernel_dim"},
		{bad("n_group", 3), "n_group 3"},
		{map[string]any{"n_group": 16, "topk_group": 16}, "n_group 16"},
		{bad("topk_group", 2), "topk_group 2"},
		{bad("num_experts_per_tok", 17), "num_experts_per_tok 17"},
		{bad("num_local_experts", 4), "n_routed_experts"},
		{bad("max_position_embeddings", 0), "max_position_embeddings"},
		{bad("eos_token_id", 4096), "eos_token_id 4096"},
		{bad("eos_token_id", "end"), "eos_token_id"},
		{bad("num_hidden_layers", 11), "num_hidden_layers: 11"},
		{bad("num_hidden_layers", 1<<19), "num_hidden_layers"},
		{bad("first_k_dense_replace", 3), "first_k_dense_replace"},
		{layers("layer_types", 2, "sliding_attention"), `layer_types: [2] = "sliding_attention"`},
		{layers("mlp_layer_types", 5, "moe"), `mlp_layer_types: [5] = "moe"`},
		{layers("indexer_types", 5, "half"), `indexer_types: [5] = "half"`},
		{layers("indexer_types", 3, "shared"), "indexer_types: [3] is shared"},
		{map[string]any{"indexer_types": nil, "index_topk_pattern": "FX"}, "layer"},
		{bad("quantization_config", map[string]any{"quant_method": "awq"}), `quant_method "awq"`},
		{bad("quantization_config", map[string]any{"quant_method": "modelopt", "quant_algo": "INT4"}), `quant_algo "INT4"`},
		{bad("quantization_config", map[string]any{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}), "group_size 32"},
		{bad("quantization_config", map[string]any{"quant_method": "fp8", "weight_block_size": []int{64, 64}}), "weight_block_size"},
		{bad("linear_attn_config", map[string]any{"head_dim": 64, "num_heads": 4, "short_conv_kernel_size": 4, "swish": 1}), "linear_attn_config.swish"},
	} {
		for _, nested := range []bool{false, true} {
			_, err := ParseConfig(edited(t, nested, tc.set))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("nested %v, %v: error %v, want one with %q", nested, tc.set, err, tc.want)
			}
		}
	}
	for _, text := range []string{"", "[]", "{", `{"model_type":"glm5_next","model_type":"glm5_next"}`, `{"model_type":"glm5_next"} x`, `{"model_type":"glm5_next","text_config":3}`} {
		if _, err := ParseConfig([]byte(text)); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
	if _, err := ReadConfig(t.TempDir()); err == nil || !strings.Contains(err.Error(), "config.json") {
		t.Error(err)
	}
}

// FuzzParseConfig: no text may panic, and what is accepted must validate.
func FuzzParseConfig(f *testing.F) {
	f.Add(string(edited(f, false, nil)))
	f.Add(string(edited(f, true, nil)))
	f.Add(`{"model_type":"glm5_next","num_hidden_layers":3,"index_topk_pattern":"F"}`)
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := ParseConfig([]byte(text)); err == nil && c.validate() != nil {
			t.Fatal("accepted", text)
		}
	})
}
