package sessions

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// Everybody at once on the same few sessions: calls may be refused, each with
// a code that says why, and what is left is consistent: the ledger (checked on
// cleanup), the log that was read live, and the goroutines (checked by
// TestMain).
func TestManyAtOnce(t *testing.T) {
	r := newRig(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var mu sync.Mutex
	var ids []string
	pick := func(rnd *rand.Rand) string {
		mu.Lock()
		defer mu.Unlock()
		return ids[rnd.IntN(len(ids))]
	}
	for i := range 4 {
		ids = append(ids, r.create(fmt.Sprint("package p", i, "\n")).ID)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var readers sync.WaitGroup
	for _, id := range ids {
		readers.Go(func() { follow(t, ctx, r, id) })
	}
	var workers sync.WaitGroup
	for w := range 8 {
		workers.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(w)))
			for range 25 {
				id := pick(rnd)
				made, err := anyCall(t.Context(), r, rnd, id)
				switch ErrorCode(err) {
				case "", CodeTurnInProgress, CodeSessionClosed, CodeNotFound, CodeInvalid:
				default:
					t.Errorf("refused with %v", err)
				}
				mu.Lock()
				ids = append(ids, made...)
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	for _, id := range ids { // what runs ends, so that everything is checked
		if _, err := r.Cancel(t.Context(), local, id); err != nil && ErrorCode(err) != CodeNotFound {
			t.Error(err)
		}
	}
	stop()
	readers.Wait()
}

func anyCall(ctx context.Context, r *rig, rnd *rand.Rand, id string) (made []string, err error) {
	switch n := rnd.IntN(20); {
	case n < 7:
		_, err = r.StartTurn(ctx, local, id, TurnRequest{Input: ptr("x"), MaxTokens: ptr(1 + rnd.IntN(60)), IgnoreEOS: true})
	case n < 12:
		var f ForkResult
		f, err = r.Fork(ctx, local, id, ForkRequest{N: ptr(1 + rnd.IntN(3))})
		for _, s := range f.Sessions {
			made = append(made, s.ID)
		}
	case n < 14:
		_, err = r.Cancel(ctx, local, id)
	case n < 15:
		_, err = r.Detach(ctx, local, id, DetachRequest{})
	case n < 16:
		_, err = r.Resume(ctx, local, id)
	case n < 17:
		_, err = r.Patch(ctx, local, id, PatchRequest{Title: ptr("t")})
	case n < 18:
		_, err = r.Turns(ctx, DefaultTenant, id, TurnFilter{})
	case n < 19:
		_, err = r.Close(ctx, local, id)
	default:
		err = r.Delete(ctx, local, id)
	}
	return made, err
}

// follow reads a log until ctx ends or the session is gone: dense, and in the
// end what the ledger has.
func follow(t *testing.T, ctx context.Context, r *rig, id string) {
	log, err := r.Log(t.Context(), DefaultTenant, id)
	if err != nil {
		if ErrorCode(err) != CodeNotFound {
			t.Error(err)
		}
		return
	}
	for next := int64(1); ; {
		if ok, err := log.Wait(ctx, next); err != nil || !ok {
			return
		}
		events, err := log.Read(t.Context(), next, 7)
		if ErrorCode(err) == CodeNotFound {
			return
		}
		if err != nil {
			t.Errorf("read from %d: %v", next, err)
			return
		}
		for _, e := range events {
			if e.Seq != next || e.SessionID != id {
				t.Errorf("event %d of %s where %d was due", e.Seq, e.SessionID, next)
				return
			}
			next++
		}
	}
}
