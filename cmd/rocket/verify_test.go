package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVerifyCommandRefuses(t *testing.T) {
	empty := t.TempDir()
	junk := filepath.Join(empty, "junk.json")
	if err := os.WriteFile(junk, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--baseline", "/no/such/model"}, 1, "/no/such/model"},
		{[]string{"--baseline", plainModel, "--text", empty}, 1, "there are no *.txt files"},
		{[]string{"--baseline", plainModel}, 1, "tokenizer.json"},
		{[]string{"--threads", "-1"}, 2, "--threads"},
		{[]string{"--class", "fp16"}, 2, "--class"},
		{[]string{"--class", "f32"}, 1, "the record does not fit: it is of numeric class bf16, and f32 is needed"},
		{[]string{"--candidate", plainModel}, 1, "tokenizer.json"},
		{[]string{"--baseline", junk}, 1, "junk.json: the record does not fit"},
		{[]string{"--save", filepath.Join(empty, "x")}, 2, "--save takes the folder of a --baseline"},
		{[]string{"--save", filepath.Join(empty, "x"), "--baseline", plainModel, "--candidate", "nano"}, 2, "--save takes"},
		{[]string{"--save", filepath.Join(empty, "x"), "--baseline", plainModel}, 1, "tokenizer.json"},
	} {
		code, out, stderr := rocket(t, append([]string{"model", "verify"}, tc.args...)...)
		if code != tc.code || !strings.Contains(stderr, tc.want) || out != "" {
			t.Errorf("%v: exit %d, %q, %q; want %d and %q", tc.args, code, stderr, out, tc.code, tc.want)
		}
	}
	if left, _ := os.ReadDir(empty); len(left) != 1 {
		t.Errorf("left %v", left)
	}
}

func TestWriteWhole(t *testing.T) {
	name := filepath.Join(t.TempDir(), "record.json")
	for _, text := range []string{"one", "two"} {
		if err := writeWhole(name, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(name); err != nil || string(b) != text {
			t.Errorf("%q, %v", b, err)
		}
	}
	taken := t.TempDir()
	if err := os.Mkdir(filepath.Join(taken, "record.json"), 0o755); err != nil {
		t.Fatal(err)
	}
	if writeWhole(filepath.Join(taken, "record.json"), nil) == nil || writeWhole("/no/such/folder/x", nil) == nil {
		t.Error("no error where there is no room for the file")
	}
	for _, dir := range []string{filepath.Dir(name), taken} {
		if left, _ := os.ReadDir(dir); len(left) != 1 {
			t.Errorf("left %v", left)
		}
	}
}
