package bench

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"rocket/engine"
)

// IdleOptions size the measurement of many idle sessions.
type IdleOptions struct {
	Sessions int // forks of one root
	Tokens   int // of the root's line
	Clients  int // that fork at once, one child a request
}

// IdleServer is a running server, as much of it as the measurement needs.
type IdleServer struct {
	REST
	LedgerBytes func(ctx context.Context) (int64, error) // size of the database
	Engine      *engine.Engine
}

// IdleResult says what many idle sessions forked off one root cost. Bytes are of this process and of the ledger, divided
// by the number of sessions.
type IdleResult struct {
	Sessions    int     `json:"sessions"`
	Tokens      int     `json:"tokens"`
	Clients     int     `json:"clients"`
	ForksPerSec float64 `json:"forks_per_second"`
	P50MS       float64 `json:"request_ms_p50"`
	P99MS       float64 `json:"request_ms_p99"`
	CommitMS    float64 `json:"commit_ms_p50"`          // an empty commit of the same database, right after
	HeapBytes   float64 `json:"heap_bytes_a_session"`   // Go heap in use after a collection
	DeviceBytes float64 `json:"device_bytes_a_session"` // pages and states
	LedgerBytes float64 `json:"ledger_bytes_a_session"`
}

// Idle forks one root many times and leaves the children idle.
func Idle(ctx context.Context, s IdleServer, o IdleOptions, progress Progress) (IdleResult, error) {
	out := IdleResult{Sessions: o.Sessions, Tokens: o.Tokens, Clients: o.Clients}
	root, length, err := s.Session(ctx, o.Tokens)
	if err != nil {
		return out, fmt.Errorf("make the root: %w", err)
	}
	out.Tokens = length
	before, err := s.usage(ctx)
	if err != nil {
		return out, err
	}
	began := time.Now()
	took, err := forkAll(ctx, s, root, length, o, progress)
	if err != nil {
		return out, err
	}
	out.ForksPerSec = float64(o.Sessions) / time.Since(began).Seconds()
	out.P50MS, out.P99MS = percentile(took, 0.5), percentile(took, 0.99)
	var commits []float64
	for range restReps {
		began := time.Now()
		if err := s.Commit(ctx); err != nil {
			return out, fmt.Errorf("empty commit: %w", err)
		}
		commits = append(commits, ms(time.Since(began)))
	}
	out.CommitMS = percentile(commits, 0.5)
	after, err := s.usage(ctx)
	if err != nil {
		return out, err
	}
	n := float64(o.Sessions)
	out.HeapBytes = float64(after.heap-before.heap) / n
	out.DeviceBytes = float64(after.device-before.device) / n
	out.LedgerBytes = float64(after.ledger-before.ledger) / n
	return out, nil
}

type idleUsage struct{ heap, device, ledger int64 }

func (s IdleServer) usage(ctx context.Context) (u idleUsage, err error) {
	runtime.GC()
	runtime.GC() // what finalisers let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	st := s.Engine.Stats()
	u.heap = int64(m.HeapAlloc)
	u.device = int64(st.PagesUsed)*st.PageBytes + int64(st.SlotsUsed)*st.SlotBytes
	if u.ledger, err = s.LedgerBytes(ctx); err != nil {
		return u, fmt.Errorf("measure the ledger: %w", err)
	}
	return u, nil
}

// forkAll makes the children from several clients and returns each request's time in milliseconds.
func forkAll(ctx context.Context, s IdleServer, root string, at int, o IdleOptions, progress Progress) ([]float64, error) {
	took := make([]float64, o.Sessions)
	errs := make([]error, o.Clients)
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for c := range o.Clients {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= o.Sessions {
					return
				}
				began := time.Now()
				if err := s.Fork(ctx, root, at); err != nil {
					errs[c] = fmt.Errorf("fork %d: %w", i, err)
					return
				}
				took[i] = ms(time.Since(began))
				if n := int(done.Add(1)); n%100 == 0 || n == o.Sessions {
					progress.step("forks", n, o.Sessions)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return took, nil
}
