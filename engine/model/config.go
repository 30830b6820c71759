package model

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// LayerKind is what mixes the tokens of a layer.
type LayerKind string

// MLPKind is the feed-forward half of a layer.
type MLPKind string

// The values of layer_types and mlp_layer_types that exist.
const (
	LayerKDA  LayerKind = "linear_attention"
	LayerMLA  LayerKind = "deepseek_sparse_attention"
	MLPDense  MLPKind   = "dense"
	MLPSparse MLPKind   = "sparse"
)

// Layer is one trunk layer. Shared: an MLA layer without an indexer of its own, which reuses the selection of the
// nearest MLA layer before it that has one.
type Layer struct {
	Kind   LayerKind
	MLP    MLPKind
	Shared bool
}

// Config is a model as config.json describes it. Every field is used; what a config says beyond it is refused by name
// unless it is listed as without effect.
type Config struct {
	Family string // "glm5_next"
	Vocab  int
	Hidden int
	Layers []Layer
	MTP    bool // one draft layer after the trunk

	ContextLimit int
	EOS          []int32
	TiedHead     bool // the head is the embedding table
	NormEps      float32

	KDAHeads, KDADim, KDAConv int
	KDALowerBound             float32 // < 0: the bounded gate; 0: the softplus gate

	Heads, QRank, KVRank, NopeDim, VDim        int // MLA
	IndexHeads, IndexDim, IndexTopK, IndexPool int
	Inter                                      int // dense layers
	SwigluLimit                                float32
	Experts, TopK, MoEInter, SharedExperts     int
	Groups, TopKGroups                         int
	NormTopK                                   bool
	RoutedScaling                              float32
	Streams, SinkhornIters                     int // mHC
	HCEps                                      float32
	QuantAlgo                                  string // as the config says; what counts is the scale tensors
	ShareIndexForMTP                           bool   // deeper drafts reuse the first draft's selection
}

// pageTokens is the tokens of a page; pools must not cross its edge.
const pageTokens = 128

// Bounds on what a config may ask for, so that a nonsense value gives an error here and not an allocation later.
const (
	maxDim     = 1 << 20 // any width or count
	maxLayers  = 1024
	maxStreams = 16
)

// ReadConfig reads config.json of a model folder.
func ReadConfig(dir string) (Config, error) {
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return Config{}, fmt.Errorf("read model config: %w", err)
	}
	c, err := ParseConfig(text)
	if err != nil {
		return Config{}, fmt.Errorf("model config %s: %w", filepath.Join(dir, "config.json"), err)
	}
	return c, nil
}

// ParseConfig understands config.json, flat or with the text model under text_config, and refuses by name every key
// or value that it does not.
func ParseConfig(text []byte) (Config, error) {
	top, err := object(text)
	if err != nil {
		return Config{}, err
	}
	r := &reader{keys: top, used: map[string]bool{}}
	family := r.str("model_type", "")
	if family != "glm5_next" && family != "glm5_next_text" {
		return Config{}, fmt.Errorf("model_type %q is not supported (known: glm5_next)", family)
	}
	c := Config{Family: "glm5_next"}
	c.QuantAlgo = r.quantisation()
	inner, nested := top["text_config"]
	if nested {
		r.used["text_config"] = true
		tied := r.flag("tie_word_embeddings", false)
		eos := r.ints("eos_token_id")
		if err := errors.Join(r.err, r.rest(harmlessTop)); err != nil {
			return Config{}, err
		}
		keys, err := object(inner)
		if err != nil {
			return Config{}, fmt.Errorf("text_config: %w", err)
		}
		r = &reader{keys: keys, used: map[string]bool{}, at: "text_config."}
		if t := r.str("model_type", "glm5_next_text"); t != "glm5_next_text" && t != "glm5_next" {
			return Config{}, fmt.Errorf("text_config.model_type %q is not supported (known: glm5_next_text)", t)
		}
		if q := r.quantisation(); q != "" {
			c.QuantAlgo = q
		}
		c.TiedHead, c.EOS = tied, eos
	}
	r.text(&c)
	if err := errors.Join(r.err, r.rest(harmlessText)); err != nil {
		return Config{}, err
	}
	return c, c.validate()
}

