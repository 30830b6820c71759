package soak

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"rocket/client"
)

// seen is what the ledger says of a session that stands still, as read through
// the API.
type seen struct {
	gone    bool // not found
	session client.Session
	line    []int32
	turns   []client.Turn // oldest first
	events  []client.Event
}

// check compares what was acknowledged about a session with what is there.
func check(s *session, got *seen) []finding {
	switch {
	case s.deleted && !got.gone:
		return []finding{{kind: lost, session: s.id, known: s.lastKnown, what: "it was deleted and is there"}}
	case s.deleted:
		return nil
	case got.gone:
		return []finding{{kind: lost, session: s.id, known: s.known, what: "there is no such session"}}
	}
	found := checkRow(s, got)
	found = append(found, checkLine(s, got)...)
	found = append(found, checkTurns(s, got)...)
	found = append(found, checkEvents(s, got)...)
	for i := range got.events {
		if got.events[i].Seq != int64(i+1) {
			return found // said already; against what is left of such a log every reader is wrong
		}
	}
	for _, r := range s.readers {
		found = append(found, r.check(got)...)
	}
	return found
}

// checkRow is about the session itself and its lineage.
func checkRow(s *session, got *seen) (found []finding) {
	x := got.session
	miss := func(format string, args ...any) {
		found = append(found, finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf(format, args...)})
	}
	parent := ""
	if x.ParentID != nil {
		parent = *x.ParentID
	}
	switch {
	case s.parent == nil && parent != "":
		miss("it was made as a root and has the parent %s", parent)
	case s.parent != nil && (parent != s.parent.id || x.ForkedAt == nil || *x.ForkedAt != s.forkedAt):
		miss("it was forked from %s at %d and says %q, %v", s.parent.id, s.forkedAt, parent, x.ForkedAt)
	}
	want := "idle"
	switch {
	case s.closed:
		want = "closed"
	case s.detached:
		want = "detached"
	}
	if x.State != want {
		miss("it is %s, acknowledged as %s", x.State, want)
	}
	if x.Title != s.title {
		miss("its title is %q, acknowledged as %q", x.Title, s.title)
	}
	if x.TurnCount < len(s.turns) {
		miss("it counts %d turns of %d", x.TurnCount, len(s.turns))
	}
	if n := s.livingChildren(); x.ChildCount != n {
		miss("it counts %d children of %d", x.ChildCount, n)
	}
	return found
}

// checkLine is about the tokens.
func checkLine(s *session, got *seen) (found []finding) {
	miss := func(format string, args ...any) {
		found = append(found, finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf(format, args...)})
	}
	if got.session.Length != len(got.line) {
		miss("it has %d tokens and gives %d", got.session.Length, len(got.line))
	}
	if len(got.line) < len(s.line) {
		miss("its line has %d tokens, %d were acknowledged", len(got.line), len(s.line))
	}
	for i, id := range s.line[:min(len(s.line), len(got.line))] {
		if id != unknown && got.line[i] != id {
			miss("token %d is %d, acknowledged as %d", i, got.line[i], id)
			break
		}
	}
	if s.parent != nil {
		for i, id := range s.parent.line[:min(s.forkedAt, len(got.line))] {
			if id != unknown && got.line[i] != id {
				miss("token %d is %d, its parent %s has %d", i, got.line[i], s.parent.id, id)
				break
			}
		}
	}
	for i, id := range s.ref.tokens[:min(s.refTo, len(got.line), len(s.ref.tokens))] {
		if got.line[i] != id {
			miss("token %d is %d, an undisturbed line has %d (%s)", i, got.line[i], id, s.ref)
			break
		}
	}
	return found
}

