package tokenizer

import (
	"sort"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedMatcher finds added tokens in a text: from left to right, the longest of those that start at a place.
type addedMatcher struct {
	byFirst [256][]matchable // by first byte, longest first
	n       int
}

type matchable struct {
	text string
	tok  AddedToken
}

func newAddedMatcher(list []matchable) *addedMatcher {
	m := &addedMatcher{n: len(list)}
	for _, a := range list {
		m.byFirst[a.text[0]] = append(m.byFirst[a.text[0]], a)
	}
	for i := range m.byFirst {
		l := m.byFirst[i]
		sort.SliceStable(l, func(i, j int) bool { return len(l[i].text) > len(l[j].text) })
	}
	return m
}

func (m *addedMatcher) empty() bool { return m.n == 0 }

// split calls f for each part of text in order: with the id of an added token, or with -1 for a part that holds none. The
// parts join to text.
func (m *addedMatcher) split(text string, f func(part string, id int32)) {
	if m.n == 0 {
		f(text, -1)
		return
	}
	done := 0
	for i := 0; i < len(text); {
		tok, n := m.at(text, i)
		if n == 0 {
			i++
			continue
		}
		start, end := i, i+n
		i = end
		if tok.SingleWord && !loneWord(text, start, end) {
			continue
		}
		if tok.LStrip {
			start = max(done, len(strings.TrimRightFunc(text[:start], unicode.IsSpace)))
		}
		if tok.RStrip {
			end += len(text[end:]) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		if start > done {
			f(text[done:start], -1)
		}
		f(text[start:end], tok.ID)
		done = end
		i = max(i, end)
	}
	if done < len(text) {
		f(text[done:], -1)
	}
}

func (m *addedMatcher) at(text string, i int) (tok AddedToken, n int) {
	for _, a := range m.byFirst[text[i]] {
		if strings.HasPrefix(text[i:], a.text) {
			return a.tok, len(a.text)
		}
	}
	return tok, 0
}

// loneWord reports whether text[start:end] has no word character right before or behind it.
func loneWord(text string, start, end int) bool {
	if before, n := utf8.DecodeLastRuneInString(text[:start]); n > 0 && wordRune(before) {
		return false
	}
	after, n := utf8.DecodeRuneInString(text[end:])
	return n == 0 || !wordRune(after)
}

// wordRune is \w of the reference's regular expressions.
func wordRune(r rune) bool {
	return r == '_' || unicode.IsLetter(r) || unicode.IsMark(r) || unicode.Is(unicode.Nd, r) || unicode.Is(unicode.Nl, r) ||
		unicode.Is(unicode.Pc, r) || unicode.Is(unicode.Other_Alphabetic, r) || unicode.Is(unicode.Join_Control, r)
}
