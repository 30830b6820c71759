package server

import (
	"encoding/json"
	"strings"
	"testing"

	"rocket/sessions"
)

func decoder(t testing.TB) *frameDecoder {
	t.Helper()
	s, err := New(Options{Sessions: &sessions.Manager{}})
	if err != nil {
		t.Fatal(err)
	}
	return s.frames
}

func TestDecodeFrame(t *testing.T) {
	d := decoder(t)
	for _, c := range []struct {
		name, text  string
		code, field string // "" for a good frame
		ref         string // what the error can still echo
	}{
		{"ping", `{"type":"ping","ref":"r1"}`, "", "", "r1"},
		{"turn", `{"type":"turn.create","input":"x","max_tokens":5,"stop":["a"],"idempotency_key":"k"}`, "", "", ""},
		{"turn of another session", `{"type":"turn.create","session_id":"ses_y"}`, "", "", ""},
		{"fork", `{"type":"fork","at":3,"n":2,"follow":true}`, "", "", ""},
		{"subscribe", `{"type":"subscribe","session_id":"s","from":7,"epoch":2}`, "", "", ""},
		{"detach", `{"type":"detach","tier":"host"}`, "", "", ""},

		{"empty", ``, codeMalformed, "frame", ""},
		{"not JSON", `{"type":`, codeMalformed, "frame", ""},
		{"two values", `{"type":"ping"}{}`, codeMalformed, "frame", ""},
		{"invalid UTF-8", "{\"type\":\"turn.create\",\"input\":\"\xff\"}", codeMalformed, "frame", ""},
		{"not an object", `[1]`, codeInvalid, "frame", ""},
		{"null", `null`, codeInvalid, "frame", ""},
		{"no type", `{"ref":"r"}`, codeInvalid, "type", "r"},
		{"unknown type", `{"type":"turn.delete","ref":"r"}`, codeInvalid, "type", "r"},
		{"type of a wrong type", `{"type":5}`, codeInvalid, "type", ""},
		{"unknown field", `{"type":"ping","ref":"r","now":true}`, codeInvalid, "now", "r"},
		{"field without a name", `{"type":"ping","":1}`, codeInvalid, "frame", ""},
		{"field of another frame", `{"type":"resume","at":5,"ref":"r"}`, codeInvalid, "at", "r"},
		{"other case", `{"type":"ping","Ref":"r"}`, codeInvalid, "Ref", ""},
		{"wrong JSON type", `{"type":"turn.create","max_tokens":"5","ref":"r"}`, codeInvalid, "max_tokens", "r"},
		{"negative limit", `{"type":"turn.create","max_tokens":-1}`, codeInvalid, "max_tokens", ""},
		{"fraction", `{"type":"turn.create","max_tokens":1.5}`, codeInvalid, "max_tokens", ""},
		{"number out of range", `{"type":"turn.create","seed":1e99}`, codeInvalid, "seed", ""},
		{"number out of every range", `{"type":"turn.create","seed":1e999}`, codeMalformed, "frame", ""},
		{"nested", `{"type":"turn.create","messages":[{"role":"user","content":5}]}`, codeInvalid, "messages[0].content", ""},
		{"too many children", `{"type":"fork","n":65}`, codeInvalid, "n", ""},
		{"negative offset", `{"type":"fork","at":-1}`, codeInvalid, "at", ""},
		{"negative from", `{"type":"subscribe","from":-1}`, codeInvalid, "from", ""},
		{"long ref", `{"type":"ping","ref":"` + strings.Repeat("r", 300) + `"}`, codeInvalid, "ref", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, p := d.decode([]byte(c.text))
			if c.code == "" {
				if p != nil {
					t.Fatalf("refused: %+v", p)
				}
				if f.request == nil || f.head.Ref != c.ref {
					t.Errorf("decoded %+v", f)
				}
				return
			}
			if p == nil {
				t.Fatalf("taken: %+v", f)
			}
			if p.Code != c.code || p.Field != c.field || p.Status != statuses[c.code] {
				t.Errorf("code %q, field %q, status %d: %s", p.Code, p.Field, p.Status, p.Detail)
			}
			if f.head.Ref != c.ref {
				t.Errorf("ref %q, want %q", f.head.Ref, c.ref)
			}
		})
	}
}

// FuzzDecodeFrame: whatever comes, the answer is a frame of a known type or a
// refusal that names a field; and a frame that was taken is taken again when
// it is written out.
func FuzzDecodeFrame(f *testing.F) {
	d := decoder(f)
	for _, seed := range []string{
		`{"type":"ping"}`, `{"type":"turn.create","input":"x","seed":-5,"temperature":0.5}`, `{"type":"fork","children":[{"title":"a","labels":{"k":"v"}}],"follow":true}`,
		`{"type":"subscribe","from":9223372036854775807}`, `{"type":"turn.create","messages":[{"role":"user","content":"\ud800","tool_calls":[1,{}]}]}`, "\xff", `{"type":null}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		fr, p := d.decode(data)
		if p != nil {
			if p.Code != codeMalformed && p.Code != codeInvalid || p.Field == "" || p.Detail == "" {
				t.Fatalf("refusal %+v", p)
			}
			return
		}
		if d.types[fr.head.Type] == nil || fr.request == nil {
			t.Fatalf("frame %+v", fr)
		}
		text, err := json.Marshal(fr.request)
		if err != nil {
			t.Fatal(err)
		}
		if _, p := d.decode(text); p != nil {
			t.Fatalf("%s was taken, %s is refused: %s", data, text, p.Detail)
		}
	})
}
