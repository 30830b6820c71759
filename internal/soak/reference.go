package soak

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"rocket/client"
)

const (
	prompts         = 2
	referenceTokens = 450 // generated; a session that has come so far gets no more turns
	promptRepeats   = 14  // some hundred tokens: lines cross the edges of pages
)

// mode is how a session generates, always the same way: then its line is one
// that can be generated undisturbed.
type mode int

const (
	greedy mode = iota
	seeded      // with noise, which comes from seed and position: equal tokens mean equal offsets too
	modes
)

func (m mode) String() string { return [modes]string{"greedy", "seeded"}[m] }

// turn is a request for n more tokens.
func (m mode) turn(n int) client.TurnRequest {
	req := client.TurnRequest{MaxTokens: &n, Temperature: new(0.0), IgnoreEOS: true}
	if m == seeded {
		req.Temperature, req.Seed = new(0.9), new(int64(11))
	}
	return req
}

// reference is a prompt and what it goes on with, undisturbed.
type reference struct {
	n        int
	mode     mode
	prompt   string
	prompted int
	tokens   []int32
}

func (f *reference) String() string { return fmt.Sprintf("%s, prompt %d", f.mode, f.n) }

// makeReferences generates one line for each prompt and mode, before anything
// is killed.
func (r *run) makeReferences(ctx context.Context) error {
	for n := range prompts {
		text := fmt.Sprintf("package p%d\n\n", n) + strings.Repeat(fmt.Sprintf("func f%d(a int) int {\n\treturn a + %d\n}\n\n", n, n), promptRepeats)
		for m := range modes {
			r.refs = append(r.refs, &reference{n: n, mode: m, prompt: text})
		}
	}
	var all sync.WaitGroup
	errs := make([]error, len(r.refs))
	for i, f := range r.refs {
		all.Go(func() { errs[i] = f.generate(ctx, r.servers[i%len(r.servers)].api) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("generate an undisturbed line: %w", err)
		}
	}
	return nil
}

func (f *reference) generate(ctx context.Context, api *client.Client) error {
	s, err := api.Create(ctx, client.CreateRequest{Input: &f.prompt}, client.CallOptions{})
	if err != nil {
		return err
	}
	if _, err := api.RunTurn(ctx, s.ID, f.mode.turn(referenceTokens), client.CallOptions{}); err != nil {
		return err
	}
	line, err := api.Tokens(ctx, s.ID, 0, -1)
	if err != nil {
		return err
	}
	f.prompted, f.tokens = s.Length, line.Tokens
	return api.Delete(ctx, s.ID, client.CallOptions{})
}
