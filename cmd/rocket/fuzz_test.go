package main

import (
	"strings"
	"testing"
)

// FuzzByteSize: a size is what it says, or is refused.
func FuzzByteSize(f *testing.F) {
	for _, seed := range []string{"0", "512MiB", "2 GiB", "9223372036854775807", "8388608TiB", "-1", "+1", "1e3", "MiB", "1KB"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var b byteSize
		if b.UnmarshalText([]byte(text)) != nil {
			return
		}
		if b < 0 || b > 1<<62 || !strings.ContainsAny(text, "0123456789") {
			t.Fatalf("%q is %d bytes", text, b)
		}
	})
}
