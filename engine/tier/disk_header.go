package tier

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Limits of a record: they make every header fit into one block.
const (
	blockBytes = 4096 // alignment and unit of direct I/O, size of every header; such a write is not torn by kill -9
	maxKey     = 1024 // bytes of a key; Put refuses a longer one
	maxTokens  = PageTokens
	maxChunks  = 192 // chunks of a record; the size of a chunk is chosen so that every record has at most that many

	diskVersion = 1 // other versions are never read; their files are removed at open
)

// Layout of a record's header, little endian. The variable part follows: key, tokens (4 bytes each), then for each
// chunk its segment, its index there and the CRC-32C of its payload (4 bytes each). The last 4 bytes of the block are
// the CRC-32C of all before them.
const (
	offMagic    = 0
	offVersion  = 8
	offKind     = 12 // 1 byte, then one of zero
	offKeyLen   = 14
	offTokens   = 16
	offChunks   = 18
	offMTP      = 20
	offIdentity = 28
	offHandle   = 60
	offPayload  = 68
	offAt       = 76
	offParent   = 84
	offChain    = 100
	offVariable = 116
	offSum      = blockBytes - 4
)

// Layout of a segment's header. Its magic, version, identity and checksum are where a record has them.
const (
	offNumber     = 64
	offSlots      = 68
	offChunkBytes = 72
)

const (
	recordMagic  = "RKTTIERR"
	segmentMagic = "RKTTIERS"
)

var zeros [blockBytes]byte

var errHeader = errors.New("no valid header")

// header is what a record's block says.
type header struct {
	Record
	handle  int64
	payload int64
	chunks  []chunkRef
}

// chunkRef is a chunk as a header names it.
type chunkRef struct {
	segment, index uint32
	sum            uint32 // CRC-32C of the payload in this chunk, without padding
}

// digest is the identity's hash: a segment and a record carry it.
func (id Identity) digest() [32]byte {
	h := sha256.New()
	for _, s := range []string{id.Model, id.Arithmetic, id.Class} {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(id.PageBytes)))
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(id.StateBytes)))
	return [32]byte(h.Sum(nil))
}

// encode fills a block. The record has been validated: everything fits.
func (h *header) encode(b []byte, identity [32]byte) {
	start(b, recordMagic, identity)
	le := binary.LittleEndian
	b[offKind] = byte(h.Kind)
	le.PutUint16(b[offKeyLen:], uint16(len(h.Key)))
	le.PutUint16(b[offTokens:], uint16(len(h.Tokens)))
	le.PutUint16(b[offChunks:], uint16(len(h.chunks)))
	le.PutUint64(b[offMTP:], uint64(h.MTPValidFrom))
	le.PutUint64(b[offHandle:], uint64(h.handle))
	le.PutUint64(b[offPayload:], uint64(h.payload))
	le.PutUint64(b[offAt:], uint64(h.At))
	copy(b[offParent:], h.Parent[:])
	copy(b[offChain:], h.Chain[:])
	at := offVariable + copy(b[offVariable:], h.Key)
	for _, t := range h.Tokens {
		le.PutUint32(b[at:], uint32(t))
		at += 4
	}
	for _, c := range h.chunks {
		le.PutUint32(b[at:], c.segment)
		le.PutUint32(b[at+4:], c.index)
		le.PutUint32(b[at+8:], c.sum)
		at += 12
	}
	seal(b)
}

// decodeHeader reads a block. A block that no encode made for this identity gives errHeader.
func decodeHeader(b []byte, identity [32]byte) (header, error) {
	if err := verify(b, recordMagic, identity); err != nil {
		return header{}, err
	}
	le := binary.LittleEndian
	key, tokens, chunks := int(le.Uint16(b[offKeyLen:])), int(le.Uint16(b[offTokens:])), int(le.Uint16(b[offChunks:]))
	h := header{
		Record: Record{
			Kind: Kind(b[offKind]), At: int(le.Uint64(b[offAt:])), MTPValidFrom: int(le.Uint64(b[offMTP:])),
			Parent: [16]byte(b[offParent:]), Chain: [16]byte(b[offChain:]),
		},
		handle: int64(le.Uint64(b[offHandle:])), payload: int64(le.Uint64(b[offPayload:])),
	}
	if key > maxKey || tokens > maxTokens || chunks == 0 || chunks > maxChunks || b[offKind+1] != 0 ||
		h.Kind > State || h.handle <= 0 || h.payload <= 0 || h.At < tokens {
		return header{}, fmt.Errorf("%w: fields out of range", errHeader)
	}
	at := offVariable + key
	h.Key = string(b[offVariable:at])
	h.Tokens = make([]int32, tokens)
	for i := range h.Tokens {
		h.Tokens[i] = int32(le.Uint32(b[at:]))
		at += 4
	}
	h.chunks = make([]chunkRef, chunks)
	for i := range h.chunks {
		h.chunks[i] = chunkRef{le.Uint32(b[at:]), le.Uint32(b[at+4:]), le.Uint32(b[at+8:])}
		at += 12
	}
	if !bytes.Equal(b[at:offSum], zeros[at:offSum]) {
		return header{}, fmt.Errorf("%w: bytes after the last field", errHeader)
	}
	return h, nil
}

// segmentHeader is what the first block of a segment file says.
type segmentHeader struct {
	number, slots uint32
	chunkBytes    int64
}

func (h segmentHeader) encode(b []byte, identity [32]byte) {
	start(b, segmentMagic, identity)
	binary.LittleEndian.PutUint32(b[offNumber:], h.number)
	binary.LittleEndian.PutUint32(b[offSlots:], h.slots)
	binary.LittleEndian.PutUint64(b[offChunkBytes:], uint64(h.chunkBytes))
	seal(b)
}

func decodeSegment(b []byte, identity [32]byte) (segmentHeader, error) {
	if err := verify(b, segmentMagic, identity); err != nil {
		return segmentHeader{}, err
	}
	le := binary.LittleEndian
	h := segmentHeader{le.Uint32(b[offNumber:]), le.Uint32(b[offSlots:]), int64(le.Uint64(b[offChunkBytes:]))}
	again := make([]byte, blockBytes)
	if h.encode(again, identity); !bytes.Equal(again, b) {
		return segmentHeader{}, fmt.Errorf("%w: bytes beside the fields", errHeader)
	}
	return h, nil
}

// start clears a block and writes what both kinds of header begin with; seal ends it.
func start(b []byte, magic string, identity [32]byte) {
	clear(b[:blockBytes])
	copy(b[offMagic:], magic)
	binary.LittleEndian.PutUint32(b[offVersion:], diskVersion)
	copy(b[offIdentity:], identity[:])
}

func seal(b []byte) {
	binary.LittleEndian.PutUint32(b[offSum:], crc32.Checksum(b[:offSum], castagnoli))
}

func verify(b []byte, magic string, identity [32]byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) != blockBytes || string(b[offMagic:offVersion]) != magic:
		return fmt.Errorf("%w: not a header", errHeader)
	case le.Uint32(b[offSum:]) != crc32.Checksum(b[:offSum], castagnoli):
		return fmt.Errorf("%w: %w", errHeader, ErrCorrupt)
	case le.Uint32(b[offVersion:]) != diskVersion:
		return fmt.Errorf("%w: version %d", errHeader, le.Uint32(b[offVersion:]))
	case [32]byte(b[offIdentity:]) != identity:
		return fmt.Errorf("%w: made by another model, arithmetic or class", errHeader)
	}
	return nil
}
