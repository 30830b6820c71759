package replay

import (
	"context"
	"fmt"

	"rocket/engine"
)

// RunResult compares what an engine reported with what the walk predicted.
type RunResult struct {
	Requests     int   `json:"requests"`
	PromptTokens int64 `json:"prompt_tokens"`
	Predicted    int64 `json:"predicted_tokens"`
	Cached       int64 `json:"cached_tokens"` // as the engine says
	Snapshots    int64 `json:"snapshots"`
	WalkCaptures int   `json:"predicted_snapshots"`
	CopyOnExtend int64 `json:"copy_on_extend"`
	WalkCopies   int   `json:"predicted_copy_on_extend"`

	Differences []RunDifference `json:"differences"` // of single requests
}

// RunDifference is a request for which the two do not agree.
type RunDifference struct {
	Request   int `json:"request"`
	Prompt    int `json:"prompt"`
	Predicted int `json:"predicted"`
	Cached    int `json:"cached"`
}

// specialIDs are the token ids that a model's tokenizer may keep for itself; made tokens avoid them.
const specialIDs = 8

// Prefix is the beginning of a trace as Run plays it: n requests at most, of contextLimit tokens at most, each over
// before the next begins and with one token of an answer at least.
func (t *Trace) Prefix(n, contextLimit int) *Trace {
	out := &Trace{Format: t.Format}
	for _, r := range t.Requests {
		if len(out.Requests) == n {
			break
		}
		if r.output == 0 {
			r.Output = []Seg{{ID: stream(scopeOwn, uint64(len(out.Requests))), N: 1}}
			r.output = 1
		}
		if r.prompt+r.output >= contextLimit {
			continue
		}
		r.Done, r.Session = r.At, -1
		out.Requests = append(out.Requests, r)
	}
	return out
}

// Run plays a trace of Prefix on an engine that has nothing in its cache and room for everything, one request after
// the other: tokens made from the ids, answers sampled by the model. Where a later prompt holds an answer, it holds
// the sampled one.
func Run(ctx context.Context, e *engine.Engine, t *Trace, g Geometry, progress func(done, total int)) (RunResult, error) {
	vocab := int32(e.Info().Vocab - specialIDs)
	predicted := make([]Served, len(t.Requests))
	walk, err := Walk(ctx, t, Options{Geometry: g, Vocab: vocab, Low: specialIDs, Served: func(i int, s Served) { predicted[i] = s }})
	if err != nil {
		return RunResult{}, err
	}
	before := e.Stats()
	res := RunResult{WalkCaptures: walk.Snapshots, WalkCopies: walk.CopyOnExtend, Differences: []RunDifference{}}
	said := answers{}
	for i := range t.Requests {
		r := &t.Requests[i]
		line := said.tokens(r.Prompt, vocab)
		usage, ids, err := turn(ctx, e, line, r.output, uint64(i))
		if err != nil {
			return RunResult{}, fmt.Errorf("request %d of %d tokens: %w", i, len(line), err)
		}
		said.keep(r.Output, ids)
		res.Requests++
		res.PromptTokens += int64(len(line))
		res.Predicted += int64(predicted[i].Cached)
		res.Cached += int64(usage.CachedTokens)
		if usage.CachedTokens != predicted[i].Cached {
			res.Differences = append(res.Differences, RunDifference{i, len(line), predicted[i].Cached, usage.CachedTokens})
		}
		if progress != nil {
			progress(i+1, len(t.Requests))
		}
	}
	after := e.Stats()
	res.Snapshots, res.CopyOnExtend = after.Snapshots-before.Snapshots, after.CopyOnExtend-before.CopyOnExtend
	return res, nil
}

// turn opens a line, generates n tokens after it, and lets go of it. The seed makes siblings' answers differ.
func turn(ctx context.Context, e *engine.Engine, line []int32, n int, seed uint64) (engine.Usage, []int32, error) {
	s, _, err := e.Open(ctx, line, engine.OpenOptions{Lazy: true})
	if err != nil {
		return engine.Usage{}, nil, err
	}
	defer e.Release(s)
	run, err := e.Start(ctx, s, engine.TurnRequest{Line: line, MaxTokens: n, Temperature: 1, Seed: seed, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		return engine.Usage{}, nil, err
	}
	for {
		toks, st := run.Read(0)
		run.Ack(len(toks))
		if st.Phase == engine.Done {
			ids := make([]int32, len(toks))
			for i, t := range toks {
				ids[i] = t.ID
			}
			return st.Usage, ids, st.Err
		}
		select {
		case <-run.Ready():
		case <-ctx.Done():
			run.Cancel()
			return engine.Usage{}, nil, ctx.Err()
		}
	}
}

// answers are sampled tokens by stream, for those streams that a prompt first shows after they were answers.
type answers map[uint64]map[int32]int32

// tokens makes a prompt's tokens, sampled ones where there are any, and notes its streams as shown.
func (a answers) tokens(segs []Seg, vocab int32) []int32 {
	line := appendTokens(nil, segs, specialIDs, vocab)
	at := 0
	for _, s := range segs {
		for i := range s.N {
			if id, ok := a[s.ID][s.Off+i]; ok {
				line[at+int(i)] = id
			}
		}
		at += int(s.N)
		if a[s.ID] == nil {
			a[s.ID] = map[int32]int32{}
		}
		for i := range s.N { // what was shown stays as it was
			a[s.ID][s.Off+i] = line[at-int(s.N)+int(i)]
		}
	}
	return line
}

// keep notes an answer.
func (a answers) keep(segs []Seg, ids []int32) {
	for _, s := range segs {
		if a[s.ID] == nil {
			a[s.ID] = map[int32]int32{}
		}
		for i := range s.N {
			if len(ids) == 0 {
				return
			}
			if _, shown := a[s.ID][s.Off+i]; !shown {
				a[s.ID][s.Off+i] = ids[0]
			}
			ids = ids[1:]
		}
	}
}
