package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// Bounds of a trace; past one, parsing ends with an error that says which.
const (
	maxFileBytes  = 4 << 30  // of one file, decompressed
	maxRecord     = 16 << 20 // bytes of one line
	maxRequests   = 4 << 20
	maxLineTokens = 4 << 20
	maxSegs       = 32 << 20 // of a whole trace: half a GiB of memory
	maxSeconds    = 1e9      // of any time in a trace
)

// Request is one turn: a prompt that is a whole line, and the tokens that the model answers with.
type Request struct {
	At, Done int64 // milliseconds since the trace's start; Done >= At
	Session  int32 // whose turn it is, counted from 0; none: -1
	Prompt   []Seg
	Output   []Seg
	prompt   int // tokens of Prompt
	output   int
}

// Session is a conversation, a sub-agent or a fork.
type Session struct {
	Name   string
	Parent int32 // the session it was forked off, -1 none
	Fork   int64 // when that happened; only with Parent
	ForkAt int   // at which offset of the parent's line; only with Parent
	Close  int64 // when it retires: Done of its last turn
}

// Trace is a workload, ready to be walked.
type Trace struct {
	Format   string
	Requests []Request // ascending by At
	Sessions []Session
	// Resident: a session keeps its timeline from its first turn (or its fork) to its last one, as sessions of the
	// native API do. Otherwise every request opens a line and lets go of it, as the other dialects do.
	Resident bool
	Root     int // tokens that all sessions begin with; 0 when unknown

	segs int
}

// Formats are the names that Parse knows. The c32 workload is made, not parsed: see C32.
var Formats = []string{"mooncake", "kvct", "bailian", "tot"}

// Source is one file of a trace.
type Source struct {
	Name string
	Data io.Reader // plain, or gzip
}

// Parse reads a trace. Several sources are one trace: their clocks start together. Errors name the source, the line
// or record, and the field.
func Parse(format string, sources ...Source) (*Trace, error) {
	parsers := map[string]func(*Trace, int, io.Reader) error{
		"mooncake": parseMooncake, "kvct": parseKVCT, "bailian": parseBailian, "tot": parseToT,
	}
	parse := parsers[format]
	if parse == nil {
		return nil, fmt.Errorf("format %q: want one of %v, or c32", format, Formats)
	}
	t := &Trace{Format: format}
	for i, s := range sources {
		r, err := plain(s.Data)
		if err == nil {
			err = parse(t, i, r)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	if len(t.Requests) == 0 {
		return nil, errors.New("the trace has no requests")
	}
	t.finish()
	return t, nil
}

// plain unpacks gzip, recognised by its first bytes, and bounds what comes out.
func plain(r io.Reader) (io.Reader, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		return &bounded{z, maxFileBytes}, nil
	}
	return &bounded{b, maxFileBytes}, nil
}

// bounded ends with an error, not silently, when more than left bytes come.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, fmt.Errorf("more than %d bytes", int64(maxFileBytes))
	}
	return n, err
}

// add appends a request, within bounds.
func (t *Trace) add(r Request) error {
	r.prompt, r.output = length(r.Prompt), length(r.Output)
	t.segs += len(r.Prompt) + len(r.Output)
	switch {
	case r.prompt < 1:
		return errors.New("input length: want 1 or more")
	case r.prompt+r.output > maxLineTokens:
		return fmt.Errorf("input and output length: %d tokens, at most %d fit", r.prompt+r.output, maxLineTokens)
	case len(t.Requests) >= maxRequests:
		return fmt.Errorf("more than %d requests", maxRequests)
	case t.segs > maxSegs:
		return fmt.Errorf("more than %d block ids in all", maxSegs)
	}
	r.Done = max(r.Done, r.At)
	t.Requests = append(t.Requests, r)
	return nil
}

// session adds a session and returns its number.
func (t *Trace) session(name string) int32 {
	t.Sessions = append(t.Sessions, Session{Name: name, Parent: -1})
	return int32(len(t.Sessions) - 1)
}

// finish sorts the requests and closes sessions after their last one.
func (t *Trace) finish() {
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	for _, r := range t.Requests {
		if r.Session >= 0 {
			s := &t.Sessions[r.Session]
			s.Close = max(s.Close, r.Done)
		}
	}
}

// milliseconds of a time in seconds, refused when it makes no sense.
func milliseconds(field string, seconds float64) (int64, error) {
	if !(seconds >= -maxSeconds && seconds <= maxSeconds) { // NaN too
		return 0, fmt.Errorf("%s: %v seconds", field, seconds)
	}
	return int64(math.Round(seconds * 1000)), nil
}

// tokens of an input or output length field.
func tokens(field string, n *int64) (int, error) {
	switch {
	case n == nil:
		return 0, fmt.Errorf("%s: missing", field)
	case *n < 0 || *n > maxLineTokens:
		return 0, fmt.Errorf("%s: %d, want 0 to %d", field, *n, maxLineTokens)
	}
	return int(*n), nil
}

// lines calls fn with every line that is not blank. Errors name the line.
func lines(r io.Reader, fn func(line []byte) error) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 1<<16), maxRecord)
	n := 0
	for sc.Scan() {
		n++
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := fn(line); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("line %d: %w", n+1, err)
	}
	return nil
}

// blocks makes a prompt of block ids: whole blocks, the last one cut to the prompt's length.
func blocks(scope uint64, ids []int64, size, tokens int) ([]Seg, error) {
	full := tokens / size
	if len(ids) != full && len(ids) != (tokens+size-1)/size {
		return nil, fmt.Errorf("hash_ids: %d blocks of %d tokens for %d tokens", len(ids), size, tokens)
	}
	segs := make([]Seg, 0, len(ids)+1)
	for i, id := range ids {
		segs = append(segs, Seg{ID: stream(scope, uint64(id)), N: int32(min(size, tokens-i*size))})
	}
	return segs, nil
}
