package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// lineageCommands asks for the lineage of two children of id, moves one of them
// through a file, and removes the copy as a subtree.
func lineageCommands(t *testing.T, server string, do func(args ...string) string, id string, children []string) {
	t.Helper()
	if out := do("ancestors", children[0]); !strings.HasPrefix(out, id) || strings.Contains(out, "\n") {
		t.Errorf("ancestors: %s", out)
	}
	if out := do("common", children[0], children[1]); !strings.HasPrefix(out, id) || !strings.HasSuffix(out, "part at token 4") {
		t.Errorf("common: %s", out)
	}
	if out := strings.Split(do("path", children[0], children[1]), "\n"); len(out) != 3 || !strings.HasPrefix(out[1], id) {
		t.Errorf("path: %q", out)
	}
	file := filepath.Join(t.TempDir(), "tree.jsonl")
	do("export", id, "--out", file)
	data, err := os.ReadFile(file)
	if err != nil || do("export", id) == "" {
		t.Fatalf("export: %v", err)
	}
	moved := do("import", file)
	if moved == id || strings.Count(do("tree", moved), "\n") != 2 {
		t.Errorf("imported %s:\n%s", moved, do("tree", moved))
	}
	if one, two := do("show", id), do("show", moved); one[strings.Index(one, "\n\n"):] != two[strings.Index(two, "\n\n"):] {
		t.Errorf("text of the copy:\n%s\nwant\n%s", two, one)
	}
	do("rm", "--subtree", moved)
	if out := do("ls", "--root", moved); strings.Contains(out, "ses_") {
		t.Errorf("removed subtree:\n%s", out)
	}
	if err := os.WriteFile(file, data[:len(data)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errOut := rocket(t, "session", "--server", server, "import", file)
	if code != exitFailed || !oneLine(errOut) || !strings.Contains(errOut, "line ") {
		t.Errorf("import of half a bundle: exit %d, %q", code, errOut)
	}
}
