package tier

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// gated stops the first read until it is opened, and tells when it has come.
type gated struct {
	came  chan struct{}
	open  chan struct{}
	first atomic.Bool
}

func gatedStore(t *testing.T) (*Disk, *gated) {
	t.Helper()
	g := &gated{came: make(chan struct{}), open: make(chan struct{})}
	fs := system
	d, _, err := openDisk(testOptions(t.TempDir()), fs)
	if err != nil {
		t.Fatal(err)
	}
	d.fs.readAt = func(f *os.File, b []byte, off int64) error {
		if g.first.CompareAndSwap(false, true) { // the others leave their place in the queue
			close(g.came)
			<-g.open
		}
		return system.readAt(f, b, off)
	}
	return d, g
}

// TestDropDuringGet: the reader gets its bytes, though the record is gone for others and others want its room.
func TestDropDuringGet(t *testing.T) {
	d, g := gatedStore(t)
	r := testRecord(1, 1)
	h := put(t, d, r, 1)
	read := make(chan error)
	go func() { read <- sameBytes(d, h, r, 1) }()
	<-g.came
	before := d.Bytes()
	if err := d.Drop(h); err != nil {
		t.Fatal(err)
	}
	if err := d.Drop(h); !errors.Is(err, ErrUnknown) {
		t.Errorf("second drop: %v", err)
	}
	if d.Bytes() != before {
		t.Error("chunks are free while they are read")
	}
	other := testRecord(2, 2)
	ho := put(t, d, other, 2)
	close(g.open)
	if err := <-read; err != nil {
		t.Error(err)
	}
	if err := sameBytes(d, ho, other, 2); err != nil {
		t.Error(err)
	}
	if d.Bytes() != d.Cost(25001) {
		t.Errorf("%d bytes are left", d.Bytes())
	}
	if err := errors.Join(d.Check(), d.Close()); err != nil {
		t.Error(err)
	}
}

// TestCloseWaits for I/O under way; what began before it ends well.
func TestCloseWaits(t *testing.T) {
	d, g := gatedStore(t)
	r := testRecord(1, 1)
	h := put(t, d, r, 1)
	read, closed := make(chan error, 1), make(chan error, 1)
	go func() { read <- sameBytes(d, h, r, 1) }()
	<-g.came
	go func() { closed <- d.Close() }()
	for d.gate.TryRLock() { // until Close waits for the gate
		d.gate.RUnlock()
		time.Sleep(time.Microsecond)
	}
	select {
	case err := <-closed:
		t.Fatalf("closed during a read: %v", err)
	default:
	}
	close(g.open)
	if err := errors.Join(<-read, <-closed); err != nil {
		t.Error(err)
	}
}

// TestDiskAtOnce: many callers put, read and drop at a bound that is hit; each finds its own bytes.
func TestDiskAtOnce(t *testing.T) {
	d, _ := openTest(t, testOptions(t.TempDir()))
	var wg sync.WaitGroup
	for caller := range 6 {
		wg.Go(func() {
			for i := range 40 {
				n := caller*100 + i
				r := testRecord(n, n%3)
				h, err := d.Put(t.Context(), r, testPayload(r, uint64(n))...)
				if errors.Is(err, ErrFull) {
					continue
				}
				if err == nil {
					err = sameBytes(d, h, r, uint64(n))
				}
				if err == nil && i%10 == 0 {
					err = d.Check()
				}
				if err == nil {
					err = d.Drop(h)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if d.Len() != 0 || d.Bytes() != 0 {
		t.Errorf("%d records of %d bytes are left", d.Len(), d.Bytes())
	}
}
