package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"rocket/client"
)

var (
	kills     = flag.Int("kills", 2, "how often TestKillWhileSessionsComeAndGo kills the server")
	killsSeed = flag.Uint64("kills.seed", 1, "of the moments")
)

const (
	comers        = 4    // sessions that come and go at once
	referenceLen  = 1200 // tokens that one session generates before a new one takes its place
	killWithin    = 700 * time.Millisecond
	tokensOneTurn = 3
)

// comer is a session that runs short turns, goes to disk and comes back, until its server dies.
type comer struct {
	prompt    string
	reference []int32 // prompt and greedy continuation, computed undisturbed
	prompted  int
	id        string
	length    int  // acknowledged
	onDisk    bool // the last call that was sent was a detach, and it was acknowledged
}

// TestKillWhileSessionsComeAndGo kills the server again and again while sessions run, detach to disk and resume: every
// acknowledged token stays, every line stays the one that an undisturbed run has, and what was acknowledged as
// detached comes back from the disk without recomputation.
func TestKillWhileSessionsComeAndGo(t *testing.T) {
	data, addr := dataDirectory(t), freeAddress(t)
	args := []string{"--listen", addr, "--data-dir", data, "--disk-bytes", "256MiB"}
	server := serve(t, args...)
	r := rand.New(rand.NewPCG(*killsSeed, 5))
	all := make([]*comer, comers)
	for i := range all {
		all[i] = newComer(t, connect(t, server.url), i)
	}
	restoredTokens := 0
	for n := range *kills {
		api := connect(t, server.url)
		ctx, cancel := context.WithCancel(t.Context())
		var dying atomic.Bool
		var wg sync.WaitGroup
		for i, c := range all {
			seed := r.Uint64()
			wg.Go(func() {
				if err := c.live(ctx, api, rand.New(rand.NewPCG(seed, uint64(i)))); err != nil && !dying.Load() {
					t.Errorf("kill %d, session %d: %v", n, i, err)
				}
			})
		}
		time.Sleep(time.Duration(r.Int64N(int64(killWithin)))) // the moment is what is random
		dying.Store(true)
		server.end(t, syscall.SIGKILL)
		cancel()
		wg.Wait()
		server = serve(t, args...)
		api = connect(t, server.url)
		for i, c := range all {
			got, err := c.verify(t.Context(), api)
			if err != nil {
				t.Fatalf("after kill %d (seed %d), session %d: %v", n, *killsSeed, i, err)
			}
			restoredTokens += got
		}
	}
	check, err := connect(t, server.url).CheckCache(t.Context(), 1)
	if err != nil || len(check.Mismatches) > 0 {
		t.Errorf("cache check %+v, error %v", check, err)
	}
	t.Logf("%d kills: %d tokens of detached sessions came back from the disk; check: %+v", *kills, restoredTokens, check)
	if code := server.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d after SIGTERM", code)
	}
}

// newComer computes the undisturbed line and makes the session.
func newComer(t *testing.T, api *client.Client, i int) *comer {
	t.Helper()
	ctx := testContext(t)
	c := &comer{prompt: fmt.Sprintf("package p%d\n\n", i) + strings.Repeat(fmt.Sprintf("func f%d(a int) int {\n\treturn a + %d\n}\n\n", i, i), 25)}
	twin, err := api.Create(ctx, client.CreateRequest{Input: &c.prompt}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.RunTurn(ctx, twin.ID, greedyTurn(referenceLen), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	line, err := api.Tokens(ctx, twin.ID, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	c.reference, c.prompted = line.Tokens, twin.Length
	if err := api.Delete(ctx, twin.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.begin(ctx, api); err != nil {
		t.Fatal(err)
	}
	return c
}

func greedyTurn(n int) client.TurnRequest {
	return client.TurnRequest{MaxTokens: &n, Temperature: new(0.0), IgnoreEOS: true}
}

// begin makes a session with nothing but the prompt.
func (c *comer) begin(ctx context.Context, api *client.Client) error {
	c.onDisk = false
	s, err := api.Create(ctx, client.CreateRequest{Input: &c.prompt}, client.CallOptions{})
	if err == nil {
		c.id, c.length = s.ID, s.Length
	}
	return err
}

// live runs random calls until one fails.
func (c *comer) live(ctx context.Context, api *client.Client, r *rand.Rand) error {
	for {
		if c.length+2*tokensOneTurn > len(c.reference) {
			if err := c.begin(ctx, api); err != nil {
				return err
			}
		}
		switch was := c.onDisk; r.IntN(3) {
		case 0:
			c.onDisk = false
			turn, err := api.RunTurn(ctx, c.id, greedyTurn(tokensOneTurn), client.CallOptions{})
			if err != nil {
				return fmt.Errorf("turn: %w", err)
			}
			c.length = turn.To
		case 1:
			c.onDisk = was // a second detach that fails leaves the first one true
			s, err := api.Detach(ctx, c.id, client.DetachRequest{Tier: "disk"}, client.CallOptions{})
			if err != nil {
				return fmt.Errorf("detach: %w", err)
			}
			c.onDisk = s.State == "detached"
		default:
			c.onDisk = false
			if _, err := api.Resume(ctx, c.id, client.CallOptions{}); err != nil {
				return fmt.Errorf("resume: %w", err)
			}
		}
	}
}

// verify compares the session with what was acknowledged and with the undisturbed line. It returns how many tokens a
// resume brought back from the disk where that can be told.
func (c *comer) verify(ctx context.Context, api *client.Client) (fromDisk int, err error) {
	s, err := api.Get(ctx, c.id)
	if err != nil {
		return 0, err
	}
	if s.State != "idle" && s.State != "detached" {
		return 0, fmt.Errorf("it is %s", s.State)
	}
	line, err := api.Tokens(ctx, c.id, 0, -1)
	if err != nil {
		return 0, err
	}
	n := len(line.Tokens)
	if n < c.length || n > len(c.reference) || !slices.Equal(line.Tokens, c.reference[:n]) {
		return 0, fmt.Errorf("its line of %d tokens, %d acknowledged, is not the undisturbed one", n, c.length)
	}
	c.length = n
	if c.onDisk {
		back, err := api.Resume(ctx, c.id, client.CallOptions{})
		if err != nil {
			return 0, err
		}
		if back.Restored.Recomputed > 0 {
			return 0, fmt.Errorf("a line of %d tokens that was on disk came back as %+v", n, back.Restored)
		}
		fromDisk = back.Restored.Disk
	}
	if n+1 > len(c.reference) {
		return fromDisk, nil
	}
	turn, err := api.RunTurn(ctx, c.id, greedyTurn(1), client.CallOptions{})
	if err != nil {
		return 0, err
	}
	c.onDisk, c.length = false, turn.To
	if turn.Tokens[0] != c.reference[n] {
		return 0, fmt.Errorf("token %d is %d, the undisturbed line has %d", n, turn.Tokens[0], c.reference[n])
	}
	return fromDisk, nil
}
