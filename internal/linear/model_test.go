package linear

import (
	"strings"
	"testing"
	"time"
)

// op is one operation of a history that is written down by hand.
type op struct {
	from, to int64 // to < 0: no answer
	call     Call
	answer   Answer
}

func history(ops ...op) *History {
	h := NewHistory()
	h.add(0, "s", Call{Kind: Born}, 0, 1, Answer{View: View{State: "idle", Length: 4}})
	for i, o := range ops {
		o.answer.Unknown = o.to < 0
		h.add(i+1, "s", o.call, o.from, o.to, o.answer)
	}
	return h
}

func view(state string, length, turns, children int) Answer {
	return Answer{View: View{State: state, Length: length, Turns: turns, Children: children}}
}

var (
	get     = Call{Kind: Get}
	turn    = Call{Kind: Start, Prompt: 2, Max: 10}
	cancel  = Call{Kind: Cancel}
	close_  = Call{Kind: Close}
	remove  = Call{Kind: Delete}
	end     = Call{Kind: End, Turn: "a"}
	fork2   = Call{Kind: Fork, At: -1, N: 2}
	started = Answer{Turn: "a", Turned: "queued", From: 4, To: 4}
	done    = Answer{Turn: "a", Turned: "completed", From: 4, To: 16}
)

func TestModel(t *testing.T) {
	refused := func(code string) Answer { return Answer{Code: code} }
	for _, x := range []struct {
		name string
		ok   bool
		ops  []op
	}{
		{"a turn and its end", true, []op{{10, 20, turn, started}, {15, 16, get, view("running", 4, 1, 0)},
			{21, 22, get, view("running", 9, 1, 0)}, {10, 60, end, done}, {70, 80, get, view("idle", 16, 1, 0)}}},
		{"an end before its turn", false, []op{{10, 20, end, done}, {30, 40, turn, started}}},
		{"half a prompt", false, []op{{10, 20, turn, started}, {15, 16, get, view("running", 5, 1, 0)}}},
		{"a line that shrinks", false, []op{{10, 20, turn, started}, {22, 23, get, view("running", 9, 1, 0)},
			{24, 25, get, view("running", 8, 1, 0)}, {10, 60, end, done}}},
		{"completed too early", false, []op{{10, 20, turn, started}, {10, 60, end, Answer{Turned: "completed", From: 4, To: 15}}}},
		{"two turns at once", false, []op{{10, 20, turn, started}, {22, 24, turn, Answer{Turn: "b", Turned: "queued", From: 4}}, {10, 60, end, done}}},
		{"a second turn refused", true, []op{{10, 20, turn, started}, {22, 24, turn, refused(TurnInProgress)}, {10, 60, end, done}}},
		{"refused without a turn", false, []op{{10, 20, turn, refused(TurnInProgress)}}},
		{"cancelled", true, []op{{10, 20, turn, started}, {30, 40, cancel, Answer{Turn: "a", Turned: "cancelled", From: 4, To: 9}},
			{10, 60, end, Answer{Turn: "a", Turned: "cancelled", From: 4, To: 9}}}},
		{"two ends", false, []op{{10, 20, turn, started}, {30, 40, cancel, Answer{Turn: "a", Turned: "cancelled", From: 4, To: 9}}, {10, 60, end, done}}},
		{"closed stays closed", false, []op{{10, 20, close_, view("closed", 4, 0, 0)}, {30, 40, turn, started}}},
		{"a close that cancels", true, []op{{10, 20, turn, started}, {30, 40, close_, view("closed", 7, 1, 0)},
			{10, 60, end, Answer{Turned: "cancelled", From: 4, To: 7}}, {41, 42, turn, refused(Closed)}}},
		{"gone stays gone", false, []op{{10, 20, remove, Answer{}}, {30, 40, get, view("idle", 4, 0, 0)}}},
		{"seen while it is deleted", true, []op{{10, 50, remove, Answer{}}, {30, 40, get, view("idle", 4, 0, 0)}, {45, 46, get, refused(NotFound)}}},
		{"gone for nothing", false, []op{{30, 40, get, refused(NotFound)}}},
		{"a fork past the end", false, []op{{10, 20, Call{Kind: Fork, At: 5, N: 1}, Answer{At: 5}}}},
		{"a part of a fork's children", false, []op{{10, 50, fork2, Answer{At: 4}}, {30, 40, get, view("idle", 4, 0, 1)}}},
		{"all of them", true, []op{{10, 50, fork2, Answer{At: 4}}, {30, 40, get, view("idle", 4, 0, 2)}, {20, 25, get, view("idle", 4, 0, 0)}}},
		{"none after the answer", false, []op{{10, 50, fork2, Answer{At: 4}}, {60, 70, get, view("idle", 4, 0, 0)}}},
		{"no answer, and it happened late", true, []op{{10, -1, fork2, Answer{}}, {30, 40, get, view("idle", 4, 0, 0)}, {60, 70, get, view("idle", 4, 0, 2)}}},
		{"no answer, and it happened twice", false, []op{{10, -1, fork2, Answer{}}, {30, 40, get, view("idle", 4, 0, 4)}}},
		{"no answer, and it was undone", false, []op{{10, -1, fork2, Answer{}}, {30, 40, get, view("idle", 4, 0, 2)}, {60, 70, get, view("idle", 4, 0, 0)}}},
		{"a turn without an answer", true, []op{{10, -1, turn, Answer{}}, {30, 40, get, view("running", 8, 1, 0)}, {50, 60, get, view("idle", 16, 1, 0)},
			{70, 80, turn, Answer{Turn: "b", Turned: "queued", From: 16}}}},
		{"a turn that never was", true, []op{{10, -1, turn, Answer{}}, {30, 40, get, view("idle", 4, 0, 0)}}},
		{"a title that nobody gave", false, []op{{30, 40, get, Answer{View: View{State: "idle", Length: 4, Title: "x"}}}}},
	} {
		err := history(x.ops...).Check(time.Minute)
		if (err == nil) != x.ok {
			t.Errorf("%s: accepted %v, want %v\n%v", x.name, err == nil, x.ok, err)
		}
		if err != nil && !strings.Contains(err.Error(), "no sequence") {
			t.Errorf("%s: %v", x.name, err)
		}
	}
}
