package verify

import (
	"path/filepath"
	"strings"
	"testing"

	"rocket/engine/chat"
	"rocket/engine/tokenizer"
)

func nanoText(t *testing.T) (*tokenizer.Tokenizer, *chat.Template) {
	t.Helper()
	tok, err := tokenizer.Load(filepath.Join("../../models/nano", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	template, err := chat.Load("../../models/nano", tok)
	if err != nil {
		t.Fatal(err)
	}
	return tok, template
}

// answers are what a good model writes, and what the case must refuse.
var answers = map[string]struct {
	good string
	bad  []string
}{
	"max":            {" y\n}\n", []string{" x\n}\n", "", " yx\n"}},
	"wrap-error":     {" nil, fmt.Errorf(\"read %s: %w\", path, err)\n", []string{" data, nil\n", " nil\n", ""}},
	"swap":           {" x[i], x[j] = x[j], x[i] }\n", []string{" x[i] = x[j] }\n", ""}},
	"loop":           {"++ {\n\t\tif s[i] == c {\n\t\t\tn++\n\t\t}\n\t}\n\treturn n\n}\n", []string{"++ {\n\t\tif s[i] == c {\n\t\t\tn++\n\t}\n\treturn n\n}\n", "-- {\n\t}\n\treturn n\n}\n", "++ {\n"}},
	"unlock":         {" c.mu.Unlock()\n", []string{" c.mu.Lock()\n", ""}},
	"switch":         {"\t\treturn \"blue\"\n\t}\n}\n", []string{"\treturn \"\"\n}\n", "\t}\n"}},
	"brackets":       {"\t\tb = b[1:]\n\t}\n\treturn b\n}\n", []string{"\t\tb = b[1:]\n\treturn b\n}\n", "\t\tb = b[1:\n\t}\n\treturn b\n}\n"}},
	"copy-4k":        {" 4711, newKestrel)\n\tregister(\"marlin\", 1207, newMarlin)\n", []string{" 4711, newKestrel)\n", " 1207, newMarlin)\n", ""}},
	"retrieval-4k":   {" 2768, newCurlew)\n", []string{" 2768, newGannet)\n", " 4711, newKestrel)\n", ""}},
	"write-function": {"func NewStack(size int) *Stack {\n\treturn &Stack{size: size}\n}", []string{"func NewStack(size int) *Stack {\n\treturn &Stack{\n", "func NewQueue(size int) *Queue {\n\treturn &Queue{}\n}", ""}},
	"write-method":   {"func (s *Stack) Len() int {\n\treturn len(s.items)\n}", []string{"func (s *Stack) Len() int {", "func Len() int {\n\treturn 0\n}"}},
	"tool-call":      {`{"tool":"read","path":"net/wire/frame.go","symbol":"ParseHeader"}`, []string{`{"tool":"read","path":"net/wire/frame.go"}`, `{"tool":"read",`, "ParseHeader reads a header."}},
}

// TestCases: every case takes a right answer, stops behind it, and refuses wrong ones; those that look far do.
func TestCases(t *testing.T) {
	tok, template := nanoText(t)
	all := cases(tok)
	if len(all) != 12 || len(answers) != 12 {
		t.Fatalf("%d cases, %d answers", len(all), len(answers))
	}
	for _, c := range all {
		a := answers[c.name]
		if err := c.check(a.good); err != nil {
			t.Errorf("%s refuses %q: %v", c.name, a.good, err)
		}
		if n := len(tok.Encode(a.good)); n > c.limit {
			t.Errorf("%s: a right answer takes %d tokens of %d", c.name, n, c.limit)
		}
		if c.stop != nil && !c.stop(a.good) {
			t.Errorf("%s does not stop behind %q", c.name, a.good)
		}
		for _, b := range a.bad {
			if c.check(b) == nil {
				t.Errorf("%s takes %q", c.name, b)
			}
		}
		ids, err := c.prompt(tok, template)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(c.name, "-4k") != (len(ids) > farTokens) || len(ids)+c.limit > MaxContext {
			t.Errorf("%s has a prompt of %d tokens", c.name, len(ids))
		}
		if c.messages != nil {
			if _, err := c.prompt(tok, nil); err == nil {
				t.Errorf("%s needs no template", c.name)
			}
		}
	}
}