// checkTurns is about the turns that the session has of its own.
func checkTurns(s *session, got *seen) (found []finding) {
	var own []client.Turn
	for _, t := range got.turns {
		if !t.Inherited {
			own = append(own, t)
		}
	}
	for _, t := range s.turns {
		i := slices.IndexFunc(own, func(o client.Turn) bool { return o.ID == t.id })
		if i < 0 {
			found = append(found, finding{kind: lost, session: s.id, turn: t.id, known: t.known, what: "there is no such turn"})
			continue
		}
		found = append(found, compareTurn(s, t, own[i])...)
		if generated := own[i].To - len(t.tokens); len(t.tokens) > 0 && (own[i].To > len(got.line) || generated < 0 || !slices.Equal(got.line[generated:own[i].To], t.tokens)) {
			found = append(found, finding{kind: lost, session: s.id, turn: t.id, known: t.known, what: fmt.Sprintf("its tokens are not on the line before %d", own[i].To)})
		}
	}
	at := s.forkedAt
	if s.parent == nil {
		at = s.prompted
	}
	for _, t := range own {
		if !slices.ContainsFunc(s.turns, func(k *turn) bool { return k.id == t.ID }) {
			found = append(found, finding{kind: duplicated, session: s.id, turn: t.ID, what: fmt.Sprintf("nobody was told of this turn: %s, [%d, %d), made %s", t.State, t.From, t.To, t.CreatedAt.UTC().Format(timeFormat))})
		}
		if t.From != at || t.To < t.From {
			found = append(found, finding{kind: lost, session: s.id, turn: t.ID, what: fmt.Sprintf("it has [%d, %d) of the line, the one before it ends at %d", t.From, t.To, at)})
		}
		at = t.To
	}
	if at != len(got.line) && len(found) == 0 {
		found = append(found, finding{kind: duplicated, session: s.id, what: fmt.Sprintf("its turns end at %d, its line at %d", at, len(got.line))})
	}
	return found
}

// compareTurn compares a turn with what was acknowledged of it.
func compareTurn(s *session, t *turn, got client.Turn) (found []finding) {
	miss := func(format string, args ...any) {
		found = append(found, finding{kind: lost, session: s.id, turn: t.id, known: t.known, what: fmt.Sprintf(format, args...)})
	}
	switch {
	case got.From != t.from:
		miss("it begins at %d, acknowledged as %d", got.From, t.from)
	case !final(t.state) && got.State == "failed":
		miss("it failed: %+v", got.Error)
	case !final(t.state):
	case got.State != t.state || got.To != t.to || got.Text != t.text:
		miss("it is %s, ends at %d and has %d bytes of text; acknowledged as %s, %d, %d", got.State, got.To, len(got.Text), t.state, t.to, len(t.text))
	}
	return found
}

// checkEvents is about the log: dense, each once, and in accord with the rest.
func checkEvents(s *session, got *seen) (found []finding) {
	add := func(k kind, e client.Event, known time.Time, format string, args ...any) {
		found = append(found, finding{kind: k, session: s.id, turn: e.TurnID, seq: e.Seq, known: known, what: fmt.Sprintf(format, args...)})
	}
	if n := int64(len(got.events)); n != got.session.LastSeq {
		add(lost, client.Event{Seq: n}, s.lastKnown, "its log has %d events, the last one is said to be %d", n, got.session.LastSeq)
	}
	for i, e := range got.events {
		switch {
		case e.Seq != int64(i+1):
			add(lost, e, s.lastKnown, "it stands where %d should be", i+1)
			return found
		case i > 0 && e.Epoch < got.events[i-1].Epoch:
			add(lost, e, s.lastKnown, "its epoch is %d after %d", e.Epoch, got.events[i-1].Epoch)
		case e.SessionID != s.id:
			add(lost, e, s.lastKnown, "it says that it is of session %s", e.SessionID)
		case e.Type == "turn.interrupted" && (e.LastSeq == nil || *e.LastSeq != e.Seq-1):
			add(lost, e, s.lastKnown, "it names %v as the last one before it", e.LastSeq)
		}
	}
	for i, e := range s.log {
		if i < len(got.events) && !sameEvent(e, got.events[i]) {
			add(lost, e, s.logAt, "it is another one now: %s, read before as %s", show(got.events[i]), show(e))
			break
		}
	}
	if len(got.events) < len(s.log) {
		add(lost, s.log[len(got.events)], s.logAt, "%d events, %d were read before", len(got.events), len(s.log))
	}
	found = append(found, checkTurnEvents(s, got)...)
	return append(found, checkForkEvents(s, got)...)
}

