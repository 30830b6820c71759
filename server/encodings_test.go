package server

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"

	"rocket/sessions"
)

// TestEncodingsAreShared: readers of one event get the same bytes, other events get their own, and what is kept is
// bounded however many events come.
func TestEncodingsAreShared(t *testing.T) {
	var c encodings
	event := func(session string, epoch, seq int64) *sessions.Event {
		text := fmt.Sprint(session, epoch, seq)
		return &sessions.Event{Type: sessions.EventTurnDelta, SessionID: session, Epoch: epoch, Seq: seq, EventData: sessions.EventData{Text: &text}}
	}
	encode := func(e *sessions.Event) []byte {
		t.Helper()
		got, err := c.encode("local", e)
		if err != nil {
			t.Fatal(err)
		}
		want, err := compact(e)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%s, want %s (%v)", got, want, err)
		}
		return got
	}
	first := encode(event("a", 1, 1))
	if again := encode(event("a", 1, 1)); &again[0] != &first[0] {
		t.Error("the same event was encoded twice")
	}
	for _, other := range []*sessions.Event{event("b", 1, 1), event("a", 2, 1), event("a", 1, 2)} {
		encode(other)
	}
	another := event("a", 1, 1) // of a session that came back under its id
	another.TurnID = "turn_2"
	encode(another)
	encode(event("a", 1, 1))
	var all sync.WaitGroup
	for r := range 4 {
		all.Go(func() {
			for seq := range int64(3 * encodingsKept) {
				_, _ = c.encode("local", event(fmt.Sprint("s", r%2), 1, seq)) // compared above
			}
		})
	}
	all.Wait()
	if n := len(c.byKey); n > encodingsKept {
		t.Errorf("%d encodings are kept", n)
	}
	long := event("a", 9, 9)
	*long.Text = strings.Repeat("x", encodingBytesMax)
	encode(long)
	if _, kept := c.byKey[eventKey{"local", "a", 9, 9}]; kept {
		t.Error("a long event is kept")
	}
}
