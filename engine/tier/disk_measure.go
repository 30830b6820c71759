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
	return measureRead(dir, bytes, minBuffer, defaultQueue)
}

func measureRead(dir string, bytes, piece int64, depth int) (rate float64, direct bool, err error) {
	n := int(max(1, bytes/piece))
	tmp, err := os.CreateTemp(dir, "measure-*")
	if err != nil {
		return 0, false, fmt.Errorf("measure reading: %w", err)
	}
	defer func() { err = errors.Join(err, tmp.Close(), os.Remove(tmp.Name())) }()
	f, err := os.OpenFile(tmp.Name(), os.O_RDWR|directFlag, 0)
	direct = directFlag != 0
	if errors.Is(err, syscall.EINVAL) {
		direct = false
		f, err = os.OpenFile(tmp.Name(), os.O_RDWR, 0)
	}
	if err != nil {
		return 0, false, fmt.Errorf("measure reading: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	d := &Disk{bufs: make(chan []byte, depth)} // only its queue
	for range depth {
		b := alignedBuffer(int(piece))
		for i := range b {
			b[i] = byte(i * 7) // zeros might never reach the disk
		}
		d.give(b)
	}
	ctx := context.Background()
	err = d.each(ctx, n, func(i int, buf []byte) error {
		_, err := f.WriteAt(buf, int64(i)*piece)
		return err
	})
	if err == nil {
		err = f.Sync()
	}
	begin := time.Now()
	var next atomic.Int64 // in file order, whichever goroutine comes first
	if err == nil {
		err = d.each(ctx, n, func(_ int, buf []byte) error {
			_, err := f.ReadAt(buf, (next.Add(1)-1)*piece)
			return err
		})
	}
	if err != nil {
		return 0, false, fmt.Errorf("measure reading: %w", err)
	}
	return float64(int64(n)*piece) / time.Since(begin).Seconds(), direct, nil
}
