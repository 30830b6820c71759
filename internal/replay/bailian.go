package replay

import (
	"encoding/json"
	"fmt"
	"io"
)

const bailianBlock = 16

// parseBailian reads {"chat_id","parent_chat_id" (-1: root),"timestamp":s,"input_length","output_length","type",
// "turn","hash_ids"} a line, blocks of 16 tokens. A chat whose prompt goes on from its parent's holds the parent's
// answer where that ended.
func parseBailian(t *Trace, source int, r io.Reader) error {
	chats := map[int64]int{} // chat_id -> its request
	first := len(t.Requests)
	follows := map[int]int{} // request -> the first one that goes on from it
	err := lines(r, func(line []byte) error {
		req, chat, parent, err := bailianRecord(t, source, line)
		if err != nil {
			return err
		}
		if _, twice := chats[chat]; twice {
			return fmt.Errorf("chat_id: %d for the second time", chat)
		}
		p, known := chats[parent]
		if parent >= 0 && known {
			req.Session = t.Requests[p].Session
			if _, taken := follows[p]; !taken {
				follows[p] = len(t.Requests)
			}
		} else { // a root, or a parent before the trace's beginning
			req.Session = t.session(fmt.Sprint("chat ", chat))
		}
		chats[chat] = len(t.Requests)
		return t.add(req)
	})
	if err != nil {
		return err
	}
	for i := first; i < len(t.Requests); i++ {
		if next, ok := follows[i]; ok {
			goOn(&t.Requests[i], t.Requests[next], bailianBlock)
		}
	}
	return nil
}

func bailianRecord(t *Trace, source int, line []byte) (req Request, chat, parent int64, err error) {
	var rec struct {
		Chat      *int64   `json:"chat_id"`
		Parent    *int64   `json:"parent_chat_id"`
		Timestamp *float64 `json:"timestamp"`
		Input     *int64   `json:"input_length"`
		Output    *int64   `json:"output_length"`
		IDs       []int64  `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &rec); err != nil {
		return req, 0, 0, err
	}
	switch {
	case rec.Chat == nil || *rec.Chat < 0:
		return req, 0, 0, fmt.Errorf("chat_id: missing or below 0")
	case rec.Parent == nil:
		return req, 0, 0, fmt.Errorf("parent_chat_id: missing")
	case rec.Timestamp == nil:
		return req, 0, 0, fmt.Errorf("timestamp: missing")
	}
	in, err := tokens("input_length", rec.Input)
	if err != nil {
		return req, 0, 0, err
	}
	out, err := tokens("output_length", rec.Output)
	if err != nil {
		return req, 0, 0, err
	}
	at, err := milliseconds("timestamp", *rec.Timestamp)
	if err != nil {
		return req, 0, 0, err
	}
	prompt, err := blocks(scopeOf(source, scopeBlocks), rec.IDs, bailianBlock, in)
	if err != nil {
		return req, 0, 0, err
	}
	req = Request{At: at, Prompt: prompt}
	t.answer(&req, source, in-length(prompt), out)
	return req, *rec.Chat, *rec.Parent, nil
}

// goOn makes a request's answer, and the end of its prompt that fills no block, what the next prompt has there, if
// that goes on from this prompt: then the ids say what those tokens were. An answer that the next prompt is too short
// for (its thinking was left out, say) stays the request's own.
func goOn(r *Request, next Request, block int) {
	full := (r.prompt / block) * block
	whole := cut(r.Prompt, 0, full)
	if next.prompt <= r.prompt || !samePrefix(whole, next.Prompt) {
		return
	}
	known := next.prompt / block * block
	if known <= r.prompt {
		return
	}
	r.Prompt = append(whole, cut(next.Prompt, full, r.prompt)...)
	if next.prompt < r.prompt+r.output {
		return
	}
	own := r.Output
	r.Output = cut(next.Prompt, r.prompt, min(r.prompt+r.output, known))
	if got := length(r.Output); got < r.output {
		r.Output = append(r.Output, cut(own, got, r.output)...)
	}
}

// samePrefix says whether the line begins with the given segments, token for token, both cut at the same edges.
func samePrefix(prefix, line []Seg) bool {
	if len(prefix) > len(line) {
		return false
	}
	for i, s := range prefix {
		if line[i].ID != s.ID || line[i].Off != s.Off || line[i].N < s.N {
			return false
		}
	}
	return true
}
