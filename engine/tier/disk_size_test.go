package tier

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

func segmentFiles(t *testing.T, dir string) (count int, size int64) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	return len(names), size
}

// fill puts pages until the store is full and returns their handles.
func fill(t *testing.T, d *Disk) []int64 {
	t.Helper()
	var handles []int64
	for n := 0; ; n++ {
		h, err := d.Put(t.Context(), testRecord(n, 0), testPayload(testRecord(n, 0), uint64(n))...)
		if errors.Is(err, ErrFull) {
			return handles
		}
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
	}
}

// TestDiskFiles: files come with need, never pass MaxBytes, and go when they are empty, but for one while the store is
// open.
func TestDiskFiles(t *testing.T) {
	o := testOptions(t.TempDir())
	d, _ := openTest(t, o)
	if n, _ := segmentFiles(t, o.Dir); n != 0 {
		t.Errorf("%d files of an empty store", n)
	}
	handles := fill(t, d)
	n, size := segmentFiles(t, o.Dir)
	if n != 4 || size > o.MaxBytes || size < o.MaxBytes-d.segmentBytes(1) || d.Bytes() != d.Max() {
		t.Errorf("%d files of %d bytes, MaxBytes %d; %d of %d", n, size, o.MaxBytes, d.Bytes(), d.Max())
	}
	for _, h := range handles {
		if err := d.Drop(h); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := segmentFiles(t, o.Dir); n != 1 {
		t.Errorf("%d files after all was dropped", n)
	}
	if again := fill(t, d); len(again) != len(handles) {
		t.Errorf("%d records fit, before it were %d", len(again), len(handles))
	}
	for _, h := range handles {
		if err := d.Get(h, make([]byte, 5000)); !errors.Is(err, ErrUnknown) {
			t.Errorf("handle %d is used again: %v", h, err)
		}
	}
	for h := range d.records {
		if err := d.Drop(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if n, _ := segmentFiles(t, o.Dir); n != 0 {
		t.Errorf("%d files after Close of an empty store", n)
	}
}

// TestDiskOtherBounds: a store opens with less and with more room, and with segments of another size.
func TestDiskOtherBounds(t *testing.T) {
	for _, c := range []struct {
		name              string
		max, segment      int64
		records, moreThan int
	}{
		{"less", 210 << 10, 100 << 10, 16, -1},
		{"much less", 50 << 10, 100 << 10, 3, -1}, // only the last, small file fits
		{"more", 700 << 10, 100 << 10, 27, 27},
		{"small segments", 350 << 10, 50 << 10, 27, -1},
		{"large segments", 700 << 10, 500 << 10, 27, 27},
	} {
		o := testOptions(t.TempDir())
		d, _, err := OpenDisk(o)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(fill(t, d)); n != 27 {
			t.Fatalf("%d pages fit", n)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		o.MaxBytes, o.SegmentBytes = c.max, c.segment
		d, stored := openTest(t, o)
		if len(stored) != c.records || d.Bytes() > d.Max() || d.Bytes() != int64(c.records)*d.Cost(5000) {
			t.Errorf("%s: %d records of %d bytes of %d", c.name, len(stored), d.Bytes(), d.Max())
		}
		for _, s := range stored {
			if err := sameBytes(d, s.Handle, testRecord(s.MTPValidFrom, 0), uint64(s.MTPValidFrom)); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if added := len(fill(t, d)); added < c.moreThan {
			t.Errorf("%s: %d more records fit", c.name, added)
		}
		if _, size := segmentFiles(t, o.Dir); size > c.max {
			t.Errorf("%s: files of %d bytes, at most %d", c.name, size, c.max)
		}
	}
}

// TestDiskTakesAnyBuffers: aligned ones, which are read and written in place, others, and mixtures.
func TestDiskTakesAnyBuffers(t *testing.T) {
	id := Identity{PageBytes: 3 * blockBytes, StateBytes: 10*blockBytes + 100}
	o := DiskOptions{Dir: t.TempDir(), MaxBytes: 1 << 20, Identity: id}
	d, _ := openTest(t, o)
	r := testRecord(1, 2)
	size := id.StateBytes + id.PageBytes
	want := make([]byte, size)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range want {
		want[i] = byte(random.Uint32())
	}
	cut := func(skew int, at ...int) [][]byte { // parts that end at those places, each skew bytes past an aligned address
		var parts [][]byte
		begin := 0
		for _, end := range append(at, size) {
			parts = append(parts, alignedBuffer(end - begin + skew)[skew:])
			begin = end
		}
		return parts
	}
	shapes := map[string]func() [][]byte{
		"one aligned":            func() [][]byte { return cut(0) },
		"one not aligned":        func() [][]byte { return cut(1) },
		"state and page":         func() [][]byte { return cut(0, id.StateBytes) },
		"many aligned":           func() [][]byte { return cut(0, blockBytes, 5*blockBytes, 6*blockBytes) },
		"many odd":               func() [][]byte { return cut(0, 1, 2, blockBytes+1, blockBytes+1, 9*blockBytes) },
		"aligned at a piece end": func() [][]byte { return cut(0, 3*blockBytes, 3*blockBytes) },
	}
	for from, in := range shapes {
		parts := in()
		scatter(parts, 0, want)
		h, err := d.Put(t.Context(), r, parts...)
		if err != nil {
			t.Fatal(err)
		}
		for to, out := range shapes {
			parts := out()
			if err := d.Get(h, parts...); err != nil || !bytes.Equal(bytes.Join(parts, nil), want) {
				t.Errorf("from %s to %s: %v", from, to, err)
			}
		}
		if err := d.Drop(h); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDiskPadsWithZeros: no bytes of another record go to the disk beside those that were given.
func TestDiskPadsWithZeros(t *testing.T) {
	o := testOptions(t.TempDir())
	o.Queue = 1 // one buffer, used for all
	d, _ := openTest(t, o)
	put(t, d, testRecord(1, 1), 1)
	put(t, d, testRecord(2, 0), 2)
	name := d.path(0)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	page := file[9*blockBytes+3*8192:][:8192] // after the state's three chunks
	if !bytes.Equal(page[5000:], make([]byte, 8192-5000)) || bytes.Equal(page[:5000], make([]byte, 5000)) {
		t.Error("padding is not zero, or the page is not there: " + fmt.Sprint(page[4990:5010]))
	}
}
