package chat

import (
	"bufio"
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/engine/tokenizer"
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

// markers are added tokens of the models whose templates the goldens use: nano's vocabulary gets them, too.
var markers = []string{
	"<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>", "[gMASK]", "<sop>",
	"<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|begin_of_text|>", "<|eot_id|>",
	"<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>", "<｜User｜>", "<｜Assistant｜>", "<turn|>", "<|turn>", "〈|EOS|〉", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<｜end▁of▁sentence｜>",
}

// markedTokenizer is nano's tokenizer with the markers. Those of thinking and of tools are not special, as in Qwen3's.
func markedTokenizer(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	data, err := os.ReadFile(nanoDir + "/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]json.RawMessage
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	var added []json.RawMessage
	if err := json.Unmarshal(file["added_tokens"], &added); err != nil {
		t.Fatal(err)
	}
	for i, m := range markers {
		special := !strings.Contains(m, "think") && !strings.Contains(m, "tool")
		one, err := json.Marshal(map[string]any{"id": 4096 + i, "content": m, "special": special, "normalized": false})
		if err != nil {
			t.Fatal(err)
		}
		added = append(added, one)
	}
	if file["added_tokens"], err = json.Marshal(added); err != nil {
		t.Fatal(err)
	}
	if data, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// realTemplates returns the goldens' templates by name.
func realTemplates(t testing.TB, goldens []golden) map[string]*Template {
	t.Helper()
	nano, _ := loadNano(t)
	tok := markedTokenizer(t)
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
	"Qwen3-8B-Q8_0/parts":           partsJoined,
	"laguna/parts":                  partsJoined,
	"gpt-oss-20b-Q8_0/parts":        partsJoined,
	"DeepSeek-V4-Flash/parts":       partsJoined,
	"NVIDIA-Nemotron-3-Super/parts": partsJoined,
}

const partsJoined = "the template knows no parts and drops them or writes them as JSON; we join the texts"

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

// Where Sound says so, the history's text with the suffix behind it is the text of everything; and the outcome for each
// template is written down here: which of them change older text in which conversation.
func TestSuffixOfRealTemplates(t *testing.T) {
	inputs, goldens := readGoldens(t)
	templates := realTemplates(t, goldens)
	unsound := map[string]bool{}
	asked := 0
	for _, g := range goldens {
		if g.Error != "" {
			continue
		}
		c, in := templates[g.Template], inputs[g.Conversation]
		for i := 1; i < len(in.Messages); i++ {
			history, added := in.Messages[:i], in.Messages[i:]
			if history[i-1].Role != "assistant" {
				continue
			}
			opts := in.options()
			asked++
			sound, err := c.Sound(history, added, opts)
			if err != nil {
				t.Errorf("%s/%s at %d: %v", g.Template, g.Conversation, i, err)
				continue
			}
			if !sound {
				unsound[g.Template+"/"+g.Conversation] = true
				continue
			}
			full, err := c.PromptWith(in.Messages, opts)
			if err != nil {
				t.Fatal(err)
			}
			opts.AddGenerationPrompt = false
			line, err := c.PromptWith(history, opts)
			if err != nil {
				t.Fatal(err)
			}
			opts.AddGenerationPrompt = in.Gen
			more, err := c.AppendTo(line, added, opts)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Concat(line, more); !slices.Equal(got, full) {
				t.Errorf("%s/%s at %d: %s", g.Template, g.Conversation, i, cmp.Diff(c.tok.Decode(full), c.tok.Decode(got)))
			}
		}
	}
	// Qwen3 and its successors write an empty thought into the last answer only, and drop older thoughts. GLM-5.2 and Nemotron
	// drop older thoughts. Gemma writes a tool's result into the message that calls it. gpt-oss ends the last message with
	// another token than the others.
	want := []string{
		"GLM-5.2/thinking", "NVIDIA-Nemotron-3-Super/thinking", "Qwen3-8B-Q8_0/parallel", "Qwen3-8B-Q8_0/system", "Qwen3-8B-Q8_0/thinking",
		"Qwen3-8B-Q8_0/tools", "Qwen3.5-35B-A3B-Q8_0/parallel", "Qwen3.5-35B-A3B-Q8_0/system", "Qwen3.5-35B-A3B-Q8_0/thinking",
		"Qwen3.6-35B-A3B-UD-Q4_K_M/parallel", "Qwen3.6-35B-A3B-UD-Q4_K_M/system", "Qwen3.6-35B-A3B-UD-Q4_K_M/thinking",
		"gemma-4-26B-A4B-it-UD-Q8_K_XL/parallel", "gemma-4-26B-A4B-it-UD-Q8_K_XL/tools", "gpt-oss-20b-Q8_0/parallel", "gpt-oss-20b-Q8_0/system",
		"gpt-oss-20b-Q8_0/thinking", "gpt-oss-20b-Q8_0/tools",
	}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(unsound))); diff != "" || asked < 50 {
		t.Errorf("%d suffixes; not sound (want -, got +): %s", asked, diff)
	}
}
