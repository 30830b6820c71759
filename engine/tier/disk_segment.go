package tier

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"unsafe"
)

const (
	minBuffer = 1 << 20 // bytes of an I/O buffer, which is also the largest single read or write
	maxBuffer = 4 << 20
)

// files are the operations on files that can fail. Tests put failures in their place.
type files struct {
	open     func(name string, flags int) (*os.File, error)
	allocate func(f *os.File, size int64) error // makes the file size bytes long, with room for all of them
	readAt   func(f *os.File, b []byte, off int64) error
	writeAt  func(f *os.File, b []byte, off int64) error
	sync     func(f *os.File) error
	remove   func(name string) error
}

var system = files{
	open:     func(name string, flags int) (*os.File, error) { return os.OpenFile(name, flags, 0o600) },
	allocate: allocate,
	readAt: func(f *os.File, b []byte, off int64) error {
		_, err := f.ReadAt(b, off) // fewer bytes are an error
		return err
	},
	writeAt: func(f *os.File, b []byte, off int64) error {
		_, err := f.WriteAt(b, off)
		return err
	},
	sync:   func(f *os.File) error { return f.Sync() },
	remove: os.Remove,
}

// segment is one file. Its chunks and its free map are guarded by Disk.mu, the rest never changes.
type segment struct {
	number uint32
	file   *os.File
	slots  int
	spare  int      // free chunks
	free   []uint64 // a bit for each chunk
}

func newSegment(number uint32, file *os.File, slots int) *segment {
	s := &segment{number: number, file: file, slots: slots, spare: slots, free: make([]uint64, (slots+63)/64)}
	for i := range slots {
		s.free[i/64] |= 1 << (i % 64)
	}
	return s
}

func (s *segment) isFree(i uint32) bool { return s.free[i/64]>>(i%64)&1 == 1 }

// claim takes a free chunk, vacate gives it back.
func (s *segment) claim(i uint32) {
	s.free[i/64] &^= 1 << (i % 64)
	s.spare--
}

func (s *segment) vacate(i uint32) {
	s.free[i/64] |= 1 << (i % 64)
	s.spare++
}

func (s *segment) headerAt(i uint32) int64 { return blockBytes * (1 + int64(i)) }

func (d *Disk) chunkAt(s *segment, i uint32) int64 {
	return blockBytes*(1+int64(s.slots)) + int64(i)*d.chunk
}

func (d *Disk) segmentBytes(slots int) int64 { return blockBytes + int64(slots)*(blockBytes+d.chunk) }

// slotsIn is how many chunks a segment file of at most that many bytes has.
func (d *Disk) slotsIn(bytes int64) int { return int(max(0, (bytes-blockBytes)/(blockBytes+d.chunk))) }

// fit is how many chunks new segments within that many bytes have: as many full ones as fit, then one of the rest.
func (d *Disk) fit(bytes int64) int {
	slots := d.slotsIn(d.o.SegmentBytes)
	full := max(0, bytes) / d.segmentBytes(slots)
	return int(full)*slots + d.slotsIn(bytes-full*d.segmentBytes(slots))
}

func (d *Disk) chunksOf(payload int64) int { return int((payload + d.chunk - 1) / d.chunk) }

func (d *Disk) path(number uint32) string {
	return filepath.Join(d.o.Dir, fmt.Sprintf(segmentName, number))
}

const segmentName = "tier-%08d.seg"

// reserve takes chunks and a handle for a record; it makes a segment where there are too few. The lowest numbers go
// first, so that neighbours are likely and the last segments become empty.
func (d *Disk) reserve(rec *record) (int64, error) {
	need := d.chunksOf(rec.payload)
	for {
		d.mu.Lock()
		if d.free >= need {
			rec.chunks = d.claimLocked(need)
			d.last++
			handle := d.last
			d.mu.Unlock()
			return handle, nil
		}
		d.mu.Unlock()
		if err := d.grow(need); err != nil {
			return 0, err
		}
	}
}