// harmlessTop are keys beside text_config that say nothing about the text model's numbers; harmlessText the same
// inside it (or in a flat config). The rotary keys are without effect because qk_rope_head_dim is 0.
var (
	harmlessTop = append([]string{"vision_config"}, harmlessText...)

	harmlessText = []string{
		"architectures", "auto_map", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "transformers_version",
		"image_token_id", "image_start_token_id", "image_end_token_id", "video_token_id", "video_start_token_id", "video_end_token_id",
		"pad_token_id", "bos_token_id", "use_cache", "initializer_range", "attention_dropout", "router_aux_loss_coef",
		"output_router_logits", "output_attentions", "output_hidden_states", "return_dict", "head_dim",
		"rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "indexer_rope_interleave", "partial_rotary_factor",
		"ep_size", "pretraining_tp", "seq_aux", "vision_config", "is_encoder_decoder", "chunk_size_feed_forward",
	}
)

// text reads the text model's own keys.
func (r *reader) text(c *Config) {
	r.flagMust("attention_bias", false)
	r.flagMust("mla_use_nope", true)
	r.flagMust("index_kpool_compress", true)
	r.flagMust("index_kpool_always_select_tail", true)
	r.strMust("hidden_act", "silu")
	r.strMust("scoring_func", "sigmoid")
	r.strMust("topk_method", "noaux_tc")
	c.Vocab, c.Hidden = r.dim("vocab_size"), r.dim("hidden_size")
	c.ContextLimit = r.integer("max_position_embeddings", -1)
	if e := r.ints("eos_token_id"); e != nil {
		c.EOS = e
	}
	c.TiedHead = r.flag("tie_word_embeddings", c.TiedHead)
	c.NormEps = r.number("rms_norm_eps", nan)

	c.Heads, c.QRank, c.KVRank = r.dim("num_attention_heads"), r.dim("q_lora_rank"), r.dim("kv_lora_rank")
	c.NopeDim, c.VDim = r.dim("qk_nope_head_dim"), r.dim("v_head_dim")
	if kv := r.integer("num_key_value_heads", c.Heads); kv != c.Heads {
		r.refuse("num_key_value_heads", "%d, only equal to num_attention_heads (%d) is supported", kv, c.Heads)
	}
	if rope := r.integer("qk_rope_head_dim", -1); rope != 0 {
		r.refuse("qk_rope_head_dim", "%d, only 0 (no rotation anywhere) is supported", rope)
	}
	if qk := r.integer("qk_head_dim", c.NopeDim); qk != c.NopeDim {
		r.refuse("qk_head_dim", "%d, want qk_nope_head_dim (%d)", qk, c.NopeDim)
	}
	c.IndexHeads, c.IndexDim = r.dim("index_n_heads"), r.dim("index_head_dim")
	c.IndexTopK, c.IndexPool = r.dim("index_topk"), r.dim("index_kpool")
	c.ShareIndexForMTP = r.flag("index_share_for_mtp_iteration", false)

	r.linear(c)
	c.Inter, c.SwigluLimit = r.dim("intermediate_size"), r.number("swiglu_limit", nan)
	c.Streams, c.SinkhornIters, c.HCEps = r.dim("hc_mult"), r.dim("hc_sinkhorn_iters"), r.number("hc_eps", nan)
	r.layers(c)
	r.moe(c)
	switch n := r.integer("num_nextn_predict_layers", 0); n {
	case 0, 1:
		c.MTP = n == 1
	default:
		r.refuse("num_nextn_predict_layers", "%d, only 0 or 1 is supported", n)
	}
}

