package tier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// MeasureRead tells how many bytes a second the disk of a directory reads in sequence: it writes a file of about that
// many bytes there, reads it once in pieces of 1 MiB with as many in flight as a Disk has, and removes it. direct is
// false where the file system has no direct I/O: then the figure is the page cache's.
func MeasureRead(dir string, bytes int64) (bytesPerSecond float64, direct bool, err error) {
	p, err := newProbe(dir, bytes, minBuffer, defaultQueue)
	if err != nil {
		return 0, false, fmt.Errorf("measure reading: %w", err)
	}
	bytesPerSecond, err = p.read()
	if err = errors.Join(err, p.close()); err != nil {
		return 0, false, fmt.Errorf("measure reading: %w", err)
	}
	return bytesPerSecond, p.direct, nil
}

// probe is a file to read in sequence.
type probe struct {
	file   *os.File
	direct bool
	pieces int
	queue  Disk // only its buffers
}

// newProbe writes a file of that many bytes, to be read by pieces with depth of them in flight.
func newProbe(dir string, bytes, piece int64, depth int) (*probe, error) {
	tmp, err := os.CreateTemp(dir, "measure-*")
	if err != nil {
		return nil, err
	}
	p := &probe{pieces: int(max(1, bytes/piece)), direct: directFlag != 0}
	p.file, err = os.OpenFile(tmp.Name(), os.O_RDWR|directFlag, 0)
	if errors.Is(err, syscall.EINVAL) {
		p.direct = false
		p.file, err = os.OpenFile(tmp.Name(), os.O_RDWR, 0)
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return nil, errors.Join(err, os.Remove(tmp.Name()))
	}
	if err := allocate(p.file, int64(p.pieces)*piece); err != nil { // in one stretch, if the file system can
		return nil, errors.Join(err, p.close())
	}
	p.queue.bufs = make(chan []byte, depth)
	for range depth {
		b := alignedBuffer(int(piece))
		for i := range b {
			b[i] = byte(i * 7) // zeros might never reach the disk
		}
		p.queue.give(b)
	}
	err = p.queue.each(context.Background(), p.pieces, func(i int, buf []byte) error {
		_, err := p.file.WriteAt(buf, int64(i)*piece)
		return err
	})
	if err == nil {
		err = p.file.Sync()
	}
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

// read reads the file once and returns bytes a second.
func (p *probe) read() (float64, error) {
	var next, sum atomic.Int64 // pieces go in file order, whichever goroutine comes first
	begin := time.Now()
	err := p.queue.each(context.Background(), p.pieces, func(_ int, buf []byte) error {
		n, err := p.file.ReadAt(buf, (next.Add(1)-1)*int64(len(buf)))
		sum.Add(int64(n))
		return err
	})
	return float64(sum.Load()) / time.Since(begin).Seconds(), err
}

func (p *probe) close() error { return errors.Join(p.file.Close(), os.Remove(p.file.Name())) }
