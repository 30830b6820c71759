package verify

import (
	"context"
	"errors"
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

// pass is one model's way through texts: what of it the measurements need, text after text. A baseline's may have been
// walked long ago and come out of a record; then it has no runner.
type pass struct {
	r        *runner
	channels []*observed
	rows     [][]float32 // each channel's values of the last chunk, or state
	choices  []int64     // the likeliest token at every position
	loss     float64     // in nats, of all tokens together
	agree    [DraftDepths]int64
	accepted int64 // drafts up to the first that is wrong
	drafted  int64 // positions that were drafted for

	start  int       // of the document, among choices
	hidden []float32 // of the document
}

// newPass makes a runner ready to walk.
func newPass(r *runner) (*pass, error) {
	if r.trace == nil {
		var err error
		if r.trace, err = r.m.Trace(r.pages, r.slots, chunkRows, 1); err != nil {
			return nil, err
		}
	}
	p := &pass{r: r}
	for _, tap := range r.trace.Taps {
		p.channels = append(p.channels, &observed{name: tap.Name, kind: tap.Kind})
	}
	for _, layer := range r.m.StateLayers() {
		p.channels = append(p.channels, &observed{name: fmt.Sprintf("layers.%d.self_attn.state", layer), kind: KindState})
	}
	p.rows = make([][]float32, len(p.channels))
	return p, nil
}

// measure runs both models through the documents side by side.
func measure(ctx context.Context, base, cand *runner, docs [][]int32, progress func(tokens int)) (Measured, error) {
	a, err := newPass(base)
	if err != nil {
		return Measured{}, err
	}
	b, err := newPass(cand)
	if err != nil {
		return Measured{}, err
	}
	diff := make([]float64, len(a.channels))
	pair := func(from, to int) {
		for i := from; i < to; i++ {
			diff[i] += squaredDistance(a.rows[i], b.rows[i])
		}
	}
	if err := walk(ctx, []*pass{a, b}, docs, pair, progress); err != nil {
		return Measured{}, err
	}
	return compare(a, b, diff)
}

func squaredDistance(a, b []float32) (sum float64) {
	for i, x := range a {
		d := float64(b[i]) - float64(x)
		sum += d * d
	}
	return sum
}

// compare tells how a candidate differs on the texts that both have walked; diff is of their channels' values where they
// walked together.
func compare(base, cand *pass, diff []float64) (Measured, error) {
	if err := sameChannels(base, cand); err != nil {
		return Measured{}, err
	}
	n, same := len(base.choices), 0
	for i, x := range base.choices {
		if x == cand.choices[i] && x >= 0 {
			same++
		}
	}
	m := Measured{Tokens: n, Parity: float64(same) / float64(n)}
	loss := [2]float64{base.loss / float64(n), cand.loss / float64(n)}
	m.Perplexity = Perplexity{finite(math.Exp(loss[0])), finite(math.Exp(loss[1])), finite(math.Exp(loss[1] - loss[0])), finite(loss[0]), finite(loss[1])}
	for i, c := range cand.channels {
		var d *float64
		if diff != nil {
			d = &diff[i]
		}
		m.Channels = append(m.Channels, c.against(base.channels[i], n, d))
	}
	m.Kinds = summarise(m.Channels)
	if cand.drafted > 0 {
		m.Drafts = &Drafts{base.draftSide(), cand.draftSide()}
	}
	return m, nil
}

// sameChannels tells whether two passes are of one architecture and of the same texts.
func sameChannels(a, b *pass) error {
	differ := len(a.channels) != len(b.channels) || len(a.choices) != len(b.choices) || a.drafted != b.drafted
	for i := 0; i < len(a.channels) && !differ; i++ {
		x, y := a.channels[i], b.channels[i]
		differ = x.name != y.name || x.kind != y.kind || x.n != y.n || len(x.experts) != len(y.experts)
	}
	if differ {
		return errors.New("what was measured is of different models")
	}
	return nil
}

// finite makes a number of what is none, since JSON has no other: one that is outside every bound.
func finite(x float64) float64 {
	if x-x != 0 {
		return math.MaxFloat64
	}
	return x
}

// walk runs passes through the documents, chunk by chunk together; pair (may be nil) is called when the values of channels
// [from, to) of all of them are in rows. The last token of a document is only predicted.
func walk(ctx context.Context, passes []*pass, docs [][]int32, pair func(from, to int), progress func(int)) error {
	for _, doc := range docs {
		for _, p := range passes {
			if err := p.r.room(len(doc)); err != nil {
				return err
			}
			if err := p.r.reset(); err != nil {
				return err
			}
			p.start, p.hidden = len(p.choices), p.hidden[:0]
		}
		for pos := 0; pos < len(doc)-1; pos += chunkRows {
			if err := ctx.Err(); err != nil {
				return err
			}
			rows := doc[pos:min(pos+chunkRows, len(doc)-1)]
			for _, p := range passes {
				if err := p.chunk(doc, rows, pos); err != nil {
					return err
				}
			}
			if pair != nil {
				pair(0, len(passes[0].r.trace.Taps))
			}
			if progress != nil {
				progress(len(rows))
			}
		}
		for _, p := range passes {
			if err := p.states(); err != nil {
				return err
			}
			if err := p.drafts(ctx, doc); err != nil {
				return err
			}
		}
		if pair != nil {
			pair(len(passes[0].r.trace.Taps), len(passes[0].channels))
		}
	}
	return nil
}

// chunk runs the next rows of a document and notes what passes through.
func (p *pass) chunk(doc, rows []int32, pos int) error {
	b := p.r.batch(rows, pos, len(rows))
	if err := p.r.trace.Run(b); err != nil {
		return err
	}
	v := p.r.m.Vocab()
	for i := range rows {
		logits := b.Logits[i*v : (i+1)*v]
		p.choices = append(p.choices, int64(argmax(logits)))
		p.loss += surprise(logits, doc[pos+i+1])
	}
	p.hidden = append(p.hidden, p.r.trace.Read(p.r.trace.Hidden, 0, len(rows))...)
	for i, tap := range p.r.trace.Taps {
		values, err := p.r.trace.Rows(tap, len(rows))
		if err != nil {
			return err
		}
		p.rows[i] = values
		p.channels[i].add(values)
		if tap.Kind == model.TapRouter {
			p.route(p.channels[i], tap.Layer, values, len(rows))
		}
	}
	return nil
}

// route notes the experts that a router's logits choose.
func (p *pass) route(o *observed, layer int, logits []float32, rows int) {
	n := len(logits) / rows
	for i := range rows {
		for _, e := range choose(p.r.m.Config, logits[i*n:(i+1)*n], p.r.m.RouterBias(layer)) {
			o.experts = append(o.experts, int64(e))
		}
	}
}

// states notes the recurrent states behind a document.
func (p *pass) states() error {
	at := len(p.r.trace.Taps)
	for i := range p.r.m.StateLayers() {
		values, err := p.r.m.RecurrentState(p.r.slots, 0, i)
		if err != nil {
			return err
		}
		p.rows[at+i] = values
		p.channels[at+i].add(values)
	}
	return nil
}

// drafts runs the draft layer over the document, depth by depth, where the model has one that can be run.
func (p *pass) drafts(ctx context.Context, doc []int32) error {
	m, h := p.r.m, p.r.m.Config.Hidden
	if !m.Config.MTP || m.Config.ShareIndexForMTP {
		return nil
	}
	plan, err := m.MTPPlan(p.r.pages, chunkRows, 1)
	if err != nil {
		return err
	}
	defer plan.Free()
	// Row t of depth d has the text's token t+d and drafts the one that the trunk chooses at t+d.
	choices := p.choices[p.start:]
	n := len(choices) - DraftDepths
	hidden, right := p.hidden, make([]bool, max(n, 0))
	for i := range right {
		right[i] = true
	}
	for depth := 1; depth <= DraftDepths; depth++ {
		var next []float32
		for pos := 0; pos < n; pos += chunkRows {
			if err := ctx.Err(); err != nil {
				return err
			}
			rows := min(chunkRows, n-pos)
			if err := plan.Write(plan.Hidden, 0, hidden[pos*h:(pos+rows)*h]); err != nil {
				return err
			}
			b := p.r.batch(doc[pos+depth:pos+depth+rows], pos, rows)
			if err := plan.Run(b); err != nil {
				return err
			}
			for i := range rows {
				draft := int64(argmax(b.Logits[i*m.Vocab() : (i+1)*m.Vocab()]))
				ok := draft == choices[pos+i+depth] && draft >= 0
				if ok {
					p.agree[depth-1]++
				}
				if right[pos+i] = right[pos+i] && ok; right[pos+i] {
					p.accepted++
				}
			}
			next = append(next, plan.Read(plan.Out, 0, rows)...)
		}
		hidden = next
	}
	p.drafted += int64(max(n, 0))
	return nil
}

func (p *pass) draftSide() DraftSide {
	s := DraftSide{AcceptedLength: 1 + float64(p.accepted)/float64(p.drafted)}
	for _, a := range p.agree {
		s.Agreement = append(s.Agreement, float64(a)/float64(p.drafted))
	}
	return s
}
