package radix

import (
	"fmt"
	"sync"
	"testing"
)

// The large forest: a million pages as 4,000 sessions of 30,000 tokens, eight
// to a root conversation of 4,096 tokens, and eight lines of a million tokens.
const (
	benchSessions = 4000
	benchTokens   = 30_000
	benchShared   = 4096
	benchLong     = 8
)

type benchForest struct {
	f            *Forest
	pages, slots *Pool
	now          int64
	ids, canon   []int32
	m            Match
}

func benchLine(i int) []int32 {
	return line(benchTokens, i, line(benchShared, benchSessions+i/8)...)
}

// put inserts a line and publishes its end, as a session does that closes.
func (b *benchForest) put(l []int32) {
	b.now++
	n := len(l) / PageTokens
	b.ids = b.ids[:0]
	for range n {
		id, ok := b.pages.Alloc()
		if !ok {
			panic("the pool is too small")
		}
		b.ids = append(b.ids, id)
	}
	b.canon, _ = b.f.Insert("k", l, 0, b.ids, b.now, b.canon[:0])
	for _, id := range b.ids {
		b.pages.Release(id)
	}
	slot, _ := b.slots.Alloc()
	b.f.Publish("k", l[:n*PageTokens], Snapshot{At: n * PageTokens, Slot: slot, Tail: None}, b.now)
	b.slots.Release(slot)
}

var million = sync.OnceValue(func() *benchForest {
	b := &benchForest{pages: NewPool("page", 1_100_000), slots: NewPool("slot", benchSessions+100)}
	b.f = NewForest(b.pages, b.slots, Options{PageBytes: 1 << 20, SlotBytes: 136 << 20})
	for i := range benchSessions {
		b.put(benchLine(i))
	}
	for i := range benchLong {
		b.put(line(1<<20, -1-i))
	}
	return b
})

func BenchmarkMatch(b *testing.B) {
	t := million()
	b.Logf("%d pages", t.f.Stats().Pages[Device])
	for _, n := range []int{1000, 8000, 30_000, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var lines [][]int32
			for i := range 8 {
				if n > benchTokens {
					lines = append(lines, line(n, -1-i))
				} else {
					lines = append(lines, benchLine(i * 499)[:n])
				}
			}
			var m Match
			t.f.Match("k", lines[0], &m)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				t.f.Match("k", lines[i%len(lines)], &m)
			}
		})
	}
}

// A child is forked off a session of 30,000 tokens: match, lock, touch, advance
// the lock to the line's last page, unlock.
func BenchmarkFork(b *testing.B) {
	t := million()
	var lines [][]int32
	for i := range 8 {
		lines = append(lines, benchLine(i*499))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		t.fork(lines[i%8])
	}
}

func (b *benchForest) fork(l []int32) {
	b.f.Match("k", l, &b.m)
	lock := b.f.Lock(&b.m)
	b.now++
	b.f.Touch(&b.m, b.now)
	b.f.UnlockSnapshot(&lock)
	b.f.Advance(&lock, "k", l[:floorPage(len(l)-1)])
	b.f.Unlock(&lock)
}

// All pages of a session of 30,000 tokens are inserted again, as at every capture.
func BenchmarkInsertKnown(b *testing.B) {
	t := million()
	var lines [][]int32
	var ids [][]int32
	for i := range 8 {
		l := benchLine(i * 499)
		lines = append(lines, l[:floorPage(len(l))])
		t.f.Match("k", l, &t.m)
		var own []int32
		for _, p := range t.m.Pages {
			own = append(own, p.Device)
		}
		ids = append(ids, own)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		t.insertKnown(lines[i%8], ids[i%8])
	}
}

func (b *benchForest) insertKnown(l, ids []int32) {
	b.now++
	var err error
	if b.canon, err = b.f.Insert("k", l, 0, ids, b.now, b.canon[:0]); err != nil {
		panic(err)
	}
}

// A new turn of 1,024 tokens on a session of 30,000: eight new pages. What the
// turn before added is dropped, not timed.
func BenchmarkInsertNew(b *testing.B) {
	t := million()
	base := benchLine(100)
	full := floorPage(len(base))
	var grown [][]int32
	for i := range 8 {
		grown = append(grown, line(full+1024, 1_000_000+i, base[:full]...))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l := grown[i%8]
		t.ids = t.ids[:0]
		for range 1024 / PageTokens {
			id, _ := t.pages.Alloc()
			t.ids = append(t.ids, id)
		}
		t.now++
		var err error
		if t.canon, err = t.f.Insert("k", l, full/PageTokens, t.ids, t.now, t.canon[:0]); err != nil {
			b.Fatal(err)
		}
		for _, id := range t.ids {
			t.pages.Release(id)
		}
		b.StopTimer()
		for _, ev := range t.f.EvictPath("k", l, Device) {
			if ev.At > full {
				t.f.Dropped(ev)
			} else {
				t.f.Keep(ev)
			}
		}
		b.StartTimer()
	}
}

func BenchmarkEvictSlot(b *testing.B) {
	t := million()
	b.Logf("%d snapshots", t.f.Stats().Snapshots[Device])
	for b.Loop() {
		t.now++
		for _, ev := range t.f.EvictSlots(1, t.now) {
			t.f.Keep(ev)
		}
	}
}

func BenchmarkEvictPages(b *testing.B) {
	t := million()
	b.ReportAllocs()
	for b.Loop() {
		t.now++
		for _, ev := range t.f.EvictPages(64, t.now) {
			t.f.Keep(ev)
		}
	}
}

// Room on a device whose memory is not divided: a snapshot's worth at a time.
func BenchmarkEvictDevice(b *testing.B) {
	t := million()
	b.ReportAllocs()
	for b.Loop() {
		t.now++
		for _, ev := range t.f.EvictDevice(64<<20, t.now) {
			t.f.Keep(ev)
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	t := million()
	for b.Loop() {
		if err := t.f.Check(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	r := newRig(t, 64, 8)
	l := line(4000, 1)
	r.run("k", l)
	b := &benchForest{f: r.f, now: 1000}
	full := l[:floorPage(len(l)-1)]
	r.match("k", l)
	var ids []int32
	for _, p := range r.m.Pages {
		ids = append(ids, p.Device)
	}
	b.insertKnown(full, ids)
	b.fork(l)
	if n := testing.AllocsPerRun(100, func() { b.fork(l) }); n != 0 {
		t.Errorf("%v allocations a fork", n)
	}
	if n := testing.AllocsPerRun(100, func() { b.insertKnown(full, ids) }); n != 0 {
		t.Errorf("%v allocations an insert", n)
	}
}
