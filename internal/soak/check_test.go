package soak

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"rocket/client"
)

// history is a session that was acknowledged and what the ledger has of it:
//
//	prompt 1 2 3 4, turn one adds 5 6 7, a fork at 6, turn two adds 8 9
//	and is interrupted by a kill; a reader saw one more token, and all after it
type history struct {
	s, child *session
	got      *seen
	r        *reader
}

func newHistory() *history {
	ref := &reference{prompted: 4, tokens: []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}
	now := time.Now()
	s := &session{id: "ses_p", known: now, lastKnown: now, prompted: 4, ref: ref, refTo: whole, title: "t", line: []int32{1, 2, 3, 4}}
	one := &turn{id: "turn_1", from: 4, known: now}
	s.turns = append(s.turns, one)
	s.ended(one, client.Turn{ID: "turn_1", State: "completed", From: 4, To: 7, Text: "567", Tokens: []int32{5, 6, 7}})
	c := s.child("ses_c", 6, "t")
	s.forked = [][]string{{"ses_c"}}
	two := &turn{id: "turn_2", from: 7, known: now}
	s.turns = append(s.turns, two)
	s.ended(two, client.Turn{ID: "turn_2", State: "interrupted", From: 7, To: 9, Text: "89", Tokens: []int32{8, 9}})
	event := func(seq, epoch int64, kind, turn string, tokens ...int32) client.Event {
		return client.Event{Seq: seq, Epoch: epoch, Type: kind, SessionID: "ses_p", TurnID: turn, Tokens: tokens}
	}
	got := &seen{
		session: client.Session{ID: "ses_p", Title: "t", State: "idle", Length: 9, TurnCount: 2, ChildCount: 1, LastSeq: 9, Epoch: 2},
		line:    []int32{1, 2, 3, 4, 5, 6, 7, 8, 9},
		turns: []client.Turn{
			{ID: "turn_1", State: "completed", From: 4, To: 7, Text: "567"},
			{ID: "turn_2", State: "interrupted", From: 7, To: 9, Text: "89"},
		},
		events: []client.Event{
			event(1, 1, "turn.started", "turn_1"), event(2, 1, "turn.delta", "turn_1", 5, 6), event(3, 1, "turn.delta", "turn_1", 7),
			event(4, 1, "turn.completed", "turn_1"), event(5, 1, "session.forked", ""),
			event(6, 1, "turn.started", "turn_2"), event(7, 1, "turn.delta", "turn_2", 8), event(8, 1, "turn.delta", "turn_2", 9),
			event(9, 2, "turn.interrupted", "turn_2"),
		},
	}
	got.events[4].Children = []string{"ses_c"}
	got.events[8].LastSeq = new(int64(8))
	r := &reader{s: s, done: make(chan struct{}), change: make(chan struct{}), from: client.Position{}}
	for _, e := range got.events {
		if e.Epoch == 2 {
			r.add(event(9, 1, "turn.delta", "turn_2", 10), &book{}) // never happened
		}
		r.add(e, &book{})
	}
	s.readers = []*reader{r}
	s.log = slices.Clone(got.events[:5])
	return &history{s, c, got, r}
}

