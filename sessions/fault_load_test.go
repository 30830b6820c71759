package sessions

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"rocket/internal/linear"
)

// reader follows logs and keeps what it saw.
type reader struct {
	r    *rig
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu   sync.Mutex
	seen map[string][]Event // guarded by mu
}

func (r *rig) reader() *reader {
	x := &reader{r: r, seen: map[string][]Event{}}
	x.ctx, x.stop = context.WithCancel(r.t.Context())
	return x
}

// follow reads a session's log from its start.
func (x *reader) follow(id string) {
	x.wg.Go(func() {
		for next := int64(1); x.ctx.Err() == nil; {
			log, err := x.r.Log(x.ctx, DefaultTenant, id)
			var events []Event
			if err == nil {
				var there bool
				if there, err = log.Wait(x.ctx, next); err == nil && !there {
					return
				}
			}
			if err == nil {
				events, err = log.Read(x.ctx, next, 9)
			}
			switch ErrorCode(err) {
			case "":
			case CodeLedgerUnavailable, CodeOverloaded:
				continue
			default:
				if x.ctx.Err() == nil && ErrorCode(err) != CodeNotFound {
					x.r.t.Errorf("read %s from %d: %v", id, next, err)
				}
				return
			}
			x.mu.Lock()
			x.seen[id] = append(x.seen[id], events...)
			x.mu.Unlock()
			next += int64(len(events))
		}
	})
}

// check ends the reading and compares what was seen with what the ledger has.
func (x *reader) check() (events int) {
	x.r.t.Helper()
	x.stop()
	x.wg.Wait()
	for id, seen := range x.seen {
		events += len(seen)
		if _, err := x.r.Get(x.r.t.Context(), DefaultTenant, id); ErrorCode(err) == CodeNotFound {
			continue
		}
		kept := x.r.ledgerEvents(id)
		if len(kept) < len(seen) {
			x.r.t.Errorf("%d events of %s were seen, %d are kept", len(seen), id, len(kept))
			continue
		}
		if diff := cmp.Diff(kept[:len(seen)], seen, cmpopts.EquateEmpty()); diff != "" {
			x.r.t.Errorf("what a reader of %s saw is not what is kept:\n%s", id, diff)
		}
	}
	return events
}

// gremlin does something to the connections to the ledger at random moments
// until ctx ends, and counts what.
func (l *lossy) gremlin(ctx context.Context, seed uint64) map[string]int {
	rnd := rand.New(rand.NewPCG(seed, 99))
	done := map[string]int{}
	for ctx.Err() == nil {
		pause := time.Duration(5+rnd.IntN(60)) * time.Millisecond
		var name string
		switch rnd.IntN(6) {
		case 0:
			name = "latency"
			l.p.Delay(time.Duration(50+rnd.IntN(250)) * time.Millisecond)
			pause *= 4
		case 1:
			name = "reset"
			l.p.Reset()
		case 2:
			name = "cut"
			l.p.Cut()
		case 3:
			name = "message lost"
			l.p.LoseAt(1 + rnd.IntN(30))
		case 4:
			name = "answer lost"
			l.p.LoseAnswerAt(1 + rnd.IntN(30))
		case 5:
			name = "throttled"
			l.p.Throttle(100_000)
		}
		done[name]++
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		l.p.Restore()
	}
	return done
}

// Calls of many clients on the same few sessions, while connections to the
// ledger go and come: what was acknowledged stays, what had no answer happened
// once or not at all, and readers saw what is kept.
func TestLinearizableUnderFaults(t *testing.T) {
	seed := firstSeed(t)
	operations, sessions, events := 0, 0, 0
	faulted := map[string]int{}
	for n := range uint64(max(1, *faults)) {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			l := newLossy(t)
			h := linear.NewHistory()
			load := l.load(seed+n, h, 3)
			load.Clients, load.Calls, load.Do = 6, 18, l.patient(load.Do)
			if *faults == 0 {
				load.Clients, load.Calls = 5, 10
			}
			x := l.reader()
			for _, id := range load.Alive() {
				x.follow(id)
			}
			ctx, stop := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				for name, count := range l.gremlin(ctx, seed+n) {
					faulted[name] += count
				}
			})
			load.Run(t.Context(), h)
			stop()
			wg.Wait()
			l.settled()
			l.checkLinear(h, load)
			events += x.check()
			a, b := h.Len()
			operations, sessions = operations+a, sessions+b
		})
	}
	t.Logf("%d calls on %d sessions, %d events read, faults %v", operations, sessions, events, faulted)
}

// settled waits until no turn is open and no commit unknown. Connections that
// were lost while nobody used them are let go of.
func (l *lossy) settled() {
	l.t.Helper()
	l.pool.Reset()
	waitFor(l.t.(*testing.T), func() bool {
		return !slices.ContainsFunc(l.sessions(), func(s *session) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.unknown != nil || s.turn != nil
		})
	})
}

// Whichever message or answer is lost while a turn runs, it comes to the same
// tokens, and who read it live saw what is kept of it.
func TestEveryMessageOfATurnLost(t *testing.T) {
	l := newLossy(t)
	root := l.create("func main() {\n")
	tokens := 40
	if *faults > 0 {
		tokens = 300
	}
	want := l.turn(l.fork(root.ID, ForkRequest{}).Sessions[0].ID, "x", tokens)
	l.everyLoss(t, func(fault string, arm func()) {
		id := l.fork(root.ID, ForkRequest{}).Sessions[0].ID
		x := l.reader()
		x.follow(id)
		turn := l.start(id, TurnRequest{Input: ptr("x"), MaxTokens: &tokens, IgnoreEOS: true})
		arm()
		got := until(t, fault, func() (Turn, error) { return l.WaitTurn(t.Context(), DefaultTenant, id, turn.ID) })
		l.p.Unset()
		if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" || got.State != TurnCompleted || got.Text != want.Text {
			t.Errorf("%s: turn %s, tokens:\n%s", fault, got.State, diff)
		}
		if s := l.get(id); s.State != StateIdle || s.Length != got.To || s.TurnCount != 1 {
			t.Errorf("%s: %+v", fault, s)
		}
		x.check()
	})
}
