package server

import "testing"

// Half a surrogate pair stands for no character: it must be refused, not replaced.
func TestHalfSurrogates(t *testing.T) {
	for text, ok := range map[string]bool{
		`"plain"`: true, `"\ud83d\ude00"`: true, `"\\ud800"`: true, `"\\\\ud800"`: true, `"\u00e9\n\ud83d\ude00\"x"`: true,
		`"\ud800"`: false, `"\ude00"`: false, `"\ud83dx\ude00"`: false, `"\ud83d\n\ude00"`: false, `"\ude00\ud83d"`: false,
		`"\ud83d\ud83d\ude00"`: false, `"\\\ud800"`: false, `"\uD800"`: false,
	} {
		var got string
		if err := unmarshalJSON([]byte(text), &got); (err == nil) != ok {
			t.Errorf("%s: %q, error %v", text, got, err)
		}
	}
}