// linear reads the KDA sizes: flat keys, or linear_attn_config in Kimi's spelling, which then wins as in transformers.
func (r *reader) linear(c *Config) {
	dict, nested := r.keys["linear_attn_config"]
	if !nested || string(dict) == "null" {
		r.used["linear_attn_config"] = true
		c.KDAHeads, c.KDADim, c.KDAConv = r.dim("linear_num_heads"), r.dim("linear_head_dim"), r.dim("linear_conv_kernel_dim")
		if _, there := r.keys["linear_lower_bound"]; !there { // null says the softplus gate; absence has a default
			r.refuse("linear_lower_bound", "missing")
		}
		c.KDALowerBound = r.number("linear_lower_bound", 0)
		return
	}
	for _, k := range []string{"linear_attn_config", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_lower_bound"} {
		r.used[k] = true
	}
	keys, err := object(dict)
	if err != nil {
		r.refuse("linear_attn_config", "%v", err)
		return
	}
	d := &reader{keys: keys, used: map[string]bool{}, at: r.at + "linear_attn_config."}
	c.KDAHeads, c.KDADim, c.KDAConv = d.dim("num_heads"), d.dim("head_dim"), d.dim("short_conv_kernel_size")
	c.KDALowerBound = d.number("gate_lower_bound", 0)
	if safe := d.flag("safe_gate", true); safe && c.KDALowerBound == 0 {
		c.KDALowerBound = -5 // transformers' default of the safe gate
	} else if !safe && c.KDALowerBound != 0 {
		d.refuse("safe_gate", "false beside gate_lower_bound %v is a contradiction", c.KDALowerBound)
	}
	r.err = errors.Join(r.err, d.err, d.rest(nil))
}

// layers reads the three per-layer lists. transformers fills in what a config leaves out with defaults that differ
// between models of one family, so layer_types and mlp_layer_types must be there.
func (r *reader) layers(c *Config) {
	n := r.dim("num_hidden_layers")
	kinds, mlps, indexers := r.strs("layer_types"), r.strs("mlp_layer_types"), r.indexers(n)
	if n > maxLayers {
		r.refuse("num_hidden_layers", "%d, at most %d", n, maxLayers)
	}
	if r.err != nil {
		return
	}
	if len(kinds) != n || len(mlps) != n || len(indexers) != n {
		r.refuse("num_hidden_layers", "%d, but layer_types has %d entries, mlp_layer_types %d, indexer_types %d", n, len(kinds), len(mlps), len(indexers))
		return
	}
	full := false
	dense := 0
	for i := range n {
		l := Layer{Kind: LayerKind(kinds[i]), MLP: MLPKind(mlps[i])}
		switch l.Kind {
		case "full_attention": // an older spelling of the same layer
			l.Kind = LayerMLA
		case LayerKDA, LayerMLA:
		default:
			r.refuse("layer_types", "[%d] = %q is not known", i, kinds[i])
		}
		if l.MLP != MLPDense && l.MLP != MLPSparse {
			r.refuse("mlp_layer_types", "[%d] = %q is not known", i, mlps[i])
		}
		if indexers[i] != "full" && indexers[i] != "shared" {
			r.refuse("indexer_types", "[%d] = %q is not known", i, indexers[i])
		}
		if l.Kind == LayerMLA {
			l.Shared = indexers[i] == "shared"
			if l.Shared && !full {
				r.refuse("indexer_types", "[%d] is shared, but no MLA layer before it has an indexer", i)
			}
			full = full || !l.Shared
		}
		if l.MLP == MLPDense && dense == i {
			dense++
		}
		c.Layers = append(c.Layers, l)
	}
	if k := r.integer("first_k_dense_replace", dense); k != dense {
		r.refuse("first_k_dense_replace", "%d, but mlp_layer_types starts with %d dense layers", k, dense)
	}
	if k := r.integer("moe_layer_freq", 1); k != 1 {
		r.refuse("moe_layer_freq", "%d, only 1 is supported", k)
	}
}

