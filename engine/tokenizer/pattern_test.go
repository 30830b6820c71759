package tokenizer

import (
	"math/rand/v2"
	"strings"
	"testing"
	"unicode"

	"github.com/dlclark/regexp2/v2"
	"github.com/google/go-cmp/cmp"
)

// splitters are a known pattern's hand-written splitter and the same pattern through regexp2.
type splitters struct {
	name       string
	hand, slow stage
}

func knownSplitters(t testing.TB) []splitters {
	t.Helper()
	var all []splitters
	for pattern := range knownPatterns {
		hand, err := newSplitStage(pattern, isolated, false)
		if err != nil || hand.fast == nil {
			t.Fatalf("%s: %v", pattern, err)
		}
		re, err := compilePattern(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, splitters{pattern, hand, stage{find: regexSplitter(re, isolated, false)}})
	}
	return all
}

func pieces(s stage, text string) []string {
	var all []string
	s.find(text, func(p string) { all = append(all, p) })
	return all
}

func checkSplit(t *testing.T, s splitters, text string) {
	t.Helper()
	got, want := pieces(s.hand, text), pieces(s.slow, text)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s\n%q (regexp2 -, by hand +): %s", s.name, text, diff)
	}
	if joined := strings.Join(got, ""); joined != text {
		t.Fatalf("%q: the pieces join to %q", text, joined)
	}
}

var splitSeeds = []string{
	"I'm SURE they'LL", "'s's", "''s", "it'", "a  b", "a   ", "  \n  \n x", "\r\n\r\n\tx", " ...\n\n x", "12345", "x12y", "\u00a0\u2003x", "é\u0301\u0301", "\u0301a",
	"\xff\xfe", "a\xffb", "'\xff", " \xc3", "½²Ⅷ", "中文 字", "👩‍👩‍👧", "\u0085\u2028", "'ſ", "'K", "\ufeffa", "\n\n\n", "\t\t\n \n", "!\r\n\r\n", "'re've'll'd'm't",
}

// The hand-written splitters cut every text where regexp2 cuts it.
func FuzzSplit(f *testing.F) {
	for _, s := range splitSeeds {
		f.Add(s)
	}
	all := knownSplitters(f)
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range all {
			checkSplit(t, s, text)
		}
	})
}

func TestSplit(t *testing.T) {
	all := knownSplitters(t)
	r := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		text := randomText(r)
		for _, s := range all {
			checkSplit(t, s, text)
		}
	}
	// Each character of the tables beside a letter, a digit, a space and a line end.
	for c := rune(0); c <= unicode.MaxRune; c++ {
		if c > 0x3000 && c%97 != 0 && !unicode.IsSpace(c) {
			continue
		}
		checkSplit(t, all[0], string([]rune{'x', c, 'y', ' ', c, '1', c, '\n', c, c, ' '}))
	}
}

// A long run of anything takes time in proportion, and no stack.
func TestSplitLongRuns(t *testing.T) {
	for _, s := range knownSplitters(t) {
		for _, run := range []string{" ", "\n", "a", "!", "1", "\r\n ", "'", " a"} {
			text := strings.Repeat(run, 100_000/len(run))
			checkSplit(t, s, text)
		}
	}
}

func TestPatternOfByteLevel(t *testing.T) {
	s, err := newSplitStage(byteLevelPattern, isolated, false)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"Hello", ",", " world", "'s", "  ", " 123", "abc", "\n"}
	if diff := cmp.Diff(want, pieces(s, "Hello, world's   123abc\n")); diff != "" {
		t.Error(diff)
	}
}

func TestSplitBehaviors(t *testing.T) {
	re := regexp2.MustCompile(`,+`)
	for _, tc := range []struct {
		b      splitBehavior
		invert bool
		want   []string
	}{
		{isolated, false, []string{"a", ",,", "b", ","}},
		{isolated, true, []string{"a", ",,", "b", ","}},
		{removed, false, []string{"a", "b"}},
		{removed, true, []string{",,", ","}},
	} {
		if diff := cmp.Diff(tc.want, pieces(stage{find: regexSplitter(re, tc.b, tc.invert)}, "a,,b,")); diff != "" {
			t.Errorf("%v, %v: %s", tc.b, tc.invert, diff)
		}
	}
}
