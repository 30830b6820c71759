// Package nano carries rocket-nano, the small model that everything runs on, inside the binary.
//
// Invariant: what Extract leaves on disk is, byte for byte, what was embedded when the program was built; its folder
// is named after the content, so two versions never share one.
package nano

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// FS holds the checkpoint: config, weights and tokenizer. The reference outputs that tests use are not in it.
//
//go:embed config.json hf_quant_config.json model.safetensors tokenizer.json tokenizer_config.json
var FS embed.FS

// Files are the names in FS, in the order in which Extract writes them.
var Files = []string{"config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}

// Extract makes the model a folder below dir that can be mapped, and returns the folder. It writes only when the
// folder is not there yet; the folder appears whole, by rename, so a crash in between leaves nothing that would pass
// for a model, and two processes may race.
func Extract(dir string) (string, error) {
	sum := sha256.New()
	for _, name := range Files {
		b, err := FS.ReadFile(name)
		if err != nil {
			return "", fmt.Errorf("extract the nano model: %w", err)
		}
		fmt.Fprintf(sum, "%s %d\n", name, len(b))
		sum.Write(b)
	}
	final := filepath.Join(dir, "nano-"+hex.EncodeToString(sum.Sum(nil)[:6]))
	if complete(final) {
		return final, nil
	}
	if err := write(dir, final); err != nil && !complete(final) {
		return "", fmt.Errorf("extract the nano model to %s: %w", final, err)
	}
	return final, nil
}

// complete tells whether the folder holds every file at its full size.
func complete(folder string) bool {
	for _, name := range Files {
		st, err := os.Stat(filepath.Join(folder, name))
		if err != nil {
			return false
		}
		if in, err := fs.Stat(FS, name); err != nil || in.Size() != st.Size() {
			return false
		}
	}
	return true
}

func write(dir, final string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, "nano-*.tmp")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	for _, name := range Files {
		b, err := FS.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(tmp, name), b, 0o644); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp, final); err == nil || complete(final) {
		return nil
	}
	// A folder that is there but not complete was damaged by someone: it goes.
	return errors.Join(os.RemoveAll(final), os.Rename(tmp, final))
}
