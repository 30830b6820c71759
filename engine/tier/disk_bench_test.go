package tier

import (
	"errors"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
)

// The sizes of GLM-5.3-Flash: a page of 128 tokens and a state in FP32.
const (
	glmPage  = 128 * 16896
	glmState = 147_619_840
)

// BenchmarkDisk compares reading and writing records with what the disk itself reads in sequence: the same file by
// pieces of the same size (and of 1 MiB) with the same number in flight, without checksums. of-disk is the quotient.
func BenchmarkDisk(b *testing.B) {
	for _, c := range []struct {
		name    string
		id      Identity
		kind    Kind
		records int
		callers int
	}{
		{"state 147 MB", Identity{PageBytes: glmPage, StateBytes: glmState}, State, 8, 1},
		{"page 192 KiB one caller", Identity{PageBytes: 192 << 10, StateBytes: 1 << 20}, Page, 4000, 1},
		{"page 192 KiB 16 callers", Identity{PageBytes: 192 << 10, StateBytes: 1 << 20}, Page, 4000, 16},
	} {
		b.Run(c.name, func(b *testing.B) { benchDisk(b, c.id, c.kind, c.records, c.callers) })
	}
}

func benchDisk(b *testing.B, id Identity, kind Kind, records, callers int) {
	o := DiskOptions{Dir: b.TempDir(), MaxBytes: 2 << 30, SegmentBytes: 2 << 30, Identity: id}
	d, _ := openTest(b, o)
	size := id.PageBytes
	if kind == State {
		size = id.StateBytes
	}
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * 7)
	}
	handles := make([]int64, records)
	begin := time.Now()
	spread(records, callers, func(i int) {
		line := make([]int32, PageTokens)
		line[0] = int32(i)
		r := Record{Kind: kind, At: PageTokens, Parent: Chain("", nil), Chain: Chain("", line), Tokens: line}
		if kind == State {
			r.Parent, r.Tokens = r.Chain, nil
		}
		var err error
		if handles[i], err = d.Put(b.Context(), r, data); err != nil {
			b.Error(err)
		}
	})
	puts := rate(records*size, begin)
	own := fileProbe(d.segs[0].file, int64(records*size), min(d.chunk, maxBuffer), d.o.Queue)
	mega := fileProbe(d.segs[0].file, int64(records*size), minBuffer, defaultQueue)
	bufs := make([][]byte, callers)
	for i := range bufs {
		bufs[i] = make([]byte, size)
	}
	free := make(chan []byte, callers)
	for _, buf := range bufs {
		free <- buf
	}
	var gets, owns, megas []float64
	for b.Loop() { // in turn, since the disk may have others to serve
		begin := time.Now()
		spread(records, callers, func(i int) {
			buf := <-free
			if err := d.Get(handles[i], buf); err != nil {
				b.Error(err)
			}
			free <- buf
		})
		gets = append(gets, rate(records*size, begin))
		o, err1 := own.read()
		m, err2 := mega.read()
		if err := errors.Join(err1, err2); err != nil {
			b.Fatal(err)
		}
		owns, megas = append(owns, o/1e6), append(megas, m/1e6)
	}
	b.ReportMetric(0, "ns/op") // of all three
	b.ReportMetric(median(owns), "disk-MB/s")
	b.ReportMetric(median(megas), "disk-1MiB-MB/s")
	b.ReportMetric(median(gets), "get-MB/s")
	b.ReportMetric(median(gets)/median(owns), "of-disk")
	b.ReportMetric(median(gets)/median(megas), "of-disk-1MiB")
	b.ReportMetric(puts, "put-MB/s")
	if !d.Direct() {
		b.Log("no direct I/O here: these are the page cache's figures")
	}
}

// fileProbe reads the records' own file in sequence: the same blocks of the same disk.
func fileProbe(f *os.File, bytes, piece int64, depth int) *probe {
	p := &probe{file: f, pieces: int(bytes / piece)}
	p.queue.bufs = make(chan []byte, depth)
	for range depth {
		p.queue.give(alignedBuffer(int(piece)))
	}
	return p
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

func rate(bytes int, begin time.Time) float64 {
	return float64(bytes) / 1e6 / time.Since(begin).Seconds()
}

// spread calls f for 0..n-1 from that many goroutines.
func spread(n, callers int, f func(i int)) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// BenchmarkDiskOpen opens a store of 100,000 records, as after a restart.
func BenchmarkDiskOpen(b *testing.B) {
	const records = 100_000
	o := DiskOptions{Dir: b.TempDir(), MaxBytes: 1 << 30, Identity: Identity{PageBytes: 4096, StateBytes: 4096}}
	d, _ := openTest(b, o)
	data := make([]byte, 4096)
	spread(records, 16, func(i int) {
		line := make([]int32, PageTokens)
		line[0] = int32(i)
		r := Record{Kind: Page, At: PageTokens, Parent: Chain("", nil), Chain: Chain("", line), Tokens: line}
		if _, err := d.Put(b.Context(), r, data); err != nil {
			b.Error(err)
		}
	})
	if err := d.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		d, stored, err := OpenDisk(o)
		if err != nil || len(stored) != records {
			b.Fatalf("%d records: %v", len(stored), err)
		}
		b.StopTimer()
		if err := d.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
