package tokenizer

import (
	"fmt"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// MaxPatternBytes limits a regular expression in the file.
const MaxPatternBytes = 8 << 10

// A stage is one step of the pre-tokenizer: it cuts each piece that reaches it into smaller ones. The bytes of the pieces are
// the bytes of the text, except that a stage may drop what it is told to remove and may put a space before a piece.
type stage struct {
	byteLevel      bool // the last stage
	addPrefixSpace bool
	find           func(text string, piece func(string)) // nil: the piece goes on as it is
	fast           func(text string) int                 // set when find is a hand-written splitter: length of the first piece
}

// passes reports whether the stage hands every piece on unchanged.
func (s *stage) passes() bool { return s.find == nil && !s.addPrefixSpace }

// byteLevelPattern is what ByteLevel splits with when use_regex is set.
const byteLevelPattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// splitBehavior says what a Split stage makes of the parts that match and those between them.
type splitBehavior int

const (
	isolated splitBehavior = iota // both are pieces
	removed                       // only what lies between is
)

// escapePattern makes an expression that matches s as it is.
func escapePattern(s string) string { return regexp2.Escape(s) }

// newSplitStage makes a stage from a regular expression. Known expressions get a hand-written splitter.
func newSplitStage(pattern string, b splitBehavior, invert bool) (stage, error) {
	if len(pattern) > MaxPatternBytes {
		return stage{}, fmt.Errorf("%d bytes, the limit is %d", len(pattern), MaxPatternBytes)
	}
	if k, ok := knownPatterns[pattern]; ok && (b == isolated || invert) {
		// These expressions match everything, so nothing lies between the matches.
		return stage{
			fast: k.next,
			find: func(text string, piece func(string)) {
				for len(text) > 0 {
					n := k.next(text)
					piece(text[:n])
					text = text[n:]
				}
			},
		}, nil
	}
	re, err := compilePattern(pattern)
	if err != nil {
		return stage{}, err
	}
	return stage{find: regexSplitter(re, b, invert)}, nil
}

// compilePattern compiles without a limit on backtracking: a long run of spaces is legitimate text, and the expressions in
// use backtrack at most once over a run.
func compilePattern(pattern string) (re *regexp2.Regexp, err error) {
	defer func() {
		if p := recover(); p != nil {
			re, err = nil, fmt.Errorf("regular expression %q: %v", pattern, p)
		}
	}()
	re, err = regexp2.Compile(pattern, regexp2.OptionMaxBacktrackingStackSize(-1))
	if err != nil {
		return nil, fmt.Errorf("regular expression %q: %w", pattern, err)
	}
	return re, nil
}

// regexSplitter cuts at the matches of re. Should the expression fail on a text, what is left is one piece: no text is lost.
func regexSplitter(re *regexp2.Regexp, b splitBehavior, invert bool) func(string, func(string)) {
	return func(text string, piece func(string)) {
		emit := func(from, to int, match bool) {
			if from < to && !(b == removed && match != invert) {
				piece(text[from:to])
			}
		}
		runes, at := runeOffsets(text)
		done := 0
		for _, m := range matches(re, runes) {
			from, to := at[m[0]], at[m[1]]
			if from < done || from == to {
				continue
			}
			emit(done, from, false)
			emit(from, to, true)
			done = to
		}
		emit(done, len(text), false)
	}
}

func matches(re *regexp2.Regexp, runes []rune) [][]int {
	all, err := re.FindAllRunesIndex(runes, -1)
	if err != nil {
		return nil
	}
	return all
}

// runeOffsets returns the characters of text and the byte offset of each, plus the length: a byte that is no UTF-8 is one
// character.
func runeOffsets(text string) ([]rune, []int) {
	n := utf8.RuneCountInString(text)
	runes, at := make([]rune, 0, n), make([]int, 0, n+1)
	for i, r := range text {
		runes = append(runes, r)
		at = append(at, i)
	}
	return runes, append(at, len(text))
}
