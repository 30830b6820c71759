package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Family is a set of matrices that is quantised as one, so that a loss of quality can be traced to it.
type Family string

// The families. Together they are every matrix of the attention and feed-forward halves. Never in one: embedding, head,
// norms, mHC, biases, convolutions, A_log, dt_bias, the indexers (small, and they choose what is attended to), and the
// b_proj of linear attention (one row a head, it sets the write strength). MLPs of dense layers count as shared experts:
// like those they run for every token. The draft layer's own matrices, eh_proj included, are MTP; its router and indexer
// are in no family.
const (
	LinearAttention Family = "linear_attention" // q, k, v, f_a, f_b, g_a, g_b, o of KDA layers
	FullAttention   Family = "full_attention"   // q_a, q_b, kv_a, kv_b, o of MLA layers
	RoutedExperts   Family = "routed_experts"   // gate, up, down of every expert
	SharedExperts   Family = "shared_experts"   // gate, up, down of shared experts and dense layers
	BaseRouters     Family = "base_routers"     // the trunk's mlp.gate
	MTP             Family = "mtp"              // the draft layer: attention, experts, eh_proj
)

// Families lists them in the order of reports.
var Families = []Family{LinearAttention, FullAttention, RoutedExperts, SharedExperts, BaseRouters, MTP}

var (
	kdaMatrices = []string{"q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"}
	mlaMatrices = []string{"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
	mlpMatrices = []string{"gate_proj", "up_proj", "down_proj"}
)

// ParseFamily knows a family by its name.
func ParseFamily(name string) (Family, error) {
	if slices.Contains(Families, Family(name)) {
		return Family(name), nil
	}
	var known []string
	for _, f := range Families {
		known = append(known, string(f))
	}
	return "", fmt.Errorf("family %q is not known (known: %s)", name, strings.Join(known, ", "))
}

// FamilyOf tells the family of a matrix by its name without prefix and ".weight", such as "layers.3.self_attn.o_proj";
// "" for what is in none. Fused experts ("layers.3.mlp.experts.gate_up_proj") count as what they hold.
func (c Config) FamilyOf(name string) Family {
	parts := strings.Split(name, ".")
	if len(parts) < 3 || parts[0] != "layers" {
		return ""
	}
	i, err := strconv.Atoi(parts[1])
	if err != nil || i < 0 || i > len(c.Layers) || i == len(c.Layers) && !c.MTP {
		return ""
	}
	layer, draft := c.mtpLayer(), i == len(c.Layers)
	if !draft {
		layer = c.Layers[i]
	}
	f := layer.familyOf(parts[2:])
	switch {
	case !draft:
		return f
	case f == BaseRouters:
		return ""
	case f != "" || len(parts) == 3 && parts[2] == "eh_proj":
		return MTP
	}
	return ""
}

// familyOf is FamilyOf inside a trunk layer.
func (l Layer) familyOf(parts []string) Family {
	last := parts[len(parts)-1]
	switch {
	case len(parts) == 2 && parts[0] == "self_attn" && l.Kind == LayerKDA && slices.Contains(kdaMatrices, last):
		return LinearAttention
	case len(parts) == 2 && parts[0] == "self_attn" && l.Kind == LayerMLA && slices.Contains(mlaMatrices, last):
		return FullAttention
	case parts[0] != "mlp":
	case len(parts) == 2 && l.MLP == MLPDense && slices.Contains(mlpMatrices, last):
		return SharedExperts
	case l.MLP != MLPSparse:
	case len(parts) == 2 && last == "gate":
		return BaseRouters
	case len(parts) == 3 && parts[1] == "shared_experts" && slices.Contains(mlpMatrices, last):
		return SharedExperts
	case len(parts) == 4 && parts[1] == "experts" && slices.Contains(mlpMatrices, last),
		len(parts) == 3 && parts[1] == "experts" && (last == "gate_up_proj" || last == "down_proj"):
		return RoutedExperts
	}
	return ""
}

// scaleSuffixes end the names of the tensors that stand beside a quantised matrix.
var scaleSuffixes = []string{"_scale", "_scale_2", "_scale_inv"}

// IsScale tells whether a tensor of a checkpoint is a scale beside a quantised matrix.
func IsScale(name string) bool {
	for _, s := range scaleSuffixes {
		if strings.HasSuffix(name, ".weight"+s) {
			return true
		}
	}
	return false
}

// moduleOf is the matrix that a tensor of a checkpoint belongs to, without prefix: itself, or what it scales.
func moduleOf(name, prefix string) string {
	name = strings.TrimPrefix(name, prefix)
	for _, s := range scaleSuffixes {
		if base, ok := strings.CutSuffix(name, ".weight"+s); ok {
			return base
		}
	}
	name = strings.TrimSuffix(name, ".input_scale")
	return strings.TrimSuffix(name, ".weight")
}
