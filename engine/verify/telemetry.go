package verify

import (
	"cmp"
	"math"
	"slices"

	"rocket/engine/model"
)

// KindState is the kind of channels that hold recurrent states, beside the taps' kinds.
const KindState model.TapKind = "recurrent_state"

// Histograms count values by sign and half octave of their magnitude, from 2^-histSpan to 2^histSpan; what is smaller
// shares the middle bin with zero, what is larger the outermost. Such bins need no scale, and a shift of a distribution
// by half its size moves most of it to another bin.
const (
	histSpan = 24
	histHalf = 2 * 2 * histSpan // bins of one sign
	histBins = 2*histHalf + 1
)

func histBin(x float64) int {
	if x == 0 || x != x {
		return histHalf
	}
	b := int(min(max(math.Floor(2*math.Log2(math.Abs(x)))+2*histSpan, -1), histHalf-1)) + 1
	if x < 0 {
		return histHalf - b
	}
	return histHalf + b
}

// channel compares one tap, or one state, of two models on the same tokens.
type channel struct {
	name             string
	kind             model.TapKind
	n                int64
	base, cand, diff float64 // sums of squares
	hist             [2][histBins]int64
	agree, chosen    int64 // router logits: experts that both choose, and that the baseline chooses
}

func (c *channel) add(base, cand []float32) {
	for i, x := range base {
		b, y := float64(x), float64(cand[i])
		c.base, c.cand, c.diff = c.base+b*b, c.cand+y*y, c.diff+(y-b)*(y-b)
		c.hist[0][histBin(b)]++
		c.hist[1][histBin(y)]++
	}
	c.n += int64(len(base))
}

// Channel is what verify reports of one place in the graph.
type Channel struct {
	Name      string        `json:"name"`
	Kind      model.TapKind `json:"kind"`
	RMSRatio  float64       `json:"rms_ratio"`                // candidate to baseline
	TV        float64       `json:"histogram_tv"`             // total variation between the two histograms of values, 0 to 1
	Error     float64       `json:"relative_error"`           // RMS of the difference to RMS of the baseline
	Agreement *float64      `json:"topk_agreement,omitempty"` // routers: share of the baseline's choices that the candidate makes too
}

func (c *channel) report() Channel {
	out := Channel{Name: c.name, Kind: c.kind, RMSRatio: 1}
	if c.base > 0 {
		out.RMSRatio, out.Error = finite(math.Sqrt(c.cand/c.base)), finite(math.Sqrt(c.diff/c.base))
	} else if c.cand > 0 {
		out.RMSRatio, out.Error = math.MaxFloat64, math.MaxFloat64
	}
	for i := range c.hist[0] {
		out.TV += math.Abs(float64(c.hist[0][i]-c.hist[1][i])) / float64(2*max(c.n, 1))
	}
	if c.chosen > 0 {
		a := float64(c.agree) / float64(c.chosen)
		out.Agreement = &a
	}
	return out
}

// Kind summarises the channels of one kind.
type Kind struct {
	Kind         model.TapKind `json:"kind"`
	Channels     int           `json:"channels"`
	MinRMSRatio  float64       `json:"min_rms_ratio"`
	MaxRMSRatio  float64       `json:"max_rms_ratio"`
	MaxTV        float64       `json:"max_histogram_tv"`
	MaxError     float64       `json:"max_relative_error"`
	MinAgreement *float64      `json:"min_topk_agreement,omitempty"`
}

func summarise(channels []Channel) (kinds []Kind) {
	for _, c := range channels {
		i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Kind == c.Kind })
		if i < 0 {
			i = len(kinds)
			kinds = append(kinds, Kind{Kind: c.Kind, MinRMSRatio: c.RMSRatio, MaxRMSRatio: c.RMSRatio})
		}
		k := &kinds[i]
		k.Channels++
		k.MinRMSRatio, k.MaxRMSRatio = min(k.MinRMSRatio, c.RMSRatio), max(k.MaxRMSRatio, c.RMSRatio)
		k.MaxTV, k.MaxError = max(k.MaxTV, c.TV), max(k.MaxError, c.Error)
		if c.Agreement != nil && (k.MinAgreement == nil || *c.Agreement < *k.MinAgreement) {
			k.MinAgreement = c.Agreement
		}
	}
	return kinds
}

// choose gives the experts that a router's logits choose, ascending: scores are sigmoids, the choice goes by score plus
// bias, first among groups by the sum of their two best, then among the experts of the groups chosen; of equal ones the
// lower index.
func choose(c model.Config, logits, bias []float32) []int {
	score := make([]float64, len(logits))
	for i, x := range logits {
		score[i] = 1/(1+math.Exp(-float64(x))) + float64(bias[i])
	}
	byScore := func(value func(int) float64) func(a, b int) int {
		return func(a, b int) int { return cmp.Or(cmp.Compare(value(b), value(a)), a-b) }
	}
	open, size := make([]bool, len(logits)), c.Experts/max(c.Groups, 1)
	var groups []int
	sums := make([]float64, max(c.Groups, 1))
	for g := range sums {
		part := slices.Clone(score[g*size : (g+1)*size])
		slices.Sort(part)
		for _, s := range part[max(0, len(part)-2):] {
			sums[g] += s
		}
		groups = append(groups, g)
	}
	slices.SortFunc(groups, byScore(func(g int) float64 { return sums[g] }))
	for _, g := range groups[:min(max(c.TopKGroups, 1), len(groups))] {
		for e := g * size; e < (g+1)*size; e++ {
			open[e] = true
		}
	}
	var ids []int
	for e := range logits {
		if open[e] {
			ids = append(ids, e)
		}
	}
	slices.SortFunc(ids, byScore(func(e int) float64 { return score[e] }))
	ids = ids[:min(c.TopK, len(ids))]
	slices.Sort(ids)
	return ids
}
