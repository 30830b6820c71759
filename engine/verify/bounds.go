package verify

import (
	"fmt"

	"rocket/engine/model"
)

// The bounds of the gate.
const (
	maxPerplexityRatio = 1.05 // a twentieth: more than NVFP4 of every family costs a model that was trained for it, less than a wrong scale does
	minTokenParity     = 0.90 // one likeliest token in ten may change where two were nearly equal; free-running text diverges sooner and is not judged
	maxAcceptedDrop    = 0.05 // of the mean accepted length, relative: beyond it a step's saved bytes are paid back in steps
	minTopKAgreement   = 0.85 // of a layer's choices of experts; nearly tied experts trade places without harm
)

// bound is what a channel of a kind may do. Each is wide enough for NVFP4's rounding (a tenth of a matrix's RMS) carried
// through every layer before it, and far from what a wrong scale or a swapped matrix does (a factor of two, or a
// histogram shifted by a bin).
type bound struct{ ratio, tv float64 }

var bounds = map[model.TapKind]bound{
	model.TapLinear:    {1.25, 0.10},
	model.TapLinearOut: {1.25, 0.10},
	model.TapFull:      {1.25, 0.10},
	model.TapFullOut:   {1.25, 0.10},
	model.TapRouter:    {1.25, 0.10},
	model.TapMLP:       {1.35, 0.15},
	KindState:          {1.50, 0.20}, // sums over all that was read, so errors of one sign add up
}

// regressions names what is outside the bounds. Comparisons are written so that NaN is outside.
func regressions(prefix string, m Measured) (list []string) {
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			list = append(list, prefix+fmt.Sprintf(format, args...))
		}
	}
	bad(m.Perplexity.Ratio <= maxPerplexityRatio, "perplexity %.4g is %.4f of the baseline's, at most %.2f is allowed", m.Perplexity.Candidate, m.Perplexity.Ratio, maxPerplexityRatio)
	bad(m.Parity >= minTokenParity, "token parity %.4f, at least %.2f is wanted", m.Parity, minTokenParity)
	if d := m.Drafts; d != nil {
		bad(d.Candidate.AcceptedLength >= d.Baseline.AcceptedLength*(1-maxAcceptedDrop), "accepted length %.3f, the baseline's is %.3f", d.Candidate.AcceptedLength, d.Baseline.AcceptedLength)
	}
	for _, c := range m.Channels {
		b := bounds[c.Kind]
		bad(c.RMSRatio <= b.ratio && c.RMSRatio >= 1/b.ratio, "%s (%s): RMS ratio %.3f, at most %.2f either way is allowed", c.Name, c.Kind, c.RMSRatio, b.ratio)
		bad(c.TV <= b.tv, "%s (%s): histograms differ by %.3f, at most %.2f is allowed", c.Name, c.Kind, c.TV, b.tv)
		if c.Agreement != nil {
			bad(*c.Agreement >= minTopKAgreement, "%s: %.3f of the experts chosen agree, at least %.2f is wanted", c.Name, *c.Agreement, minTopKAgreement)
		}
	}
	return list
}
