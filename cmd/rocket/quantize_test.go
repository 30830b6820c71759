package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// plainModel is a checkpoint in BF16 without a draft layer.
const plainModel = "../../engine/model/testdata/glm5-next-shared"

func TestQuantizeCommand(t *testing.T) {
	out := t.TempDir()
	code, stdout, stderr := rocket(t, "model", "quantize", plainModel, "--to", "nvfp4", "--families", "all", "--out", out, "--json")
	var q quantized
	if err := json.Unmarshal([]byte(stdout), &q); code != 0 || err != nil {
		t.Fatalf("exit %d, %v: %s", code, err, stderr)
	}
	if q.Dir != filepath.Join(out, q.Digest) || len(q.Families) != 5 || q.Bytes >= q.SourceBytes {
		t.Errorf("%+v", q)
	}
	var i inspected
	code, stdout, stderr = rocket(t, "model", "inspect", q.Dir, "--json")
	if err := json.Unmarshal([]byte(stdout), &i); code != 0 || err != nil {
		t.Fatalf("exit %d, %v: %s", code, err, stderr)
	}
	for family, n := range q.Matrices {
		if f := i.Families[family]; f.Matrices != n || f.Kinds["NVFP4"] != n {
			t.Errorf("family %s: %d matrices were encoded, inspect says %+v", family, n, f)
		}
	}
	code, stdout, _ = rocket(t, "model", "quantize", plainModel, "--map", "routed_experts=nvfp4", "--map", "full_attention=fp8", "--out", out)
	if left, _ := os.ReadDir(out); code != 0 || len(left) != 2 || !strings.HasPrefix(stdout, out) {
		t.Errorf("exit %d, %q, left %v", code, stdout, left)
	}
}

func TestQuantizeCommandRefuses(t *testing.T) {
	out := t.TempDir()
	for _, tc := range []struct {
		args string
		code int
		want string
	}{
		{"--to nvfp4 --families mtp", 1, "family mtp: the model has no such matrices"},
		{"--to nvfp4 --families router", 2, `family "router" is not known`},
		{"--to int8 --families mtp", 2, `format "int8" is not known`},
		{"--to nvfp4", 2, "--to and --families go together"},
		{"", 2, "nothing to do"},
		{"--map mtp", 2, "want FAMILY=FORMAT"},
		{"--map base_routers=fp8 --to nvfp4 --families all", 2, "family base_routers is given two formats"},
	} {
		code, _, stderr := rocket(t, append([]string{"model", "quantize", plainModel, "--out", out}, strings.Fields(tc.args)...)...)
		if code != tc.code || !strings.Contains(stderr, tc.want) {
			t.Errorf("%q: exit %d, %q; want %d and %q", tc.args, code, stderr, tc.code, tc.want)
		}
	}
	if code, _, stderr := rocket(t, "model", "quantize", "nano", "--to", "fp8", "--families", "all", "--out", out); code != 1 || !strings.Contains(stderr, "is quantised already") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if left, _ := os.ReadDir(out); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}
