package tokenizer

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"
)

// Without a normalizer the tokens' bytes are the text's, whatever they are.
func FuzzRoundTrip(f *testing.F) {
	tok := loadNano(f)
	for _, s := range splitSeeds {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, ids := range [][]int32{tok.Encode(text), tok.EncodeSpecial(text)} {
			var raw []byte
			for _, id := range ids {
				raw = append(raw, tok.Bytes(id)...)
			}
			if string(raw) != text {
				t.Fatalf("%q becomes %q", text, raw)
			}
		}
	})
}

// A stream gives what Decode gives, never a part of a character, and holds back no more than three bytes.
func TestStream(t *testing.T) {
	tok := loadNano(t)
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.OneOf(rapid.Int32Range(-1, int32(tok.Size())), rapid.Int32Range(0, 300))
		ids := rapid.SliceOf(id).Draw(t, "ids")
		s := tok.NewStream()
		var b strings.Builder
		for _, id := range ids {
			text := s.Push(id)
			if !utf8.ValidString(text) {
				t.Fatalf("Push(%d) gives %q", id, text)
			}
			if s.Held() >= utf8.UTFMax {
				t.Fatalf("%d bytes are held back", s.Held())
			}
			b.WriteString(text)
		}
		b.WriteString(s.Flush())
		if got, want := b.String(), tok.Decode(ids); got != want {
			t.Fatalf("%v: the stream gives %q, Decode %q", ids, got, want)
		}
	})
}

// A stream of whole text comes without replacement characters.
func TestStreamOfText(t *testing.T) {
	tok := loadNano(t)
	text := "né 中文 👩‍👩‍👧 end"
	s := tok.NewStream()
	var b strings.Builder
	for _, id := range tok.Encode(text) {
		b.WriteString(s.Push(id))
	}
	if s.Held() != 0 || s.Flush() != "" || b.String() != text {
		t.Errorf("got %q", b.String())
	}
}

