package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"rocket/client"
)

const timeFormat = "15:04:05.000"

// kind says what a finding counts as.
type kind string

const (
	lost       kind = "lost"
	duplicated kind = "duplicated"
)

// finding is one fact that is not as it was acknowledged.
type finding struct {
	kind    kind
	session string
	turn    string // "" where it is about none
	seq     int64  // 0 where it is about none
	what    string
	known   time.Time // when it was acknowledged; zero: it never was
}

func (f finding) String() string {
	text := string(f.kind) + ": session " + f.session
	if f.turn != "" {
		text += ", turn " + f.turn
	}
	if f.seq != 0 {
		text += fmt.Sprintf(", seq %d", f.seq)
	}
	text += ": " + f.what
	if !f.known.IsZero() {
		text += " (acknowledged " + f.known.UTC().Format(timeFormat) + ")"
	}
	return text
}

// book counts what was acknowledged and what became of it.
type book struct {
	log  io.Writer
	stop context.CancelCauseFunc

	acknowledged, read, repeated, restored, wrongs, stale, killCount atomic.Int64

	mu       sync.Mutex
	findings []finding       // guarded by mu
	told     map[string]bool // guarded by mu; sessions of findings
}

func newBook(log io.Writer, stop context.CancelCauseFunc) *book {
	return &book{log: log, stop: stop, told: map[string]bool{}}
}

var errEnough = errors.New("that many findings are enough")

func (b *book) acknowledge(n int) { b.acknowledged.Add(int64(n)) }
func (b *book) killed()           { b.killCount.Add(1) }
func (b *book) kills() int        { return int(b.killCount.Load()) }

// add reports findings.
func (b *book) add(found ...finding) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range found {
		b.findings = append(b.findings, f)
		b.told[f.session] = true
		fmt.Fprintf(b.log, "%s after %d kills: %s\n", time.Now().UTC().Format(timeFormat), b.kills(), f)
	}
	if len(b.findings) >= findingsMax {
		b.stop(errEnough)
	}
}

// wrong reports an answer that makes no sense, and is neither a loss nor a
// doubling.
func (b *book) wrong(format string, args ...any) {
	b.wrongs.Add(1)
	fmt.Fprintf(b.log, "%s after %d kills: wrong: %s\n", time.Now().UTC().Format(timeFormat), b.kills(), fmt.Sprintf(format, args...))
}

// known says whether something was found about a session: it is told once.
func (b *book) known(session string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.told[session]
}

func (b *book) report() Report {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := Report{Acknowledged: int(b.acknowledged.Load()), Kills: b.kills()}
	for _, f := range b.findings {
		if f.kind == lost {
			r.Lost++
		} else {
			r.Duplicated++
		}
	}
	return r
}

// unknown is the place of a token that exists but that nobody has been told.
const unknown = int32(-1)

// whole marks a line that is its reference's as far as it goes.
const whole = math.MaxInt

// session is what was acknowledged about one. Only its agent's goroutine.
type session struct {
	id        string
	parent    *session // nil: a root
	forkedAt  int
	prompted  int // of a root: the length of its prompt
	known     time.Time
	ref       *reference
	refTo     int     // the line is the reference's below this offset, or whole
	line      []int32 // acknowledged tokens, or unknown
	turns     []*turn // own ones, oldest first
	children  []*session
	title     string
	detached  bool
	closed    bool
	deleted   bool
	warm      int            // the number of kills, plus one, when it last ended a turn or was resumed undisturbed: the server has its state
	onDisk    bool           // it was detached to disk, all of it, and nothing followed
	changed   bool           // since it was last compared
	log       []client.Event // as last read
	logAt     time.Time      // when
	forked    [][]string     // children of each acknowledged fork
	readers   []*reader
	lastKnown time.Time // of the last thing acknowledged
}

// turn is what was acknowledged about one.
type turn struct {
	id     string
	from   int
	state  string // "": only that it exists
	to     int
	text   string
	tokens []int32
	known  time.Time
	join   func(ctx context.Context, api *client.Client) (client.Turn, error) // waits for it, with the key that began it
}

func final(state string) bool { return state != "" && state != "queued" && state != "running" }

// extend makes the line at least n tokens long.
func (s *session) extend(n int) {
	for len(s.line) < n {
		s.line = append(s.line, unknown)
	}
}

// touch says that something about the session was acknowledged or begun.
func (s *session) touch() {
	s.changed, s.onDisk = true, false
	s.lastKnown = time.Now()
}

// ended adds a turn's end to what is known. An end that was known before must
// be the same.
func (s *session) ended(t *turn, got client.Turn) []finding {
	if final(t.state) {
		return compareTurn(s, t, got)
	}
	t.state, t.to, t.text, t.tokens, t.known = got.State, got.To, got.Text, append([]int32{}, got.Tokens...), time.Now()
	s.extend(t.to)
	return s.place(t, t.to-len(t.tokens), t.tokens)
}

// place puts tokens on the line that were acknowledged to be there.
func (s *session) place(t *turn, from int, tokens []int32) []finding {
	for i, id := range tokens {
		if at := from + i; s.line[at] == unknown {
			s.line[at] = id
		} else if s.line[at] != id {
			return []finding{{kind: lost, session: s.id, turn: t.id, known: t.known,
				what: fmt.Sprintf("token %d of the line was acknowledged as %d, the turn's end has %d", at, s.line[at], id)}}
		}
	}
	return nil
}

// child begins the book of a child.
func (s *session) child(id string, at int, title string) *session {
	s.extend(at)
	c := &session{id: id, parent: s, forkedAt: at, known: time.Now(), ref: s.ref, refTo: s.refTo,
		line: slices.Clone(s.line[:at]), title: title, changed: true, lastKnown: time.Now()}
	if c.refTo = min(at, s.refTo); c.refTo == at && at >= s.ref.prompted {
		c.refTo = whole // within the prompt it would go on otherwise
	}
	s.children = append(s.children, c)
	return c
}

// livingChildren counts what a parent's child_count counts.
func (s *session) livingChildren() int {
	n := 0
	for _, c := range s.children {
		if !c.deleted {
			n++
		}
	}
	return n
}
