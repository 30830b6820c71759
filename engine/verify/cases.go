package verify

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"strings"

	"rocket/engine/chat"
	"rocket/engine/tokenizer"
)

// testCase is something that the small Go model can do, with a definite criterion. Prompts are what its training text
// looks like: a file after its name, or a chat.
type testCase struct {
	name, what string
	file       string         // a prompt that is the beginning of a file, or
	messages   []chat.Message // a chat
	limit      int            // tokens
	stop       func(text string) bool
	check      func(text string) error // of the generated text alone
}

// until stops behind a string.
func until(s string) func(string) bool {
	return func(text string) bool { return strings.Contains(text, s) }
}

// starts wants the generated text to go on with one of the given strings.
func starts(want ...string) func(string) error {
	return func(text string) error {
		for _, w := range want {
			if strings.HasPrefix(text, w) {
				return nil
			}
		}
		return fmt.Errorf("want it to begin with %q", want)
	}
}

// fileParses wants a beginning and what was generated, up to the end of the first function, to be Go.
func fileParses(before string, also func(text string) error) func(string) error {
	return func(text string) error {
		end := strings.Index(text, "\n}\n")
		if end < 0 {
			return errors.New("the function has no end")
		}
		if err := parses(before + text[:end+3]); err != nil {
			return err
		}
		if also != nil {
			return also(text[:end])
		}
		return nil
	}
}

func parses(source string) error {
	if !strings.HasPrefix(source, "package") && !strings.Contains(source, "\npackage ") {
		source = "package p\n" + source
	}
	_, err := parser.ParseFile(token.NewFileSet(), "", source, parser.ParseComments)
	return err
}

// declares wants a chat's answer to be Go that declares what was asked for.
func declares(want string) func(string) error {
	return func(text string) error {
		if err := parses(text); err != nil {
			return err
		}
		if !strings.Contains(text, want) {
			return fmt.Errorf("want it to declare %q", want)
		}
		return nil
	}
}

// The entries that copying and retrieval are tried on: no file of the training text has them.
var entries = []string{`"kestrel", 4711, newKestrel)`, `"marlin", 1207, newMarlin)`, `"osprey", 8822, newOsprey)`, `"heron", 3605, newHeron)`,
	`"gannet", 9140, newGannet)`, `"curlew", 2768, newCurlew)`}

const entryCall = "\tregister("

// table is the entries over and over, at least farTokens tokens of them, whole rounds.
func table(tok *tokenizer.Tokenizer) string {
	round := ""
	for _, e := range entries {
		round += entryCall + e + "\n"
	}
	n := farTokens/len(tok.Encode(round)) + 1
	return "// birds/table.go\npackage birds\n\nfunc init() {\n" + strings.Repeat(round, n)
}

