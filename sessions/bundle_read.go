package sessions

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/maphash"
	"io"
	"unicode/utf8"

	"github.com/google/uuid"

	"rocket/engine"
	"rocket/engine/tokenizer"
)

// bundleReader reads a bundle section by section and refuses, with the line,
// whatever would not be a ledger: nothing of a line is used before it and all
// before it are known to fit together. What is held in memory is one line, the
// sessions, and a few words for each turn and run.
type bundleReader struct {
	src   *bufio.Reader
	model engine.ModelInfo
	tok   *tokenizer.Tokenizer
	hold  func(bytes int) error // counts what is held in memory, and may refuse more
	seed  maphash.Seed

	longest int // of all lines, as far as hold knows

	line   int // lines read
	sum    hash.Hash
	raw    []byte // the line that was read and not taken yet
	kind   string // of raw
	peeked bool

	head     bundleHeader
	headSum  [32]byte // of the header's line
	sessions []bundleEntry
	byID     map[string]int32
	turns    map[uuid.UUID]*bundleTurnRef
	newIDs   bool // ids are given anew

	counts struct{ turns, runs, events, tokens int }
	at     bundlePlace
}

// bundleEntry is a session of a bundle as it is to be written.
type bundleEntry struct {
	bundleSession
	id, root  uuid.UUID
	parent    *uuid.UUID
	children  int  // alive ones
	told      bool // its parent's log has its fork
	from, end int  // its own tokens: [from, end)
	turns     []*bundleTurnRef
	deltas    []seqRange
}

// What hold counts for each turn and run, with what their map and slices leave free.
const (
	turnRefBytes  = 320
	seqRangeBytes = 64
)

// seqRange is the seqs of a run's deltas, [from, to).
type seqRange struct {
	from, to, epoch int64
	tokens          int32
	turn            *bundleTurnRef
}

// bundlePlace is how far a section has come; each begins at its zero value.
type bundlePlace struct {
	session int32 // lines of sessions before this one are over
	began   bool  // next, seq and the others are this session's
	next    int   // token
	turns   int
	seq     int64 // event
	epoch   int64
	delta   int // of the session's deltas

	run  *turnTokens    // of the turn whose runs come
	open *bundleTurnRef // the turn whose events come
	told int32          // its tokens that deltas before had
	rest bool           // its last delta, which has no tokens, came
}

// newBundleReader reads a bundle for the server of a model; tok is its tokenizer.
func newBundleReader(r io.Reader, model engine.ModelInfo, tok *tokenizer.Tokenizer) *bundleReader {
	return &bundleReader{src: bufio.NewReaderSize(r, 64<<10), model: model, tok: tok, sum: sha256.New(), seed: maphash.MakeSeed(),
		hold: func(int) error { return nil }, byID: map[string]int32{}, turns: map[uuid.UUID]*bundleTurnRef{}}
}

// bad refuses the bundle for the line that was read last.
func (b *bundleReader) bad(format string, args ...any) error {
	return invalid("bundle", "line %d: %s", b.line, fmt.Sprintf(format, args...))
}

// peek reads the next line, if that was not done, and says what it is.
func (b *bundleReader) peek() (string, error) {
	if b.peeked {
		return b.kind, nil
	}
	b.raw = b.raw[:0]
	b.line++
	for {
		part, err := b.src.ReadSlice('\n')
		if len(b.raw)+len(part) > BundleLineBytesMax {
			return "", b.bad("it has more than %d bytes", BundleLineBytesMax)
		}
		if more := len(b.raw) + len(part) - b.longest; more > 0 {
			if err := b.hold(more); err != nil {
				return "", err
			}
			b.longest += more
		}
		b.raw = append(b.raw, part...)
		if err == nil {
			break
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return "", b.bad("the bundle ends early")
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return "", fmt.Errorf("read bundle: %w", err)
		}
	}
	if !utf8.Valid(b.raw) {
		return "", b.bad("not valid UTF-8")
	}
	var head struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(b.raw, &head); err != nil {
		return "", b.bad("not a JSON object: %v", err)
	}
	b.kind, b.peeked = head.Type, true
	return b.kind, nil
}

