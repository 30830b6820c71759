package sessions

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// clockStep is what the ledger's clock may differ by from what this server
	// takes it for. Less is left alone: times of events would go back and forth.
	clockStep = 100 * time.Millisecond

	// clockRoundMax is how long a look at the ledger's clock may take to be of
	// any use.
	clockRoundMax = time.Second
)

// ledgerClock is the ledger's clock as this server last saw it. What one server
// writes another reads, and Postgres compares with its own now(): times of
// events, from which sessions expire and old events are dropped. Between two
// looks it goes by the monotonic clock, so that nothing depends on this
// machine's wall clock, however it jumps.
type ledgerClock struct {
	seen atomic.Pointer[clockLook]
}

// clockLook is what the ledger's clock showed at a moment here.
type clockLook struct{ ledger, here time.Time }

// now is the time of events: to the millisecond, which is what the ledger
// keeps of a delta's.
func (c *ledgerClock) now() time.Time {
	x := c.seen.Load()
	return x.ledger.Add(time.Since(x.here)).UTC().Truncate(time.Millisecond)
}

// read looks at the ledger's clock.
func (c *ledgerClock) read(ctx context.Context, conn *pgxpool.Conn) error {
	asked := time.Now()
	var ledger time.Time
	if err := conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&ledger); err != nil {
		return fmt.Errorf("read the ledger's clock: %w", err)
	}
	c.set(ledger, asked, time.Since(asked))
	return nil
}

// set takes in a look that began here at asked.
func (c *ledgerClock) set(ledger, asked time.Time, round time.Duration) {
	if known := c.seen.Load(); known != nil {
		off := ledger.Sub(known.ledger) - asked.Add(round/2).Sub(known.here)
		if off.Abs() < clockStep || round > clockRoundMax {
			return
		}
	}
	c.seen.Store(&clockLook{ledger, asked.Add(round / 2)})
}
