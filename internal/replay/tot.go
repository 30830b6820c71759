package replay

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"strings"
)

const (
	// totPrompt is how many tokens of instructions stand before every puzzle. The file does not say; this is about the
	// length of the paper's few-shot prompt.
	totPrompt = 512
	// totTokenBytes is how many bytes of text make a token.
	totTokenBytes = 3
	totStepMS     = 1000 // the file has no clock: one step of a search a second, its nodes at once
	totThinkMS    = 500
)

// parseToT reads search trees of tree-of-thought-llm: a list of puzzles, each with steps, each with the nodes it
// started from (ys) and the nodes that were generated (new_ys), whole texts from the root. A node is a request of its
// own: its prompt is instructions, puzzle and the node that it goes on from, its answer the rest of its text.
func parseToT(t *Trace, source int, r io.Reader) error {
	dec := json.NewDecoder(r)
	if tok, err := dec.Token(); err != nil || tok != json.Delim('[') {
		return fmt.Errorf("want a list of puzzles, not %v", tok)
	}
	for i := 0; dec.More(); i++ {
		var puzzle struct {
			Steps []totStep `json:"steps"`
		}
		if err := dec.Decode(&puzzle); err != nil {
			return fmt.Errorf("puzzle %d: %w", i, err)
		}
		for j, s := range puzzle.Steps {
			if err := s.add(t, int64(i*8+j)*totStepMS); err != nil {
				return fmt.Errorf("puzzle %d: steps[%d].%w", i, j, err)
			}
		}
	}
	_, err := dec.Token()
	return err
}

type totStep struct {
	X   string   `json:"x"`
	Ys  []string `json:"ys"`
	New []string `json:"new_ys"`
}

func (s totStep) add(t *Trace, at int64) error {
	if s.X == "" {
		return fmt.Errorf("x: missing")
	}
	for i, text := range s.New {
		parent := "" // the longest node of ys that it goes on from
		for _, y := range s.Ys {
			if len(y) > len(parent) && strings.HasPrefix(text, y) {
				parent = y
			}
		}
		answer := text[len(parent):]
		if answer == "" {
			return fmt.Errorf("new_ys[%d]: adds nothing to its parent", i)
		}
		prompt := append([]Seg{{ID: stream(scopePrefix, 2), N: totPrompt}}, words("", s.X)...)
		prompt = append(prompt, words(s.X, parent)...)
		req := Request{At: at, Done: at + totThinkMS, Session: -1, Prompt: prompt, Output: words(s.X+parent, answer)}
		if err := t.add(req); err != nil {
			return fmt.Errorf("new_ys[%d]: %w", i, err)
		}
	}
	return nil
}

// words makes tokens of a text line by line: the same text after the same text gives the same tokens.
func words(before, text string) []Seg {
	h := fnv.New64a()
	io.WriteString(h, before)
	var segs []Seg
	for line := range strings.Lines(text) {
		io.WriteString(h, line)
		segs = append(segs, Seg{ID: stream(scopeText, h.Sum64()), N: int32((len(line) + totTokenBytes - 1) / totTokenBytes)})
	}
	return segs
}
