package model

import (
	"errors"
	"fmt"

	"rocket/kernels"
)

// MTPPlan is one depth of the draft layer, teacher-forced: row t takes the embedding of a token x and a hidden row h and
// gives eh([enorm(embed(x)) | hnorm(h)]) through the layer, whose shared_head.norm output is both the logits' input and
// the next depth's hidden row. It attends over the rows that this plan has stored in the given pages, so a depth-wise
// pass gives every depth pages of its own. For tests; drafting inside the loop is a plan of its own, later.
type MTPPlan struct {
	*kernels.Plan
	Hidden kernels.Scratch // write the batch's hidden rows here before Run
	Out    kernels.Scratch // read the rows for the next depth here after it
}

// MTPPlan builds the draft layer over its part of the page arena. The batch's tokens are the x of each row.
func (m *Model) MTPPlan(pages *kernels.Buffer, maxRows, maxSegs int) (*MTPPlan, error) {
	switch {
	case m.mtp == nil:
		return nil, errors.New("draft plan: the model has no draft layer")
	case m.weights.packed == nil:
		return nil, errors.New("draft plan: the model is closed")
	case m.Config.ShareIndexForMTP:
		return nil, errors.New("draft plan: index_share_for_mtp_iteration true is not supported")
	}
	p, err := m.dev.NewPlan(m.Class, maxRows, maxSegs, m.limit)
	if err != nil {
		return nil, fmt.Errorf("draft plan: %w", err)
	}
	g := newGraph(m, p, pages, nil)
	g.page = len(g.layout.Page) - 1
	in, out := g.draft()
	if err := p.Err(); err != nil {
		p.Free()
		return nil, fmt.Errorf("draft plan: %w", err)
	}
	return &MTPPlan{Plan: p, Hidden: in, Out: out}, nil
}

// draft appends the draft layer with its plain residual.
func (g *graph) draft() (in, out kernels.Scratch) {
	c, p, w := g.c, g.p, g.m.mtp
	g.scratches([]Layer{c.mtpLayer()})
	in, res, pair := p.Scratch(c.Hidden), p.Scratch(c.Hidden), p.Scratch(2*c.Hidden)
	p.Embed(g.m.embed, g.emb)
	p.Barrier()
	p.RMSNorm(g.emb, w.eNorm, c.NormEps, pair, 0, true)
	p.RMSNorm(in, w.hNorm, c.NormEps, pair, c.Hidden, true)
	p.Barrier()
	p.Linear(pair, 0, w.eh, res, 0)
	p.Barrier()
	p.RMSNorm(res, w.inNorm, c.NormEps, g.x, 0, true)
	p.Barrier()
	g.attention(&w.layerWeights)
	p.Barrier()
	p.Add(res, g.y, res)
	p.Barrier()
	p.RMSNorm(res, w.postNorm, c.NormEps, g.x, 0, true)
	p.Barrier()
	g.mlp(&w.mlp)
	p.Barrier()
	p.Add(res, g.y, res)
	p.Barrier()
	p.RMSNorm(res, w.outNorm, c.NormEps, g.hidden, 0, true)
	p.Barrier()
	p.Logits(g.hidden, g.m.head)
	return in, g.hidden
}
