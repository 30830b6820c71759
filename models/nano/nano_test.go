package nano

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestExtract(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data", "models")
	folder, err := Extract(dir)
	if err != nil {
		t.Fatal(err)
	}
	same := func() {
		t.Helper()
		for _, name := range Files {
			want, _ := FS.ReadFile(name)
			got, err := os.ReadFile(filepath.Join(folder, name))
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%s differs from the embedded file: %v", name, err)
			}
		}
		if left, _ := os.ReadDir(dir); len(left) != 1 {
			t.Fatalf("left beside the model: %v", left)
		}
	}
	same()
	st, _ := os.Stat(filepath.Join(folder, "model.safetensors"))
	if again, err := Extract(dir); err != nil || again != folder {
		t.Fatal(again, err)
	}
	if st2, _ := os.Stat(filepath.Join(folder, "model.safetensors")); !os.SameFile(st, st2) {
		t.Fatal("a complete folder was written again")
	}
	if err := os.Truncate(filepath.Join(folder, "model.safetensors"), 100); err != nil {
		t.Fatal(err)
	}
	if _, err := Extract(dir); err != nil {
		t.Fatal(err)
	}
	same()
}

func TestExtractCannotWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Extract(file); err == nil {
		t.Fatal("no error for a data directory that is a file")
	}
}
