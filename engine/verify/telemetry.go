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

// halfOctave is the mantissa from which a number is in the upper half of its octave: that of the first FP32 above sqrt 2.
const halfOctave = 0x3504f4

func histBin(x float32) int {
	if x == 0 || x != x {
		return histHalf
	}
	bits := math.Float32bits(x)
	half := 2 * (int(bits>>23&0xff) - 127)
	if bits&(1<<23-1) >= halfOctave {
		half++
	}
	b := min(max(half+2*histSpan, -1), histHalf-1) + 1
	if x < 0 {
		return histHalf - b
	}
	return histHalf + b
}

// observed is what one model's values at one place in the graph amount to.
type observed struct {
	name    string
	kind    model.TapKind
	n       int64
	squares float64
	hist    [histBins]int64
	experts []int64 // routers: those that every row chooses, ascending, row after row
}

func (o *observed) add(values []float32) {
	for _, x := range values {
		o.squares += float64(x) * float64(x)
		o.hist[histBin(x)]++
	}
	o.n += int64(len(values))
}

// Channel is what verify reports of one place in the graph.
type Channel struct {
	Name      string        `json:"name"`
	Kind      model.TapKind `json:"kind"`
	RMSRatio  float64       `json:"rms_ratio"`                // candidate to baseline
	TV        float64       `json:"histogram_tv"`             // total variation between the two histograms of values, 0 to 1
	Error     *float64      `json:"relative_error,omitempty"` // RMS of the difference to RMS of the baseline; absent where that is a record
	Agreement *float64      `json:"topk_agreement,omitempty"` // routers: share of the baseline's choices that the candidate makes too
}

// against compares a candidate's channel with the baseline's. diff is the sum of the squares of the differences.
func (o *observed) against(base *observed, rows int, diff *float64) Channel {
	out := Channel{Name: o.name, Kind: o.kind, RMSRatio: 1}
	relative := func(squares float64) float64 {
		if base.squares == 0 && squares == 0 {
			return 0
		}
		return finite(math.Sqrt(squares / base.squares))
	}
	if base.squares != 0 || o.squares != 0 {
		out.RMSRatio = relative(o.squares)
	}
	if diff != nil {
		e := relative(*diff)
		out.Error = &e
	}
	for i, n := range o.hist {
		out.TV += math.Abs(float64(n-base.hist[i])) / float64(2*max(o.n, 1))
	}
	if len(base.experts) > 0 {
		a := float64(shared(base.experts, o.experts, rows)) / float64(len(base.experts))
		out.Agreement = &a
	}
	return out
}

// shared counts the experts of a that are among those of b, row by row.
func shared(a, b []int64, rows int) (n int) {
	ka, kb := len(a)/rows, len(b)/rows
	for i := range rows {
		for _, e := range a[i*ka : (i+1)*ka] {
			if slices.Contains(b[i*kb:(i+1)*kb], e) {
				n++
			}
		}
	}
	return n
}

// Kind summarises the channels of one kind.
type Kind struct {
	Kind         model.TapKind `json:"kind"`
	Channels     int           `json:"channels"`
	MinRMSRatio  float64       `json:"min_rms_ratio"`
	MaxRMSRatio  float64       `json:"max_rms_ratio"`
	MaxTV        float64       `json:"max_histogram_tv"`
	MaxError     *float64      `json:"max_relative_error,omitempty"`
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
		k.MaxTV = max(k.MaxTV, c.TV)
		if c.Error != nil && (k.MaxError == nil || *c.Error > *k.MaxError) {
			k.MaxError = c.Error
		}
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
