package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"rocket/client"
	"rocket/internal/localpg/pgtest"
)

func TestTakeHome(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "data")
	one, release, err := takeHome(dir)
	if err != nil || one == "" {
		t.Fatalf("%q, %v", one, err)
	}
	if second, _, err := takeHome(dir); err != nil || second != "" {
		t.Errorf("a second server has it too: %q, %v", second, err)
	}
	release()
	again, release, err := takeHome(dir)
	if err != nil || again != one {
		t.Errorf("after a restart %q, %v, want %q", again, err, one)
	}
	release()
	other, release, err := takeHome(t.TempDir())
	if err != nil || other == one {
		t.Errorf("another directory has %q, %v", other, err)
	}
	release()
	if err := os.WriteFile(filepath.Join(dir, homeFile), []byte("half a na"), 0o600); err != nil {
		t.Fatal(err)
	}
	named, release, err := takeHome(dir)
	if err != nil || named == "" || named == one {
		t.Errorf("after half a write %q, %v", named, err)
	}
	release()
	if again, release, err := takeHome(dir); err != nil || again != named {
		t.Errorf("and then %q, %v, want %q", again, err, named)
	} else {
		release()
	}
	file := filepath.Join(dir, homeFile)
	if _, _, err := takeHome(file); err == nil {
		t.Error("a file was taken for a directory")
	}
	// a server goes on without, and one that has no use for a directory makes none
	for name, s := range map[string]serveCmd{"no directory": {DataDir: file}, "nothing to keep": {DatabaseURL: "postgres://x"}} {
		got, release := s.home(slog.New(slog.DiscardHandler))
		if got != "" {
			t.Errorf("%s: %q", name, got)
		}
		release()
	}
}

// A server that was killed and starts again at another address has its sessions at once, by its data directory.
func TestRestartAtAnotherAddress(t *testing.T) {
	data := dataDirectory(t)
	args := []string{"--database-url", pgtest.New(t), "--data-dir", data, "--disk-bytes", "0", "--listen", "127.0.0.1:0"}
	first := serve(t, args...)
	api := connect(t, first.url)
	ctx := testContext(t)
	s, err := api.Create(ctx, client.CreateRequest{Title: "kept"}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if code := first.end(t, syscall.SIGKILL); code != -1 {
		t.Fatalf("killed server exited with %d", code)
	}
	second := connect(t, serve(t, args...).url)
	if got, err := second.Get(ctx, s.ID); err != nil || got.Epoch != 2 {
		t.Errorf("after the restart: %+v, %v", got, err)
	}
	if list, err := second.Servers(ctx); err != nil || len(list) != 1 {
		t.Errorf("servers %+v, %v", list, err)
	}
}
