package tier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
)

// Errors of the disk store alone.
var (
	ErrLocked = errors.New("directory is in use by another process")
	ErrClosed = errors.New("tier is closed")
)

const (
	defaultQueue   = 16       // I/Os under way at once
	minSegment     = 64 << 20 // least bytes of a segment file by default
	segmentsAtMost = 64       // about how many segment files MaxBytes makes by default
)

// Identity says which bytes a record may be loaded into: digests of the model and of the arithmetic, the numeric class,
// and the sizes that follow from them. A record of another identity is never loaded.
type Identity struct {
	Model, Arithmetic, Class string
	PageBytes, StateBytes    int
}

// DiskOptions configure a store. SegmentBytes and Queue have defaults.
type DiskOptions struct {
	Dir          string // created if it is missing
	MaxBytes     int64  // bound on the bytes of all segment files: headers, padding and free room included
	SegmentBytes int64  // size of a segment file, 0: a 64th of MaxBytes, at least 64 MiB
	Queue        int    // I/Os under way at once, 0: 16; each has a buffer of 1 to 4 MiB
	Identity     Identity
}

// Kind says what a record holds.
type Kind uint8

// Kinds of a record. A page has PageBytes; a state has StateBytes, or with a partial page (Tokens not empty) both.
const (
	Page Kind = iota
	State
)

func (k Kind) String() string {
	if k == Page {
		return "page"
	}
	return "state"
}

// Record describes what is stored. Key is the namespace (at most 1,024 bytes), Tokens are those of the page or of the
// state's partial page (at most PageTokens). Chain is the hash of the tokens [0, At), Parent that of
// [0, At-len(Tokens)).
type Record struct {
	Kind          Kind
	Key           string
	At            int
	Parent, Chain [16]byte
	Tokens        []int32
	MTPValidFrom  int
}

// Stored is a record on the disk. Bytes is what it takes of Max, headers and padding included.
type Stored struct {
	Record
	Handle, Bytes int64
}

// Disk keeps pages and states in segment files of one directory. It is safe for concurrent use; every call but Bytes,
// Max, Len, Cost and Direct does I/O, so the engine's loop makes none of the others.
//
// A segment file is a header, a table of one header block for each of its chunks, and the chunks. Chunks are all of one
// size, so no room is ever too small for a record of another kind. A record takes as many chunks as it needs, of any
// segments; its header is in the table beside its first chunk.
//
// Invariants (Check, and what open does after a kill -9):
//   - A record is on the disk if and only if its header is valid. The header is written when the payload is complete,
//     and cleared before a chunk of the record is used again. So what Put returned is there after a restart, what Drop
//     returned for is not, and of what was under way there is all or nothing.
//   - A handle is never 0 and never used twice while a process runs. After a restart the records keep theirs.
//   - Every chunk of a segment is free, in exactly one record, or given up for an I/O error (until the next open).
//   - The bytes that Get returns are those that Put was given, or Get fails with ErrCorrupt.
//   - The segment files are never larger than MaxBytes together.
//
// Nothing is synced before Close: it is a cache. After a power loss any record may be missing, come back, or fail with
// ErrCorrupt; none is wrong.
type Disk struct {
	o        DiskOptions
	fs       files
	lock     *os.File
	direct   bool
	identity [32]byte
	chunk    int64       // bytes of a chunk, a multiple of blockBytes
	bufs     chan []byte // Queue aligned buffers: who holds one may do one I/O

	gate   sync.RWMutex // held for reading by every operation, for writing by Check and Close
	closed bool         // guarded by gate

	growing sync.Mutex // held to create and remove segment files; taken before mu

	mu      sync.Mutex
	segs    []*segment        // guarded by mu; by number
	size    int64             // guarded by mu; bytes of all segment files
	slots   int               // guarded by mu; chunks of all segments
	free    int               // guarded by mu; those of them that are free
	refused bool              // guarded by mu; the file system had no room for the segment that was tried last
	lost    []chunk           // guarded by mu; those given up: they count as used
	last    int64             // guarded by mu; the last handle given out
	records map[int64]*record // guarded by mu
}

// record is what memory keeps of a stored record.
type record struct {
	chunks  []chunk
	payload int64
	readers int  // guarded by mu; the chunks are free when a dropped record has none
	dropped bool // guarded by mu
}

// chunk is a place in a segment and the checksum of the payload there.
type chunk struct {
	seg   *segment
	index uint32
	sum   uint32
}