// take decodes the line that was peeked at. Unknown fields are refused: they
// might mean something.
func (b *bundleReader) take(v any) error {
	dec := json.NewDecoder(bytes.NewReader(b.raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return b.bad("%v", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return b.bad("more than one JSON value")
	}
	if b.kind != lineTrailer {
		b.sum.Write(b.raw)
	}
	b.peeked = false
	return nil
}

// want takes the next line, which must be of a kind.
func (b *bundleReader) want(kind string, v any) error {
	got, err := b.peek()
	if err != nil {
		return err
	}
	if got != kind {
		return b.bad("a line of type %q where %q is due", got, kind)
	}
	return b.take(v)
}

// more tells whether the next line is of a kind, taking it if so.
func (b *bundleReader) more(kind string, v any) (bool, error) {
	got, err := b.peek()
	if err != nil || got != kind {
		return false, err
	}
	return true, b.take(v)
}

// header reads the first line.
func (b *bundleReader) header() error {
	if err := b.want(lineHeader, &b.head); err != nil {
		return err
	}
	b.headSum = sha256.Sum256(b.raw)
	h := &b.head
	switch {
	case h.Format != bundleFormat:
		return b.bad("the format is %q, want %q", h.Format, bundleFormat)
	case h.Version != bundleVersion:
		return b.bad("version %d of the format, this server reads version %d", h.Version, bundleVersion)
	case h.TokenizerDigest != b.model.TokenizerDigest:
		return b.bad("the sessions are of model %q, whose tokenizer is not this server's", h.Model)
	case h.ModelDigest != b.model.Digest:
		return b.bad("the sessions are of model %q, whose weights are not this server's", h.Model)
	case h.Sessions < 1 || h.Sessions > BundleSessionsMax:
		return b.bad("%d sessions, between 1 and %d are allowed", h.Sessions, BundleSessionsMax)
	case h.Turns < 0 || h.Turns > BundleTurnsMax:
		return b.bad("%d turns, at most %d are allowed", h.Turns, BundleTurnsMax)
	case h.TokenRuns < 0 || h.TokenRuns > BundleRunsMax:
		return b.bad("%d runs of tokens, at most %d are allowed", h.TokenRuns, BundleRunsMax)
	case h.Events < 0:
		return b.bad("%d events", h.Events)
	}
	return nil
}

// readSessions reads the section of sessions.
func (b *bundleReader) readSessions() error {
	bytesMax := bundleHeadBytesMax
	for {
		var s bundleSession
		more, err := b.more(lineSession, &s)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if bytesMax -= len(b.raw); bytesMax < 0 {
			return b.bad("the lines of sessions have more than %d bytes together", bundleHeadBytesMax)
		}
		if len(b.sessions) == b.head.Sessions {
			return b.bad("more sessions than the header says (%d)", b.head.Sessions)
		}
		if err := b.hold(len(b.raw)); err != nil {
			return err
		}
		if err := b.session(s); err != nil {
			return err
		}
	}
	if len(b.sessions) != b.head.Sessions {
		return b.bad("%d sessions before it, the header says %d", len(b.sessions), b.head.Sessions)
	}
	top, ok := b.byID[b.head.ID]
	if !ok || b.sessions[top].DeletedAt != nil {
		return b.bad("the header's session %q is not among the sessions, or deleted", b.head.ID)
	}
	return nil
}

// session checks one session against those before it.
func (b *bundleReader) session(s bundleSession) error {
	x := bundleEntry{bundleSession: s}
	var ok bool
	if x.id, ok = parseID(sessionPrefix, s.ID); !ok {
		return b.bad("id: %q is no session id", s.ID)
	}
	if _, twice := b.byID[s.ID]; twice {
		return b.bad("id: %s is there twice", s.ID)
	}
	if (s.ParentID == nil) != (s.ForkedAt == nil) || (s.ParentID == nil) != (len(b.sessions) == 0) {
		return b.bad("parent_id, forked_at: the first session, and no other, has neither")
	}
	x.root = x.id
	if s.ParentID != nil {
		p, known := b.byID[*s.ParentID]
		if !known {
			return b.bad("parent_id: %q is not before its child", *s.ParentID)
		}
		parent := &b.sessions[p]
		id := parent.id
		x.parent, x.root, x.from = &id, parent.root, *s.ForkedAt
		inherits := x.from
		if s.KeptTo != nil {
			inherits = min(inherits, *s.KeptTo)
		}
		if x.from < 0 || inherits > parent.end || parent.DeletedAt == nil && x.from > parent.Length {
			return b.bad("forked_at: the parent has no token %d", x.from)
		}
		if s.DeletedAt == nil {
			parent.children++
		}
	}
	if err := b.sessionFields(&s); err != nil {
		return err
	}
	if s.Length < x.from || s.Length > b.model.Context {
		return b.bad("length: %d, of a session that begins at %d; the model's context is %d", s.Length, x.from, b.model.Context)
	}
	x.end = s.Length
	if s.DeletedAt != nil {
		x.end = *s.KeptTo
	}
	b.byID[s.ID] = int32(len(b.sessions))
	b.sessions = append(b.sessions, x)
	return nil
}

func (b *bundleReader) sessionFields(s *bundleSession) error {
	if err := checkText("title", s.Title, TitleBytesMax); err != nil {
		return b.bad("%s", err.(*Error).Field+": "+err.(*Error).Message)
	}
	if err := checkLabels("labels", s.Labels); err != nil {
		return b.bad("%s", err.(*Error).Field+": "+err.(*Error).Message)
	}
	deleted := s.DeletedAt != nil
	switch {
	case s.State != StateIdle && s.State != StateDetached && s.State != StateClosed:
		return b.bad("state: %q", s.State)
	case (s.State == StateClosed) != (s.ClosedAt != nil):
		return b.bad("closed_at: a closed session, and no other, has it")
	case deleted && s.State != StateClosed || deleted != (s.KeptTo != nil):
		return b.bad("deleted_at, kept_to: a deleted session has both and is closed")
	case deleted && (*s.KeptTo < 0 || *s.KeptTo > s.Length):
		return b.bad("kept_to: %d of a line of %d", *s.KeptTo, s.Length)
	case s.Epoch < 1 || s.Epoch > bundleEpochMax || s.GoneEpoch < 0 || s.GoneEpoch > s.Epoch:
		return b.bad("epoch: %d, gone_epoch: %d", s.Epoch, s.GoneEpoch)
	case s.LastSeq < 0 || s.LastSeq > bundleSeqMax || s.FirstSeq < 1 || s.FirstSeq > s.LastSeq+1:
		return b.bad("first_seq: %d, last_seq: %d", s.FirstSeq, s.LastSeq)
	case (s.FirstSeq > 1) != (s.GoneEpoch > 0):
		return b.bad("gone_epoch: %d, of a log that begins at %d", s.GoneEpoch, s.FirstSeq)
	case deleted && (s.LastSeq != 0 || s.FirstSeq != 1):
		return b.bad("last_seq: a deleted session has no events")
	case !deleted && s.LastSeq < 1:
		return b.bad("last_seq: a session's log begins with its creation")
	case s.TurnCount < 0 || s.TurnCount > b.head.Turns:
		return b.bad("turn_count: %d, the header says %d turns of all sessions", s.TurnCount, b.head.Turns)
	case s.TTLSeconds != nil && (*s.TTLSeconds < 1 || *s.TTLSeconds > TTLSecondsMax):
		return b.bad("ttl_seconds: must be between 1 and %d", TTLSecondsMax)
	case !bundleTimes(&s.CreatedAt, &s.UpdatedAt, s.ClosedAt, s.DeletedAt):
		return b.bad("created_at, updated_at, closed_at, deleted_at: must be between the years %d and %d", bundleYearMin, bundleYearMax)
	}
	return nil
}

// rename gives every session a new id; turns get theirs as they come. The
// order of ids stays that of the bundle.
func (b *bundleReader) rename() {
	b.newIDs = true
	renamed := make(map[uuid.UUID]uuid.UUID, len(b.sessions))
	for i := range b.sessions {
		x := &b.sessions[i]
		old := x.id
		x.id = newID()
		renamed[old] = x.id
		x.root = b.sessions[0].id
		if x.parent != nil {
			parent := renamed[*x.parent]
			x.parent = &parent
		}
	}
}

// owner finds the session of a line, which must not come before the section's
// last one; over is told of each session that is over by then.
func (b *bundleReader) owner(id string, over func(*bundleEntry) error) (*bundleEntry, error) {
	i, ok := b.byID[id]
	if !ok {
		return nil, b.bad("session_id: %q is not among the sessions", id)
	}
	if i < b.at.session {
		return nil, b.bad("session_id: lines of %s came before", id)
	}
	if err := b.until(i, over); err != nil {
		return nil, err
	}
	return &b.sessions[i], nil
}

// until ends the sessions before the i-th.
func (b *bundleReader) until(i int32, over func(*bundleEntry) error) error {
	for ; b.at.session < i; b.at = (bundlePlace{session: b.at.session + 1}) {
		if err := over(&b.sessions[b.at.session]); err != nil {
			return err
		}
	}
	return nil
}

// endSection ends all sessions and checks the header's count.
func (b *bundleReader) endSection(what string, n, want int, over func(*bundleEntry) error) error {
	if _, err := b.peek(); err != nil { // the line that is blamed is the one after
		return err
	}
	if err := b.until(int32(len(b.sessions)), over); err != nil {
		return err
	}
	if n != want {
		return b.bad("%d %s before it, the header says %d", n, what, want)
	}
	b.at = bundlePlace{}
	return nil
}

// trailer reads the last line and makes sure that it is.
func (b *bundleReader) trailer() error {
	var t bundleTrailer
	if err := b.want(lineTrailer, &t); err != nil {
		return err
	}
	switch {
	case t.Lines != b.line-1:
		return b.bad("lines: %d, it is line %d", t.Lines, b.line)
	case t.SHA256 != hex.EncodeToString(b.sum.Sum(nil)):
		return b.bad("sha256: the bundle is not what was written")
	}
	switch _, err := b.src.ReadByte(); {
	case err == nil:
		b.line++
		return b.bad("there is something after the trailer")
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("read bundle: %w", err)
	}
	return nil
}
