package server

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"rocket/client"
	"rocket/engine"
)

// expected are the codes that calls which race with each other may get.
// Anything else, "internal" above all, is a fault.
var expected = map[string]bool{
	"": true, "not_found": true, "session_closed": true, "turn_in_progress": true, "invalid": true, "queue_full": true,
}

// TestManyClients lets clients do everything at once to sessions that they
// share. Nobody may get an answer that makes no sense; at the end the engine's
// and the ledger's own checks must hold.
func TestManyClients(t *testing.T) {
	for name, memory := range map[string]engine.Options{
		"with room":    {},
		"short memory": {PageBytes: 8 << 20, SnapshotBytes: 16 << 20, HostBytes: 4 << 20, MaxSeqs: 4},
	} {
		t.Run(name, func(t *testing.T) { manyClients(t, memory) })
	}
}

func manyClients(t *testing.T, memory engine.Options) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := start(t, worldOptions{engine: memory})
	var mu sync.Mutex
	var ids []string
	pick := func(r *rand.Rand) string {
		mu.Lock()
		defer mu.Unlock()
		return ids[r.IntN(len(ids))]
	}
	add := func(id string) {
		mu.Lock()
		defer mu.Unlock()
		ids = append(ids, id)
	}
	add(w.create("func main() {").ID)
	const clients, calls = 8, 40
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := range calls {
				what, err := w.anything(r, pick(r), add)
				if !expected[client.CodeOf(err)] || err != nil && client.CodeOf(err) == "" {
					t.Errorf("client %d, call %d, %s: %v", i, n, what, err)
					return
				}
			}
		})
	}
	all.Wait()
	// What is left can be read, and its logs are dense.
	seen := 0
	for _, id := range ids {
		if _, err := w.api.Get(w.ctx(), id); client.CodeOf(err) == "not_found" {
			continue
		}
		seen++
		if _, err := w.api.Cancel(w.ctx(), id, client.CallOptions{}); !expected[client.CodeOf(err)] {
			t.Errorf("cancel %s: %v", id, err)
		}
		for i, e := range w.page(id, 0) {
			if e.Seq != int64(i+1) {
				t.Fatalf("event %d of %s has seq %d", i, id, e.Seq)
			}
		}
	}
	t.Logf("%d sessions, %d left", len(ids), seen)
}

// anything does one call that makes sense for some state of a session.
func (w *world) anything(r *rand.Rand, id string, add func(string)) (what string, err error) {
	ctx, none := w.ctx(), client.CallOptions{}
	tokens := 1 + r.IntN(40)
	input := fmt.Sprintf(" x%d", r.IntN(1000))
	switch r.IntN(14) {
	case 0:
		s, err := w.api.Create(ctx, client.CreateRequest{Input: &input}, none)
		if err == nil {
			add(s.ID)
		}
		return "create", err
	case 1, 2:
		_, err = w.api.RunTurn(ctx, id, client.TurnRequest{Input: &input, MaxTokens: &tokens, Temperature: new(0.7)}, none)
		return "run turn", err
	case 3, 4:
		_, err = w.api.StartTurn(ctx, id, client.TurnRequest{MaxTokens: &tokens, Stop: []string{"}"}}, none)
		return "start turn", err
	case 5, 6:
		result, err := w.api.Fork(ctx, id, client.ForkRequest{N: new(1 + r.IntN(3))}, none)
		for _, s := range result.Sessions {
			add(s.ID)
		}
		return "fork", err
	case 7:
		s, err := w.api.Get(ctx, id)
		if err != nil || s.Length == 0 {
			return "get", err
		}
		result, err := w.api.Fork(ctx, id, client.ForkRequest{At: new(1 + r.IntN(s.Length))}, none)
		for _, s := range result.Sessions {
			add(s.ID)
		}
		return "fork at", err
	case 8:
		_, err = w.api.Cancel(ctx, id, none)
		return "cancel", err
	case 9:
		_, err = w.api.Detach(ctx, id, client.DetachRequest{}, none)
		return "detach", err
	case 10:
		_, err = w.api.Resume(ctx, id, none)
		return "resume", err
	case 11:
		_, err = w.api.Tree(ctx, id, -1)
		return "tree", err
	case 12:
		_, err = w.api.Tokens(ctx, id, 0, -1)
		return "tokens", err
	}
	if r.IntN(3) > 0 {
		_, err = w.api.Turns(ctx, id, 0, "")
		return "turns", err
	}
	return "delete", w.api.Delete(ctx, id, none)
}
