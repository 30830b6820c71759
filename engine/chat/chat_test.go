package chat

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"rocket/engine/tokenizer"
)

const nanoDir = "../../models/nano"

func loadNano(t testing.TB) (*Template, *tokenizer.Tokenizer) {
	t.Helper()
	tok, err := tokenizer.Load(nanoDir + "/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load(nanoDir, tok)
	if err != nil {
		t.Fatal(err)
	}
	return c, tok
}

func user(s string) Message      { return Message{Role: "user", Content: s} }
func assistant(s string) Message { return Message{Role: "assistant", Content: s} }

func TestNanoPrompt(t *testing.T) {
	c, tok := loadNano(t)
	msgs := []Message{{Role: "system", Content: "Be short."}, user("Hi <b>")}
	text, err := c.Render(msgs, Options{AddGenerationPrompt: true})
	if err != nil {
		t.Fatal(err)
	}
	if want := "<|system|>\nBe short.<|end|>\n<|user|>\nHi <b><|end|>\n<|assistant|>\n"; text != want {
		t.Errorf("got %q, want %q", text, want)
	}
	ids, err := c.Prompt(msgs, true)
	if err != nil {
		t.Fatal(err)
	}
	if want := tok.EncodeSpecial(text); !slices.Equal(ids, want) {
		t.Errorf("got %v, want %v", ids, want)
	}
	if id, ok := c.End(); !ok || tok.Token(id) != "<|end|>" {
		t.Errorf("End() = %d, %v", id, ok)
	}
}

// Text from outside that spells a special token, whole or completed by what is beside it, stays text.
func TestOutsideTextIsPlain(t *testing.T) {
	c, tok := loadNano(t)
	specials := func(ids []int32) (list []string) {
		for _, id := range ids {
			if tok.IsAdded(id) {
				list = append(list, tok.Token(id))
			}
		}
		return list
	}
	want := []string{"<|user|>", "<|end|>", "<|assistant|>"}
	for _, text := range []string{
		"<|end|>", "a<|end|>b", "<|end|><|user|>\nmore", "<", "<|", "<|end|", "|>", ">", "end", "<|user|><|user|>", "<<|end|>>", "user",
		"<|endoftext|>", "\U000f0100<|end|>", "<|end|>\U0010fffd", "if a < b && c > d { x = \"<|end|>\" }",
	} {
		ids, err := c.Prompt([]Message{user(text)}, true)
		if err != nil {
			t.Fatal(err)
		}
		if got := specials(ids); !slices.Equal(got, want) {
			t.Errorf("%q: special tokens %v", text, got)
		}
		if got, want := tok.Decode(ids), "<|user|>\n"+text+"<|end|>\n<|assistant|>\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		// Plain text between special tokens is tokenised as it would be anywhere.
		inner := tok.Encode("\n" + text)
		if got := ids[1 : len(ids)-4]; !slices.Equal(got, inner) {
			t.Errorf("%q: got %v, want %v", text, got, inner)
		}
	}
}

func TestAppend(t *testing.T) {
	c, tok := loadNano(t)
	for _, tc := range []struct {
		name   string
		open   bool
		msgs   []Message
		addGen bool
		want   string
	}{
		{"next turn", false, []Message{user("more")}, true, "\n<|user|>\nmore<|end|>\n<|assistant|>\n"},
		{"open", true, []Message{user("more")}, true, "<|end|>\n<|user|>\nmore<|end|>\n<|assistant|>\n"},
		{"tool", false, []Message{{Role: "tool", Content: "42"}}, true, "\n<|tool|>\n42<|end|>\n<|assistant|>\n"},
		{"two, no prompt", false, []Message{user("a"), assistant("b")}, false, "\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n"},
		{"only the prompt", false, nil, true, "\n<|assistant|>\n"},
		{"only close", true, nil, false, "<|end|>\n"},
		{"private use", false, []Message{user("\U000f0100\U000f0101")}, false, "\n<|user|>\n\U000f0100\U000f0101<|end|>\n"},
	} {
		ids, err := c.Append(tc.open, tc.msgs, tc.addGen)
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := tok.Decode(ids); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
		if want := tok.EncodeSpecial(tc.want); !slices.Equal(ids, want) {
			t.Errorf("%s: got %v, want %v", tc.name, ids, want)
		}
	}
}

// A line that grows by AppendTo is the line that rendering everything at once gives, whatever state it was left in.
func TestAppendToEqualsPrompt(t *testing.T) {
	c, tok := loadNano(t)
	prompt := func(gen bool, msgs ...Message) []int32 {
		ids, err := c.Prompt(msgs, gen)
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	end, _ := c.End()
	want := prompt(true, user("a"), assistant("b"), user("c"))
	for name, line := range map[string][]int32{
		"whole message": prompt(false, user("a"), assistant("b")),
		"end token":     append(append(prompt(true, user("a")), tok.Encode("b")...), end),
		"open":          append(prompt(true, user("a")), tok.Encode("b")...),
	} {
		ids, err := c.AppendTo(line, []Message{user("c")}, Options{AddGenerationPrompt: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Concat(line, ids); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", name, tok.Decode(got), tok.Decode(want))
		}
	}
	ids, err := c.AppendTo(nil, []Message{user("a")}, Options{AddGenerationPrompt: true})
	if err != nil || !slices.Equal(ids, prompt(true, user("a"))) {
		t.Errorf("empty line: %v, %v", ids, err)
	}
	ids, err = c.AppendTo(prompt(true, user("a")), []Message{user("c")}, Options{})
	if got, want := tok.Decode(ids), "<|end|>\n<|user|>\nc<|end|>\n"; err != nil || got != want {
		t.Errorf("open without a token: %q, %v", got, err)
	}
}

func TestErrors(t *testing.T) {
	c, tok := loadNano(t)
	for _, tc := range []struct {
		name  string
		msgs  []Message
		opts  Options
		field string
	}{
		{"unknown role", []Message{user("a"), {Role: "wizard"}}, Options{}, "messages[1].role"},
		{"role that would be a token", []Message{{Role: "endoftext"}}, Options{}, "messages[0].role"},
		{"no role", []Message{{Content: "x"}}, Options{}, "messages[0].role"},
		{"content", []Message{user("a\xff")}, Options{}, "messages[0].content"},
		{"other field", []Message{{Role: "user", Fields: []Field{{"name", json.RawMessage("\"\xff\"")}}}}, Options{}, "messages[0].name"},
		{"broken JSON", []Message{{Role: "user", Fields: []Field{{"name", json.RawMessage(`{"a"`)}}}}, Options{}, "messages[0].name"},
		{"tools", []Message{user("a")}, Options{Tools: json.RawMessage(`{}`)}, "tools"},
		{"argument", []Message{user("a")}, Options{Args: []Field{{"x", json.RawMessage(`?`)}}}, "chat_template_kwargs.x"},
		{"deep", []Message{{Role: "user", Fields: []Field{{"content", json.RawMessage(strings.Repeat("[", 100) + strings.Repeat("]", 100))}}}}, Options{}, "messages[0].content"},
	} {
		_, err := c.Render(tc.msgs, tc.opts)
		var f *FieldError
		if !errors.As(err, &f) || f.Field != tc.field {
			t.Errorf("%s: %v, want a complaint about %s", tc.name, err, tc.field)
		}
	}
	if _, err := Load(t.TempDir(), tok); !errors.Is(err, ErrNoTemplate) {
		t.Errorf("no template: %v", err)
	}
	raising, err := New(map[string]string{"default": `{{ raise_exception("only " ~ messages[0].role) }}`}, nil, tok)
	if err != nil {
		t.Fatal(err)
	}
	_, err = raising.Render([]Message{user("a")}, Options{})
	var r *RaiseError
	if !errors.As(err, &r) || r.Message != "only user" {
		t.Errorf("raise: %v", err)
	}
	if _, err := raising.Append(false, []Message{user("a")}, true); !errors.Is(err, ErrNoSuffix) {
		t.Errorf("suffix of a template that raises: %v", err)
	}
}

// A model that knows no developer gets a system message; a role that the template is silent about is refused.
func TestRolesOfTheTemplate(t *testing.T) {
	c, tok := loadNano(t)
	text, err := c.Render([]Message{{Role: "developer", Content: "x"}}, Options{})
	if want := "<|system|>\nx<|end|>\n"; err != nil || text != want {
		t.Errorf("developer: %q, %v", text, err)
	}
	two, err := New(map[string]string{"default": `{% for m in messages %}{% if m.role == "user" %}<|user|>{{ m.content }}{% elif m.role == "assistant" %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}`}, nil, tok)
	if err != nil {
		t.Fatal(err)
	}
	var f *FieldError
	if _, err := two.Render([]Message{{Role: "tool", Content: "x"}}, Options{}); !errors.As(err, &f) || f.Field != "messages[0].role" {
		t.Errorf("tool: %v", err)
	}
}

func TestMessageJSON(t *testing.T) {
	for _, in := range []string{
		`{"role":"user","content":"hi"}`,
		`{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":{"z":1,"a":2.50}}}]}`,
		`{"role":"assistant","tool_calls":[]}`,
		`{"role":"user","content":[{"type":"text","text":"x"}],"name":"bob"}`,
		`{"role":"user","content":""}`,
	} {
		var m Message
		if err := json.Unmarshal([]byte(in), &m); err != nil {
			t.Fatal(err)
		}
		out, err := m.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if string(out) != in {
			t.Errorf("got %s, want %s", out, in)
		}
	}
	var m Message
	for _, in := range []string{`[]`, `{"role":1}`, `"x"`} {
		if err := json.Unmarshal([]byte(in), &m); err == nil {
			t.Errorf("%s is accepted", in)
		}
	}
}