// checkTurnEvents: each turn begins at most once, ends exactly once, and its
// deltas are its tokens.
func checkTurnEvents(s *session, got *seen) (found []finding) {
	type life struct {
		started, ended int
		end            client.Event
		tokens         []int32
	}
	lives := map[string]*life{}
	for _, t := range s.turns {
		lives[t.id] = &life{}
	}
	for _, e := range got.events {
		if e.TurnID == "" {
			continue
		}
		l := lives[e.TurnID]
		if l == nil {
			found = append(found, finding{kind: duplicated, session: s.id, turn: e.TurnID, seq: e.Seq, what: e.Type + " of a turn that nobody was told of"})
			continue
		}
		switch {
		case e.Type == "turn.started":
			l.started++
		case e.Type == "turn.delta":
			l.tokens = append(l.tokens, e.Tokens...)
		case e.Final():
			l.ended++
			l.end = e
		}
	}
	for _, t := range s.turns {
		i := slices.IndexFunc(got.turns, func(o client.Turn) bool { return o.ID == t.id })
		if i < 0 {
			continue // said already
		}
		l, o := lives[t.id], got.turns[i]
		f := finding{session: s.id, turn: t.id, seq: l.end.Seq, known: t.known}
		switch {
		case l.started > 1 || l.ended > 1:
			f.kind, f.what = duplicated, fmt.Sprintf("its log begins it %d times and ends it %d times", l.started, l.ended)
		case l.ended == 0 || l.started == 0 && o.To > o.From:
			f.kind, f.what = lost, fmt.Sprintf("it is %s, [%d, %d); its log begins it %d times and ends it %d times", o.State, o.From, o.To, l.started, l.ended)
		case l.end.Type != "turn."+o.State:
			f.kind, f.what = lost, fmt.Sprintf("it is %s, its log ends it with %s", o.State, l.end.Type)
		case o.To > len(got.line) || len(l.tokens) > o.To-o.From || !slices.Equal(l.tokens, got.line[o.To-len(l.tokens):o.To]):
			f.kind, f.what = lost, fmt.Sprintf("its %d tokens in the log are not those before %d on the line", len(l.tokens), o.To)
		case final(t.state) && t.tokens != nil && len(t.tokens) != len(l.tokens):
			f.kind, f.what = lost, fmt.Sprintf("its log has %d tokens, acknowledged were %d", len(l.tokens), len(t.tokens))
		default:
			continue
		}
		found = append(found, f)
	}
	return found
}

// checkForkEvents: each fork is in the log once, with its children, and a
// session begins and ends once.
func checkForkEvents(s *session, got *seen) (found []finding) {
	var forks [][]string
	closed := 0
	for i, e := range got.events {
		switch e.Type {
		case "session.forked":
			forks = append(forks, e.Children)
			if !slices.ContainsFunc(s.forked, func(ids []string) bool { return slices.Equal(ids, e.Children) }) {
				found = append(found, finding{kind: duplicated, session: s.id, seq: e.Seq, what: fmt.Sprintf("a fork that nobody was told of: %v", e.Children)})
			}
		case "session.created":
			if i > 0 {
				found = append(found, finding{kind: duplicated, session: s.id, seq: e.Seq, what: "it is made once more"})
			}
		case "session.closed":
			closed++
		}
	}
	for _, ids := range s.forked {
		n := 0
		for _, f := range forks {
			if slices.Equal(ids, f) {
				n++
			}
		}
		switch {
		case n == 0:
			found = append(found, finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf("its log lacks the fork of %v", ids)})
		case n > 1:
			found = append(found, finding{kind: duplicated, session: s.id, what: fmt.Sprintf("its log has the fork of %v %d times", ids, n)})
		}
	}
	if want := 0; s.closed != (closed > 0) || closed > 1 {
		if s.closed {
			want = 1
		}
		found = append(found, finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf("its log closes it %d times, acknowledged were %d", closed, want)})
	}
	return found
}

// checkList compares the list of all sessions with all that were acknowledged.
func checkList(want map[string]*session, all []client.Session) (found []finding) {
	have := map[string]bool{}
	for _, x := range all {
		if have[x.ID] {
			found = append(found, finding{kind: duplicated, session: x.ID, what: "the list has it twice"})
		}
		have[x.ID] = true
		if s := want[x.ID]; s == nil || s.deleted {
			what := "nobody was told of it"
			if s != nil {
				what = "it was deleted and is listed"
			}
			if x.ParentID != nil {
				what += ", a child of " + *x.ParentID
			}
			found = append(found, finding{kind: duplicated, session: x.ID, what: what + ", made " + x.CreatedAt.UTC().Format(timeFormat)})
		}
	}
	for id, s := range want {
		if !s.deleted && !have[id] {
			found = append(found, finding{kind: lost, session: id, known: s.known, what: "the list lacks it"})
		}
	}
	return found
}

// sameEvent compares what clients rely on; times and usage come from clocks.
func sameEvent(a, b client.Event) bool { return show(a) == show(b) }

func show(e client.Event) string {
	e.Time, e.Usage = time.Time{}, nil
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain data
	}
	return string(text)
}
