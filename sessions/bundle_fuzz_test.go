package sessions

import (
	"bytes"
	"strings"
	"testing"

	"rocket/internal/localpg/pgtest"
)

// drain reads a bundle as an import does, without a ledger.
func (b *bundleReader) drain() error {
	if err := b.header(); err != nil {
		return err
	}
	if err := b.readSessions(); err != nil {
		return err
	}
	b.rename()
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.turn(); err != nil {
			return err
		}
	}
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.run(); err != nil {
			return err
		}
	}
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.event(); err != nil {
			return err
		}
	}
	return b.trailer()
}

// FuzzBundle: no bundle makes the reader panic, every refusal names a line, and
// what is not refused works: see works. The trailer is made right, or no input
// would come past it.
func FuzzBundle(f *testing.F) {
	r := openRig(f, pgtest.New(f))
	lines := r.copse()
	if !r.reads("", reseal(lines)) {
		f.Fatal("the first bundle is not taken")
	}
	f.Add([]byte(strings.Join(lines, "")))
	for i := range lines { // beginnings of it
		f.Add([]byte(strings.Join(lines[:i], "")))
		f.Add([]byte(strings.Join(lines[:i], "") + lines[i][:len(lines[i])/2]))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := &rig{r.Manager, t, r.url}
		sealed := data
		if n := bytes.Count(data, []byte("\n")); bytes.HasSuffix(data, []byte("\n")) {
			sealed = reseal(strings.SplitAfter(string(data), "\n")[:n])
		}
		if r.reads("", sealed) {
			r.works("", sealed)
		}
	})
}
