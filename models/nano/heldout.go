package nano

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"
)

//go:embed heldout/*.txt
var heldOut embed.FS

// Baseline is a record of what the BF16 weights do that the embedded ones were quantised from: `rocket model verify`
// compares with it, since the BF16 weights are too large to be here.
//
//go:embed baseline.json
var Baseline []byte

// HeldOut is Go source that was never trained on: frozen copies of four files of this repository, which is in nobody's
// corpus. Each begins with its name in a comment, as the files of the training text do.
func HeldOut() ([]string, error) {
	names, err := fs.Glob(heldOut, "heldout/*.txt")
	if err != nil {
		return nil, fmt.Errorf("list held-out text: %w", err)
	}
	var docs []string
	for _, name := range names {
		b, err := heldOut.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read held-out text: %w", err)
		}
		path := strings.TrimSuffix(strings.TrimPrefix(name, "heldout/"), ".txt")
		docs = append(docs, "// "+path+".go\n"+string(b))
	}
	return docs, nil
}
