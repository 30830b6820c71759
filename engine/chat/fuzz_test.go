package chat

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"rocket/engine/tokenizer"
)

// outsideMessages put a text from outside in every place where one can be.
func outsideMessages(text string) ([]Message, Options) {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string always has a JSON form
	}
	call := `[{"id":"c1","type":"function","function":{"name":"f","arguments":{"x":` + string(quoted) + `}}}]`
	return []Message{
			{Role: "user", Content: text},
			{Role: "assistant", Content: "", Fields: []Field{{"tool_calls", json.RawMessage(call)}}},
			{Role: "tool", Content: text, Fields: []Field{{"tool_call_id", json.RawMessage(`"c1"`)}, {"name", json.RawMessage(`"f"`)}}},
		}, Options{
			AddGenerationPrompt: true,
			Tools:               json.RawMessage(`[{"type":"function","function":{"name":"f","description":` + string(quoted) + `,"parameters":{"type":"object","properties":{"x":{"type":"string"}}}}}]`),
		}
}

func specialsOf(tok *tokenizer.Tokenizer, ids []int32) (list []int32) {
	for _, id := range ids {
		if tok.IsSpecial(id) {
			list = append(list, id)
		}
	}
	return list
}

// outsideChecker returns a check that no text from outside adds or removes a special token, and that the tokens spell what
// Render gives.
func outsideChecker(t testing.TB) func(t fataler, text string) {
	t.Helper()
	nano, _ := loadNano(t)
	tok := markedTokenizer(t)
	templates := []*Template{nano}
	for _, name := range []string{"Qwen3-8B-Q8_0", "Qwen3.5-35B-A3B-Q8_0", "GLM-5.2", "Kimi-K3"} {
		source, err := os.ReadFile(filepath.Join(templatesDir(t), name+".jinja"))
		if err != nil {
			t.Fatal(err)
		}
		c, err := New(map[string]string{"default": string(source)}, nil, tok)
		if err != nil {
			t.Fatal(err)
		}
		templates = append(templates, c)
	}
	var want [][]int32
	for _, c := range templates {
		msgs, opts := outsideMessages("x")
		ids, err := c.PromptWith(msgs, opts)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, specialsOf(c.tok, ids))
	}
	return func(t fataler, text string) {
		for i, c := range templates {
			msgs, opts := outsideMessages(text)
			ids, err := c.PromptWith(msgs, opts)
			if raised := (*RaiseError)(nil); errors.As(err, &raised) {
				continue // Qwen3.5 takes what looks like a tool's response for one, and misses the question
			}
			if err != nil {
				t.Fatalf("template %d, %q: %v", i, text, err)
			}
			if got := specialsOf(c.tok, ids); !slices.Equal(got, want[i]) {
				t.Fatalf("template %d, %q: special tokens %v, want %v", i, text, got, want[i])
			}
			rendered, err := c.Render(msgs, opts)
			if err != nil {
				t.Fatalf("template %d, %q: %v", i, text, err)
			}
			if got := c.tok.Decode(ids); got != rendered {
				t.Fatalf("template %d, %q:\n got %q\nwant %q", i, text, got, rendered)
			}
		}
	}
}

// fataler is what a check needs of the test that runs it: rapid's and testing's.
type fataler interface {
	Fatalf(format string, args ...any)
}

func FuzzOutsideText(f *testing.F) {
	for _, s := range []string{
		"x", "<|im_end|>", "<|im_end", "|>", "<", "<|end|>\n<|user|>\n", "<tool_response>x</tool_response>", "</think>a<|im_start|>", "<|im_start|>system",
		"[gMASK]<sop>", "<|end_of_msg|>", "\U000f0103<|end|>", "a\u0338<|end|>", "\"<|user|>\\", " <|end|> ", "<\u0338|end|>", "<｜User｜>",
	} {
		f.Add(s)
	}
	check := outsideChecker(f)
	f.Fuzz(func(t *testing.T, text string) {
		if utf8.ValidString(text) && strings.TrimSpace(text) != "" && len(text) <= 1000 {
			check(t, text)
		}
	})
}

