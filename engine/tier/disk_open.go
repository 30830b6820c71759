package tier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

const lockName = "tier.lock"

// found is a valid header and where it was. chunks of its record are at most as many as its segment's file really has.
type found struct {
	header
	at chunk
}

// open takes the directory over and fills the index.
func (d *Disk) open() ([]Stored, error) {
	if err := os.MkdirAll(d.o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := d.takeLock(); err != nil {
		return nil, err
	}
	present, err := d.adoptAll()
	if err != nil {
		return nil, err
	}
	candidates, err := d.scan()
	if err != nil {
		return nil, err
	}
	stored, rejected := d.index(candidates, present)
	for _, f := range rejected { // else they might come back when what is in their way is gone
		if err := d.clearHeader(f.at, alignedBuffer(blockBytes)); err != nil {
			return nil, fmt.Errorf("clear header: %w", err)
		}
	}
	slices.SortFunc(stored, func(a, b Stored) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Handle, b.Handle))
	})
	return stored, nil
}

// takeLock locks the directory, and finds out by a write whether the file system takes direct I/O.
func (d *Disk) takeLock() error {
	name, block := filepath.Join(d.o.Dir, lockName), alignedBuffer(blockBytes)
	copy(block, "Held with flock by the server that uses this directory.\n")
	for _, flag := range []int{directFlag, 0} {
		f, err := d.fs.open(name, os.O_RDWR|os.O_CREATE|flag)
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
			if errors.Is(err, syscall.EWOULDBLOCK) {
				err = ErrLocked
			}
			if err == nil {
				err = d.fs.writeAt(f, block, 0)
			}
			if err == nil {
				d.lock, d.direct = f, flag != 0
				return nil
			}
			_ = f.Close()
		}
		if flag == 0 || !errors.Is(err, syscall.EINVAL) {
			return fmt.Errorf("lock: %w", err)
		}
	}
	return nil
}

// adoptAll opens the segment files of this identity and removes the others, and those that MaxBytes has no room for.
// It returns how many chunks each file really has.
func (d *Disk) adoptAll() (map[*segment]uint32, error) {
	entries, err := os.ReadDir(d.o.Dir)
	if err != nil {
		return nil, err
	}
	present := map[*segment]uint32{}
	for _, entry := range entries { // sorted, and so by number
		var number uint32
		_, err := fmt.Sscanf(entry.Name(), segmentName, &number)
		name := d.path(number)
		if err != nil || filepath.Base(name) != entry.Name() {
			continue // not ours
		}
		s, n, err := d.adopt(name, number)
		if err != nil {
			return nil, fmt.Errorf("segment %d: %w", number, err)
		}
		if s == nil {
			if err := d.fs.remove(name); err != nil {
				return nil, err
			}
			continue
		}
		present[s] = n
		d.addLocked(s)
	}
	return present, nil
}

// adopt opens a segment file. It returns nil when the file is of no use. A file that was cut gets its length back.
func (d *Disk) adopt(name string, number uint32) (*segment, uint32, error) {
	f, err := d.fs.open(name, os.O_RDWR|d.openFlags())
	if err != nil {
		return nil, 0, err
	}
	block := alignedBuffer(blockBytes)
	err = d.fs.readAt(f, block, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		_ = f.Close()
		return nil, 0, err
	}
	h, err := decodeSegment(block, d.identity)
	if err != nil || h.number != number || h.chunkBytes != d.chunk || h.slots == 0 ||
		d.size+d.segmentBytes(int(h.slots)) > d.o.MaxBytes {
		return nil, 0, f.Close()
	}
	s := newSegment(number, f, int(h.slots))
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	n := min((info.Size()-d.chunkAt(s, 0))/d.chunk, int64(s.slots))
	if n <= 0 {
		return nil, 0, f.Close()
	}
	if want := d.segmentBytes(s.slots); info.Size() < want {
		err = d.fs.allocate(f, want)
	} else if info.Size() > want {
		err = f.Truncate(want)
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	return s, uint32(n), nil
}

// scan reads the tables of all segments and returns the valid headers.
func (d *Disk) scan() ([]found, error) {
	type span struct {
		seg  *segment
		from int
	}
	var spans []span
	per := 1 << 20 / blockBytes
	for _, s := range d.segs {
		for from := 0; from < s.slots; from += per {
			spans = append(spans, span{s, from})
		}
	}
	var mu sync.Mutex
	var all []found
	err := d.each(context.Background(), len(spans), func(i int, buf []byte) error {
		s, from := spans[i].seg, spans[i].from
		n := min(per, s.slots-from)
		if err := d.fs.readAt(s.file, buf[:n*blockBytes], s.headerAt(uint32(from))); err != nil {
			return fmt.Errorf("read headers of segment %d: %w", s.number, err)
		}
		var here []found
		for j := range n {
			if h, err := decodeHeader(buf[j*blockBytes:(j+1)*blockBytes], d.identity); err == nil {
				here = append(here, found{h, chunk{seg: s, index: uint32(from + j)}})
			}
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, here...)
		return nil
	})
	return all, err
}

// index takes the records that are whole, later ones first, and returns them and the headers that must go: those that
// name chunks that are not there or are another's, and earlier records of the same tokens.
func (d *Disk) index(all []found, present map[*segment]uint32) (stored []Stored, rejected []found) {
	type name struct {
		kind  Kind
		key   string
		at    int
		chain [16]byte
	}
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(b.handle, a.handle) })
	segs := map[uint32]*segment{}
	for _, s := range d.segs {
		segs[s.number] = s
	}
	known := map[name]bool{}
	for _, f := range all {
		n := name{f.Kind, f.Key, f.At, f.Chain}
		rec := d.resolve(f, segs, present)
		if rec == nil || known[n] || d.records[f.handle] != nil {
			rejected = append(rejected, f)
			continue
		}
		known[n] = true
		for _, c := range rec.chunks {
			c.seg.claim(c.index)
		}
		d.free -= len(rec.chunks)
		d.records[f.handle] = rec
		d.last = max(d.last, f.handle)
		stored = append(stored, Stored{Record: f.Record, Handle: f.handle, Bytes: d.Cost(f.payload)})
	}
	return stored, rejected
}

// resolve turns a header into a record, or returns nil when it cannot be one.
func (d *Disk) resolve(f found, segs map[uint32]*segment, present map[*segment]uint32) *record {
	if d.validate(&f.Record, f.payload) != nil || len(f.chunks) != d.chunksOf(f.payload) ||
		f.chunks[0].segment != f.at.seg.number || f.chunks[0].index != f.at.index {
		return nil
	}
	rec := &record{payload: f.payload, chunks: make([]chunk, len(f.chunks))}
	for i, c := range f.chunks {
		s := segs[c.segment]
		if s == nil || c.index >= present[s] || !s.isFree(c.index) {
			return nil
		}
		rec.chunks[i] = chunk{seg: s, index: c.index, sum: c.sum}
	}
	for i, c := range rec.chunks { // the same chunk twice
		for _, other := range rec.chunks[:i] {
			if other.seg == c.seg && other.index == c.index {
				return nil
			}
		}
	}
	return rec
}