// OpenDisk locks the directory, reads all headers and returns what is stored, sorted by At with pages before states, so
// that a record's ancestors come first. Room of what is partial or fails its header's checksum is used again; files of
// another identity or version are removed. Of two records with the same kind, key and chain the later one stays. A
// smaller MaxBytes than before drops whole segment files: in the order of their numbers, those that no longer fit.
// ErrLocked while another Disk has the directory.
func OpenDisk(o DiskOptions) (*Disk, []Stored, error) { return openDisk(o, system) }

func openDisk(o DiskOptions, fs files) (*Disk, []Stored, error) {
	if o.Queue == 0 {
		o.Queue = defaultQueue
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = max(minSegment, o.MaxBytes/segmentsAtMost)
	}
	if o.Queue < 0 || o.SegmentBytes < 0 || o.Identity.PageBytes <= 0 || o.Identity.StateBytes <= 0 {
		return nil, nil, fmt.Errorf("sizes %d, %d, queue %d, segments of %d bytes", o.Identity.PageBytes,
			o.Identity.StateBytes, o.Queue, o.SegmentBytes)
	}
	d := &Disk{o: o, fs: fs, identity: o.Identity.digest(), records: map[int64]*record{}}
	most := int64(o.Identity.PageBytes + o.Identity.StateBytes)
	d.chunk = alignUp(max(int64(o.Identity.PageBytes), (most+maxChunks-1)/maxChunks))
	d.o.SegmentBytes = max(o.SegmentBytes, d.segmentBytes(1))
	if d.fit(o.MaxBytes) == 0 {
		return nil, nil, fmt.Errorf("%d bytes hold no record, one takes %d", o.MaxBytes, d.segmentBytes(1))
	}
	d.bufs = make(chan []byte, o.Queue)
	for range o.Queue {
		d.bufs <- alignedBuffer(int(min(max(d.chunk, minBuffer), maxBuffer)))
	}
	stored, err := d.open()
	if err != nil {
		for _, s := range d.segs {
			_ = s.file.Close() // the first error is the one to tell
		}
		if d.lock != nil {
			_ = d.lock.Close()
		}
		return nil, nil, fmt.Errorf("in %s: %w", o.Dir, err)
	}
	return d, stored, nil
}

// Put stores the parts, one after the other, and returns the record's handle when all of it is in the file. It may be
// called from any goroutine and waits while Queue I/Os are under way; the parts must not change meanwhile. ErrFull when
// MaxBytes or the file system has no room. After an error (ctx's too) nothing is stored.
func (d *Disk) Put(ctx context.Context, r Record, parts ...[]byte) (int64, error) {
	d.gate.RLock()
	defer d.gate.RUnlock()
	handle, err := d.put(ctx, r, parts)
	if noRoom(err) {
		err = fmt.Errorf("%w: %w", ErrFull, err)
	}
	if err != nil {
		return 0, fmt.Errorf("store %s at %d: %w", r.Kind, r.At, err)
	}
	return handle, nil
}

func (d *Disk) put(ctx context.Context, r Record, parts [][]byte) (int64, error) {
	if d.closed {
		return 0, ErrClosed
	}
	rec := &record{payload: total(parts)}
	if err := d.validate(&r, rec.payload); err != nil {
		return 0, err
	}
	handle, err := d.reserve(rec)
	if err != nil {
		return 0, err
	}
	if err := d.write(ctx, rec, parts); err != nil {
		d.release(rec.chunks)
		return 0, err
	}
	h := header{Record: r, handle: handle, payload: rec.payload, chunks: make([]chunkRef, len(rec.chunks))}
	for i, c := range rec.chunks {
		h.chunks[i] = chunkRef{c.seg.number, c.index, c.sum}
	}
	buf, err := d.take(ctx)
	if err != nil {
		d.release(rec.chunks)
		return 0, err
	}
	defer d.give(buf)
	h.encode(buf[:blockBytes], d.identity)
	if err := d.writeHeader(rec.chunks[0], buf); err != nil {
		// The block may be on the disk all the same. Unless it can be cleared, the chunks are given up: a valid header
		// must not point to somebody else's bytes.
		if clearErr := d.clearHeader(rec.chunks[0], buf); clearErr == nil {
			d.release(rec.chunks)
		} else {
			d.mu.Lock()
			d.lost = append(d.lost, rec.chunks...)
			d.mu.Unlock()
		}
		return 0, err
	}
	d.mu.Lock()
	d.records[handle] = rec
	d.mu.Unlock()
	return handle, nil
}

