package replay

import (
	"encoding/json"
	"fmt"
	"io"
)

const (
	kvctBlock  = 64
	maxNesting = 4 // sub-agents of sub-agents
)

// kvctEntry is a request, or a sub-agent with requests of its own.
type kvctEntry struct {
	T        *float64    `json:"t"`
	Type     string      `json:"type"`
	In       *int64      `json:"in"`
	Out      *int64      `json:"out"`
	IDs      []int64     `json:"hash_ids"`
	APITime  *float64    `json:"api_time"`
	Agent    string      `json:"agent_id"`
	Duration *float64    `json:"duration_ms"`
	Tools    int64       `json:"tool_tokens"`
	System   int64       `json:"system_tokens"`
	Requests []kvctEntry `json:"requests"`
}

// kvctReader collects one conversation.
type kvctReader struct {
	t      *Trace
	source int
	name   string
	first  [2][]Seg // the first prompt of the conversation, of its sub-agents: see canonical
}

// parseKVCT reads conversations of kv-cache-tester: one JSON object each, blocks of 64 tokens whose ids mean something
// inside the conversation only. The beginning that all conversations have in common, tools and system prompt, is made
// equal here; a sub-agent's clock starts when it starts, and what it is listed under is its end.
func parseKVCT(t *Trace, source int, r io.Reader) error {
	dec := json.NewDecoder(r)
	for n := 0; ; n++ {
		tok, err := dec.Token()
		if err == io.EOF && n > 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("conversation: %w", err)
		}
		if tok != json.Delim('{') {
			return fmt.Errorf("conversation: want an object, not %v", tok)
		}
		k := &kvctReader{t: t, source: len(t.Sessions), name: fmt.Sprint("conversation ", len(t.Sessions))}
		if err := k.conversation(dec); err != nil {
			return fmt.Errorf("byte %d: %w", dec.InputOffset(), err)
		}
	}
}

// conversation reads an object whose brace is read already, request by request.
func (k *kvctReader) conversation(dec *json.Decoder) error {
	var tools, system int64
	first := len(k.t.Requests)
	session := int32(-1)
	seen := false
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		switch key {
		case "id":
			err = field(dec, "id", &k.name)
		case "tool_tokens":
			err = field(dec, "tool_tokens", &tools)
		case "system_tokens":
			err = field(dec, "system_tokens", &system)
		case "block_size":
			var size int
			if err = field(dec, "block_size", &size); err == nil && size != kvctBlock {
				err = fmt.Errorf("block_size: %d, want %d", size, kvctBlock)
			}
		case "hash_id_scope":
			var scope string
			if err = field(dec, "hash_id_scope", &scope); err == nil && scope != "local" {
				err = fmt.Errorf("hash_id_scope: %q, want local", scope)
			}
		case "requests":
			seen = true
			session = k.t.session(k.name)
			err = k.requests(dec, session)
		default:
			var skipped json.RawMessage
			err = field(dec, fmt.Sprint(key), &skipped)
		}
		if err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return err
	}
	if !seen {
		return fmt.Errorf("requests: missing")
	}
	k.t.Sessions[session].Name = k.name
	prefix, err := prefixTokens(tools, system)
	if err != nil {
		return err
	}
	k.agent(first, session, prefix, 0)
	return nil
}

