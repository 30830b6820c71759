package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"rocket/internal/replay"
)

const replayData = "../../internal/replay/testdata"

// TestReplayCommand: a walk, a sweep with its picture, a made workload, and a folder of files.
func TestReplayCommand(t *testing.T) {
	walk := func(args ...string) []replay.Result {
		t.Helper()
		code, out, stderr := rocket(t, append([]string{"--json", "replay"}, args...)...)
		if code != 0 {
			t.Fatalf("%v: exit %d, %s", args, code, stderr)
		}
		var all []replay.Result
		for line := range strings.Lines(out) {
			var r replay.Result
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatal(err)
			}
			all = append(all, r)
		}
		return all
	}
	kvct := filepath.Join(replayData, "kvct_0019.json.gz")
	r := walk("--format", "kvct", kvct, "--budget-gib", "2")[0]
	if r.Budget != 2<<30 || r.PeakBytes > r.Budget || r.Policy != "value" || r.Requests != 24 || r.Sessions == nil || r.Sessions.FitShared == 0 {
		t.Errorf("%+v", r)
	}
	picture := filepath.Join(t.TempDir(), "curve.svg")
	if all := walk("--format", "kvct", kvct, "--geometry", "nano", "--sweep", "--svg", picture); len(all) != 1+10*2 {
		t.Errorf("%d lines of a sweep", len(all))
	}
	if b, err := os.ReadFile(picture); err != nil || !strings.HasPrefix(string(b), "<svg") {
		t.Errorf("%.40s, %v", b, err)
	}
	if r := walk("--format", "c32", "--root", "1000", "--sessions", "40", "--policy", "lru", "--state", "bf16")[0]; r.Sessions.Live != 40 || r.Policy != "lru" || r.State != "bf16" {
		t.Errorf("%+v", r)
	}
	folder := t.TempDir()
	b, err := os.ReadFile(filepath.Join(replayData, "bailian_made.jsonl"))
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, "a.jsonl"), b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r := walk("--format", "bailian", folder)[0]; r.Requests != 6 {
		t.Errorf("%+v", r)
	}
}

func TestReplayCommandRefuses(t *testing.T) {
	made := filepath.Join(replayData, "bailian_made.jsonl")
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--format", "bailian"}, 2, "want the trace's files"},
		{[]string{"--format", "cards", made}, 2, "--format"},
		{[]string{"--format", "bailian", "/no/such/trace"}, 1, "/no/such/trace"},
		{[]string{"--format", "mooncake", made}, 1, "bailian_made.jsonl: line 1: hash_ids: 25 blocks of 512 tokens for 400 tokens"},
		{[]string{"--format", "bailian", made, "--geometry", "nano", "--state", "bf16"}, 2, "f32 only"},
		{[]string{"--format", "bailian", made, "--budget-gib", "-1"}, 2, "--budget-gib"},
		{[]string{"--format", "bailian", made, "--budget-gib", "0.1"}, 1, "at least 2 of each"},
		{[]string{"--format", "bailian", made, "--svg", "x.svg"}, 2, "--svg"},
		{[]string{"--format", "bailian", made, "--sweep", "--budget-gib", "1"}, 2, "--sweep"},
		{[]string{"--format", "bailian", made, "--run", "2", "--sweep"}, 2, "--run"},
		{[]string{"--format", "c32", made}, 2, "c32"},
		{[]string{"--format", "c32", "--sessions", "0"}, 2, "sessions"},
		{[]string{"--format", "c32", "--waiting", "2"}, 2, "wait"},
	} {
		code, out, stderr := rocket(t, append([]string{"replay"}, tc.args...)...)
		if code != tc.code || !strings.Contains(stderr, tc.want) || out != "" {
			t.Errorf("%v: exit %d, %q, %q; want %d and %q", tc.args, code, stderr, out, tc.code, tc.want)
		}
	}
}