// validate refuses a record that a header or Get could not represent.
func (d *Disk) validate(r *Record, payload int64) error {
	want := int64(d.o.Identity.PageBytes)
	if r.Kind == State {
		want = int64(d.o.Identity.StateBytes)
		if len(r.Tokens) > 0 {
			want += int64(d.o.Identity.PageBytes)
		}
	}
	switch {
	case r.Kind > State || r.Kind == Page && len(r.Tokens) == 0:
		return fmt.Errorf("kind %d with %d tokens", r.Kind, len(r.Tokens))
	case len(r.Key) > maxKey:
		return fmt.Errorf("key of %d bytes, at most %d", len(r.Key), maxKey)
	case len(r.Tokens) > maxTokens || r.At < len(r.Tokens):
		return fmt.Errorf("%d tokens, at most %d", len(r.Tokens), min(maxTokens, r.At))
	case payload != want:
		return fmt.Errorf("%d bytes, want %d", payload, want)
	case ChainNext(r.Parent, r.Tokens) != r.Chain:
		return errors.New("the chain does not follow from its parent and tokens")
	}
	return nil
}

// Get fills the caller's buffers, in the order that Put had them; together they must have the record's length. After
// an error their contents mean nothing. ErrUnknown when the handle was dropped (a Drop during Get does not disturb it),
// ErrCorrupt when the bytes are not those that were stored.
func (d *Disk) Get(handle int64, parts ...[]byte) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if err := d.get(handle, parts); err != nil {
		return fmt.Errorf("read handle %d: %w", handle, err)
	}
	return nil
}

func (d *Disk) get(handle int64, parts [][]byte) error {
	if d.closed {
		return ErrClosed
	}
	d.mu.Lock()
	rec := d.records[handle]
	if rec == nil {
		d.mu.Unlock()
		return ErrUnknown
	}
	rec.readers++
	d.mu.Unlock()
	err := d.read(rec, parts)
	d.mu.Lock()
	rec.readers--
	gone := rec.dropped && rec.readers == 0
	d.mu.Unlock()
	if gone {
		d.release(rec.chunks)
	}
	return err
}

// Drop forgets a record; after a restart it does not come back. A Get that is under way is not disturbed. After an I/O
// error the record is still there and may be dropped again. ErrUnknown when the handle is not there.
func (d *Disk) Drop(handle int64) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	if err := d.drop(handle); err != nil {
		return fmt.Errorf("drop handle %d: %w", handle, err)
	}
	return nil
}

func (d *Disk) drop(handle int64) error {
	if d.closed {
		return ErrClosed
	}
	d.mu.Lock()
	rec := d.records[handle]
	delete(d.records, handle)
	d.mu.Unlock()
	if rec == nil {
		return ErrUnknown
	}
	buf, err := d.take(context.Background())
	if err != nil {
		return err
	}
	err = d.clearHeader(rec.chunks[0], buf)
	d.give(buf)
	d.mu.Lock()
	if err != nil {
		d.records[handle] = rec
	}
	rec.dropped = err == nil
	gone := rec.dropped && rec.readers == 0
	d.mu.Unlock()
	if gone {
		d.release(rec.chunks)
	}
	return err
}

// Cost is what a payload takes of Max, headers and padding included. As long as Bytes and the cost are within Max, Put
// finds room, unless the file system has none.
func (d *Disk) Cost(payload int64) int64 { return int64(d.chunksOf(payload)) * (blockBytes + d.chunk) }

// Bytes is what is stored now, headers and padding included.
func (d *Disk) Bytes() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return int64(d.slots-d.free) * (blockBytes + d.chunk)
}

// Max is the part of MaxBytes that records can fill. After the file system has refused a segment it is what the present
// ones hold, until another try succeeds.
func (d *Disk) Max() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	slots := d.slots
	if !d.refused {
		slots += d.fit(d.o.MaxBytes - d.size)
	}
	return int64(slots) * (blockBytes + d.chunk)
}

// Len is the number of records.
func (d *Disk) Len() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.records)
}

// Direct reports whether I/O goes past the page cache. File systems that refuse that get buffered I/O.
func (d *Disk) Direct() bool { return d.direct }

// Close waits for I/O under way, removes empty files, syncs the others and unlocks the directory. Later calls fail with
// ErrClosed; a second Close does nothing.
func (d *Disk) Close() error {
	d.gate.Lock()
	defer d.gate.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	d.shrink(0)
	var errs []error
	for _, s := range d.segs {
		errs = append(errs, d.fs.sync(s.file), s.file.Close())
	}
	errs = append(errs, d.lock.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close disk tier: %w", err)
	}
	return nil
}
