package sessions

import (
	"strings"

	"rocket/engine/tokenizer"
)

// cutter turns a turn's tokens into its text, piece by piece. It never splits
// a character, ends before a stop string, and holds back what may be the start
// of one. It is a function of the tokens and the stop strings: the ledger
// rebuilds the deltas' text with it. Special tokens have
// no text.
type cutter struct {
	tok     *tokenizer.Tokenizer
	stream  *tokenizer.Stream
	stops   []string
	held    string // complete characters that may begin a stop string
	stopped bool   // a stop string was found: there is no more text
}

func newCutter(tok *tokenizer.Tokenizer, stops []string) *cutter {
	return &cutter{tok: tok, stream: tok.NewStream(), stops: stops}
}

// push adds tokens and returns the text that they release. It looks for stop
// strings after each token, as the engine does, so that the text does not
// depend on how many come at once.
func (c *cutter) push(ids []int32) string {
	var out strings.Builder
	for _, id := range ids {
		if c.stopped {
			break
		}
		if !c.tok.IsSpecial(id) {
			out.WriteString(c.release(c.held + storable(c.stream.Push(id))))
		}
	}
	return out.String()
}

// flush returns what was held back, at the end of a turn.
func (c *cutter) flush() string {
	if c.stopped {
		return ""
	}
	text := c.release(c.held+storable(c.stream.Flush())) + c.held
	c.held = ""
	return text
}

func (c *cutter) release(text string) string {
	end := -1
	for _, stop := range c.stops {
		if i := strings.Index(text, stop); i >= 0 && (end < 0 || i < end) {
			end = i
		}
	}
	if end >= 0 {
		c.stopped, c.held = true, ""
		return text[:end]
	}
	hold := 0
	for _, stop := range c.stops {
		for n := min(len(stop)-1, len(text)); n > hold; n-- {
			if strings.HasSuffix(text, stop[:n]) {
				hold = n
				break
			}
		}
	}
	c.held = text[len(text)-hold:]
	return text[:len(text)-hold]
}

// storable replaces what Postgres has no text for.
func storable(text string) string { return strings.ReplaceAll(text, "\x00", "\uFFFD") }
