package verify

import (
	"context"
	"fmt"
	"math"

	"rocket/engine/model"
)

// DraftDepths is how deep the draft layer is run.
const DraftDepths = 3

// Measured is how a candidate differs from the baseline on held-out text, every token given (teacher-forced).
type Measured struct {
	Tokens     int        `json:"tokens"`
	Parity     float64    `json:"token_parity"` // share of positions where both find the same token likeliest
	Perplexity Perplexity `json:"perplexity"`
	Drafts     *Drafts    `json:"drafts,omitempty"`
	Kinds      []Kind     `json:"kinds"`
	Channels   []Channel  `json:"channels,omitempty"`
}

// Perplexity is of a token, with the loss in nats beside it.
type Perplexity struct {
	Baseline      float64 `json:"baseline"`
	Candidate     float64 `json:"candidate"`
	Ratio         float64 `json:"ratio"`
	BaselineLoss  float64 `json:"baseline_loss"`
	CandidateLoss float64 `json:"candidate_loss"`
}

// Drafts is what the draft layer would have got accepted, each model's by its own trunk's greedy choice. Every depth is
// given the text's own tokens and attends over rows of its depth only; drafting in the loop does not exist yet.
type Drafts struct {
	Baseline  DraftSide `json:"baseline"`
	Candidate DraftSide `json:"candidate"`
}

// DraftSide is one model's.
type DraftSide struct {
	Agreement      []float64 `json:"agreement"`       // by depth, from 1
	AcceptedLength float64   `json:"accepted_length"` // mean tokens of a step: the trunk's own and the drafts up to the first that is wrong
}

// pass is one model's way through the text.
type pass struct {
	r       *runner
	loss    float64
	choices []int32   // of the document
	hidden  []float32 // of the document
	agree   [DraftDepths]int64
	length  int64
}

// measure runs both models through the documents side by side.
func measure(ctx context.Context, base, cand *runner, docs [][]int32, progress func(tokens int)) (Measured, error) {
	sides := [2]*pass{{r: base}, {r: cand}}
	for _, p := range sides {
		if p.r.trace == nil {
			var err error
			if p.r.trace, err = p.r.m.Trace(p.r.pages, p.r.slots, chunkRows, 1); err != nil {
				return Measured{}, err
			}
		}
	}
	var channels []*channel
	for _, tap := range base.trace.Taps {
		channels = append(channels, &channel{name: tap.Name, kind: tap.Kind})
	}
	for _, layer := range base.m.StateLayers() {
		channels = append(channels, &channel{name: fmt.Sprintf("layers.%d.self_attn.state", layer), kind: KindState})
	}
	m, same, drafted := Measured{}, 0, int64(0)
	for _, doc := range docs {
		n, err := measureText(ctx, sides, doc, channels, progress)
		if err != nil {
			return Measured{}, err
		}
		m.Tokens += len(doc) - 1
		same += n
		for _, p := range sides {
			if n, err = p.drafts(ctx, doc); err != nil {
				return Measured{}, err
			}
		}
		drafted += int64(n)
	}
	loss := [2]float64{sides[0].loss / float64(m.Tokens), sides[1].loss / float64(m.Tokens)}
	m.Parity = float64(same) / float64(m.Tokens)
	m.Perplexity = Perplexity{finite(math.Exp(loss[0])), finite(math.Exp(loss[1])), finite(math.Exp(loss[1] - loss[0])), finite(loss[0]), finite(loss[1])}
	for _, c := range channels {
		m.Channels = append(m.Channels, c.report())
	}
	m.Kinds = summarise(m.Channels)
	if drafted > 0 {
		m.Drafts = &Drafts{sides[0].draftSide(drafted), sides[1].draftSide(drafted)}
	}
	return m, nil
}

// finite makes a number of what is none, since JSON has no other: one that is outside every bound.
func finite(x float64) float64 {
	if x-x != 0 {
		return math.MaxFloat64
	}
	return x
}

// measureText runs a document and gives the number of positions where both choose the same token. The last token is
// only predicted.
func measureText(ctx context.Context, sides [2]*pass, doc []int32, channels []*channel, progress func(int)) (same int, err error) {
	for _, p := range sides {
		if err := p.r.room(len(doc)); err != nil {
			return 0, err
		}
		if err := p.r.reset(); err != nil {
			return 0, err
		}
		p.choices, p.hidden = p.choices[:0], p.hidden[:0]
	}
	for pos := 0; pos < len(doc)-1; pos += chunkRows {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rows := doc[pos:min(pos+chunkRows, len(doc)-1)]
		for _, p := range sides {
			if err := p.chunk(doc, rows, pos); err != nil {
				return 0, err
			}
		}
		if err := compareTaps(sides, channels, len(rows)); err != nil {
			return 0, err
		}
		if progress != nil {
			progress(len(rows))
		}
	}
	for i, x := range sides[0].choices {
		if x == sides[1].choices[i] && x >= 0 {
			same++
		}
	}
	for i := range sides[0].r.m.StateLayers() {
		a, err := sides[0].r.m.RecurrentState(sides[0].r.slots, 0, i)
		if err != nil {
			return 0, err
		}
		b, err := sides[1].r.m.RecurrentState(sides[1].r.slots, 0, i)
		if err != nil {
			return 0, err
		}
		channels[len(sides[0].r.trace.Taps)+i].add(a, b)
	}
	return same, nil
}

