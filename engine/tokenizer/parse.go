package tokenizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"sort"
	"sync/atomic"
	"unicode/utf8"
)

const (
	// MaxVocab limits the number of ids of a vocabulary.
	MaxVocab = 1 << 21
	// MaxAddedTokens limits the added tokens.
	MaxAddedTokens = 1 << 16
	// maxNesting limits how deep normalizers and pre-tokenizers may be nested.
	maxNesting = 8
)

// Parse reads a tokenizer.json. Whatever it does not know it refuses by name.
func Parse(data []byte) (*Tokenizer, error) {
	if len(data) > MaxFileBytes {
		return nil, fmt.Errorf("%d bytes, the limit is %d", len(data), MaxFileBytes)
	}
	var f struct {
		Version       json.RawMessage `json:"version"`
		Truncation    json.RawMessage `json:"truncation"`
		Padding       json.RawMessage `json:"padding"`
		AddedTokens   []addedJSON     `json:"added_tokens"`
		Normalizer    json.RawMessage `json:"normalizer"`
		PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
		PostProcessor json.RawMessage `json:"post_processor"`
		Decoder       json.RawMessage `json:"decoder"`
		Model         json.RawMessage `json:"model"`
	}
	if err := strict(data, &f); err != nil {
		return nil, err
	}
	for _, c := range []struct {
		name string
		raw  json.RawMessage
	}{{"truncation", f.Truncation}, {"padding", f.Padding}} {
		if !absent(c.raw) {
			return nil, fmt.Errorf("%s: only null is supported", c.name)
		}
	}
	sum := sha256.Sum256(data)
	t := &Tokenizer{digest: hex.EncodeToString(sum[:])}
	var err error
	if t.nfc, err = parseNormalizer(f.Normalizer, "normalizer", 0); err != nil {
		return nil, err
	}
	if t.stages, err = parsePreTokenizer(f.PreTokenizer, "pre_tokenizer", 0); err != nil {
		return nil, err
	}
	if len(t.stages) == 0 || !t.stages[len(t.stages)-1].byteLevel {
		return nil, errors.New("pre_tokenizer: must end with ByteLevel")
	}
	if err := parsePostProcessor(f.PostProcessor); err != nil {
		return nil, err
	}
	if err := parseDecoder(f.Decoder); err != nil {
		return nil, err
	}
	if err := t.parseModel(f.Model); err != nil {
		return nil, err
	}
	if err := t.parseAdded(f.AddedTokens); err != nil {
		return nil, err
	}
	return t, nil
}

// strict decodes one JSON value and refuses unknown members and anything behind the value.
func strict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("data behind the JSON value")
	}
	return nil
}

func absent(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// typeOf returns the "type" member of a component. It reads no further than that: a model's other members are large.
func typeOf(raw json.RawMessage, path string) (string, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return "", fmt.Errorf("%s: is no object", path)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		if key != "type" {
			continue
		}
		var typ string
		if err := json.Unmarshal(value, &typ); err != nil || typ == "" {
			return "", fmt.Errorf("%s.type: is no name", path)
		}
		return typ, nil
	}
	return "", fmt.Errorf("%s.type: missing", path)
}

// parseNormalizer reports whether the text is normalised to form C, the only normalizer there is.
func parseNormalizer(raw json.RawMessage, path string, depth int) (nfc bool, err error) {
	if absent(raw) {
		return false, nil
	}
	if depth > maxNesting {
		return false, fmt.Errorf("%s: nested deeper than %d", path, maxNesting)
	}
	typ, err := typeOf(raw, path)
	if err != nil {
		return false, err
	}
	switch typ {
	case "NFC":
		var c struct{ Type string }
		if err := strict(raw, &c); err != nil {
			return false, fmt.Errorf("%s: %w", path, err)
		}
		return true, nil
	case "Sequence":
		var c struct {
			Type        string            `json:"type"`
			Normalizers []json.RawMessage `json:"normalizers"`
		}
		if err := strict(raw, &c); err != nil {
			return false, fmt.Errorf("%s: %w", path, err)
		}
		for i, n := range c.Normalizers {
			is, err := parseNormalizer(n, fmt.Sprintf("%s.normalizers[%d]", path, i), depth+1)
			if err != nil {
				return false, err
			}
			nfc = nfc || is
		}
		return nfc, nil
	}
	return false, fmt.Errorf("%s.type: %q is not supported", path, typ)
}

