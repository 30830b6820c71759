package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"rocket/internal/soak"
)

var soakSeed = flag.Uint64("soak.seed", 1, "of what clients do and of the moments of the kills")

// TestSoak is `make soak` in small: agents create, run turns, fork, cancel, detach to disk and resume, close and
// delete, others follow, while the server is killed again and again; nothing that was acknowledged may be lost or have
// happened twice.
func TestSoak(t *testing.T) {
	data := dataDirectory(t)
	if err := os.MkdirAll(data, 0o755); err != nil {
		t.Fatal(err)
	}
	kills := 5
	if testing.Short() {
		kills = 3
	}
	log := &testLog{t}
	report, err := soak.Run(testContext(t), soak.Options{
		Command: func(args ...string) *exec.Cmd { return command(t, args...) },
		Dir:     data, Servers: 1, Sessions: 12, Kills: kills, Every: time.Second, Seed: *soakSeed, Log: log,
	})
	if err != nil || report.Lost != 0 || report.Duplicated != 0 || report.Kills != kills || report.Acknowledged == 0 {
		text, _ := os.ReadFile(filepath.Join(data, "server0.log")) // there may be none
		t.Logf("server: %s", text)
		t.Errorf("%+v, %v", report, err)
	}
}

// testLog gives lines to a test's log.
type testLog struct{ t *testing.T }

func (l *testLog) Write(p []byte) (int, error) {
	l.t.Log(string(p[:max(0, len(p)-1)]))
	return len(p), nil
}