// indexers gives indexer_types, or what the schedule keys make of it.
func (r *reader) indexers(n int) []string {
	types := r.strs("indexer_types")
	pattern, freq, offset := r.str("index_topk_pattern", ""), r.integer("index_topk_freq", 1), r.integer("index_skip_topk_offset", 2)
	if types != nil || n > maxLayers {
		return types
	}
	for i := range n {
		switch {
		case pattern != "" && i < len(pattern):
			types = append(types, map[byte]string{'F': "full", 'S': "shared"}[pattern[i]])
		case pattern != "":
		case max(i-offset+1, 0)%max(freq, 1) == 0:
			types = append(types, "full")
		default:
			types = append(types, "shared")
		}
	}
	return types
}

func (r *reader) moe(c *Config) {
	if !slices.ContainsFunc(c.Layers, func(l Layer) bool { return l.MLP == MLPSparse }) && r.err == nil {
		for _, k := range []string{"n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"} {
			r.used[k] = true
		}
		return
	}
	alias := r.integer("num_local_experts", -1)
	c.Experts = r.integer("n_routed_experts", alias)
	if c.Experts <= 0 || alias >= 0 && alias != c.Experts {
		r.refuse("n_routed_experts", "%d (num_local_experts %d) is not usable", c.Experts, alias)
	}
	c.TopK, c.MoEInter, c.SharedExperts = r.dim("num_experts_per_tok"), r.dim("moe_intermediate_size"), r.integer("n_shared_experts", -1)
	if c.SharedExperts < 0 {
		r.refuse("n_shared_experts", "missing or negative")
	}
	c.Groups, c.TopKGroups = r.dim("n_group"), r.dim("topk_group")
	c.NormTopK, c.RoutedScaling = r.flag("norm_topk_prob", true), r.number("routed_scaling_factor", nan)
}

// validate checks the sizes against each other and against what the kernels and the page layout can hold.
func (c Config) validate() error {
	bad := func(format string, args ...any) error { return fmt.Errorf(format, args...) }
	switch {
	case c.ContextLimit < 1:
		return bad("max_position_embeddings %d is missing or not positive", c.ContextLimit)
	case !(c.NormEps > 0) || !(c.HCEps >= 0):
		return bad("rms_norm_eps %v and hc_eps %v must be positive", c.NormEps, c.HCEps)
	case c.IndexTopK%c.IndexPool != 0:
		return bad("index_topk %d is not a multiple of index_kpool %d", c.IndexTopK, c.IndexPool)
	case pageTokens%c.IndexPool != 0:
		return bad("index_kpool %d does not divide a page of %d tokens", c.IndexPool, pageTokens)
	case c.Streams > maxStreams:
		return bad("hc_mult %d, at most %d is supported", c.Streams, maxStreams)
	case c.KDALowerBound > 0:
		return bad("linear_lower_bound %v must be negative (or absent)", c.KDALowerBound)
	case c.KDAConv < 2:
		return bad("linear_conv_kernel_dim %d, at least 2 is supported", c.KDAConv)
	}
	for _, e := range c.EOS {
		if e < 0 || int(e) >= c.Vocab {
			return bad("eos_token_id %d is outside the vocabulary of %d", e, c.Vocab)
		}
	}
	if c.Experts == 0 {
		return nil
	}
	switch {
	case c.Experts%c.Groups != 0:
		return bad("n_routed_experts %d is not a multiple of n_group %d", c.Experts, c.Groups)
	case c.TopKGroups > c.Groups:
		return bad("topk_group %d is more than n_group %d", c.TopKGroups, c.Groups)
	case c.Groups > 1 && c.Experts/c.Groups < 2:
		return bad("n_group %d leaves groups of %d experts, groups are ranked by their two best", c.Groups, c.Experts/c.Groups)
	case c.TopK > c.Experts/c.Groups*c.TopKGroups:
		return bad("num_experts_per_tok %d is more than the %d experts that topk_group leaves", c.TopK, c.Experts/c.Groups*c.TopKGroups)
	}
	return nil
}

var nan = float32(math.NaN())
