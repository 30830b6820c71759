package tier

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// onDisk makes a store of a page (1), a state (2) and one with a partial page (3), closed, and returns its one file.
func onDisk(t *testing.T, o DiskOptions) (file string, stored []Stored) {
	t.Helper()
	d, _, err := OpenDisk(o)
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 3; n++ {
		put(t, d, testRecord(n, n-1), uint64(n))
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d, stored, err = OpenDisk(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob(filepath.Join(o.Dir, "*.seg"))
	if err != nil || len(names) != 1 || len(stored) != 3 {
		t.Fatalf("%d records in %v: %v", len(stored), names, err)
	}
	return names[0], stored
}

// TestDiskFindsFlippedBits: in a header they cost that record, in a payload they give ErrCorrupt, in the segment's
// header they cost the segment; elsewhere they matter to nobody. Never are there other bytes or another record.
func TestDiskFindsFlippedBits(t *testing.T) {
	o := testOptions(t.TempDir())
	file, _ := onDisk(t, o)
	clean, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const table, chunks = blockBytes, 9 * blockBytes // 8 slots; records take chunks 0, 1-3, 4-7
	for _, c := range []struct {
		name   string
		at     int
		back   int
		broken int // number of the record that cannot be read
	}{
		{"segment magic", 3, 0, 0},
		{"segment slots", offSlots, 0, 0},
		{"segment padding", 2000, 0, 0},
		{"magic", table + 2, 2, 0},
		{"version", table + offVersion, 2, 0},
		{"key", table + blockBytes + offVariable + 1, 2, 0},
		{"padding of a header", table + 4*blockBytes + 4000, 2, 0},
		{"checksum", table + 4*blockBytes + offSum, 2, 0},
		{"unused header", table + 2*blockBytes + 50, 3, 0},
		{"page", chunks + 4999, 3, 1},
		{"padding of a page", chunks + 5000, 3, 0},
		{"first byte of a state", chunks + 8192, 3, 2},
		{"last byte of a state", chunks + 8192 + 20000, 3, 2},
		{"partial page", chunks + 4*8192 + 25000, 3, 3},
	} {
		dirty := slices.Clone(clean)
		dirty[c.at] ^= 1 << (c.at % 8)
		if err := os.WriteFile(file, dirty, 0o600); err != nil {
			t.Fatal(err)
		}
		d, stored, err := OpenDisk(o)
		if err != nil {
			t.Fatal(err)
		}
		if len(stored) != c.back {
			t.Errorf("%s: %d records, want %d", c.name, len(stored), c.back)
		}
		for _, s := range stored {
			n := s.MTPValidFrom
			r := testRecord(n, n-1)
			if !sameRecord(s.Record, r) {
				t.Errorf("%s: %+v", c.name, s.Record)
			}
			err := sameBytes(d, s.Handle, r, uint64(n))
			if n == c.broken && !errors.Is(err, ErrCorrupt) || n != c.broken && err != nil {
				t.Errorf("%s: record %d: %v", c.name, n, err)
			}
		}
		if err := errors.Join(d.Check(), d.Close()); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestDiskTruncated cuts the file at many places: records that are there in full come back, the others do not, and the
// store goes on.
func TestDiskTruncated(t *testing.T) {
	o := testOptions(t.TempDir())
	file, _ := onDisk(t, o)
	clean, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const chunks = 9 * blockBytes
	for _, c := range []struct{ size, back int }{
		{0, 0}, {100, 0}, {blockBytes, 0}, {chunks, 0}, {chunks + 8191, 0}, {chunks + 8192, 1}, {chunks + 3*8192, 1},
		{chunks + 4*8192, 2}, {len(clean) - 1, 2}, {len(clean), 3}, {len(clean) + 8192, 3},
	} {
		dirty := append(slices.Clone(clean), make([]byte, 8192)...)[:c.size]
		if err := os.WriteFile(file, dirty, 0o600); err != nil {
			t.Fatal(err)
		}
		d, stored, err := OpenDisk(o)
		if err != nil {
			t.Fatal(err)
		}
		if len(stored) != c.back {
			t.Errorf("cut at %d: %d records, want %d", c.size, len(stored), c.back)
		}
		for _, s := range stored {
			n := s.MTPValidFrom
			if err := sameBytes(d, s.Handle, testRecord(n, n-1), uint64(n)); err != nil {
				t.Errorf("cut at %d: %v", c.size, err)
			}
		}
		r := testRecord(50, 2)
		if c.back < 3 {
			if err := sameBytes(d, put(t, d, r, 50), r, 50); err != nil {
				t.Errorf("cut at %d: %v", c.size, err)
			}
		}
		if err := errors.Join(d.Check(), d.Close()); err != nil {
			t.Errorf("cut at %d: %v", c.size, err)
		}
	}
}

// TestDiskLoadsNothingOfAnother identity, and gives its room to the new one.
func TestDiskLoadsNothingOfAnother(t *testing.T) {
	for name, change := range map[string]func(*Identity){
		"model":      func(id *Identity) { id.Model = "other" },
		"arithmetic": func(id *Identity) { id.Arithmetic = "other" },
		"class":      func(id *Identity) { id.Class = "bf16" },
		"page":       func(id *Identity) { id.PageBytes++ },
		"state":      func(id *Identity) { id.StateBytes++ },
		"boundary":   func(id *Identity) { id.Model, id.Arithmetic = "ma", "" },
	} {
		o := testOptions(t.TempDir())
		onDisk(t, o)
		other := filepath.Join(o.Dir, "tier-notes.seg")
		if err := os.WriteFile(other, []byte("not ours"), 0o600); err != nil {
			t.Fatal(err)
		}
		change(&o.Identity)
		d, stored := openTest(t, o)
		if len(stored) != 0 || d.Bytes() != 0 {
			t.Errorf("%s: %d records of %d bytes", name, len(stored), d.Bytes())
		}
		if _, err := os.Stat(other); err != nil {
			t.Errorf("%s: a foreign file: %v", name, err)
		}
	}
}

// TestDiskResolvesConflicts: two records of the same tokens, and headers that name what is not theirs. The later one
// stays, and the earlier one does not come back when the later one goes.
func TestDiskResolvesConflicts(t *testing.T) {
	o := testOptions(t.TempDir())
	d, _, err := OpenDisk(o)
	if err != nil {
		t.Fatal(err)
	}
	r := testRecord(1, 0)
	put(t, d, r, 1)
	later := put(t, d, r, 2)
	other := testRecord(2, 1)
	put(t, d, other, 3)
	s := d.segs[0]
	write := func(at uint32, handle int64, refs ...chunkRef) { // a valid header with those chunks
		h := header{Record: testRecord(int(handle), 1), handle: handle, payload: 20001, chunks: refs}
		if len(refs) == 1 {
			h.Record, h.payload = testRecord(int(handle), 0), 5000
		}
		b := alignedBuffer(blockBytes)
		h.encode(b, d.identity)
		if err := d.writeHeader(chunk{seg: s, index: at}, b); err != nil {
			t.Fatal(err)
		}
	}
	write(3, 1<<20, chunkRef{0, 2, 0})                                       // another's chunk, and not its own place
	write(5, 1<<21, chunkRef{0, 5, 0}, chunkRef{0, 5, 0}, chunkRef{0, 6, 0}) // a chunk twice
	write(6, 1<<22, chunkRef{0, 6, 0}, chunkRef{9, 1, 0}, chunkRef{0, 7, 0}) // no such segment
	write(7, 2, chunkRef{0, 7, 0})                                           // a handle that is later's too
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d, stored, err := OpenDisk(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Check(); err != nil {
		t.Error(err)
	}
	if got := fmt.Sprint(len(stored), d.Len()); got != "2 2" {
		t.Fatalf("%s records", got)
	}
	if err := sameBytes(d, later, r, 2); err != nil {
		t.Error(err)
	}
	if err := d.Drop(later); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, stored = openTest(t, o); len(stored) != 1 || !sameRecord(stored[0].Record, other) {
		t.Errorf("back: %+v", stored)
	}
}
