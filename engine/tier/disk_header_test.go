package tier

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

// FuzzDecode reads blocks with every checksum made right, since a fuzzer does not guess one. What is taken for a header
// must be one that encode writes: the same block comes out.
func FuzzDecode(f *testing.F) {
	id := testIdentity.digest()
	block := make([]byte, blockBytes)
	h := header{Record: testRecord(7, 2), handle: 9, payload: 25001, chunks: []chunkRef{{1, 2, 3}, {4, 5, 6}, {0, 0, 1 << 31}, {1, 1, 1}}}
	h.encode(block, id)
	f.Add(bytes.Clone(block))
	f.Add(bytes.Clone(block[:300]))
	segmentHeader{3, 8, 8192}.encode(block, id)
	f.Add(bytes.Clone(block))
	block[100] = 1 // beside the fields
	f.Add(bytes.Clone(block))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := decodeHeader(data, id); err == nil && len(data) != blockBytes {
			t.Fatalf("%d bytes are a header", len(data))
		}
		b := make([]byte, blockBytes)
		copy(b, data)
		seal(b)
		out := make([]byte, blockBytes)
		if h, err := decodeHeader(b, id); err == nil {
			if h.encode(out, id); !bytes.Equal(out, b) {
				t.Fatalf("%+v encodes to another block", h)
			}
		}
		if s, err := decodeSegment(b, id); err == nil {
			if s.encode(out, id); !bytes.Equal(out, b) {
				t.Fatalf("%+v encodes to another block", s)
			}
		}
	})
}

// TestHeaderHoldsEveryRecord: what Put lets in comes back equal.
func TestHeaderHoldsEveryRecord(t *testing.T) {
	id := testIdentity.digest()
	rapid.Check(t, func(t *rapid.T) {
		h := header{handle: rapid.Int64Range(1, 1<<63-1).Draw(t, "handle"), payload: rapid.Int64Range(1, 1<<63-1).Draw(t, "payload")}
		h.Kind = Kind(rapid.IntRange(0, 1).Draw(t, "kind"))
		h.Key = string(rapid.SliceOfN(rapid.Byte(), 0, maxKey).Draw(t, "key"))
		h.Tokens = rapid.SliceOfN(rapid.Int32(), 0, maxTokens).Draw(t, "tokens")
		h.At = rapid.IntRange(len(h.Tokens), 1<<62).Draw(t, "at")
		h.MTPValidFrom = rapid.Int().Draw(t, "mtp")
		copy(h.Chain[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "chain"))
		for range rapid.IntRange(1, maxChunks).Draw(t, "chunks") {
			h.chunks = append(h.chunks, chunkRef{rapid.Uint32().Draw(t, "segment"), 1, 2})
		}
		b := make([]byte, blockBytes)
		h.encode(b, id)
		got, err := decodeHeader(b, id)
		if err != nil {
			t.Fatal(err)
		}
		if !sameRecord(got.Record, h.Record) || got.handle != h.handle || got.payload != h.payload || len(got.chunks) != len(h.chunks) ||
			got.chunks[0] != h.chunks[0] || got.chunks[len(got.chunks)-1] != h.chunks[len(h.chunks)-1] {
			t.Fatalf("%+v came back as %+v", h, got)
		}
		other := id
		other[31] ^= 1
		if _, err := decodeHeader(b, other); err == nil {
			t.Fatal("loaded under another identity")
		}
	})
}

// TestChain: the chain goes on from page to page, and no other key or tokens have the same.
func TestChain(t *testing.T) {
	line := make([]int32, 300)
	for i := range line {
		line[i] = int32(i * i)
	}
	chain := Chain("k", nil)
	for at := 0; at < len(line); at += PageTokens {
		next := line[at:min(at+PageTokens, len(line))]
		for n := range len(next) + 1 {
			if ChainNext(chain, next[:n]) != Chain("k", line[:at+n]) {
				t.Fatalf("chain of %d tokens differs by how it is made", at+n)
			}
		}
		chain = ChainNext(chain, next)
	}
	seen := map[[16]byte]string{}
	for name, c := range map[string][16]byte{
		"line": Chain("k", line), "shorter": Chain("k", line[:299]), "other key": Chain("k1", line), "no key": Chain("", line),
		"nothing": Chain("k", nil), "zeros": Chain("k", make([]int32, 3)), "fewer zeros": Chain("k", make([]int32, 2)),
		"page": Chain("k", line[:128]), "key like tokens": Chain("k\x00\x00\x00\x00", nil), "token": Chain("k", line[:1]),
	} {
		if other, known := seen[c]; known {
			t.Errorf("%s and %s have one chain", name, other)
		}
		seen[c] = name
	}
}

func TestMeasureRead(t *testing.T) {
	dir := t.TempDir()
	rate, _, err := MeasureRead(dir, 3<<20+5)
	if err != nil || rate <= 0 {
		t.Errorf("%v bytes a second: %v", rate, err)
	}
	if _, _, err := MeasureRead(dir+"/none", 1); err == nil {
		t.Error("measured a directory that is not there")
	}
}
