// Package tokenizer turns text into token ids and back: byte-level BPE as Hugging Face's tokenizer.json describes it.
//
// Invariants:
//
//   - Everything in the file is either honoured or refused by name when it is parsed. Nothing is guessed.
//   - Encode never yields a token that an added token's text would name: text from outside is only text. EncodeSpecial and
//     EncodeMarked recognise added tokens; they are for text that the caller wrote itself (chat templates).
//   - Without a normalizer, the bytes of Encode's tokens are the bytes of the text, for any bytes, valid UTF-8 or not.
//   - Decode of ids is what a Stream gives for the same ids, pushed one by one and flushed. A Stream never splits a
//     character; bytes that are no UTF-8 become U+FFFD, one for each maximal subpart, as Unicode recommends.
//   - A Tokenizer is immutable after Parse (its word cache is lock-free) and may be used by any number of goroutines.
package tokenizer

import (
	"fmt"
	"os"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// MaxFileBytes limits a tokenizer.json; a larger one is refused.
const MaxFileBytes = 256 << 20

// Tokenizer encodes and decodes with one vocabulary.
type Tokenizer struct {
	digest string

	names  []string         // by id: the token as the file spells it; "" where no token has the id
	bytes  [][]byte         // by id: the bytes that the token stands for; nil where no token has the id
	ids    map[string]int32 // by spelling
	added  []AddedToken     // in id order
	flags  []uint8          // by id: flagAdded, flagSpecial
	nfc    bool
	raw    *addedMatcher // added tokens found in the text as it is
	normed *addedMatcher // added tokens found after normalisation
	stages []stage       // pre-tokenizer, in order
	bpe    *bpe
}

const (
	flagAdded   = 1 << 0
	flagSpecial = 1 << 1
)

// AddedToken is a token that is matched as a whole, before any splitting.
type AddedToken struct {
	ID         int32
	Content    string
	Special    bool
	SingleWord bool // only between characters that are no word characters
	LStrip     bool // takes the white space before it along
	RStrip     bool // takes the white space behind it along
	Normalized bool // is looked for in the normalised text
}

// Load reads and parses the tokenizer.json at path.
func Load(path string) (*Tokenizer, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	if fi.Size() > MaxFileBytes {
		return nil, fmt.Errorf("open tokenizer %s: %d bytes, the limit is %d", path, fi.Size(), MaxFileBytes)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer: %w", err)
	}
	t, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("open tokenizer %s: %w", path, err)
	}
	return t, nil
}

// Size returns the number of ids: the largest id plus one.
func (t *Tokenizer) Size() int { return len(t.names) }

// Digest returns the SHA-256 of the tokenizer.json in hexadecimal.
func (t *Tokenizer) Digest() string { return t.digest }

// Token returns the spelling of id in the vocabulary ("Ġthe", "<|end|>"), or "" where no token has that id.
func (t *Tokenizer) Token(id int32) string {
	if id < 0 || int(id) >= len(t.names) {
		return ""
	}
	return t.names[id]
}

// ID returns the id of the token that the vocabulary spells so.
func (t *Tokenizer) ID(token string) (int32, bool) {
	id, ok := t.ids[token]
	return id, ok
}

// IsSpecial reports whether id is an added token that is marked special.
func (t *Tokenizer) IsSpecial(id int32) bool {
	return id >= 0 && int(id) < len(t.flags) && t.flags[id]&flagSpecial != 0
}

// IsAdded reports whether id is an added token, special or not.
func (t *Tokenizer) IsAdded(id int32) bool {
	return id >= 0 && int(id) < len(t.flags) && t.flags[id]&flagAdded != 0
}

// AddedTokens returns the added tokens in id order. The slice is the tokenizer's own and must not be changed.
func (t *Tokenizer) AddedTokens() []AddedToken { return t.added }

// Bytes returns the bytes that the token stands for; nil where no token has that id. The slice must not be changed.
func (t *Tokenizer) Bytes(id int32) []byte {
	if id < 0 || int(id) >= len(t.bytes) {
		return nil
	}
	return t.bytes[id]
}

// Encode returns the ids of text as ordinary text: nothing in it becomes an added token.
func (t *Tokenizer) Encode(text string) []int32 {
	if text == "" {
		return nil
	}
	return t.appendPlain(make([]int32, 0, len(text)/3+4), text)
}

// EncodeSpecial returns the ids of text with added tokens recognised in it.
func (t *Tokenizer) EncodeSpecial(text string) []int32 { return t.EncodeMarked(text, nil) }

// EncodeMarked is EncodeSpecial for text in which the caller has replaced characters, so that some of its parts cannot match
// an added token. plain maps a part of the text that matched none back to what it means; that is then encoded as ordinary
// text. A nil plain maps nothing.
func (t *Tokenizer) EncodeMarked(text string, plain func(string) string) []int32 {
	if text == "" {
		return nil
	}
	out := make([]int32, 0, len(text)/3+4)
	t.raw.split(text, func(part string, id int32) {
		if id >= 0 {
			out = append(out, id)
			return
		}
		if !t.normed.empty() {
			if t.nfc {
				part = nfc(part)
			}
			t.normed.split(part, func(part string, id int32) {
				if id >= 0 {
					out = append(out, id)
					return
				}
				out = t.appendMapped(out, part, plain)
			})
			return
		}
		out = t.appendMapped(out, part, plain)
	})
	return out
}

func (t *Tokenizer) appendMapped(out []int32, part string, plain func(string) string) []int32 {
	if plain != nil {
		part = plain(part)
	}
	return t.appendPlain(out, part)
}

// appendPlain encodes text in which no added token is looked for.
func (t *Tokenizer) appendPlain(out []int32, text string) []int32 {
	if text == "" {
		return out
	}
	if t.nfc {
		text = nfc(text)
	}
	return t.split(out, text, 0)
}

// split runs the pre-tokenizer's stages from the given one on, and BPE on what comes out.
func (t *Tokenizer) split(out []int32, text string, from int) []int32 {
	if text == "" {
		return out
	}
	if from == len(t.stages) {
		return t.bpe.append(out, text)
	}
	s := &t.stages[from]
	if s.addPrefixSpace && text[0] != ' ' {
		text = " " + text
	}
	if s.find == nil {
		return t.split(out, text, from+1)
	}
	if from+1 == len(t.stages) || t.stages[from+1].passes() && from+2 == len(t.stages) {
		// The common case without a closure: every piece is a word for BPE.
		if s.fast != nil {
			for len(text) > 0 {
				n := s.fast(text)
				out = t.bpe.append(out, text[:n])
				text = text[n:]
			}
			return out
		}
	}
	s.find(text, func(piece string) { out = t.split(out, piece, from+1) })
	return out
}

// nfc returns text in normalisation form C. Unlike the norm package it puts no grapheme joiner into long runs of combining
// marks: the reference does not either.
func nfc(text string) string {
	if norm.NFC.IsNormalString(text) {
		return text
	}
	if hasLongMarkRun(text) {
		return nfcSlow(text)
	}
	return norm.NFC.String(text)
}

// validPrefix returns the length of the longest prefix of b that ends on a character's border: what follows it is the start
// of a character that is not complete yet. Bytes that can never become a character count as complete.
func validPrefix(b []byte) int {
	n := len(b)
	for i := 1; i <= utf8.UTFMax-1 && i <= n; i++ {
		c := b[n-i]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[n-i:]) {
				return n - i
			}
			return n
		}
	}
	return n
}
