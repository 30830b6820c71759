// Package linear checks that what many clients saw of sessions is what some
// sequence of their calls gives: the tests of sessions and of server record
// histories with it, and porcupine looks for the sequence.
//
// Invariants:
//   - One history a session: a call that two sessions see, such as the deletion
//     of a child, is an operation of each.
//   - The end of a turn is an operation too. It lies between the call that
//     started the turn and the answer to who waited for its end.
//   - A call without an answer may have happened at any later time, or never.
//   - The model knows the rules of the API only: it imports neither sessions
//     nor server.
package linear

import (
	"fmt"
	"math"
	"strings"
)

// Kind is what a call does.
type Kind string

// The calls of the API that the model knows, and three things that happen to a
// session without a call on it.
const (
	Start  Kind = "turn"
	Cancel Kind = "cancel"
	Fork   Kind = "fork"
	Close  Kind = "close"
	Detach Kind = "detach"
	Resume Kind = "resume"
	Patch  Kind = "patch"
	Get    Kind = "get"
	Delete Kind = "delete"

	Born      Kind = "born"       // created or forked, with View
	End       Kind = "end"        // the turn Call.Turn came to its end
	ChildGone Kind = "child gone" // a child was deleted
)

// Call is one call on a session.
type Call struct {
	Kind   Kind
	Turn   string // End
	Prompt int    // Start: tokens of the prompt
	Max    int    // Start: tokens to generate; the model has no early ends
	At     int    // Fork: the offset; -1: the end of the line
	N      int    // Fork: children
	Title  string // Patch
}

// View is what a session's representation says.
type View struct {
	State                   string
	Length, Turns, Children int
	Title                   string
}

// Answer is what the caller was told. Code is empty for success.
type Answer struct {
	Unknown bool // no answer came
	Code    string
	View    // Get, Patch, Close, Detach, Resume, Born
	Turn    string
	Turned  string // state of the turn that Start, Cancel, End tell of
	From    int    // Start, Cancel, End
	To      int    // Cancel, End
	At      int    // Fork, with the children's Title
}

// Codes that the model knows.
const (
	NotFound       = "not_found"
	Closed         = "session_closed"
	TurnInProgress = "turn_in_progress"
	Invalid        = "invalid"
	Overloaded     = "overloaded"
)

// state is a session at one moment. Its length is known to lie in [lo, hi]
// while a turn runs, since tokens come without a call.
type state struct {
	born, gone, closed, detached bool

	lo, hi          int
	turns, children int
	title           string

	open         string // the open turn; lost: one whose start had no answer
	from, prompt int    // of the open turn
	last         string // the turn before; lost as well
	ended        string // turns with their ends, "id=to;"
}

const lost = "?"

func (s state) view() string {
	switch {
	case s.closed:
		return "closed"
	case s.open != "":
		return "running"
	case s.detached:
		return "detached"
	}
	return "idle"
}

// length narrows what is known of the length by one that was seen.
func (s state) length(n int) (state, bool) {
	if n < s.lo || n > s.hi {
		return s, false
	}
	if s.open == "" {
		s.lo, s.hi = n, n
		return s, true
	}
	// the prompt joins the line as a whole
	if n > s.from && n < s.from+s.prompt {
		return s, false
	}
	s.lo = n
	return s, true
}

// sees tells whether a representation of the session is right.
func (s state) sees(v View) (state, bool) {
	if v.State != s.view() || v.Turns != s.turns || v.Children != s.children || v.Title != s.title {
		return s, false
	}
	return s.length(v.Length)
}

// end ends the open turn at to; -1: nobody knows where.
func (s state) end(to int, how string) (state, bool) {
	if to >= 0 {
		var ok bool
		if s, ok = s.length(to); !ok || how == "completed" && to != s.hi {
			return s, false
		}
		s.lo, s.hi = to, to
	}
	if s.open != lost {
		s.ended += fmt.Sprintf("%s=%d;", s.open, to)
	}
	s.last, s.open, s.from, s.prompt = s.open, "", 0, 0
	return s, true
}

func (s state) endedAt(turn string) (to string, ok bool) {
	_, rest, ok := strings.Cut(";"+s.ended, ";"+turn+"=")
	to, _, _ = strings.Cut(rest, ";")
	return to, ok
}

// step gives every state that the session can be in when it was in s and the
// call had that answer: none, if it cannot have had it.
func step(s state, c Call, a Answer) []state {
	if s.open == lost && c.Kind != ChildGone { // it may have come to its end unseen
		after, _ := s.end(-1, "")
		return append(step1(s, c, a), step1(after, c, a)...)
	}
	return step1(s, c, a)
}

func step1(s state, c Call, a Answer) []state {
	switch c.Kind {
	case Born:
		s.born, s.title, s.lo, s.hi = true, a.Title, a.Length, a.Length
		return []state{s}
	case ChildGone:
		after := s
		after.children--
		switch {
		case a.Unknown:
			return []state{s, after}
		case !s.gone && s.children == 0:
			return nil
		}
		return []state{after}
	}
	if a.Unknown {
		return append(happened(s, c), s)
	}
	switch {
	case !s.born:
		return nil
	case a.Code == NotFound:
		return only(s, s.gone || c.Kind == Cancel && s.turns == 0)
	case a.Code == Overloaded:
		return only(s, true)
	case s.gone:
		return nil
	case a.Code != "":
		return only(s, refusable(s, c, a.Code))
	}
	return answered(s, c, a)
}

