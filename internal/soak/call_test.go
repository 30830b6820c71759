package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"sync"
	"testing"

	"rocket/client"
)

// TestOutcomes: only what a server has answered for good is an answer; a call
// that is taken for answered would not be repeated.
func TestOutcomes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want outcome
	}{
		{nil, answered},
		{&client.Error{Status: 404, Code: "not_found"}, answered},
		{&client.Error{Status: 409, Code: "session_closed"}, answered},
		{&client.Error{Status: 500, Code: "internal"}, answered},
		{fmt.Errorf("follow: %w", &client.Error{Status: 503, Code: "overloaded"}), refused},
		{&client.Error{Status: 429}, refused},
		{&client.Error{Status: 409, Code: "idempotency_running"}, refused},
		{&client.Error{Status: 500, Code: "timeout"}, broken},
		{&url.Error{Op: "Post", Err: errors.New("connection refused")}, broken},
		{fmt.Errorf("decode answer: %w", io.ErrUnexpectedEOF), broken},
		{fmt.Errorf("read frame: %w", io.EOF), broken},
		{errors.New("something else"), broken},
	} {
		if got := outcomeOf(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

// TestGate: a round ends when all agents have checked it, and a kill in between begins another one.
func TestGate(t *testing.T) {
	g := newGate(2)
	first := g.raise(false)
	var all sync.WaitGroup
	for n := range 2 {
		all.Go(func() {
			for done := 0; ; {
				round, last := g.now()
				if round == done {
					continue
				}
				if err := g.arrive(t.Context(), n, round); err != nil {
					t.Error(err)
				}
				if done = round; last {
					return
				}
			}
		})
	}
	if err := g.wait(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	last := g.raise(true) // the first one is not released
	if err := g.wait(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	g.release(last)
	all.Wait()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errEnough)
	if err := g.wait(ctx, last+1); err != errEnough {
		t.Errorf("wait after the end of the run: %v", err)
	}
}
