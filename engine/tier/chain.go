package tier

import (
	"crypto/sha256"
	"encoding/binary"
)

// PageTokens is the tokens of a full page: the step of the chain hash.
const PageTokens = 128

// Chain is the hash of a key (namespace) and the tokens from a line's start: ChainNext over its pages of PageTokens,
// the last one possibly partial. Two lines that differ in the key or in any token have different chains.
func Chain(key string, tokens []int32) [16]byte {
	h := sha256.New()
	h.Write([]byte("rocket chain 1\x00"))
	h.Write([]byte(key))
	var chain [16]byte
	copy(chain[:], h.Sum(nil))
	for len(tokens) > PageTokens {
		chain = ChainNext(chain, tokens[:PageTokens])
		tokens = tokens[PageTokens:]
	}
	return ChainNext(chain, tokens)
}

// ChainNext is the chain of a line that goes on from one with the chain parent, which must end at a page edge, by at
// most one page of tokens. Without tokens it is the parent.
func ChainNext(parent [16]byte, tokens []int32) [16]byte {
	if len(tokens) == 0 {
		return parent
	}
	b := make([]byte, 0, len(parent)+4*PageTokens)
	b = append(b, parent[:]...)
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	sum := sha256.Sum256(b)
	return [16]byte(sum[:16])
}
