package chat

import (
	"errors"
	"strings"
	"unicode"
	"unicode/utf8"

	"rocket/engine/tokenizer"
)

// Marks keep what users write apart from what the template writes. Before a template runs, some characters of each text from
// outside are replaced by private-use characters that nobody else uses in this request; after added tokens have been looked
// for in the rendered text, they are put back. How many characters are replaced is the level.
type level int

const (
	noMarks level = iota
	// fewMarks replaces a character in each whole special token and at an edge that could complete one with the template's
	// text beside it.
	fewMarks
	// allMarks replaces every character that an added token begins or ends with, so that a text from outside can be no more
	// than the inside of a match.
	allMarks
)

// A window is a range of private-use characters: three for stubs, the rest for replaced characters.
const (
	windowSize = 256
	stubUser   = 0
	stubAnswer = 1
	stubProbe  = 2
	firstMark  = 3
)

var errNoWindow = errors.New("the text uses characters of every private-use range")

// edges is what the marks need to know of the vocabulary's added tokens.
type edges struct {
	all      []string // contents of all added tokens
	special  []string // contents of those that are special
	ends     map[rune]bool
	prefixes map[string]bool // proper prefixes of special tokens
	suffixes map[string]bool
	longest  int
}

func newEdges(added []tokenizer.AddedToken) *edges {
	e := &edges{ends: map[rune]bool{}, prefixes: map[string]bool{}, suffixes: map[string]bool{}}
	for _, a := range added {
		e.all = append(e.all, a.Content)
		first, _ := utf8.DecodeRuneInString(a.Content)
		last, _ := utf8.DecodeLastRuneInString(a.Content)
		for _, r := range []rune{first, last} {
			// White space must stay what it is for trimming, quotes and backslashes for JSON; letters and digits would break
			// the words that templates compare.
			if !unicode.IsSpace(r) && !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '"' && r != '\\' && r != '\'' {
				e.ends[r] = true
			}
		}
		if !a.Special {
			continue
		}
		e.special = append(e.special, a.Content)
		e.longest = max(e.longest, len(a.Content))
		for i := range a.Content {
			if i > 0 {
				e.prefixes[a.Content[:i]] = true
				e.suffixes[a.Content[i:]] = true
			}
		}
	}
	return e
}

// inside reports whether s is a piece of an added token that the template could complete on both sides.
func (e *edges) inside(s string) bool {
	for _, a := range e.all {
		if len(s) < len(a) && strings.Contains(a, s) {
			return true
		}
	}
	return false
}

// marks replaces characters and puts them back. It belongs to one rendering.
type marks struct {
	edges *edges
	level level
	base  rune // first character of the window
	table []rune
	index map[rune]rune
	used  bool // something was replaced
	full  bool // something had to be replaced and there was no room: the rendering must not be used
}

// marker applies marks to texts from outside; the zero value leaves them alone.
type marker struct{ m *marks }

// text marks a value.
func (k marker) text(s string) string {
	if k.m == nil || k.m.level == noMarks {
		return s
	}
	return k.m.apply(s, true)
}

// key marks a name that templates compare: never its inside.
func (k marker) key(s string) string {
	if k.m == nil || k.m.level == noMarks {
		return s
	}
	return k.m.apply(s, false)
}

func (m *marks) apply(s string, whole bool) string {
	var at map[int]bool
	put := func(i int) {
		if at == nil {
			at = map[int]bool{}
		}
		at[i] = true
	}
	if m.level == allMarks {
		for i, r := range s {
			if m.edges.ends[r] {
				put(i)
			}
		}
		if whole && s != "" && m.edges.inside(s) {
			put(0)
		}
	}
	list := m.edges.all
	if m.level == fewMarks {
		list = m.edges.special
		for n := 1; n < m.edges.longest && n <= len(s); n++ {
			if m.edges.suffixes[s[:n]] {
				put(0)
			}
			if m.edges.prefixes[s[len(s)-n:]] {
				put(len(s) - n)
			}
		}
	}
	for _, a := range list {
		for i := 0; ; {
			j := strings.Index(s[i:], a)
			if j < 0 {
				break
			}
			put(i + j)
			i += j + 1
		}
	}
	if at == nil {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 3*len(at))
	for i, r := range s {
		if at[i] {
			r = m.replace(r)
		}
		b.WriteRune(r)
	}
	return b.String()
}

// replace returns the private character that stands for r.
func (m *marks) replace(r rune) rune {
	if p, ok := m.index[r]; ok {
		return p
	}
	if firstMark+len(m.table) == windowSize {
		m.full = true
		return r
	}
	p := m.base + firstMark + rune(len(m.table))
	if m.index == nil {
		m.index = map[rune]rune{}
	}
	m.index[r] = p
	m.table = append(m.table, r)
	m.used = true
	return p
}

// restore puts the replaced characters back.
func (m *marks) restore(s string) string {
	if !m.used {
		return s
	}
	return strings.Map(func(r rune) rune {
		if i := r - m.base - firstMark; i >= 0 && int(i) < len(m.table) {
			return m.table[i]
		}
		return r
	}, s)
}

// stub returns the character that stands for a stub's content.
func (m *marks) stub(which rune) string { return string(m.base + which) }

// window returns the first character of a private-use range that none of the texts has a character of. The texts may be
// JSON: an escape sequence there names a character too.
func window(texts [][]byte) (rune, error) {
	var taken [512]bool
	mark := func(r rune) {
		if r >= 0xf0000 {
			taken[(r-0xf0000)/windowSize] = true
		}
	}
	for _, t := range texts {
		if len(t) == 0 {
			continue
		}
		for i := 0; i < len(t); {
			if t[i] >= 0xf0 { // only planes 15 and 16 matter; they are four bytes long
				r, n := utf8.DecodeRune(t[i:])
				mark(r)
				i += n
				continue
			}
			if t[i] == '\\' && i+12 <= len(t) && t[i+1] == 'u' && (t[i+2]|0x20) == 'd' {
				mark(surrogates(t[i:]))
			}
			i++
		}
	}
	for i := 1; i < len(taken)-1; i++ { // the first and the last range are left alone: noncharacters end a plane
		if !taken[i] && i != 255 && i != 256 {
			return 0xf0000 + rune(i)*windowSize, nil
		}
	}
	return 0, errNoWindow
}

// surrogates returns the character that the JSON escapes at the start of t name, or 0.
func surrogates(t []byte) rune {
	hi, ok1 := hex4(t[2:6])
	lo, ok2 := hex4(t[8:12])
	if !ok1 || !ok2 || t[6] != '\\' || t[7] != 'u' || hi < 0xd800 || hi > 0xdbff || lo < 0xdc00 || lo > 0xdfff {
		return 0
	}
	return (hi-0xd800)<<10 | (lo - 0xdc00) + 0x10000
}

func hex4(b []byte) (r rune, ok bool) {
	for _, c := range b {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}