// TestCheckSeesWhatIsWrong: of a history without a fault nothing is said, and of each with one it is.
func TestCheckSeesWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(h *history)
		kind kind
		says string
	}{
		{"nothing", func(*history) {}, "", ""},
		{"session lost", func(h *history) { h.got.gone = true }, lost, "no such session"},
		{"deletion lost", func(h *history) { h.s.deleted = true }, lost, "deleted and is there"},
		{"last token lost", func(h *history) { h.got.line = h.got.line[:8]; h.got.session.Length = 8 }, lost, "9 were acknowledged"},
		{"token changed", func(h *history) { h.got.line[8] = 99 }, lost, "token 8 is 99"},
		{"not the undisturbed line", func(h *history) { h.s.line[8] = unknown; h.got.line[8] = 99 }, lost, "an undisturbed line has 9"},
		{"token twice", func(h *history) {
			h.got.line = append(h.got.line, 9)
			h.got.session.Length = 10
			h.s.refTo = 0
		}, duplicated, "turns end at 9, its line at 10"},
		{"turn lost", func(h *history) { h.got.turns = h.got.turns[:1] }, lost, "no such turn"},
		{"turn twice", func(h *history) {
			h.got.turns = append(h.got.turns, client.Turn{ID: "turn_3", State: "completed", From: 9, To: 9})
		}, duplicated, "nobody was told of this turn"},
		{"completed turn interrupted", func(h *history) { h.got.turns[0].State = "interrupted" }, lost, "acknowledged as completed"},
		{"text changed", func(h *history) { h.got.turns[0].Text = "56" }, lost, "2 bytes of text"},
		{"turn in another place", func(h *history) { h.got.turns[1].From = 8 }, lost, "begins at 8"},
		{"child lost", func(h *history) { h.got.session.ChildCount = 0 }, lost, "counts 0 children of 1"},
		{"fork not in the log", func(h *history) { h.got.events[4].Children = nil; h.s.log = nil; h.s.readers = nil }, lost, "lacks the fork"},
		{"fork twice", func(h *history) {
			e := h.got.events[4]
			e.Seq, e.Epoch = 10, 2
			h.got.events = append(h.got.events, e)
			h.got.session.LastSeq, h.s.readers = 10, nil
		}, duplicated, "2 times"},
		{"closing lost", func(h *history) { h.s.closed = true }, lost, "acknowledged as closed"},
		{"detaching lost", func(h *history) { h.s.detached = true }, lost, "acknowledged as detached"},
		{"title lost", func(h *history) { h.got.session.Title = "old" }, lost, `"old", acknowledged as "t"`},
		{"event lost", func(h *history) { h.got.events = slices.Delete(h.got.events, 3, 4) }, lost, "stands where 4 should be"},
		{"log cut short", func(h *history) { h.got.events = h.got.events[:8]; h.s.readers = nil }, lost, "its log has 8 events"},
		{"epoch falls", func(h *history) { h.got.events[8].Epoch = 0 }, lost, "its epoch is 0 after 1"},
		{"event changed", func(h *history) { h.got.events[1].Tokens = []int32{5} }, lost, "read before as"},
		{"turn ends twice", func(h *history) { h.got.events[4].Type, h.got.events[4].TurnID = "turn.completed", "turn_1" }, duplicated, "ends it 2 times"},
		{"interruption says more", func(h *history) { h.got.events[8].LastSeq = new(int64(9)) }, lost, "as the last one before it"},
		{"reader saw what is not there", func(h *history) {
			h.r.events[3].Type = "turn.cancelled"
		}, lost, "a reader over WebSockets, from {From:0 Epoch:0}: saw"},
		{"reader got it twice", func(h *history) { h.r.events = slices.Insert(h.r.events, 4, h.r.events[3]) }, duplicated, "got turn.completed again"},
		{"reader got too little", func(h *history) { h.r.events = slices.Delete(h.r.events, 2, 3) }, lost, "did not get 3 to 3"},
		{"reader saw beyond the log", func(h *history) {
			h.r.events = h.r.events[:9]
			h.r.events = append(h.r.events, client.Event{Seq: 10, Epoch: 2, Type: "session.closed", SessionID: "ses_p"})
		}, lost, "the log ends at 9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHistory()
			h.r.times = make([]time.Time, 20)
			c.harm(h)
			found := check(h.s, h.got)
			if c.kind == "" {
				if len(found) > 0 {
					t.Errorf("%v", found)
				}
				return
			}
			if !slices.ContainsFunc(found, func(f finding) bool { return f.kind == c.kind && strings.Contains(f.String(), c.says) }) {
				t.Errorf("want %s with %q: %v", c.kind, c.says, found)
			}
		})
	}
}

// TestCheckComparesChildren: what a child shares with its parent, and the list of all sessions.
func TestCheckComparesChildren(t *testing.T) {
	h := newHistory()
	x := client.Session{ID: "ses_c", ParentID: &h.s.id, ForkedAt: new(6), Title: "t", State: "idle", Length: 6}
	got := &seen{session: x, line: []int32{1, 2, 3, 4, 5, 6}}
	if found := check(h.child, got); len(found) > 0 {
		t.Errorf("%v", found)
	}
	h.child.line[5] = unknown
	got.line[5] = 7
	if found := check(h.child, got); len(found) == 0 || !strings.Contains(found[0].what, "its parent ses_p has 6") {
		t.Errorf("another token than the parent's: %v", found)
	}
	want := map[string]*session{"ses_p": h.s, "ses_c": h.child}
	if found := checkList(want, []client.Session{h.got.session, x}); len(found) > 0 {
		t.Errorf("%v", found)
	}
	twin := x
	twin.ID = "ses_d"
	if found := checkList(want, []client.Session{h.got.session, x, twin}); len(found) != 1 || found[0].kind != duplicated || !strings.Contains(found[0].String(), "ses_d: nobody was told of it, a child of ses_p") {
		t.Errorf("one child too many: %v", found)
	}
	if found := checkList(want, []client.Session{h.got.session}); len(found) != 1 || found[0].kind != lost || found[0].session != "ses_c" {
		t.Errorf("a child too few: %v", found)
	}
}

// TestFindingsAreCountedAndStop: lost and duplicated are told apart, and too many end a run.
func TestFindingsAreCountedAndStop(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	b := newBook(io.Discard, cancel)
	b.acknowledge(3)
	b.killed()
	b.add(finding{kind: lost}, finding{kind: lost}, finding{kind: duplicated})
	if got, want := b.report(), (Report{Acknowledged: 3, Lost: 2, Duplicated: 1, Kills: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if ctx.Err() != nil {
		t.Error("three findings end the run")
	}
	b.add(make([]finding, findingsMax)...)
	if context.Cause(ctx) != errEnough {
		t.Errorf("%v ends the run", context.Cause(ctx))
	}
}