func (d *Disk) claimLocked(need int) []chunk {
	chunks := make([]chunk, 0, need)
	for _, s := range d.segs {
		for w := 0; w < len(s.free) && s.spare > 0 && len(chunks) < need; w++ {
			for s.free[w] != 0 && len(chunks) < need {
				i := uint32(w*64 + bits.TrailingZeros64(s.free[w]))
				s.claim(i)
				chunks = append(chunks, chunk{seg: s, index: i})
			}
		}
	}
	d.free -= need
	return chunks
}

// release makes chunks free that no valid header names and nobody reads.
func (d *Disk) release(chunks []chunk) {
	d.mu.Lock()
	empty := 0
	for _, c := range chunks {
		c.seg.vacate(c.index)
	}
	d.free += len(chunks)
	for _, s := range d.segs {
		if s.spare == s.slots {
			empty++
		}
	}
	d.mu.Unlock()
	if empty > 1 {
		d.shrink(1)
	}
}

// grow makes one segment, unless others have freed enough chunks meanwhile. ErrFull when even all segments that
// MaxBytes has room for would not be enough.
func (d *Disk) grow(need int) error {
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	free, used, max, room := d.free, d.slots-d.free, d.slots, d.o.MaxBytes-d.size
	var number uint32
	for i := 0; i < len(d.segs) && d.segs[i].number == number; i++ {
		number++
	}
	d.mu.Unlock()
	if free >= need {
		return nil
	}
	if max += d.fit(room); max-used < need {
		return fmt.Errorf("%d chunks of %d bytes beside %d of %d: %w", need, d.chunk, used, max, ErrFull)
	}
	s, err := d.create(number, d.slotsIn(min(room, d.o.SegmentBytes)))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refused = noRoom(err)
	if err == nil {
		d.addLocked(s)
	}
	return err
}

func (d *Disk) addLocked(s *segment) {
	i, _ := slices.BinarySearchFunc(d.segs, s, func(a, b *segment) int { return int(a.number) - int(b.number) })
	d.segs = slices.Insert(d.segs, i, s)
	d.size += d.segmentBytes(s.slots)
	d.slots += s.slots
	d.free += s.spare
}

// create makes a segment file. Its header is written last: a file without one is removed at the next open.
func (d *Disk) create(number uint32, slots int) (*segment, error) {
	name := d.path(number)
	f, err := d.fs.open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC|d.openFlags())
	if err != nil {
		return nil, fmt.Errorf("create segment: %w", err)
	}
	err = d.fs.allocate(f, d.segmentBytes(slots))
	if err == nil {
		b := alignedBuffer(blockBytes)
		segmentHeader{number, uint32(slots), d.chunk}.encode(b, d.identity)
		err = d.fs.writeAt(f, b, 0)
	}
	if err != nil {
		_ = f.Close()
		_ = d.fs.remove(name) // the next open removes or uses it
		return nil, fmt.Errorf("create segment: %w", err)
	}
	return newSegment(number, f, slots), nil
}

// shrink removes the last of the empty segments until keep of them are left: one stays in use, so that a record that
// comes and goes does not make and remove a file each time.
func (d *Disk) shrink(keep int) {
	d.growing.Lock()
	defer d.growing.Unlock()
	for {
		d.mu.Lock()
		empty, at := 0, 0
		for i, s := range d.segs {
			if s.spare == s.slots {
				empty, at = empty+1, i
			}
		}
		if empty <= keep {
			d.mu.Unlock()
			return
		}
		s := d.segs[at]
		d.segs = slices.Delete(d.segs, at, at+1)
		d.size -= d.segmentBytes(s.slots)
		d.slots -= s.slots
		d.free -= s.slots
		d.mu.Unlock()
		// Should these fail, an empty file stays, which the next open or create of that number takes over.
		_ = s.file.Close()
		_ = d.fs.remove(d.path(s.number))
	}
}

func (d *Disk) openFlags() int {
	if d.direct {
		return directFlag
	}
	return 0
}

func noRoom(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

func alignUp(n int64) int64 { return (n + blockBytes - 1) / blockBytes * blockBytes }

// alignedBuffer returns n bytes that direct I/O accepts. Go does not move them.
func alignedBuffer(n int) []byte {
	b := make([]byte, n+blockBytes)
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (blockBytes - 1)
	return b[skip : skip+n : skip+n]
}

func isAligned(b []byte) bool { return uintptr(unsafe.Pointer(&b[0]))%blockBytes == 0 }
