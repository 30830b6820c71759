package tier

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
)

// fault is how operations fail.
type fault struct {
	err    error
	writes bool // only writes and allocations fail, else every operation
	late   bool // a failing write has written everything, else the first half of its blocks
}

// failing returns file operations of which the i-th fails. happened reports whether it came to that.
func failing(i int, f fault) (fs files, happened func() bool) {
	var mu sync.Mutex
	count := 0
	hit := func(write bool) bool {
		mu.Lock()
		defer mu.Unlock()
		if write || !f.writes {
			count++
		}
		return count == i && (write || !f.writes)
	}
	fs = files{
		open: func(name string, flags int) (*os.File, error) {
			if hit(false) {
				return nil, f.err
			}
			return system.open(name, flags)
		},
		allocate: func(file *os.File, size int64) error {
			if hit(true) {
				return f.err
			}
			return system.allocate(file, size)
		},
		readAt: func(file *os.File, b []byte, off int64) error {
			if hit(false) {
				return f.err
			}
			return system.readAt(file, b, off)
		},
		writeAt: func(file *os.File, b []byte, off int64) error {
			if !hit(true) {
				return system.writeAt(file, b, off)
			}
			if n := len(b); f.late {
				_ = system.writeAt(file, b, off)
			} else if half := n / 2 / blockBytes * blockBytes; half > 0 {
				_ = system.writeAt(file, b[:half], off)
			}
			return f.err
		},
		sync: func(*os.File) error {
			if hit(false) {
				return f.err
			}
			return nil // slow, and of no use to a process that lives
		},
		remove: func(name string) error {
			if hit(false) {
				return f.err
			}
			return system.remove(name)
		},
	}
	return fs, func() bool { mu.Lock(); defer mu.Unlock(); return count >= i }
}

// TestDiskFailsTheIth makes the i-th file operation of a run fail, for each i until none fails. Whatever failed, what
// Put returned is there bit for bit, what Drop returned for is gone, and the accounts agree, then and after a restart.
func TestDiskFailsTheIth(t *testing.T) {
	for _, f := range []fault{{err: syscall.EIO}, {syscall.EIO, true, true}, {syscall.ENOSPC, true, false}} {
		i := 1
		for ; failIth(t, i, f); i++ {
			if t.Failed() {
				t.Fatalf("operation %d failing with %+v", i, f)
			}
		}
		if i < 20 {
			t.Errorf("only %d operations", i)
		}
	}
}

// failIth reports whether the i-th operation came.
func failIth(t *testing.T, i int, f fault) bool {
	dir, done := quickDir(t)
	defer done()
	o := testOptions(dir)
	o.Queue = 1 // so that the order is the same each time
	fs, happened := failing(i, f)
	after, _ := failing(0, f)
	live, dropped := map[int64]int{}, map[int64]bool{}
	unsure := 0 // Puts that failed: complete on the disk at most when their header could not be cleared
	session := func(fs files) (ok bool) {
		d, stored, err := openDisk(o, fs)
		if err != nil {
			if !happened() {
				t.Errorf("open: %v", err)
			}
			return false
		}
		for _, s := range stored {
			n, known := live[s.Handle]
			if dropped[s.Handle] || !known && unsure == 0 {
				t.Errorf("handle %d is back, known %v, dropped %v", s.Handle, known, dropped[s.Handle])
			}
			if known && !sameRecord(s.Record, testRecord(n, n%3)) {
				t.Errorf("handle %d: %+v", s.Handle, s.Record)
			}
		}
		if len(stored) < len(live) {
			t.Errorf("%d records back, want %d", len(stored), len(live))
		}
		work(t, d, live, dropped, &unsure, f.err)
		if err := d.Check(); err != nil && !errors.Is(err, f.err) {
			t.Errorf("check: %v", err)
		}
		if err := d.Close(); err != nil && !errors.Is(err, f.err) {
			t.Errorf("close: %v", err)
		}
		return true
	}
	if session(fs) {
		session(fs) // the failure may be in this one's open
	}
	if !session(after) {
		t.Error("no restart after the failure")
	}
	return happened()
}

// work stores, reads and drops, and keeps the model up to date. Any call may fail with the injected error, once.
func work(t *testing.T, d *Disk, live map[int64]int, dropped map[int64]bool, unsure *int, injected error) {
	base := len(live) + len(dropped) + *unsure
	for n := base; n < base+5; n++ {
		r := testRecord(n, n%3)
		before, most := d.Bytes(), d.Max()
		h, err := d.Put(t.Context(), r, testPayload(r, uint64(n))...)
		if err != nil {
			full := d.Bytes()+d.Cost(total(testPayload(r, 1))) > most
			want := full || injected == syscall.ENOSPC
			if errors.Is(err, ErrFull) != want || !full && !errors.Is(err, injected) || d.Bytes() != before {
				t.Errorf("put: %v, %d bytes before, %d after", err, before, d.Bytes())
			}
			if !full {
				*unsure++
			}
			continue
		}
		live[h] = n
		delete(dropped, h)
	}
	for h, n := range live {
		if err := sameBytes(d, h, testRecord(n, n%3), uint64(n)); err != nil && !errors.Is(err, injected) {
			t.Errorf("get %d: %v", h, err)
		}
	}
	handles := make([]int64, 0, len(live))
	for h := range live {
		handles = append(handles, h)
	}
	slices.Sort(handles)
	for _, h := range handles[:len(handles)/2] {
		err := d.Drop(h)
		if err != nil && errors.Is(err, injected) {
			if err := sameBytes(d, h, testRecord(live[h], live[h]%3), uint64(live[h])); err != nil {
				t.Errorf("get %d after a failed drop: %v", h, err)
			}
			err = d.Drop(h)
		}
		if err != nil {
			t.Errorf("drop %d: %v", h, err)
		}
		delete(live, h)
		dropped[h] = true
	}
}

