package sessions

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
)

// streamHash is the version of an import's hash in the ledger; a version and a
// SHA-256. Keys of before have the SHA-256 of the first line only.
const streamHash = 1

// importStream is a bundle's bytes and their hash. What a call with an
// idempotency key brings is known at the bundle's end only, so a call whose key
// has an answer is read to its end too, within the bounds of any import.
type importStream struct {
	src io.Reader
	sum hash.Hash
	b   *bundleReader
}

func newImportStream(src io.Reader) *importStream { return &importStream{src: src, sum: sha256.New()} }

func (s *importStream) Read(p []byte) (int, error) {
	n, err := s.src.Read(p)
	s.sum.Write(p[:n])
	return n, err
}

// bodyHash is the hash of all that was read.
func (s *importStream) bodyHash() []byte { return s.sum.Sum([]byte{streamHash}) }

// sameBody reads the rest of the body and compares it with that of a call
// before.
func (s *importStream) sameBody(ctx context.Context, stored []byte) (bool, error) {
	if len(stored) == sha256.Size {
		return bytes.Equal(stored, s.b.headSum[:]), nil
	}
	buf := make([]byte, 64<<10)
	for {
		_, err := s.Read(buf)
		if err == io.EOF {
			return bytes.Equal(stored, s.bodyHash()), nil
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return false, fmt.Errorf("read bundle: %w", err)
		}
	}
}