func TestLossy(t *testing.T) {
	for in, want := range map[string]string{
		"":                     "",
		"a":                    "a",
		"\xff":                 "\ufffd",
		"\xe4\xb8":             "\ufffd",
		"\xe4\xb8x":            "\ufffdx",
		"\xe4x":                "\ufffdx",
		"\xf0\x9f\x98":         "\ufffd",
		"\xf0\x9f\x98\xf0":     "\ufffd\ufffd",
		"\xe0\x80\x80":         "\ufffd\ufffd\ufffd", // overlong
		"\xed\xa0\x80":         "\ufffd\ufffd\ufffd", // a surrogate
		"\xf4\x90\x80\x80":     "\ufffd\ufffd\ufffd\ufffd",
		"\x80\x80":             "\ufffd\ufffd",
		"\xc3\xa9\xc3":         "é\ufffd",
		"\xf0\x9f\x98\x80\xe2": "😀\ufffd",
	} {
		if got := lossy([]byte(in)); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// The two ways to merge give the same tokens.
func TestMergeScanEqualsHeap(t *testing.T) {
	tok := loadNano(t)
	r := rand.New(rand.NewPCG(5, 6))
	for range 3000 {
		word := "x" + randomText(r)
		if len(word) > scanBytes {
			word = word[:scanBytes]
		}
		if got, want := tok.bpe.mergeHeap(nil, word), tok.bpe.mergeScan(nil, word); !slices.Equal(got, want) {
			t.Fatalf("%q: heap %v, scan %v", word, got, want)
		}
	}
}

// Normalisation by definition equals the norm package's where that inserts nothing.
func TestNFC(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 3000 {
		text := randomText(r)
		if hasLongMarkRun(text) {
			continue
		}
		if got, want := nfcSlow(text), norm.NFC.String(text); got != want {
			t.Fatalf("%q: got %q, want %q", text, got, want)
		}
	}
	for c := rune(0); c < 0x30000; c++ {
		if c > 0x3100 && c < 0xf900 && c%53 != 0 {
			continue // ideographs and syllables, all alike
		}
		text := string([]rune{'a', c, 0x301, c, 0x323})
		if got, want := nfcSlow(text), norm.NFC.String(text); got != want {
			t.Fatalf("%q: got %q, want %q", text, got, want)
		}
	}
	zalgo := "a" + strings.Repeat("\u0301\u0323", 40) + "b"
	if got, want := nfc(zalgo), "\u1ea1"+strings.Repeat("\u0323", 39)+strings.Repeat("\u0301", 40)+"b"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// edited returns nano's tokenizer.json with one part replaced; a null part is removed.
func edited(t testing.TB, path []string, value any) []byte {
	t.Helper()
	data, err := os.ReadFile(nanoPath)
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	at := file
	for _, p := range path[:len(path)-1] {
		at = at[p].(map[string]any)
	}
	at[path[len(path)-1]] = value
	out, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

type object = map[string]any

func TestRefusals(t *testing.T) {
	byteLevel := object{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}
	for _, tc := range []struct {
		path  []string
		value any
		want  string
	}{
		{[]string{"surprise"}, 1, `unknown field "surprise"`},
		{[]string{"truncation"}, object{"max_length": 1}, "truncation: only null is supported"},
		{[]string{"padding"}, object{}, "padding: only null is supported"},
		{[]string{"normalizer"}, object{"type": "NFKC"}, `normalizer.type: "NFKC" is not supported`},
		{[]string{"normalizer"}, object{"type": "Sequence", "normalizers": []any{object{"type": "Lowercase"}}}, `normalizer.normalizers[0].type: "Lowercase" is not supported`},
		{[]string{"normalizer"}, object{}, "normalizer.type: missing"},
		{[]string{"pre_tokenizer"}, nil, "pre_tokenizer: missing"},
		{[]string{"pre_tokenizer"}, object{"type": "Metaspace"}, `pre_tokenizer.type: "Metaspace" is not supported`},
		{[]string{"pre_tokenizer"}, object{"type": "Sequence", "pretokenizers": []any{}}, "pre_tokenizer: must end with ByteLevel"},
		{[]string{"pre_tokenizer"}, object{"type": "Sequence", "pretokenizers": []any{byteLevel, byteLevel}}, "pre_tokenizer.pretokenizers[1]: nothing may follow ByteLevel"},
		{[]string{"pre_tokenizer"}, object{"type": "Split", "pattern": object{"Regex": "("}, "behavior": "Isolated"}, "pre_tokenizer.pattern: regular expression"},
		{[]string{"pre_tokenizer"}, object{"type": "Split", "pattern": object{"Regex": "a"}, "behavior": "Contiguous"}, `pre_tokenizer.behavior: "Contiguous" is not supported`},
		{[]string{"pre_tokenizer"}, object{"type": "Split", "pattern": object{}, "behavior": "Isolated"}, "pre_tokenizer.pattern: want one of"},
		{[]string{"pre_tokenizer"}, object{"type": "ByteLevel", "x": 1}, `pre_tokenizer: json: unknown field "x"`},
		{[]string{"post_processor"}, object{"type": "TemplateProcessing"}, `post_processor.type: "TemplateProcessing" is not supported`},
		{[]string{"decoder"}, nil, "decoder: missing"},
		{[]string{"decoder"}, object{"type": "WordPiece"}, `decoder.type: "WordPiece" is not supported`},
		{[]string{"model"}, nil, "model: missing"},
		{[]string{"model", "type"}, "Unigram", `model.type: "Unigram" is not supported`},
		{[]string{"model", "dropout"}, 0.1, "model.dropout: is not supported"},
		{[]string{"model", "byte_fallback"}, true, "model.byte_fallback: is not supported"},
		{[]string{"model", "end_of_word_suffix"}, "</w>", "model.end_of_word_suffix: is not supported"},
		{[]string{"model", "continuing_subword_prefix"}, "##", "model.continuing_subword_prefix: is not supported"},
		{[]string{"model", "vocab"}, object{}, "model.vocab: missing"},
		{[]string{"model", "vocab"}, object{"a": 0}, "model.vocab: has no token"},
		{[]string{"model", "vocab"}, object{"a": 0, "b": 0}, `model.vocab: "a" and "b" have the same id 0`},
		{[]string{"model", "vocab"}, object{"a": 1.5}, `vocab["a"]: is no id`},
		{[]string{"model", "vocab"}, object{"a": 1 << 40}, `vocab["a"]: is no id`},
		{[]string{"model", "vocab"}, object{"a": "b"}, `vocab["a"]: is no id`},
		{[]string{"model", "vocab"}, []any{}, "vocab: is no object"},
		{[]string{"model", "merges"}, object{}, "merges: is no array"},
		{[]string{"model", "merges"}, []any{1}, "merges[0]: is neither"},
		{[]string{"model", "merges"}, []any{[]any{"a", 1}}, "merges[0]: is not two strings"},
		{[]string{"model", "vocab"}, object{"a": -1}, `model.vocab["a"]: id -1 is outside`},
		{[]string{"model", "merges"}, []any{"a"}, `merges[0]: "a" is not two words`},
		{[]string{"model", "merges"}, []any{[]any{"a"}}, "merges[0]: is not two strings"},
		{[]string{"model", "merges"}, []any{"a 不"}, `model.merges[0]: "不" is not in the vocabulary`},
		{[]string{"added_tokens"}, []any{object{"id": 6, "content": "x"}}, `added_tokens[0].id: 6, but "x" has id`},
		{[]string{"added_tokens"}, []any{object{"id": 6, "content": "<new>"}}, `added_tokens[0].id: 6 is taken by "!"`},
		{[]string{"added_tokens"}, []any{object{"id": 5000, "content": ""}}, "added_tokens[0].content: is empty"},
		{[]string{"added_tokens"}, []any{object{"id": -1, "content": "<a>"}}, "added_tokens[0].id: -1 is outside"},
		{[]string{"added_tokens"}, []any{object{"id": 5000, "content": "<a>"}, object{"id": 5000, "content": "<a>"}}, "added_tokens[1].id: 5000 is there twice"},
		{[]string{"added_tokens"}, []any{object{"id": 5000, "content": "<a>", "odd": true}}, `unknown field "odd"`},
	} {
		_, err := Parse(edited(t, tc.path, tc.value))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v = %v: %v, want %q", tc.path, tc.value, err, tc.want)
		}
	}
}

// Merges as strings and as pairs are the same; with ignore_merges a word that is a token is that token.
func TestMergeForms(t *testing.T) {
	tok := loadNano(t)
	data, err := os.ReadFile(nanoPath)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Model struct{ Merges mergeList }
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	pairs, err := Parse(edited(t, []string{"model", "merges"}, file.Model.Merges))
	if err != nil {
		t.Fatal(err)
	}
	lines := make([]string, len(file.Model.Merges))
	for i, p := range file.Model.Merges {
		lines[i] = p[0] + " " + p[1]
	}
	strs, err := Parse(edited(t, []string{"model", "merges"}, lines))
	if err != nil {
		t.Fatal(err)
	}
	text := "func main() { return errors.New(\"x\") }"
	if diff := cmp.Diff(tok.Encode(text), pairs.Encode(text)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(tok.Encode(text), strs.Encode(text)); diff != "" {
		t.Error(diff)
	}
	few, err := Parse(edited(t, []string{"model", "merges"}, []any{}))
	if err != nil {
		t.Fatal(err)
	}
	if got := len(few.Encode("return")); got != 6 {
		t.Errorf("without merges: %d tokens", got)
	}
	var file2 map[string]any
	if err := json.Unmarshal(edited(t, []string{"model", "ignore_merges"}, true), &file2); err != nil {
		t.Fatal(err)
	}
	file2["model"].(map[string]any)["merges"] = []any{}
	whole, err := json.Marshal(file2)
	if err != nil {
		t.Fatal(err)
	}
	ignoring, err := Parse(whole)
	if err != nil {
		t.Fatal(err)
	}
	if got := ignoring.Encode("return"); len(got) != 1 || string(ignoring.Bytes(got[0])) != "return" {
		t.Errorf("with ignore_merges: %v", got)
	}
}

func TestAddedTokens(t *testing.T) {
	added := []any{
		object{"id": 5000, "content": "<l>", "lstrip": true},
		object{"id": 5001, "content": "<r>", "rstrip": true},
		object{"id": 5002, "content": "wörd", "single_word": true},
		object{"id": 5003, "content": "<a>"},
		object{"id": 5004, "content": "<a><a>"},
		object{"id": 5005, "content": "e\u0301", "normalized": true},
	}
	tok, err := Parse(edited(t, []string{"added_tokens"}, added))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(edited(t, []string{"added_tokens"}, added), &file); err != nil {
		t.Fatal(err)
	}
	file["normalizer"] = object{"type": "NFC"}
	data, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	normal, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	show := func(tok *Tokenizer, text string) string {
		var parts []string
		plain := ""
		for _, id := range tok.EncodeSpecial(text) {
			if tok.IsAdded(id) {
				if plain != "" {
					parts = append(parts, plain)
				}
				plain = ""
				parts = append(parts, "["+tok.Token(id)+"]")
				continue
			}
			plain += string(tok.Bytes(id))
		}
		if plain != "" {
			parts = append(parts, plain)
		}
		return strings.Join(parts, "|")
	}
	for _, tc := range []struct {
		tok        *Tokenizer
		text, want string
	}{
		{tok, "a \n<l> b", "a|[<l>]| b"},
		{tok, "a <r> \n b", "a |[<r>]|b"},
		{tok, "a <r> <l> b", "a |[<r>]|[<l>]| b"},
		{tok, "wörd wörds swörd wörd_ wörd. éwörd", "[wörd]| wörds swörd wörd_ |[wörd]|. éwörd"},
		{tok, "<a><a><a>", "[<a><a>]|[<a>]"},
		{tok, "x<a", "x<a"},
		{tok, "é e\u0301", "é |[e\u0301]"},
		{normal, "é e\u0301", "[e\u0301]| |[e\u0301]"},
	} {
		if got := show(tc.tok, tc.text); got != tc.want {
			t.Errorf("%q: got %s, want %s", tc.text, got, tc.want)
		}
	}
}

// plain maps only what is no added token.
func TestEncodeMarked(t *testing.T) {
	tok := loadNano(t)
	ids := tok.EncodeMarked("<|user|>\ue000|end|><|end|>", func(s string) string { return strings.ReplaceAll(s, "\ue000", "<") })
	want := append(append([]int32{2}, tok.Encode("<|end|>")...), 5)
	if !slices.Equal(ids, want) {
		t.Errorf("got %v, want %v", ids, want)
	}
}

func TestAddPrefixSpace(t *testing.T) {
	tok, err := Parse(edited(t, []string{"pre_tokenizer"}, object{"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}))
	if err != nil {
		t.Fatal(err)
	}
	if got := tok.Decode(tok.Encode("the end")); got != " the end" {
		t.Errorf("got %q", got)
	}
	if got := tok.Decode(tok.Encode(" the end")); got != " the end" {
		t.Errorf("got %q", got)
	}
}

// Broken files give errors, never a panic; what is accepted works.
func FuzzParse(f *testing.F) {
	alphabet := object{}
	for i, r := range byteToRune {
		alphabet[string(r)] = i
	}
	alphabet["ab"] = 256
	small, err := json.Marshal(object{
		"version": "1.0", "added_tokens": []any{object{"id": 257, "content": "<e>", "special": true}}, "normalizer": object{"type": "NFC"},
		"pre_tokenizer": object{"type": "ByteLevel", "add_prefix_space": false}, "decoder": object{"type": "ByteLevel"},
		"model": object{"type": "BPE", "vocab": alphabet, "merges": []any{"a b"}},
	})
	if err != nil {
		f.Fatal(err)
	}
	if _, err := Parse(small); err != nil {
		f.Fatal(err)
	}
	f.Add(small)
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[["a"]]}}`))
	f.Add([]byte(`{"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"(?i:a)|\\p{Nd}"},"behavior":"Removed"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := Parse(data)
		if err != nil {
			return
		}
		ids := tok.EncodeSpecial("ab <e> é")
		for _, id := range ids {
			if tok.Bytes(id) == nil {
				t.Fatalf("id %d has no bytes", id)
			}
		}
		tok.Decode(ids)
	})
}
