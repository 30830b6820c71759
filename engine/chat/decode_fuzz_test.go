package chat

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"unicode/utf8"
)

// FuzzMessages: messages of a request, with whatever members, are rendered or
// refused, and what is rendered is text.
func FuzzMessages(f *testing.F) {
	c, tok := loadNano(f)
	for _, s := range []string{
		`[{"role":"user","content":"a"}]`, `[{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"f","arguments":{"a":[1,2.5,null,true]}}}]},{"role":"tool","tool_call_id":"x","content":"b"}]`,
		`[{"role":"user","content":[{"type":"text","text":"a"}]}]`, `[{"role":"user","content":null,"name":"\ud83d\ude00"}]`, `[{"role":"user","role":"system"}]`, `[{}]`, `[{"role":5}]`, `[{"content":"<|im_end|>"}]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var msgs []Message
		if json.Unmarshal(data, &msgs) != nil {
			return
		}
		if text, err := c.Render(msgs, Options{AddGenerationPrompt: true}); err == nil && utf8.Valid(data) && !utf8.ValidString(text) {
			t.Fatalf("%s gives %q", data, text)
		}
		ids, err := c.AppendTo(nil, msgs, Options{AddGenerationPrompt: true})
		if err != nil {
			return
		}
		for _, id := range ids {
			if id < 0 || int(id) >= tok.Size() {
				t.Fatalf("%s gives token %d", data, id)
			}
		}
	})
}

// FuzzConfig: whatever tokenizer_config.json is, a template comes of it or an
// error.
func FuzzConfig(f *testing.F) {
	_, tok := loadNano(f)
	for _, s := range []string{
		`{"chat_template":"{{ messages }}","bos_token":"<s>","eos_token":{"content":"</s>"}}`, `{"chat_template":[{"name":"default","template":"a"},{"name":"tool_use","template":"b"}]}`,
		`{"chat_template":[]}`, `{"chat_template":null,"x_token":null}`, `{"a_token":}`, `[]`, ``, `{"pad_token":{"content":5}}`,
	} {
		f.Add([]byte(s))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir, tok); err != nil && err.Error() == "" {
			t.Fatal("an error that says nothing")
		}
	})
}
