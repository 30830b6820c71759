package main

import (
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
}
