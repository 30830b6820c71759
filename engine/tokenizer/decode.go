package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids. It skips nothing but ids that no token has. Bytes that are no UTF-8 become U+FFFD.
func (t *Tokenizer) Decode(ids []int32) string {
	var raw []byte
	for _, id := range ids {
		raw = append(raw, t.Bytes(id)...)
	}
	return lossy(raw)
}

// lossy returns b as valid UTF-8 with one U+FFFD for each maximal subpart of what is invalid.
func lossy(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var out strings.Builder
	out.Grow(len(b) + 8)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			n = subpart(b)
		}
		out.WriteRune(r)
		b = b[n:]
	}
	return out.String()
}

// subpart returns the length of the maximal subpart at the start of b, which starts no valid character: the longest prefix
// that could still have become one, and at least one byte.
func subpart(b []byte) int {
	n := 1
	for n < len(b) && n < utf8.UTFMax && !utf8.FullRune(b[:n]) {
		n++
	}
	// b[:n] is the first prefix that is decided; as it is no character, its last byte spoiled it.
	if n > 1 && utf8.FullRune(b[:n]) {
		n--
	}
	return n
}

// Stream decodes ids one at a time. It belongs to one goroutine.
type Stream struct {
	t    *Tokenizer
	held []byte // at most 3 bytes: the start of a character that is not complete
}

// NewStream returns a stream with nothing in it.
func (t *Tokenizer) NewStream() *Stream { return &Stream{t: t} }

// Push adds one token and returns the text that is complete by now, "" if none is.
func (s *Stream) Push(id int32) string {
	s.held = append(s.held, s.t.Bytes(id)...)
	n := validPrefix(s.held)
	if n == 0 {
		return ""
	}
	text := lossy(s.held[:n])
	s.held = append(s.held[:0], s.held[n:]...)
	return text
}

// Flush ends the stream and returns what it held back: "" or one U+FFFD. The stream can be used again.
func (s *Stream) Flush() string {
	text := lossy(s.held)
	s.held = s.held[:0]
	return text
}

// Held returns the number of bytes that wait for the rest of their character.
func (s *Stream) Held() int { return len(s.held) }