func parsePreTokenizer(raw json.RawMessage, path string, depth int) ([]stage, error) {
	if absent(raw) {
		return nil, fmt.Errorf("%s: missing", path)
	}
	if depth > maxNesting {
		return nil, fmt.Errorf("%s: nested deeper than %d", path, maxNesting)
	}
	typ, err := typeOf(raw, path)
	if err != nil {
		return nil, err
	}
	switch typ {
	case "Sequence":
		var c struct {
			Type string            `json:"type"`
			Pre  []json.RawMessage `json:"pretokenizers"`
		}
		if err := strict(raw, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		var all []stage
		for i, p := range c.Pre {
			s, err := parsePreTokenizer(p, fmt.Sprintf("%s.pretokenizers[%d]", path, i), depth+1)
			if err != nil {
				return nil, err
			}
			for _, prev := range all {
				if prev.byteLevel {
					return nil, fmt.Errorf("%s.pretokenizers[%d]: nothing may follow ByteLevel", path, i)
				}
			}
			all = append(all, s...)
		}
		return all, nil
	case "Split":
		s, err := parseSplit(raw, path)
		return []stage{s}, err
	case "ByteLevel":
		return parseByteLevel(raw, path)
	}
	return nil, fmt.Errorf("%s.type: %q is not supported", path, typ)
}

type byteLevelJSON struct {
	Type           string `json:"type"`
	AddPrefixSpace *bool  `json:"add_prefix_space"`
	TrimOffsets    *bool  `json:"trim_offsets"` // concerns offsets only, which nobody asks for
	UseRegex       *bool  `json:"use_regex"`
}

func parseByteLevel(raw json.RawMessage, path string) ([]stage, error) {
	var c byteLevelJSON
	if err := strict(raw, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var s stage
	if c.UseRegex == nil || *c.UseRegex {
		var err error
		if s, err = newSplitStage(byteLevelPattern, isolated, false); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	s.addPrefixSpace = c.AddPrefixSpace == nil || *c.AddPrefixSpace
	s.byteLevel = true
	return []stage{s}, nil
}

func parseSplit(raw json.RawMessage, path string) (stage, error) {
	var c struct {
		Type    string `json:"type"`
		Pattern struct {
			Regex  *string
			String *string
		} `json:"pattern"`
		Behavior string `json:"behavior"`
		Invert   bool   `json:"invert"`
	}
	if err := strict(raw, &c); err != nil {
		return stage{}, fmt.Errorf("%s: %w", path, err)
	}
	var b splitBehavior
	switch c.Behavior {
	case "Isolated", "isolated":
		b = isolated
	case "Removed", "removed":
		b = removed
	default:
		return stage{}, fmt.Errorf("%s.behavior: %q is not supported", path, c.Behavior)
	}
	var pattern string
	switch {
	case c.Pattern.Regex != nil && c.Pattern.String == nil:
		pattern = *c.Pattern.Regex
	case c.Pattern.String != nil && c.Pattern.Regex == nil:
		pattern = escapePattern(*c.Pattern.String)
	}
	if pattern == "" {
		return stage{}, fmt.Errorf("%s.pattern: want one of Regex and String, not empty", path)
	}
	s, err := newSplitStage(pattern, b, c.Invert)
	if err != nil {
		return stage{}, fmt.Errorf("%s.pattern: %w", path, err)
	}
	return s, nil
}

// parsePostProcessor accepts what does not change the ids.
func parsePostProcessor(raw json.RawMessage) error {
	if absent(raw) {
		return nil
	}
	typ, err := typeOf(raw, "post_processor")
	if err != nil {
		return err
	}
	if typ != "ByteLevel" {
		return fmt.Errorf("post_processor.type: %q is not supported", typ)
	}
	var c byteLevelJSON
	if err := strict(raw, &c); err != nil {
		return fmt.Errorf("post_processor: %w", err)
	}
	return nil
}

func parseDecoder(raw json.RawMessage) error {
	if absent(raw) {
		return errors.New("decoder: missing")
	}
	typ, err := typeOf(raw, "decoder")
	if err != nil {
		return err
	}
	if typ != "ByteLevel" {
		return fmt.Errorf("decoder.type: %q is not supported", typ)
	}
	var c byteLevelJSON
	if err := strict(raw, &c); err != nil {
		return fmt.Errorf("decoder: %w", err)
	}
	return nil
}

type modelJSON struct {
	Type         string    `json:"type"`
	Dropout      *float64  `json:"dropout"`
	UnkToken     *string   `json:"unk_token"`
	Prefix       *string   `json:"continuing_subword_prefix"`
	Suffix       *string   `json:"end_of_word_suffix"`
	FuseUnk      bool      `json:"fuse_unk"`
	ByteFallback bool      `json:"byte_fallback"`
	IgnoreMerges bool      `json:"ignore_merges"`
	Vocab        vocabJSON `json:"vocab"`
	Merges       mergeList `json:"merges"`
}

func (t *Tokenizer) parseModel(raw json.RawMessage) error {
	if absent(raw) {
		return errors.New("model: missing")
	}
	typ, err := typeOf(raw, "model")
	if err != nil {
		return err
	}
	if typ != "BPE" {
		return fmt.Errorf("model.type: %q is not supported", typ)
	}
	var m modelJSON
	if err := strict(raw, &m); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	switch {
	case m.Dropout != nil && *m.Dropout != 0:
		return errors.New("model.dropout: is not supported")
	case m.Prefix != nil && *m.Prefix != "":
		return errors.New("model.continuing_subword_prefix: is not supported")
	case m.Suffix != nil && *m.Suffix != "":
		return errors.New("model.end_of_word_suffix: is not supported")
	case m.ByteFallback:
		return errors.New("model.byte_fallback: is not supported")
	case len(m.Vocab) == 0:
		return errors.New("model.vocab: missing")
	}
	if err := t.setVocab(m.Vocab); err != nil {
		return err
	}
	return t.setMerges(&m)
}

func (t *Tokenizer) setVocab(vocab map[string]int32) error {
	size := int32(0)
	for tok, id := range vocab {
		if id < 0 || id >= MaxVocab {
			return fmt.Errorf("model.vocab[%q]: id %d is outside [0, %d)", tok, id, MaxVocab)
		}
		size = max(size, id+1)
	}
	t.ids = vocab
	t.names, t.bytes = make([]string, size), make([][]byte, size)
	for tok, id := range vocab {
		if tok == "" {
			return errors.New("model.vocab: has an empty token")
		}
		if t.bytes[id] != nil {
			return fmt.Errorf("model.vocab: %q and %q have the same id %d", min(tok, t.names[id]), max(tok, t.names[id]), id)
		}
		t.names[id] = tok
		t.bytes[id], _ = spellingBytes(tok)
	}
	return nil
}

func (t *Tokenizer) setMerges(m *modelJSON) error {
	b := &bpe{
		merges:       newMergeTable(len(m.Merges)),
		ignoreMerges: m.IgnoreMerges,
		seed:         maphash.MakeSeed(),
		cache:        make([]atomic.Pointer[cachedWord], cacheSlots),
	}
	for c := 0; c < 256; c++ {
		id, ok := t.ids[string(byteToRune[c])]
		if !ok {
			return fmt.Errorf("model.vocab: has no token %q for byte 0x%02x", string(byteToRune[c]), c)
		}
		b.byteIDs[c] = id
	}
	for i, pair := range m.Merges {
		var ids [3]int32
		for j, tok := range [3]string{pair[0], pair[1], pair[0] + pair[1]} {
			id, ok := t.ids[tok]
			if !ok {
				return fmt.Errorf("model.merges[%d]: %q is not in the vocabulary", i, tok)
			}
			ids[j] = id
		}
		b.merges.put(ids[0], ids[1], int32(i), ids[2])
	}
	if m.IgnoreMerges {
		b.whole = make(map[string]int32, len(t.ids))
		for tok, id := range t.ids {
			if raw, ok := spellingBytes(tok); ok {
				b.whole[string(raw)] = id
			}
		}
	}
	t.bpe = b
	return nil
}

type addedJSON struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	Special    bool   `json:"special"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
}

func (t *Tokenizer) parseAdded(list []addedJSON) error {
	if len(list) > MaxAddedTokens {
		return fmt.Errorf("added_tokens: %d, the limit is %d", len(list), MaxAddedTokens)
	}
	seen := make(map[int32]bool, len(list))
	for i, a := range list {
		if seen[a.ID] {
			return fmt.Errorf("added_tokens[%d].id: %d is there twice", i, a.ID)
		}
		seen[a.ID] = true
		if err := t.addToken(a); err != nil {
			return fmt.Errorf("added_tokens[%d].%w", i, err)
		}
	}
	t.flags = make([]uint8, len(t.names))
	sort.Slice(t.added, func(i, j int) bool { return t.added[i].ID < t.added[j].ID })
	var raw, normed []matchable
	for _, a := range t.added {
		t.flags[a.ID] |= flagAdded
		if a.Special {
			t.flags[a.ID] |= flagSpecial
		}
		if !a.Normalized {
			raw = append(raw, matchable{a.Content, a})
			continue
		}
		text := a.Content
		if t.nfc {
			text = nfc(text)
		}
		normed = append(normed, matchable{text, a})
	}
	t.raw, t.normed = newAddedMatcher(raw), newAddedMatcher(normed)
	return nil
}

func (t *Tokenizer) addToken(a addedJSON) error {
	switch {
	case a.Content == "":
		return errors.New("content: is empty")
	case !utf8.ValidString(a.Content):
		return errors.New("content: is not UTF-8")
	case a.ID < 0 || a.ID >= MaxVocab:
		return fmt.Errorf("id: %d is outside [0, %d)", a.ID, MaxVocab)
	}
	if id, ok := t.ids[a.Content]; ok && id != a.ID {
		return fmt.Errorf("id: %d, but %q has id %d", a.ID, a.Content, id)
	}
	for int(a.ID) >= len(t.names) {
		t.names, t.bytes = append(t.names, ""), append(t.bytes, nil)
	}
	if name := t.names[a.ID]; name != "" && name != a.Content {
		return fmt.Errorf("id: %d is taken by %q", a.ID, name)
	}
	t.ids[a.Content], t.names[a.ID], t.bytes[a.ID] = a.ID, a.Content, []byte(a.Content)
	t.added = append(t.added, AddedToken(a))
	return nil
}
