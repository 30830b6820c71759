package replay

import (
	"encoding/json"
	"fmt"
	"io"
)

const mooncakeBlock = 512

// parseMooncake reads {"timestamp":ms,"input_length":n,"output_length":n,"hash_ids":[...]} a line. Requests have no
// sessions and no durations; answers are not part of any later prompt's ids, so each is its own.
func parseMooncake(t *Trace, source int, r io.Reader) error {
	return lines(r, func(line []byte) error {
		var rec struct {
			Timestamp *float64 `json:"timestamp"`
			Input     *int64   `json:"input_length"`
			Output    *int64   `json:"output_length"`
			IDs       []int64  `json:"hash_ids"`
		}
		if err := json.Unmarshal(line, &rec); err != nil {
			return err
		}
		if rec.Timestamp == nil {
			return fmt.Errorf("timestamp: missing")
		}
		at, err := milliseconds("timestamp", *rec.Timestamp/1000)
		if err != nil {
			return err
		}
		in, err := tokens("input_length", rec.Input)
		if err != nil {
			return err
		}
		out, err := tokens("output_length", rec.Output)
		if err != nil {
			return err
		}
		scope := scopeOf(source, scopeBlocks)
		prompt, err := blocks(scope, rec.IDs, mooncakeBlock, in)
		if err != nil {
			return err
		}
		req := Request{At: at, Session: -1, Prompt: prompt}
		t.answer(&req, source, in-length(prompt), out)
		return t.add(req)
	})
}

// Scopes of stream ids.
const (
	scopeBlocks uint64 = iota + 1
	scopeOwn
	scopePrefix
	scopeText
	scopeC32
)

// scopeOf is a scope of one source file.
func scopeOf(source int, kind uint64) uint64 { return stream(uint64(source)+1000, kind) }

// answer appends rest prompt tokens without an id and out answer tokens, all of a stream of the request's own.
func (t *Trace) answer(r *Request, source, rest, out int) {
	id := stream(scopeOf(source, scopeOwn), uint64(len(t.Requests)))
	if rest > 0 {
		r.Prompt = append(r.Prompt, Seg{ID: id, N: int32(rest)})
	}
	if out > 0 {
		r.Output = []Seg{{ID: id, Off: int32(max(rest, 0)), N: int32(out)}}
	}
}
