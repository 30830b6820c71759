package verify

import (
	"fmt"

	"rocket/engine/model"
)

// The bounds of the gate.
const (
	maxPerplexityRatio = 1.03 // NVFP4 of every family costs the nano model, which was trained for it, 1 %; a wrong scale costs far more
	minTokenParity     = 0.88 // NVFP4 of every family: 0.908; about one likeliest token in ten may change where two were nearly equal; free-running text diverges sooner and is not judged
	maxAcceptedDrop    = 0.05 // of the mean accepted length, relative: beyond it a step's saved bytes are paid back in steps
	minTopKAgreement   = 0.85 // of a layer's choices of experts; nearly tied experts trade places without harm
)

// bound is what a channel of a kind may do. NVFP4 of every family moves the nano model's channels by at most 3.3 % in RMS
// and 0.02 in their histograms; each bound is about three times that, and far from what a wrong scale or a swapped
// matrix does (a factor of two, or a histogram shifted by a bin).
type bound struct{ ratio, tv float64 }

var bounds = map[model.TapKind]bound{
	model.TapLinear:    {1.10, 0.05},
	model.TapLinearOut: {1.10, 0.05},
	model.TapFull:      {1.10, 0.05},
	model.TapFullOut:   {1.10, 0.05},
	model.TapRouter:    {1.10, 0.05},
	model.TapMLP:       {1.10, 0.05},
	KindState:          {1.20, 0.06}, // sums over all that was read, so errors of one sign add up
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