func (p *pass) chunk(doc, rows []int32, pos int) error {
	b := p.r.batch(rows, pos, len(rows))
	if err := p.r.trace.Run(b); err != nil {
		return err
	}
	v := p.r.m.Vocab()
	for i := range rows {
		logits := b.Logits[i*v : (i+1)*v]
		p.choices = append(p.choices, argmax(logits))
		p.loss += surprise(logits, doc[pos+i+1])
	}
	p.hidden = append(p.hidden, p.r.trace.Read(p.r.trace.Hidden, 0, len(rows))...)
	return nil
}

func compareTaps(sides [2]*pass, channels []*channel, rows int) error {
	for i, tap := range sides[0].r.trace.Taps {
		a, err := sides[0].r.trace.Rows(tap, rows)
		if err != nil {
			return err
		}
		b, err := sides[1].r.trace.Rows(sides[1].r.trace.Taps[i], rows)
		if err != nil {
			return err
		}
		channels[i].add(a, b)
		if tap.Kind == model.TapRouter {
			channels[i].route(sides, tap.Layer, a, b, rows)
		}
	}
	return nil
}

// route counts the experts that the baseline chooses and those of them that the candidate chooses too.
func (c *channel) route(sides [2]*pass, layer int, base, cand []float32, rows int) {
	n := len(base) / rows
	for i := range rows {
		want := choose(sides[0].r.m.Config, base[i*n:(i+1)*n], sides[0].r.m.RouterBias(layer))
		got := choose(sides[1].r.m.Config, cand[i*n:(i+1)*n], sides[1].r.m.RouterBias(layer))
		c.chosen += int64(len(want))
		for j, k := 0, 0; j < len(want) && k < len(got); {
			switch {
			case want[j] == got[k]:
				c.agree, j, k = c.agree+1, j+1, k+1
			case want[j] < got[k]:
				j++
			default:
				k++
			}
		}
	}
}

// drafts runs the draft layer over the document, depth by depth, and gives the number of positions that every depth
// has drafted for; 0 where the model has no draft layer that can be run.
func (p *pass) drafts(ctx context.Context, doc []int32) (int, error) {
	m, h := p.r.m, p.r.m.Config.Hidden
	if !m.Config.MTP || m.Config.ShareIndexForMTP {
		return 0, nil
	}
	plan, err := m.MTPPlan(p.r.pages, chunkRows, 1)
	if err != nil {
		return 0, err
	}
	defer plan.Free()
	// Row t of depth d has the text's token t+d and drafts the one that the trunk chooses at t+d.
	n := len(p.choices) - DraftDepths
	hidden, right := p.hidden, make([]bool, max(n, 0))
	for i := range right {
		right[i] = true
	}
	for depth := 1; depth <= DraftDepths; depth++ {
		var next []float32
		for pos := 0; pos < n; pos += chunkRows {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			rows := min(chunkRows, n-pos)
			if err := plan.Write(plan.Hidden, 0, hidden[pos*h:(pos+rows)*h]); err != nil {
				return 0, err
			}
			b := p.r.batch(doc[pos+depth:pos+depth+rows], pos, rows)
			if err := plan.Run(b); err != nil {
				return 0, err
			}
			for i := range rows {
				ok := argmax(b.Logits[i*m.Vocab():(i+1)*m.Vocab()]) == p.choices[pos+i+depth] && p.choices[pos+i+depth] >= 0
				if ok {
					p.agree[depth-1]++
				}
				if right[pos+i] = right[pos+i] && ok; right[pos+i] {
					p.length++
				}
			}
			next = append(next, plan.Read(plan.Out, 0, rows)...)
		}
		hidden = next
	}
	return max(n, 0), nil
}

func (p *pass) draftSide(n int64) DraftSide {
	s := DraftSide{AcceptedLength: 1 + float64(p.length)/float64(n)}
	for _, a := range p.agree {
		s.Agreement = append(s.Agreement, float64(a)/float64(n))
	}
	return s
}
