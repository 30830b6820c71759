package tokenizer

import (
	"sort"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// markRun is the number of combining marks in a row from which the norm package inserts a grapheme joiner.
const markRun = 30

// hasLongMarkRun reports whether text has more combining marks in a row than the norm package leaves alone.
func hasLongMarkRun(text string) bool {
	// A mark of a longer run is at least two bytes long.
	if len(text) < 2*markRun {
		return false
	}
	run := 0
	for i := 0; i < len(text); {
		if text[i] < utf8.RuneSelf {
			run = 0
			i++
			continue
		}
		p := norm.NFD.PropertiesString(text[i:])
		n := max(p.Size(), 1)
		// A character that decomposes into marks only counts for as many as it may have.
		if p.CCC() != 0 || p.LeadCCC() != 0 {
			run += max(1, utf8.RuneCount(p.Decomposition()))
			if run >= markRun {
				return true
			}
		} else {
			run = utf8.RuneCount(p.Decomposition())
		}
		i += n
	}
	return false
}

// nfcSlow is normalisation form C by its definition: decompose, order the marks, compose.
func nfcSlow(text string) string {
	runes, ccc := decompose(text)
	for i := 0; i < len(runes); {
		j := i
		for j < len(runes) && ccc[j] != 0 {
			j++
		}
		sort.Stable(marks{runes[i:j], ccc[i:j]})
		i = j + 1
	}
	out := make([]byte, 0, len(text))
	starter := -1 // index of the last starter, which later characters may compose with
	var last uint8
	kept := runes[:0]
	for i, r := range runes {
		// A character composes unless a kept one since the starter has the same or a higher class.
		if starter >= 0 && (starter == len(kept)-1 || last != 0 && last < ccc[i]) {
			if c, ok := composePair(kept[starter], r); ok {
				kept[starter] = c
				continue
			}
		}
		kept = append(kept, r)
		last = ccc[i]
		if ccc[i] == 0 {
			starter = len(kept) - 1
		}
	}
	for _, r := range kept {
		if r < 0 {
			out = append(out, byte(-r))
			continue
		}
		out = utf8.AppendRune(out, r)
	}
	return string(out)
}

// decompose returns the canonical decomposition of text and the combining classes. A byte that is no UTF-8 is kept as its
// negative value.
func decompose(text string) (runes []rune, ccc []uint8) {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		if r == utf8.RuneError && n == 1 {
			runes, ccc = append(runes, -rune(text[i])), append(ccc, 0)
			i++
			continue
		}
		p := norm.NFD.PropertiesString(text[i : i+n])
		d := p.Decomposition()
		if d == nil {
			d = []byte(text[i : i+n])
		}
		if hangul := norm.NFD.Bytes(d); r >= 0xac00 && r <= 0xd7a3 {
			d = hangul
		}
		for len(d) > 0 {
			r, n := utf8.DecodeRune(d)
			runes = append(runes, r)
			ccc = append(ccc, norm.NFD.Properties(d[:n]).CCC())
			d = d[n:]
		}
		i += n
	}
	return runes, ccc
}

// composePair returns the character that a and b compose to.
func composePair(a, b rune) (rune, bool) {
	if a < 0 || b < 0 {
		return 0, false
	}
	s := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(s)
	return r, n == len(s)
}

type marks struct {
	runes []rune
	ccc   []uint8
}

func (m marks) Len() int           { return len(m.runes) }
func (m marks) Less(i, j int) bool { return m.ccc[i] < m.ccc[j] }
func (m marks) Swap(i, j int) {
	m.runes[i], m.runes[j] = m.runes[j], m.runes[i]
	m.ccc[i], m.ccc[j] = m.ccc[j], m.ccc[i]
}
