package tier

import (
	"fmt"
	"math/bits"
	"slices"
)

// Check waits for I/O under way and verifies the accounts, the files' sizes, and that the valid headers on the disk are
// those of the records in memory. It reads no payload: Get does.
func (d *Disk) Check() error {
	d.gate.Lock()
	defer d.gate.Unlock()
	if d.closed {
		return ErrClosed
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkChunks(); err != nil {
		return fmt.Errorf("check disk tier: %w", err)
	}
	if err := d.checkFiles(); err != nil {
		return fmt.Errorf("check disk tier: %w", err)
	}
	return nil
}

// checkChunks: every chunk is free, lost or in one record, and the sums agree.
func (d *Disk) checkChunks() error {
	type place struct {
		seg   *segment
		index uint32
	}
	used := map[place]bool{}
	take := func(chunks []chunk) error {
		for _, c := range chunks {
			if p := (place{c.seg, c.index}); used[p] || c.seg.isFree(c.index) {
				return fmt.Errorf("chunk %d of segment %d is free or used twice", c.index, c.seg.number)
			} else {
				used[p] = true
			}
		}
		return nil
	}
	if err := take(d.lost); err != nil {
		return err
	}
	for handle, rec := range d.records {
		if err := take(rec.chunks); err != nil {
			return fmt.Errorf("handle %d: %w", handle, err)
		}
		if handle <= 0 || handle > d.last || rec.readers != 0 || rec.dropped {
			return fmt.Errorf("handle %d of at most %d has %d readers", handle, d.last, rec.readers)
		}
	}
	free, slots, size := 0, 0, int64(0)
	for _, s := range d.segs {
		spare := 0
		for _, w := range s.free {
			spare += bits.OnesCount64(w)
		}
		if spare != s.spare {
			return fmt.Errorf("segment %d has %d free chunks, its account says %d", s.number, spare, s.spare)
		}
		free, slots, size = free+s.spare, slots+s.slots, size+d.segmentBytes(s.slots)
	}
	if free != d.free || slots != d.slots || len(used) != slots-free || size != d.size || size > d.o.MaxBytes {
		return fmt.Errorf("%d chunks, %d free, %d used, %d bytes; the account says %d, %d, %d of %d bytes", slots, free,
			len(used), size, d.slots, d.free, d.size, d.o.MaxBytes)
	}
	return nil
}

// checkFiles: the files are as long as their accounts, and their valid headers are the index.
func (d *Disk) checkFiles() error {
	for _, s := range d.segs {
		info, err := s.file.Stat()
		if err != nil {
			return err
		}
		if info.Size() != d.segmentBytes(s.slots) {
			return fmt.Errorf("segment %d has %d bytes, want %d", s.number, info.Size(), d.segmentBytes(s.slots))
		}
	}
	all, err := d.scan()
	if err != nil {
		return err
	}
	seen := 0
	for _, f := range all {
		if slices.ContainsFunc(d.lost, func(c chunk) bool { return c.seg == f.at.seg && c.index == f.at.index }) {
			continue // could not be cleared
		}
		rec := d.records[f.handle]
		if rec == nil || len(rec.chunks) != len(f.chunks) || rec.payload != f.payload ||
			rec.chunks[0].seg != f.at.seg || rec.chunks[0].index != f.at.index {
			return fmt.Errorf("header %d of segment %d is that of handle %d, which is not there", f.at.index,
				f.at.seg.number, f.handle)
		}
		for i, c := range rec.chunks {
			if f.chunks[i] != (chunkRef{c.seg.number, c.index, c.sum}) {
				return fmt.Errorf("handle %d: chunk %d differs between header and index", f.handle, i)
			}
		}
		seen++
	}
	if seen != len(d.records) {
		return fmt.Errorf("%d of %d records have a valid header", seen, len(d.records))
	}
	return nil
}