// cases makes the twelve cases.
func cases(tok *tokenizer.Tokenizer) []testCase {
	const maxFunc = "// math/minmax.go\npackage math\n\n// Min returns the smaller of x and y.\nfunc Min(x, y int) int {\n\tif x < y {\n\t\treturn x\n\t}\n\treturn y\n}\n\n// Max returns the larger of x and y.\nfunc Max(x, y int) int {\n\tif x > y {\n\t\treturn x\n\t}\n\treturn"
	const readFile = "// os/config.go\npackage config\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\n// Load reads the file at path.\nfunc Load(path string) ([]byte, error) {\n\tdata, err := os.ReadFile(path)\n\tif err != nil {\n\t\treturn"
	const swap = "// sort/age.go\npackage sort\n\ntype byAge []Person\n\nfunc (x byAge) Len() int           { return len(x) }\nfunc (x byAge) Less(i, j int) bool { return x[i].Age < x[j].Age }\nfunc (x byAge) Swap(i, j int)      {"
	const loop = "// strings/count.go\npackage strings\n\n// countByte counts the bytes of s that equal c.\nfunc countByte(s string, c byte) int {\n\tn := 0\n\tfor i := 0; i < len(s); i"
	const lock = "// cache/cache.go\npackage cache\n\nimport \"sync\"\n\ntype Cache struct {\n\tmu sync.Mutex\n\tm  map[string]int\n}\n\n// Get returns the value of key.\nfunc (c *Cache) Get(key string) int {\n\tc.mu.Lock()\n\tdefer"
	const color = "// color/color.go\npackage color\n\n// name returns the name of the color.\nfunc name(c int) string {\n\tswitch c {\n\tcase 0:\n\t\treturn \"red\"\n\tcase 1:\n\t\treturn \"green\"\n\tdefault:\n"
	const brackets = "// bytes/skip.go\npackage bytes\n\n// skipSpace returns b without its leading spaces.\nfunc skipSpace(b []byte) []byte {\n\tfor len(b) > 0 && (b[0] == ' ' || b[0] == '\\t') {\n"
	far := table(tok)
	return []testCase{
		{name: "max", what: "the other branch of Max", file: maxFunc, limit: 8, check: starts(" y\n")},
		{name: "wrap-error", what: "an error path returns the error", file: readFile, limit: 24, stop: until("\n"),
			check: func(text string) error {
				if line, _, _ := strings.Cut(text, "\n"); !strings.HasPrefix(line, " nil, ") || !strings.Contains(line, "err") {
					return errors.New("want it to return nil and the error")
				}
				return nil
			}},
		{name: "swap", what: "Swap of sort.Interface", file: swap, limit: 24, stop: until("\n"), check: starts(" x[i], x[j] = x[j], x[i] }")},
		{name: "loop", what: "a counting loop and its end", file: loop, limit: 96, stop: until("\n}\n"), check: fileParses(loop, func(text string) error {
			if !strings.HasPrefix(text, "++ {") {
				return errors.New("want the loop to count up")
			}
			return nil
		})},
		{name: "unlock", what: "a mutex is unlocked", file: lock, limit: 8, check: starts(" c.mu.Unlock()\n")},
		{name: "switch", what: "a switch is closed, and the function behind it", file: color, limit: 96, stop: until("\n}\n"), check: fileParses(color, nil)},
		{name: "brackets", what: "brackets balance", file: brackets, limit: 96, stop: until("\n}\n"), check: fileParses(brackets, nil)},
		{name: "copy-4k", what: "a table that repeats over 4k tokens goes on", file: far + entryCall + `"kestrel",`, limit: 48, stop: until(entries[1]),
			check: starts(" 4711, newKestrel)\n" + entryCall + entries[1])},
		{name: "retrieval-4k", what: "in such a table an entry out of turn is found by its key", file: far + entryCall + `"curlew",`, limit: 16, stop: until("\n"),
			check: starts(" 2768, newCurlew)\n")},
		{name: "write-function", what: "a function asked for in a chat parses", limit: 160,
			messages: []chat.Message{{Role: "user", Content: "Write func NewStack(size int) *Stack in package stack.\nNewStack returns an empty stack."}}, check: declares("func NewStack(size int) *Stack {")},
		{name: "write-method", what: "a method asked for in a chat parses", limit: 160,
			messages: []chat.Message{{Role: "user", Content: "Write func (s *Stack) Len() int in package stack.\nLen returns the number of elements in the stack."}}, check: declares("func (s *Stack) Len() int {")},
		{name: "tool-call", what: "a question about a symbol becomes a call of the tool", limit: 64,
			messages: []chat.Message{{Role: "system", Content: "You write Go. Tools: read(path, symbol)."}, {Role: "user", Content: "What does ParseHeader in net/wire/frame.go do?"}},
			check: func(text string) error {
				var call struct{ Tool, Path, Symbol string }
				if err := json.Unmarshal([]byte(text), &call); err != nil {
					return err
				}
				if call.Tool != "read" || call.Path != "net/wire/frame.go" || call.Symbol != "ParseHeader" {
					return fmt.Errorf("the call is %+v", call)
				}
				return nil
			}},
	}
}

// farTokens is the context of the cases that look back, many times what sparse attention selects.
const farTokens = 4096

// documentStart is the token that begins every document of the training text.
const documentStart = "<|endoftext|>"

// document is a text as the model was trained on it.
func document(tok *tokenizer.Tokenizer, text string) (ids []int32) {
	if id, ok := tok.ID(documentStart); ok {
		ids = append(ids, id)
	}
	return append(ids, tok.Encode(text)...)
}

// prompt gives the tokens of a case.
func (c testCase) prompt(tok *tokenizer.Tokenizer, template *chat.Template) ([]int32, error) {
	if c.messages == nil {
		return document(tok, c.file), nil
	}
	if template == nil {
		return nil, chat.ErrNoTemplate
	}
	return template.Prompt(c.messages, true)
}
