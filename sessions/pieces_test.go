package sessions

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"rocket/engine/tokenizer"
)

// TestPiecesJoinToTheText: whatever the ids, broken characters included.
func TestPiecesJoinToTheText(t *testing.T) {
	tok, err := tokenizer.Load("../models/nano/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	m := &Manager{tok: tok}
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOf(rapid.Int32Range(0, int32(tok.Size()-1))).Draw(t, "ids")
		pieces := m.Pieces(ids)
		if len(pieces) != len(ids) {
			t.Fatalf("%d pieces of %d tokens", len(pieces), len(ids))
		}
		if got, want := strings.Join(pieces, ""), tok.Decode(ids); got != want {
			t.Fatalf("pieces join to %q, want %q", got, want)
		}
	})
}
