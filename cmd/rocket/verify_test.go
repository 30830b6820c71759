package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVerifyCommandRefuses(t *testing.T) {
	empty := t.TempDir()
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "--baseline"},
		{[]string{"--baseline", "/no/such/model"}, 1, "/no/such/model"},
		{[]string{"--baseline", plainModel, "--text", empty}, 1, "there are no *.txt files"},
		{[]string{"--baseline", plainModel}, 1, "tokenizer.json"},
		{[]string{"--baseline", "nano", "--threads", "-1"}, 2, "--threads"},
		{[]string{"--baseline", "nano", "--class", "fp16"}, 2, "--class"},
	} {
		code, out, stderr := rocket(t, append([]string{"model", "verify"}, tc.args...)...)
		if code != tc.code || !strings.Contains(stderr, tc.want) || out != "" {
			t.Errorf("%v: exit %d, %q, %q; want %d and %q", tc.args, code, stderr, out, tc.code, tc.want)
		}
	}
	if err := os.WriteFile(filepath.Join(empty, "a.txt"), []byte("package p\n\nfunc f() {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := rocket(t, "model", "verify", "--baseline", "nano", "--text", empty); code != 1 || !strings.Contains(stderr, "fewer than 4096 tokens") {
		t.Errorf("a short text: exit %d, %q", code, stderr)
	}
}