// TestDiskKeepsGoingWithoutRoom: a file system that is full at any operation gives ErrFull, keeps what is there, and takes new
// records as soon as old ones go.
func TestDiskKeepsGoingWithoutRoom(t *testing.T) {
	full := false
	fs := system
	fs.allocate = func(f *os.File, size int64) error {
		if full {
			return syscall.ENOSPC
		}
		return system.allocate(f, size)
	}
	d, _, err := openDisk(testOptions(t.TempDir()), fs)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	a, b := testRecord(1, 1), testRecord(2, 2)
	ha := put(t, d, a, 1)
	put(t, d, b, 2) // 7 of 8 chunks of the only segment
	full = true
	c := testRecord(3, 1)
	if _, err := d.Put(t.Context(), c, testPayload(c, 3)...); !errors.Is(err, ErrFull) {
		t.Fatalf("put: %v", err)
	}
	if cost := d.Cost(total(testPayload(c, 3))); d.Bytes()+cost <= d.Max() {
		t.Errorf("%d bytes of %d with room for %d: nobody would make room for what was refused", d.Bytes(), d.Max(), cost)
	}
	if err := sameBytes(d, ha, a, 1); err != nil {
		t.Error(err)
	}
	if err := d.Drop(ha); err != nil {
		t.Fatal(err)
	}
	hc := put(t, d, c, 3)
	if err := sameBytes(d, hc, c, 3); err != nil {
		t.Error(err)
	}
	bounded := d.Max()
	full = false
	put(t, d, testRecord(4, 1), 4)
	put(t, d, testRecord(5, 2), 5)
	if d.Max() <= bounded {
		t.Errorf("Max is still %d after the file system had room again", d.Max())
	}
	if err := d.Check(); err != nil {
		t.Error(err)
	}
}

// TestDiskFallsBackToBufferedIO where direct I/O is refused.
func TestDiskFallsBackToBufferedIO(t *testing.T) {
	if directFlag == 0 {
		t.Skip("no direct I/O on this system")
	}
	fs := system
	fs.open = func(name string, flags int) (*os.File, error) {
		if flags&directFlag != 0 {
			return nil, &os.PathError{Op: "open", Path: name, Err: syscall.EINVAL}
		}
		return system.open(name, flags)
	}
	o := testOptions(t.TempDir())
	d, _, err := openDisk(o, fs)
	if err != nil {
		t.Fatal(err)
	}
	if d.Direct() {
		t.Error("direct I/O that was refused")
	}
	r := testRecord(1, 2)
	put(t, d, r, 9)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	back, stored := openTest(t, o) // now perhaps with direct I/O: the format is the same
	if len(stored) != 1 {
		t.Fatalf("%d records", len(stored))
	}
	if err := sameBytes(back, stored[0].Handle, r, 9); err != nil {
		t.Error(err)
	}
}

// TestDiskPutGivenUp: a cancelled Put leaves nothing, wherever it was.
func TestDiskPutGivenUp(t *testing.T) {
	for stop := range 4 { // at the writes of the three chunks of a state, then of the header
		ctx, cancel := context.WithCancel(t.Context())
		writes, fs := 0, system
		fs.writeAt = func(f *os.File, b []byte, off int64) error {
			if writes++; writes == stop+3 { // the lock's and the segment's are the first two
				cancel()
			}
			return system.writeAt(f, b, off)
		}
		o := testOptions(t.TempDir())
		o.Queue = 1
		d, _, err := openDisk(o, fs)
		if err != nil {
			t.Fatal(err)
		}
		r := testRecord(1, 1)
		_, err = d.Put(ctx, r, testPayload(r, 1)...)
		if tooLate := stop == 3; tooLate != (err == nil) || !tooLate && !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled at write %d: %v", stop, err)
		}
		cancel()
		if err := d.Check(); err != nil {
			t.Error(err)
		}
		if want := map[bool]int{true: 1}[err == nil]; d.Len() != want || d.Bytes() != int64(want)*d.Cost(20001) {
			t.Errorf("cancelled at write %d: %d records, %d bytes", stop, d.Len(), d.Bytes())
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