func only(s state, ok bool) []state {
	if !ok {
		return nil
	}
	return []state{s}
}

// refusable tells whether a call can be refused with the code.
func refusable(s state, c Call, code string) bool {
	switch code {
	case Closed:
		return s.closed && (c.Kind == Start || c.Kind == Fork || c.Kind == Detach || c.Kind == Resume)
	case TurnInProgress:
		return !s.closed && s.open != "" && (c.Kind == Start || c.Kind == Detach)
	case Invalid:
		return !s.closed && c.Kind == Fork && c.At > s.lo
	}
	return false
}

// answered is step for a call that succeeded.
func answered(s state, c Call, a Answer) []state {
	ok := true
	switch c.Kind {
	case Get, Patch:
		if c.Kind == Patch {
			s.title = c.Title
		}
		s, ok = s.sees(a.View)
	case Start:
		if s.closed || s.open != "" || a.From < s.lo || a.From > s.hi {
			return nil
		}
		s = begin(s, a.Turn, a.From, c)
		if a.Turned == "running" {
			s.lo = s.from + s.prompt
		}
	case End, Cancel:
		s, ok = over(s, c, a)
	case Fork:
		s, ok = forked(s, c, a)
	case Close:
		if s.open != "" { // its end is part of the call
			s, ok = s.end(a.Length, "cancelled")
		}
		s.closed, s.detached = true, false
		if ok {
			s, ok = s.sees(a.View)
		}
	case Detach:
		ok = s.open == "" && !s.closed
		s.detached = true
		if ok {
			s, ok = s.sees(a.View)
		}
	case Resume:
		ok = !s.closed
		s.detached = false
		if ok {
			s, ok = s.sees(a.View)
		}
	case Delete:
		s = gone()
	}
	return only(s, ok)
}

// gone is the state of every deleted session.
func gone() state { return state{born: true, gone: true} }

func begin(s state, turn string, from int, c Call) state {
	s.open, s.from, s.prompt = turn, from, c.Prompt
	s.lo, s.hi = from, from+c.Prompt+c.Max
	s.turns++
	s.detached = false
	return s
}

// over is the end of a turn, told by who waited for it or by who cancelled it.
func over(s state, c Call, a Answer) (state, bool) {
	id := a.Turn
	if c.Kind == End {
		id = c.Turn
	}
	if s.open == lost && c.Kind == Cancel {
		s.open = id
		return s.end(a.To, "")
	}
	if s.open == id {
		return s.end(a.To, a.Turned)
	}
	if c.Kind == Cancel && s.open != "" {
		return s, false // it ends the open turn
	}
	if c.Kind == Cancel && s.last != id && s.last != lost {
		return s, false
	}
	to, ended := s.endedAt(id)
	if !ended {
		return s, c.Kind == Cancel && s.last == lost
	}
	return s, to == "-1" || to == fmt.Sprint(a.To)
}

func forked(s state, c Call, a Answer) (state, bool) {
	if s.closed || a.Title != s.title || c.At >= 0 && a.At != c.At || a.At > s.hi {
		return s, false
	}
	ok := true
	switch at := a.At; {
	case c.At < 0: // the end of what was there
		s, ok = s.length(at)
	case s.open != "" && at > s.from && at < s.from+s.prompt:
		s.lo = max(s.lo, s.from+s.prompt) // the prompt joins the line as a whole
	default:
		s.lo = max(s.lo, at) // by then the line was that long
	}
	s.children += c.N
	s.detached = false
	return s, ok
}

// happened gives the states after a call that nobody got an answer to and that
// had its effect.
func happened(s state, c Call) []state {
	if !s.born || s.gone {
		return nil
	}
	switch c.Kind {
	case Start:
		if s.closed || s.open != "" {
			return nil
		}
		from, most := s.lo, s.hi
		s = begin(s, lost, from, c)
		if most != from { // where it began is not known either
			s.prompt, s.hi = 0, most+c.Prompt+c.Max
		}
	case End:
		if s.open != c.Turn {
			return nil
		}
		s, _ = s.end(-1, "")
	case Fork:
		if s.closed {
			return nil
		}
		s.children += c.N
		s.detached = false
	case Close:
		if s.open != "" { // the end of its turn is an operation of its own
			return nil
		}
		s.closed, s.detached = true, false
	case Detach:
		if s.closed || s.open != "" {
			return nil
		}
		s.detached = true
	case Resume:
		if s.closed {
			return nil
		}
		s.detached = false
	case Patch:
		s.title = c.Title
	case Delete:
		s = gone()
	default: // what changes nothing, and Cancel, whose effect is the end of the turn
		return nil
	}
	return []state{s}
}

// never is the time of an answer that did not come.
const never = math.MaxInt64