func field(dec *json.Decoder, name string, to any) error {
	if err := dec.Decode(to); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func prefixTokens(tools, system int64) (int, error) {
	if tools < 0 || system < 0 || tools > maxLineTokens || system > maxLineTokens {
		return 0, fmt.Errorf("tool_tokens, system_tokens: %d and %d, want 0 to %d", tools, system, maxLineTokens)
	}
	return int(tools + system), nil
}

// requests reads the conversation's list, one element in memory at a time.
func (k *kvctReader) requests(dec *json.Decoder, session int32) error {
	if tok, err := dec.Token(); err != nil || tok != json.Delim('[') {
		return fmt.Errorf("requests: want a list, not %v", tok)
	}
	for i := 0; dec.More(); i++ {
		var e kvctEntry
		if err := dec.Decode(&e); err != nil {
			return fmt.Errorf("requests[%d]: %w", i, err)
		}
		if err := k.entry(e, session, 0, 0); err != nil {
			return fmt.Errorf("requests[%d].%w", i, err)
		}
	}
	_, err := dec.Token()
	return err
}

// entry adds a request, or a sub-agent's requests. base is the start of the clock that e.t counts on, in ms.
func (k *kvctReader) entry(e kvctEntry, session int32, base int64, depth int) error {
	if e.T == nil {
		return fmt.Errorf("t: missing")
	}
	t, err := milliseconds("t", *e.T)
	if err != nil {
		return err
	}
	switch e.Type {
	case "subagent":
		return k.subagent(e, base+t, depth)
	case "n", "s":
	default:
		return fmt.Errorf("type: %q, want n, s or subagent", e.Type)
	}
	in, err := tokens("in", e.In)
	if err != nil {
		return err
	}
	out, err := tokens("out", e.Out)
	if err != nil {
		return err
	}
	prompt, err := blocks(scopeOf(k.source, scopeBlocks), e.IDs, kvctBlock, in)
	if err != nil {
		return err
	}
	req := Request{At: base + t, Session: session, Prompt: prompt}
	if e.APITime != nil {
		d, err := milliseconds("api_time", *e.APITime)
		if err != nil {
			return err
		}
		req.Done = req.At + d
	}
	k.t.answer(&req, k.source, in-length(prompt), out)
	return k.t.add(req)
}

func (k *kvctReader) subagent(e kvctEntry, end int64, depth int) error {
	if depth >= maxNesting {
		return fmt.Errorf("requests: sub-agents nested deeper than %d", maxNesting)
	}
	if e.Duration == nil {
		return fmt.Errorf("duration_ms: missing")
	}
	d, err := milliseconds("duration_ms", *e.Duration/1000)
	if err != nil {
		return err
	}
	prefix, err := prefixTokens(e.Tools, e.System)
	if err != nil {
		return err
	}
	session := k.t.session(k.name + "/" + e.Agent)
	first := len(k.t.Requests)
	for i, r := range e.Requests {
		if err := k.entry(r, session, end-d, depth+1); err != nil {
			return fmt.Errorf("requests[%d].%w", i, err)
		}
	}
	k.agent(first, session, prefix, 1)
	return nil
}

// agent finishes the requests of one agent, the session's from number first on: answers that the next prompt holds,
// and the common beginning.
func (k *kvctReader) agent(first int, session int32, prefix, kind int) {
	last := -1
	for i := first; i < len(k.t.Requests); i++ {
		if k.t.Requests[i].Session != session {
			continue
		}
		if last >= 0 {
			goOn(&k.t.Requests[last], k.t.Requests[i], kvctBlock)
		}
		last = i
	}
	for i := first; i < len(k.t.Requests); i++ {
		if k.t.Requests[i].Session == session {
			k.canonical(&k.t.Requests[i], prefix, kind)
		}
	}
}

// canonical puts the beginning that all agents of a kind have in common in the place of the conversation's own ids,
// as far as this prompt begins like the conversation's first one of the kind.
func (k *kvctReader) canonical(r *Request, prefix, kind int) {
	if k.first[kind] == nil {
		k.first[kind] = r.Prompt
	}
	common := 0
	for i, s := range k.first[kind] {
		if i >= len(r.Prompt) || r.Prompt[i] != s {
			break
		}
		common += int(s.N)
	}
	if n := min(prefix, common); n > 0 {
		head := Seg{ID: stream(scopePrefix, uint64(kind)), N: int32(n)}
		r.Prompt = append([]Seg{head}, cut(r.Prompt, n, r.prompt)...)
	}
}
