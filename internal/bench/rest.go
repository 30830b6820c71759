package bench

import (
	"context"
	"fmt"
	"time"
)

// REST is a running server and its database, for the part of a fork that clients see.
type REST struct {
	// Session makes a session of about n tokens, prefilled, and returns its id and length.
	Session func(ctx context.Context, n int) (id string, length int, err error)
	// Fork forks it at an offset; the answer has arrived when it returns.
	Fork func(ctx context.Context, id string, at int) error
	// Commit commits an empty transaction on the server's database.
	Commit func(ctx context.Context) error
}

// restReps is how many requests and commits one median is taken from.
const restReps = 50

// measure fills in the request and commit times of one size's rows. Requests and commits alternate, so that both see
// the same machine.
func (r *REST) measure(ctx context.Context, size int, rows []ForkRow) error {
	if r == nil {
		return nil
	}
	id, length, err := r.Session(ctx, size)
	if err != nil {
		return fmt.Errorf("make a session of %d tokens: %w", size, err)
	}
	for i := range rows {
		at := length
		var requests, commits []float64
		for n := range restReps {
			switch rows[i].Kind {
			case "turn_end":
				at = length - 1
			case "random":
				at = 1 + (n*7919)%(length-1)
			}
			began := time.Now()
			if err := r.Fork(ctx, id, at); err != nil {
				return fmt.Errorf("fork session of %d tokens at %d: %w", length, at, err)
			}
			requests = append(requests, ms(time.Since(began)))
			began = time.Now()
			if err := r.Commit(ctx); err != nil {
				return fmt.Errorf("empty commit: %w", err)
			}
			commits = append(commits, ms(time.Since(began)))
		}
		rows[i].RequestMS, rows[i].CommitMS = percentile(requests, 0.5), percentile(commits, 0.5)
	}
	return nil
}
