package sessions

import (
	"testing"
	"time"
)

// readTail reads all there is.
func readTail(t *testing.T, tail *Tail) (events []Event, err error) {
	t.Helper()
	for {
		got, last, err := tail.Next(t.Context(), time.Minute, 0)
		if err != nil {
			return events, err
		}
		if events = append(events, got...); len(events) > 0 && events[len(events)-1].Seq >= last {
			return events, nil
		}
	}
}

// A reader that got all there is from the ledger is woken by what comes then,
// as one that got it from memory is.
func TestTailWaitsBehindTheLedger(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	a.turn(s.ID, "", 3)
	if _, err := a.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	woken := map[*rig]chan struct{}{a: make(chan struct{}, 1), b: make(chan struct{}, 1)}
	tails := map[*rig]*Tail{}
	for _, r := range []*rig{a, b} {
		l, err := r.Log(t.Context(), DefaultTenant, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		tails[r] = l.Tail(1, func() { signal(woken[r]) })
		defer tails[r].Close()
		if events, err := readTail(t, tails[r]); err != nil || len(events) < 3 || events[0].Seq != 1 {
			t.Fatalf("%+v, %v", events, err)
		}
	}
	turn := a.turn(s.ID, "", 3)
	for r, tail := range tails {
		var seen []Event
		var err error
		for err == nil && (len(seen) == 0 || r == b || seen[len(seen)-1].Type != EventTurnCompleted) {
			select {
			case <-woken[r]:
			case <-time.After(time.Minute):
				t.Fatalf("not woken, at the other server: %v; seen %+v", r == b, seen)
			}
			var more []Event
			more, err = readTail(t, tail)
			seen = append(seen, more...)
		}
		if r == b { // the other server's readers are sent away
			wantCode(t, err, CodeMoved, "")
		} else if err != nil || seen[0].TurnID != turn.ID {
			t.Errorf("%+v, %v", seen, err)
		}
	}
}
