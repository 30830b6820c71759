package sessions

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
)

// TestLargePromptsWait: one of a tenant's goes at a time, promptsLargeMax of
// all, and who waits can give up.
func TestLargePromptsWait(t *testing.T) {
	var g promptGate
	ctx, giveUp := context.WithCancel(t.Context())
	var leave []func()
	for _, tenant := range []string{"a", "b", "c", "d"}[:promptsLargeMax] {
		l, err := g.enter(ctx, tenant)
		if err != nil {
			t.Fatal(err)
		}
		leave = append(leave, l)
	}
	var all sync.WaitGroup
	through := make(chan string, 2)
	for _, tenant := range []string{"a", "e"} {
		all.Go(func() {
			l, err := g.enter(t.Context(), tenant)
			if err != nil {
				t.Error(err)
				return
			}
			through <- tenant
			l()
		})
	}
	all.Go(func() {
		if _, err := g.enter(ctx, "b"); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
	giveUp()
	select {
	case tenant := <-through:
		t.Fatalf("%s did not wait", tenant)
	default:
	}
	for _, l := range leave {
		l()
	}
	all.Wait()
	if len(g.busy) != 0 || len(through) != 2 {
		t.Errorf("%v are under way, %d got through", g.busy, len(through))
	}
}

// TestLargePrompts: they work beside each other, and a call that ends while it
// waits changes nothing.
func TestLargePrompts(t *testing.T) {
	r := newRig(t)
	s := r.create("abc")
	text := strings.Repeat("a b c d ", promptLarge/8+1)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	leave, err := r.prompts.enter(t.Context(), DefaultTenant)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.StartTurn(gone, local, s.ID, TurnRequest{Input: &text}); err == nil {
		t.Error("a call that was given up has an effect")
	}
	leave()
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			_, err := r.Create(t.Context(), local, CreateRequest{Input: &text})
			wantCode(t, err, CodeContextLimit, "input")
		})
	}
	all.Wait()
}