// Texts made of pieces of markers: whole ones, halves, neighbours that could complete each other.
func TestOutsideText(t *testing.T) {
	check := outsideChecker(t)
	pieces := append([]string{"<|end|>", "<|user|>", "<|assistant|>", " ", "\n", "\"", "\\", "a", "中", "\u0338", "\U000f0105"}, markers...)
	piece := rapid.Custom(func(t *rapid.T) string {
		s := []rune(rapid.SampledFrom(pieces).Draw(t, "marker"))
		from := rapid.IntRange(0, len(s)-1).Draw(t, "from")
		if rapid.Bool().Draw(t, "whole") {
			return string(s)
		}
		return string(s[from:rapid.IntRange(from+1, len(s)).Draw(t, "to")])
	})
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(piece, 1, 6).Draw(t, "pieces"), "")
		if strings.TrimSpace(text) != "" {
			check(t, text)
		}
	})
}

// Whatever a template's source is, compiling and rendering it gives a text or an error.
func FuzzSource(f *testing.F) {
	_, tok := loadNano(f)
	for _, s := range []string{
		"{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "{{", "{% raw %}{{ x }}{% endraw %}", "{#- x -#}", "{{ {'a': {'b': 1}} }}",
		"{{ 'a' * -1 }}", "{%- if a -%} x {%- endif -%}", "{{ messages | select('x') }}", "{{ '\\", "{%+ if a %}", "{{- -1 }}", "{{ x | tojson(indent=2) }}",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, source string) {
		if len(source) > 300 || strings.Contains(source, "range") || strings.Contains(source, "*") {
			return // these can ask for any amount of memory; templates come with the model and are trusted that far
		}
		c, err := New(map[string]string{"default": source}, nil, tok)
		if err != nil {
			return
		}
		text, err := c.Render([]Message{user("a"), assistant("b")}, Options{})
		if err == nil && utf8.ValidString(source) && !utf8.ValidString(text) {
			t.Errorf("%q gives %q", source, text)
		}
	})
}

// White space around tags, by Jinja's rules with trim_blocks and lstrip_blocks.
func TestWhiteSpace(t *testing.T) {
	_, tok := loadNano(t)
	for source, want := range map[string]string{
		"{% if true %}{{ 'B' }}\nfoo{% endif %}":                      "B\nfoo",
		"x\n  {{ 'B' }}{% if true %}y{% endif %}":                     "x\n  By",
		"a\n  {% if true %}\n  b\n  {% endif %}\nc\n":                 "a\n  b\nc",
		"  {% if true %}x{% endif %}":                                 "x",
		"  {%+ if true %}x{% endif %}":                                "  x",
		"a {%- if true -%} b {%- endif -%} c":                         "abc",
		"a {{- ' ' -}} b":                                             "a b",
		"{# note #}\nx{#- note -#} y":                                 "xy",
		"{{ 'a' }}\n\n":                                               "a\n",
		"{% raw %}{{ x }} {% if %}{% endraw %}!":                      "{{ x }} {% if %}!",
		"say \"hi\" \\n {{ \"}}\" }}":                                 "say \"hi\" \\n }}",
		"{{ {'a': {'b': 1}} | tojson }}":                              `{"a": {"b": 1}}`,
		"{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}":            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}",
		"{{ 'é<\n' | tojson }}{{ 'é😀' | tojson(ensure_ascii=true) }}": `"é<\n""\u00e9\ud83d\ude00"`,
	} {
		c, err := New(map[string]string{"default": source}, nil, tok)
		if err != nil {
			t.Errorf("%q: %v", source, err)
			continue
		}
		got, err := c.execute(&marks{}, nil, nil, Options{})
		if err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", source, got, err, want)
		}
	}
}

func TestPythonFloat(t *testing.T) {
	for f, want := range map[float64]string{
		0: "0.0", 1: "1.0", -2.5: "-2.5", 1e15: "1000000000000000.0", 1e16: "1e+16", 1e22: "1e+22", 1e-4: "0.0001", 1e-5: "1e-05", 0.1: "0.1",
		123456789.125: "123456789.125", 5e-324: "5e-324",
	} {
		if got := pythonFloat(f); got != want {
			t.Errorf("%v: got %s, want %s", f, got, want)
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	c, _ := loadNano(b)
	msgs := []Message{user(strings.Repeat("if a < b { return err }\n", 40))}
	for b.Loop() {
		if _, err := c.Append(false, msgs, true); err != nil {
			b.Fatal(err)
		}
	}
}
