package bench

import (
	"context"
	"fmt"
)

// DetachedOptions size the measurement of idle detached sessions.
type DetachedOptions struct {
	Sessions int // of each kind
	Tokens   int // of the root's line; and what each session of the second kind generates

	// Root makes a session of about n tokens; Child forks it at its end, runs a turn of n tokens on the child unless n is
	// 0, and detaches the child to host memory.
	Root  func(ctx context.Context, n int) (id string, err error)
	Child func(ctx context.Context, root string, n int) error
	Live  func(ctx context.Context) (int, error) // sessions that the server has in memory
}

// DetachedResult says what idle detached sessions cost, in bytes a session. A session that has left memory is rows in the
// ledger only; what the cache keeps of its tokens is the cache's, which gives it up under pressure.
type DetachedResult struct {
	Sessions    int     `json:"sessions"`
	HeapBytes   float64 `json:"bytes_per_idle_session"`         // Go heap after a collection; sessions that share all of their line with others
	OwnBytes    float64 `json:"bytes_per_idle_session_cached"`  // the same of sessions with a turn of their own: with the cache's bookkeeping of it, without host_bytes
	HostBytes   float64 `json:"host_bytes_per_session_cached"`  // pages and states of the second kind in host memory: the cache's
	Live        int     `json:"sessions_in_memory"`             // that are left in the server's map
	LedgerBytes float64 `json:"ledger_bytes_per_idle_session"`  // growth of the database
	OwnTokens   int     `json:"tokens_per_session_with_a_turn"` // that each of the second kind generated
}

// Detached makes sessions that are forked off one root, detaches them, and compares this process's heap.
func Detached(ctx context.Context, s IdleServer, o DetachedOptions, progress Progress) (DetachedResult, error) {
	out := DetachedResult{Sessions: o.Sessions, OwnTokens: o.Tokens}
	root, err := o.Root(ctx, o.Tokens)
	if err != nil {
		return out, fmt.Errorf("make the root: %w", err)
	}
	if err := o.Child(ctx, root, o.Tokens); err != nil { // what the first call makes is not counted
		return out, err
	}
	n := float64(o.Sessions)
	for kind, tokens := range []int{0, o.Tokens} {
		before, err := s.usage(ctx)
		if err != nil {
			return out, err
		}
		host := s.Engine.Stats().HostBytes
		for i := range o.Sessions {
			if err := o.Child(ctx, root, tokens); err != nil {
				return out, fmt.Errorf("session %d: %w", i, err)
			}
			if (i+1)%100 == 0 || i+1 == o.Sessions {
				progress.step("detached sessions", kind*o.Sessions+i+1, 2*o.Sessions)
			}
		}
		after, err := s.usage(ctx)
		if err != nil {
			return out, err
		}
		bytes := float64(after.heap-before.heap) / n
		if kind == 0 {
			out.HeapBytes, out.LedgerBytes = bytes, float64(after.ledger-before.ledger)/n
		} else {
			out.HostBytes = float64(s.Engine.Stats().HostBytes-host) / n
			out.OwnBytes = bytes - out.HostBytes // the host tier is on this heap too
		}
	}
	out.Live, err = o.Live(ctx)
	return out, err
}
