package tier

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
)

// take waits for an I/O buffer, which is the right to one I/O; give returns it.
func (d *Disk) take(ctx context.Context) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case b := <-d.bufs:
		return b, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *Disk) give(b []byte) { d.bufs <- b }

// each calls f for 0..n-1, each with a buffer and as many at once as there are buffers. After the first error it starts
// no more; it returns when all are done.
func (d *Disk) each(ctx context.Context, n int, f func(i int, buf []byte) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	fail := func(err error) bool {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
		}
		return first != nil
	}
	for i := range n {
		buf, err := d.take(ctx)
		if fail(err) {
			if err == nil {
				d.give(buf)
			}
			break
		}
		run := func() {
			err := f(i, buf)
			d.give(buf)
			fail(err)
		}
		if i == n-1 { // the last one, often the only one, needs no goroutine
			run()
		} else {
			wg.Go(run)
		}
	}
	wg.Wait()
	return first
}

// write writes a record's payload and notes the sums.
func (d *Disk) write(ctx context.Context, rec *record, parts [][]byte) error {
	return d.each(ctx, len(rec.chunks), func(i int, buf []byte) error {
		c := &rec.chunks[i]
		at := int64(i) * d.chunk
		return pieces(min(d.chunk, rec.payload-at), len(buf), func(off, n int64) error {
			b := aligned(parts, at+off, n)
			if b == nil {
				b = buf[:alignUp(n)]
				gather(b[:n], parts, at+off)
				clear(b[n:])
			}
			c.sum = crc32.Update(c.sum, castagnoli, b[:n])
			return d.fs.writeAt(c.seg.file, b, d.chunkAt(c.seg, c.index)+off)
		})
	})
}

// read fills parts with a record's payload and checks the sums.
func (d *Disk) read(rec *record, parts [][]byte) error {
	if got := total(parts); got != rec.payload {
		return fmt.Errorf("buffers of %d bytes for a record of %d", got, rec.payload)
	}
	return d.each(context.Background(), len(rec.chunks), func(i int, buf []byte) error {
		c := rec.chunks[i]
		at, sum := int64(i)*d.chunk, uint32(0)
		err := pieces(min(d.chunk, rec.payload-at), len(buf), func(off, n int64) error {
			b := aligned(parts, at+off, n)
			bounce := b == nil
			if bounce {
				b = buf[:alignUp(n)]
			}
			err := d.fs.readAt(c.seg.file, b, d.chunkAt(c.seg, c.index)+off)
			if errors.Is(err, io.EOF) { // somebody has cut the file
				return fmt.Errorf("%w: %w", ErrCorrupt, err)
			}
			if err != nil {
				return err
			}
			sum = crc32.Update(sum, castagnoli, b[:n])
			if bounce {
				scatter(parts, at+off, b[:n])
			}
			return nil
		})
		if err == nil && sum != c.sum {
			return fmt.Errorf("chunk %d of %d: %w", i, len(rec.chunks), ErrCorrupt)
		}
		return err
	})
}

// writeHeader writes a sealed block to where the header of the record that begins with c is; clearHeader zeros.
func (d *Disk) writeHeader(c chunk, buf []byte) error {
	return d.fs.writeAt(c.seg.file, buf[:blockBytes], c.seg.headerAt(c.index))
}

func (d *Disk) clearHeader(c chunk, buf []byte) error {
	clear(buf[:blockBytes])
	return d.writeHeader(c, buf)
}

// pieces calls f for each piece of at most size bytes of n.
func pieces(n int64, size int, f func(off, n int64) error) error {
	for off := int64(0); off < n; off += int64(size) {
		if err := f(off, min(n-off, int64(size))); err != nil {
			return err
		}
	}
	return nil
}

func total(parts [][]byte) int64 {
	var n int64
	for _, p := range parts {
		n += int64(len(p))
	}
	return n
}

// gather fills dst with the bytes from off on of the parts laid end to end; scatter does the reverse.
func gather(dst []byte, parts [][]byte, off int64) {
	overlap(parts, off, int64(len(dst)), func(part []byte, at int64) { copy(dst[at:], part) })
}

func scatter(parts [][]byte, off int64, src []byte) {
	overlap(parts, off, int64(len(src)), func(part []byte, at int64) { copy(part, src[at:]) })
}

// overlap calls f with what each part has of the n bytes from off on, and where that begins in them.
func overlap(parts [][]byte, off, n int64, f func(part []byte, at int64)) {
	var begin int64
	for _, p := range parts {
		end := begin + int64(len(p))
		if from, to := max(begin, off), min(end, off+n); from < to {
			f(p[from-begin:to-begin], from-off)
		}
		begin = end
	}
}

// aligned returns the n bytes from off on when one part has them all and direct I/O takes them as they are: large parts
// mostly do, which saves a copy. Else nil.
func aligned(parts [][]byte, off, n int64) []byte {
	for _, p := range parts {
		if size := int64(len(p)); off >= size {
			off -= size
		} else if b := p[off:]; n <= int64(len(b)) && n%blockBytes == 0 && isAligned(b) {
			return b[:n:n]
		} else {
			return nil
		}
	}
	return nil
}
