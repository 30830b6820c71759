package tier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"rocket/internal/leaktest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		crashChild(dir)
	}
	leaktest.Main(m)
}

// testIdentity has pages of an odd length that are padded, and states of several chunks.
var testIdentity = Identity{Model: "m", Arithmetic: "a", Class: "f32", PageBytes: 5000, StateBytes: 20001}

func testOptions(dir string) DiskOptions {
	// A segment has 8 chunks of 8 KiB, the bound has room for 3 segments and a bit.
	return DiskOptions{Dir: dir, MaxBytes: 350 << 10, SegmentBytes: 100 << 10, Queue: 3, Identity: testIdentity}
}

// quickDir makes a directory for the tests of many operations: in memory where the system has such a place. done
// removes it.
func quickDir(t interface{ Fatal(args ...any) }) (dir string, done func()) {
	base := "/dev/shm"
	if info, err := os.Stat(base); err != nil || !info.IsDir() {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "rocket-tier-")
	if err != nil {
		t.Fatal(err)
	}
	return dir, func() { _ = os.RemoveAll(dir) }
}

func openTest(t testing.TB, o DiskOptions) (*Disk, []Stored) {
	t.Helper()
	d, stored, err := OpenDisk(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Check(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d, stored
}

// testRecord makes a record of line number n: a page, a state at a page's edge or a state within a page.
func testRecord(n int, shape int) Record {
	line := make([]int32, 128+[]int{128, 0, 77}[shape])
	for i := range line {
		line[i] = int32(n*1000 + i)
	}
	key := fmt.Sprintf("key %d", n%3)
	r := Record{Kind: State, Key: key, At: len(line), MTPValidFrom: n}
	r.Tokens = line[128:]
	if shape == 0 {
		r.Kind = Page
	}
	r.Parent, r.Chain = Chain(key, line[:128]), Chain(key, line)
	return r
}

// testPayload is what a record of that seed holds, cut into parts at odd places.
func testPayload(r Record, seed uint64) [][]byte {
	n := testIdentity.PageBytes
	if r.Kind == State {
		n = testIdentity.StateBytes
		if len(r.Tokens) > 0 {
			n += testIdentity.PageBytes
		}
	}
	b := make([]byte, n)
	var chacha [32]byte
	binary.LittleEndian.PutUint64(chacha[:], seed)
	_, _ = rand.NewChaCha8(chacha).Read(b) // never fails
	cut := 1 + int(seed%uint64(n-1))
	return [][]byte{b[:cut], {}, b[cut:]}
}

func put(t testing.TB, d *Disk, r Record, seed uint64) int64 {
	t.Helper()
	h, err := d.Put(t.Context(), r, testPayload(r, seed)...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// sameBytes reads a record into parts cut elsewhere than Put's.
func sameBytes(d *Disk, handle int64, r Record, seed uint64) error {
	want := bytes.Join(testPayload(r, seed), nil)
	got := make([]byte, len(want))
	if err := d.Get(handle, got[:33], got[33:34], got[34:]); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("handle %d: other bytes without an error", handle)
	}
	return nil
}

func sameRecord(a, b Record) bool {
	return a.Kind == b.Kind && a.Key == b.Key && a.At == b.At && a.Parent == b.Parent && a.Chain == b.Chain &&
		slices.Equal(a.Tokens, b.Tokens) && a.MTPValidFrom == b.MTPValidFrom
}

// TestDiskModel runs random puts, gets, drops and restarts against a map, with a bound that is hit.
func TestDiskModel(t *testing.T) {
	type live struct {
		Record
		seed uint64
	}
	fs := system
	fs.sync = func(*os.File) error { return nil } // slow, and of no use to a process that lives
	rapid.Check(t, func(t *rapid.T) {
		dir, done := quickDir(t)
		defer done()
		d, _, err := openDisk(testOptions(dir), fs)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = d.Close() }()
		model := map[int64]live{}
		var handles []int64
		lines := 0
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				lines++
				r := testRecord(lines, rapid.IntRange(0, 2).Draw(t, "shape"))
				cost := d.Cost(total(testPayload(r, 1)))
				fits := d.Bytes()+cost <= d.Max()
				h, err := d.Put(t.Context(), r, testPayload(r, uint64(lines))...)
				if fits != (err == nil) || !fits && !errors.Is(err, ErrFull) {
					t.Fatalf("put of %d at %d of %d: %v", cost, d.Bytes(), d.Max(), err)
				}
				if err == nil {
					if _, known := model[h]; known || h == 0 {
						t.Fatalf("handle %d again", h)
					}
					model[h] = live{r, uint64(lines)}
					handles = append(handles, h)
				}
			},
			"get": func(t *rapid.T) {
				if len(handles) == 0 {
					t.Skip()
				}
				h := rapid.SampledFrom(handles).Draw(t, "handle")
				want, known := model[h]
				if !known {
					want = live{testRecord(1, 0), 1}
				}
				if err := sameBytes(d, h, want.Record, want.seed); known != (err == nil) || !known && !errors.Is(err, ErrUnknown) {
					t.Fatalf("get %d: %v", h, err)
				}
			},
			"drop": func(t *rapid.T) {
				if len(handles) == 0 {
					t.Skip()
				}
				h := rapid.SampledFrom(handles).Draw(t, "handle")
				_, known := model[h]
				if err := d.Drop(h); known != (err == nil) || !known && !errors.Is(err, ErrUnknown) {
					t.Fatalf("drop %d: %v", h, err)
				}
				delete(model, h)
			},
			"restart": func(t *rapid.T) {
				if err := d.Close(); err != nil {
					t.Fatal(err)
				}
				var stored []Stored
				if d, stored, err = openDisk(testOptions(dir), fs); err != nil {
					t.Fatal(err)
				}
				if len(stored) != len(model) {
					t.Fatalf("%d records are back, want %d", len(stored), len(model))
				}
				for i, s := range stored {
					if want, known := model[s.Handle]; !known || !sameRecord(s.Record, want.Record) {
						t.Fatalf("back: %+v, want %+v", s, want)
					}
					if i > 0 && (s.At < stored[i-1].At || s.At == stored[i-1].At && s.Kind < stored[i-1].Kind) {
						t.Fatalf("record %d is not in order", i)
					}
				}
				handles = slices.DeleteFunc(handles, func(h int64) bool { _, known := model[h]; return !known }) // theirs may come again
			},
			"": func(t *rapid.T) {
				if err := d.Check(); err != nil {
					t.Fatal(err)
				}
				var want int64
				for _, l := range model {
					want += d.Cost(total(testPayload(l.Record, 1)))
				}
				if d.Bytes() != want || d.Len() != len(model) || d.Bytes() > d.Max() {
					t.Fatalf("%d bytes in %d records, want %d in %d", d.Bytes(), d.Len(), want, len(model))
				}
			},
		})
		for h, l := range model {
			if err := sameBytes(d, h, l.Record, l.seed); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestDiskRefuses(t *testing.T) {
	d, _ := openTest(t, testOptions(t.TempDir()))
	good := testRecord(1, 2)
	parts := testPayload(good, 1)
	for name, change := range map[string]func(r *Record, p *[][]byte){
		"a byte short":    func(_ *Record, p *[][]byte) { (*p)[0] = (*p)[0][1:] },
		"no partial page": func(r *Record, p *[][]byte) { *p = testPayload(testRecord(1, 1), 1) },
		"page without token": func(r *Record, p *[][]byte) {
			*r, *p = testRecord(1, 0), testPayload(testRecord(1, 0), 1)
			r.Tokens = nil
		},
		"unknown kind": func(r *Record, _ *[][]byte) { r.Kind = 2 },
		"long key":     func(r *Record, _ *[][]byte) { r.Key = string(make([]byte, maxKey+1)) },
		"many tokens": func(r *Record, _ *[][]byte) {
			r.Tokens = make([]int32, maxTokens+1)
			r.Chain = ChainNext(r.Parent, r.Tokens)
		},
		"more tokens than at": func(r *Record, _ *[][]byte) { r.At = len(r.Tokens) - 1 },
		"other chain":         func(r *Record, _ *[][]byte) { r.Chain[3] ^= 1 },
	} {
		r, p := good, slices.Clone(parts)
		change(&r, &p)
		if h, err := d.Put(t.Context(), r, p...); err == nil {
			t.Errorf("%s: stored as %d", name, h)
		}
	}
	h := put(t, d, good, 1)
	if err := d.Get(h, make([]byte, 3)); err == nil || errors.Is(err, ErrCorrupt) {
		t.Errorf("get into 3 bytes: %v", err)
	}
	if err := sameBytes(d, h, good, 1); err != nil {
		t.Error(err)
	}
	if d.Len() != 1 || d.Bytes() != d.Cost(25001) {
		t.Errorf("%d records of %d bytes", d.Len(), d.Bytes())
	}
	limit := testRecord(2, 2)
	limit.Key, limit.At, limit.MTPValidFrom = string(make([]byte, maxKey)), 1<<40, -1
	lh := put(t, d, limit, 2)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	_, stored := openTest(t, d.o)
	if len(stored) != 2 || stored[1].Handle != lh || !sameRecord(stored[1].Record, limit) {
		t.Errorf("back: %+v", stored)
	}
}

func TestDiskIsAlone(t *testing.T) {
	o := testOptions(filepath.Join(t.TempDir(), "not", "there"))
	d, _ := openTest(t, o)
	if _, _, err := OpenDisk(o); !errors.Is(err, ErrLocked) {
		t.Fatalf("second open: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := d.Put(t.Context(), testRecord(1, 0), testPayload(testRecord(1, 0), 1)...)
	for _, err := range []error{err, d.Get(1), d.Drop(1), d.Check()} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if names, _ := filepath.Glob(filepath.Join(o.Dir, "*")); len(names) != 1 {
		t.Errorf("an empty store leaves %v", names)
	}
	openTest(t, o)
}

func TestDiskNeedsADirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*DiskOptions){
		"a file":      func(o *DiskOptions) { o.Dir = file },
		"no room":     func(o *DiskOptions) { o.MaxBytes = 12 << 10 },
		"no sizes":    func(o *DiskOptions) { o.Identity.PageBytes = 0 },
		"less than 0": func(o *DiskOptions) { o.Queue = -1 },
	} {
		o := testOptions(t.TempDir())
		change(&o)
		if d, _, err := OpenDisk(o); err == nil {
			t.Errorf("%s: opened", name)
			_ = d.Close()
		}
	}
	if os.Getuid() == 0 {
		return // root writes anywhere
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenDisk(testOptions(dir)); !errors.Is(err, os.ErrPermission) {
		t.Errorf("read-only directory: %v", err)
	}
}
