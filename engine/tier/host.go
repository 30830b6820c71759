// Package tier stores the bytes of pages and snapshots below the device. It knows handles, bytes and checksums; which
// tokens they belong to, who uses them and what goes first is radix's to account for.
//
// Invariants (Host.Check):
//   - A handle is never 0 and never used twice.
//   - The bytes that Get returns are those that Put was given, or Get fails with ErrCorrupt.
//   - Bytes() is the sum over what is stored, and never above the budget.
package tier

import (
	"errors"
	"fmt"
	"hash/crc32"
	"sync"
)

// Errors of a store.
var (
	ErrFull    = errors.New("tier is full")
	ErrUnknown = errors.New("handle is unknown")
	ErrCorrupt = errors.New("checksum does not match")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Host keeps blobs in host memory, within a budget. It is safe for concurrent use: copies are made off the engine's
// loop, which only names handles.
type Host struct {
	max int64

	mu    sync.Mutex
	used  int64           // guarded by mu
	last  int64           // guarded by mu; the last handle given out
	blobs map[int64]*blob // guarded by mu
}

type blob struct {
	parts [][]byte
	sum   uint32
	bytes int64
}

// NewHost returns an empty store of at most max bytes.
func NewHost(max int64) *Host { return &Host{max: max, blobs: map[int64]*blob{}} }

// Put stores the parts and returns their handle. It takes ownership: the caller must not write to them any more.
// ErrFull when they do not fit; nothing is stored then.
func (h *Host) Put(parts ...[]byte) (int64, error) {
	b := &blob{parts: parts, sum: checksum(parts)}
	for _, p := range parts {
		b.bytes += int64(len(p))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used+b.bytes > h.max {
		return 0, fmt.Errorf("store %d bytes beside %d of %d: %w", b.bytes, h.used, h.max, ErrFull)
	}
	h.last++
	h.used += b.bytes
	h.blobs[h.last] = b
	return h.last, nil
}

// Get returns the parts of a handle after checking their sum. They stay the store's: the caller must not write to them.
func (h *Host) Get(handle int64) ([][]byte, error) {
	h.mu.Lock()
	b := h.blobs[handle]
	h.mu.Unlock()
	if b == nil {
		return nil, fmt.Errorf("read handle %d: %w", handle, ErrUnknown)
	}
	if checksum(b.parts) != b.sum {
		return nil, fmt.Errorf("read handle %d: %w", handle, ErrCorrupt)
	}
	return b.parts, nil
}

// Drop forgets a handle. A reader that has its parts keeps them.
func (h *Host) Drop(handle int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.blobs[handle]
	if b == nil {
		return fmt.Errorf("drop handle %d: %w", handle, ErrUnknown)
	}
	delete(h.blobs, handle)
	h.used -= b.bytes
	return nil
}

// Bytes is what is stored now, Max the budget, Len the number of handles.
func (h *Host) Bytes() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.used
}

// Max is the budget in bytes.
func (h *Host) Max() int64 { return h.max }

// Len is the number of handles.
func (h *Host) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.blobs)
}

// Check verifies the account and every checksum.
func (h *Host) Check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var sum int64
	for handle, b := range h.blobs {
		var n int64
		for _, p := range b.parts {
			n += int64(len(p))
		}
		if n != b.bytes || handle <= 0 || handle > h.last {
			return fmt.Errorf("handle %d holds %d bytes, its account says %d", handle, n, b.bytes)
		}
		if checksum(b.parts) != b.sum {
			return fmt.Errorf("handle %d: %w", handle, ErrCorrupt)
		}
		sum += n
	}
	if sum != h.used || h.used > h.max {
		return fmt.Errorf("blobs sum to %d bytes, the account says %d of %d", sum, h.used, h.max)
	}
	return nil
}

// checksum is CRC-32C over the parts and their lengths.
func checksum(parts [][]byte) uint32 {
	var sum uint32
	for _, p := range parts {
		sum = crc32.Update(sum, castagnoli, p)
		n := len(p)
		sum = crc32.Update(sum, castagnoli, []byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)})
	}
	return sum
}
