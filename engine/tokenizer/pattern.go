package tokenizer

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// wordPattern is the family of expressions that GPT-4 began: contractions, words with one leading character, digits, runs of
// other characters with the line ends behind them, line ends, white space.
//
//	(?i:'s|'t|'re|'ve|'m|'ll|'d)
//	|[^\r\n\p{L}\p{N}]?\p{L}+
//	|\p{N}
//	| ?[^\s\p{L}\p{N}]+[\r\n]*
//	|\s*[\r\n]+
//	|\s+(?!\S)
//	|\s+
//
// The contractions ignore case by Unicode's rules.
type wordPattern struct {
	digits int  // how many digits make one piece: 1, or up to 3 with \p{N}{1,3}
	marks  bool // \p{M} counts as part of a word
}

// knownPatterns are the expressions that have a hand-written splitter; tests hold each equal to regexp2.
var knownPatterns = map[string]wordPattern{
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`:             {digits: 1},
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`:        {digits: 3},
	`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: {digits: 1, marks: true},
}

// class of a character. A mark is of class other where the pattern does not know marks.
const (
	classOther uint8 = iota
	classLetter
	classDigit
	classSpace
	classMark
)

// planeClasses holds the classes of the Basic Multilingual Plane.
var planeClasses = sync.OnceValue(func() *[1 << 16]uint8 {
	var t [1 << 16]uint8
	for r := range t {
		t[r] = lookupClass(rune(r))
	}
	return &t
})

func lookupClass(r rune) uint8 {
	switch {
	case unicode.IsLetter(r):
		return classLetter
	case unicode.IsNumber(r):
		return classDigit
	case unicode.IsSpace(r):
		return classSpace
	case unicode.IsMark(r):
		return classMark
	}
	return classOther
}

// rune returns the class and the length of the first character of s, which is not empty.
func (p wordPattern) rune(t *[1 << 16]uint8, s string) (class uint8, n int) {
	if c := s[0]; c < utf8.RuneSelf {
		return t[c], 1
	}
	r, n := utf8.DecodeRuneInString(s)
	if r < 1<<16 {
		class = t[r]
	} else {
		class = lookupClass(r)
	}
	if class == classMark {
		class = classOther
		if p.marks {
			class = classMark
		}
	}
	return class, n
}

func isWord(class uint8) bool { return class == classLetter || class == classMark }

// next returns the length of the first piece of s, which is not empty.
func (p wordPattern) next(s string) int {
	t := planeClasses()
	if s[0] == '\'' {
		if n := contraction(s); n > 0 {
			return n
		}
	}
	class, n := p.rune(t, s)
	newline := s[0] == '\n' || s[0] == '\r'
	if isWord(class) {
		return p.run(t, s, n, isWord)
	}
	second, m := classSpace, 0 // class and length of the next character; a space where there is none
	if n < len(s) {
		second, m = p.rune(t, s[n:])
	}
	if class != classDigit && !newline && m > 0 && isWord(second) {
		return p.run(t, s, n+m, isWord)
	}
	switch {
	case class == classDigit:
		for i := 1; i < p.digits && n < len(s); i++ {
			class, m := p.rune(t, s[n:])
			if class != classDigit {
				break
			}
			n += m
		}
		return n
	case class == classOther:
		return newlines(s, p.run(t, s, n, isOther))
	case s[0] == ' ' && m > 0 && second == classOther:
		return newlines(s, p.run(t, s, n+m, isOther))
	}
	return p.space(t, s)
}

func isOther(class uint8) bool { return class == classOther }

// run returns the end of the run of characters from n on whose class is in.
func (p wordPattern) run(t *[1 << 16]uint8, s string, n int, in func(uint8) bool) int {
	for n < len(s) {
		class, m := p.rune(t, s[n:])
		if !in(class) {
			break
		}
		n += m
	}
	return n
}

func newlines(s string, n int) int {
	for n < len(s) && (s[n] == '\n' || s[n] == '\r') {
		n++
	}
	return n
}

// space returns the length of the piece when s begins with white space that belongs to no word: up to the last line end of
// the run; else the run, without its last character if something follows it and the run is longer than that.
func (p wordPattern) space(t *[1 << 16]uint8, s string) int {
	end, last, newline := 0, 0, 0
	for end < len(s) {
		class, m := p.rune(t, s[end:])
		if class != classSpace {
			break
		}
		last = end
		end += m
		if c := s[last]; c == '\n' || c == '\r' {
			newline = end
		}
	}
	switch {
	case newline > 0:
		return newline
	case end == len(s) || last == 0:
		return end
	}
	return last
}

// contraction returns the length of an English contraction at the start of s, which begins with an apostrophe; 0 if there is
// none.
func contraction(s string) int {
	if len(s) < 2 {
		return 0
	}
	switch s[1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	}
	if len(s) < 3 {
		return 0
	}
	if s[1:3] == "ſ" { // the long s folds to s; no other letter of the contractions has such a form
		return 3
	}
	switch [2]byte{s[1] | 0x20, s[2] | 0x20} {
	case [2]byte{'r', 'e'}, [2]byte{'v', 'e'}, [2]byte{'l', 'l'}:
		return 3
	}
	return 0
}
