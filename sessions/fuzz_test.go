package sessions

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/uuid"
)

// FuzzIDs: an id has one form, and nothing else is one.
func FuzzIDs(f *testing.F) {
	id := uuid.Must(uuid.NewV7())
	for _, seed := range []string{sessionID(id), turnID(id), strings.ToUpper(sessionID(id)), "ses_", "ses_{" + id.String() + "}", "ses_urn:uuid:" + id.String(), "ses_" + strings.ReplaceAll(id.String(), "-", ""), "\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if u, err := parseSession(text); err == nil && sessionID(u) != text {
			t.Fatalf("%q is %s", text, sessionID(u))
		}
		if u, err := parseTurn(text); err == nil && turnID(u) != text {
			t.Fatalf("%q is %s", text, turnID(u))
		}
		if k, ok := parseOwnerPayload(text); ok {
			if again, ok := parseOwnerPayload(ownerPayload(k)); !ok || again != k {
				t.Fatalf("%q is %+v, then %+v", text, k, again)
			}
		}
	})
}

// FuzzRequests: a request that is taken is one that the ledger can keep, and
// within the limits.
func FuzzRequests(f *testing.F) {
	for _, seed := range []string{
		`{"input":"x","max_tokens":5,"stop":["a"]}`, `{"messages":[{"role":"user","content":"x","name":"\u0000"}]}`, `{"messages":[{"role":"user","tool_calls":["\\u0000"]}]}`,
		`{"top_p":0}`, `{"seed":-1}`, `{"temperature":1e308}`, `{"mtp":{"max_depth":8}}`, `{"messages":[{"role":"a","tool_calls":"\\\u0000"}]}`,
		`{"messages":[{"role":"user","tool_calls":[1e131071,"\\"",-2.5E-3]}]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r TurnRequest
		if json.Unmarshal(data, &r) != nil || checkTurn(&r) != nil {
			return
		}
		if *r.MaxTokens < 1 || *r.TopK < 0 || *r.TopK > TopKMax || *r.Temperature < 0 || *r.Temperature > TemperatureMax || *r.TopP <= 0 || *r.TopP > 1 || *r.Seed < 0 || len(r.Stop) > StopMax {
			t.Fatalf("%s was taken as %+v", data, r)
		}
		out, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var kept any // as Postgres would keep it
		if err := json.Unmarshal(out, &kept); err != nil {
			t.Fatal(err)
		}
		var walk func(v any)
		text := func(s string) {
			if strings.ContainsRune(s, 0) || !utf8.ValidString(s) {
				t.Fatalf("%s was taken, and Postgres does not keep %q", data, s)
			}
		}
		walk = func(v any) {
			switch v := v.(type) {
			case string:
				text(v)
			case []any:
				for _, e := range v {
					walk(e)
				}
			case map[string]any:
				for k, e := range v {
					text(k)
					walk(e)
				}
			}
		}
		walk(kept)
	})
}
