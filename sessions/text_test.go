package sessions

import (
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"rocket/engine/tokenizer"
)

func testTokenizer(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	tok, err := tokenizer.Load(nanoDir + "/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestCutter(t *testing.T) {
	tok := testTokenizer(t)
	for _, test := range []struct {
		name, text string
		stops      []string
		want       string
	}{
		{"no stop", "hello world", nil, "hello world"},
		{"stop in the middle", "hello END world", []string{"END"}, "hello "},
		{"the earlier of two", "a BB CC", []string{"CC", "BB"}, "a "},
		{"start of a stop at the end", "hello EN", []string{"END"}, "hello EN"},
		{"false start", "EN ENEND x", []string{"END"}, "EN EN"},
		{"stop that overlaps itself", "aab", []string{"aaab"}, "aab"},
		{"several bytes a character", "größe 漢字 🚀 Ende", []string{"🚀 E"}, "größe 漢字 "},
		{"control characters", "a\x01\x02\x00b", nil, "a\x01\x02\uFFFDb"},
	} {
		ids := tok.Encode(test.text)
		for size := 1; size <= len(ids); size++ {
			c := newCutter(tok, test.stops)
			var got strings.Builder
			for rest := ids; len(rest) > 0; {
				n := min(size, len(rest))
				part := c.push(rest[:n])
				if !utf8.ValidString(part) {
					t.Errorf("%s: piece %q splits a character", test.name, part)
				}
				got.WriteString(part)
				rest = rest[n:]
				if !strings.HasPrefix(test.want, got.String()) {
					t.Fatalf("%s, %d tokens at a time: released %q of %q", test.name, size, got.String(), test.want)
				}
			}
			got.WriteString(c.flush())
			if got.String() != test.want {
				t.Errorf("%s, %d tokens at a time: %q, want %q", test.name, size, got.String(), test.want)
			}
		}
	}
}

// Whatever the tokens, the cuts and the stop strings: the pieces are the text
// before the first stop string.
func TestCutterAgainstTheWholeText(t *testing.T) {
	tok := testTokenizer(t)
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Int32Range(0, int32(tok.Size()-1)), 0, 40).Draw(t, "ids")
		if rapid.Bool().Draw(t, "from text") {
			ids = tok.Encode(rapid.StringOfN(rapid.RuneFrom([]rune("ab é漢🚀")), 0, 40, -1).Draw(t, "text"))
		}
		stops := rapid.SliceOfN(rapid.StringOfN(rapid.RuneFrom([]rune("ab é漢🚀")), 1, 3, -1), 0, 3).Draw(t, "stops")
		// the reference looks at the whole text after each token
		stream, want := tok.NewStream(), ""
		stopped := false
		look := func(more string) {
			if stopped {
				return
			}
			want += storable(more)
			end := len(want)
			for _, stop := range stops {
				if i := strings.Index(want, stop); i >= 0 {
					end, stopped = min(end, i), true
				}
			}
			want = want[:end]
		}
		for _, id := range ids {
			if !tok.IsSpecial(id) {
				look(stream.Push(id))
			}
		}
		look(stream.Flush())
		c := newCutter(tok, stops)
		var got strings.Builder
		for rest := ids; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "cut")
			got.WriteString(c.push(rest[:n]))
			rest = rest[n:]
		}
		got.WriteString(c.flush())
		if got.String() != want {
			t.Fatalf("got %q, want %q", got.String(), want)
		}
	})
}

func TestSpecialTokensHaveNoText(t *testing.T) {
	tok := testTokenizer(t)
	special := int32(-1)
	for _, a := range tok.AddedTokens() {
		if a.Special {
			special = a.ID
		}
	}
	if special < 0 {
		t.Skip("no special token")
	}
	c := newCutter(tok, nil)
	if got := c.push([]int32{tok.Encode("a")[0], special, tok.Encode("b")[0]}) + c.flush(); got != "ab" {
		t.Errorf("text %q", got)
	}
}
