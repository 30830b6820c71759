package chat

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// conversation is an input of the goldens.
type conversation struct {
	Messages []Message       `json:"messages"`
	Tools    json.RawMessage `json:"tools"`
	Gen      bool            `json:"add_generation_prompt"`
	Thinking json.RawMessage `json:"enable_thinking"`
}

func (c *conversation) options() Options {
	o := Options{AddGenerationPrompt: c.Gen, Tools: c.Tools, Now: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)}
	if c.Thinking != nil {
		o.Args = []Field{{"enable_thinking", c.Thinking}}
	}
	return o
}

// golden is one answer of the reference, testdata/oracle.mjs.
type golden struct {
	Template     string        `json:"template"`
	Conversation string        `json:"conversation"`
	Input        *conversation `json:"input"`
	Text         string        `json:"text"`
	Error        string        `json:"error"`
}

func readGoldens(t testing.TB) (map[string]*conversation, []golden) {
	t.Helper()
	data, err := os.ReadFile("testdata/goldens.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	inputs := map[string]*conversation{}
	var all []golden
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var g golden
		if err := json.Unmarshal(lines.Bytes(), &g); err != nil {
			t.Fatal(err)
		}
		if g.Input != nil {
			inputs[g.Conversation] = g.Input
			continue
		}
		all = append(all, g)
	}
	return inputs, all
}

// templatesDir returns where the template engine's own test data has templates of real models.
func templatesDir(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/ardanlabs/jinja").Output()
	dir := filepath.Join(strings.TrimSpace(string(out)), "testdata", "templates")
	if _, statErr := os.Stat(dir); err != nil || statErr != nil {
		t.Skip("the template engine's module, whose test data has the templates, is not in the module cache")
	}
	return dir
}

// realTemplates returns the goldens' templates by name, made for nano's vocabulary.
func realTemplates(t testing.TB, goldens []golden) map[string]*Template {
	t.Helper()
	nano, tok := loadNano(t)
	dir := templatesDir(t)
	vars := map[string]string{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
	all := map[string]*Template{"nano": nano}
	for _, g := range goldens {
		if all[g.Template] != nil {
			continue
		}
		source, err := os.ReadFile(filepath.Join(dir, g.Template+".jinja"))
		if err != nil {
			t.Fatal(err)
		}
		c, err := New(map[string]string{"default": string(source)}, vars, tok)
		if err != nil {
			t.Fatalf("%s: %v", g.Template, err)
		}
		all[g.Template] = c
	}
	return all
}

// knownGaps are the answers that differ from the reference, with the reason.
var knownGaps = map[string]string{
	"nano/parts":                    partsJoined,
	"gpt-oss-20b-Q8_0/parts":        partsJoined,
	"DeepSeek-V4-Flash/parts":       partsJoined,
	"NVIDIA-Nemotron-3-Super/parts": partsJoined,
}

const partsJoined = "the template knows no parts and writes them as JSON; we join the texts"

func TestGoldens(t *testing.T) {
	inputs, goldens := readGoldens(t)
	templates := realTemplates(t, goldens)
	same := 0
	for _, g := range goldens {
		name := g.Template + "/" + g.Conversation
		in := inputs[g.Conversation]
		text, err := templates[g.Template].Render(in.Messages, in.options())
		switch {
		case knownGaps[name] != "":
			if err != nil || text == g.Text || strings.Contains(text, "type") || !strings.Contains(text, "one two") {
				t.Errorf("%s: %q, %v", name, text, err)
			}
		case g.Error != "":
			// The reference cannot say; what it does not know we may know.
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case text != g.Text:
			t.Errorf("%s (want - , got +): %s", name, cmp.Diff(g.Text, text))
		default:
			same++
		}
	}
	t.Logf("%d of %d equal", same, len(goldens))
}
