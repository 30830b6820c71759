package radix

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// The model stores every page and every snapshot under its whole list of tokens
// (a string, one byte a token, the key in front) and answers every question by
// looking at all of them.

type modelPage struct {
	dev    int32
	low    [tiers]int64
	last   int64 // last use of this page or anything below it
	flying *modelFlight
}

type modelSnap struct {
	at         int
	slot, tail int32
	low        [tiers]int64
	mtp        int
	last       int64
	flying     *modelFlight
}

type modelFlight struct {
	ev         Eviction
	name       string // of the page or snapshot
	orphan     bool
	page, slot int32 // what an orphan holds
	low        [tiers]int64
}

// modelSeq is one user of the tree: its consumed tokens, a reference of its own
// for each full page, and a lock.
type modelSeq struct {
	key      string
	tokens   []int32
	pages    []int32
	lock     Lock
	locked   string // name of the deepest locked page or root; "" before there is one
	lockSnap string
}

type machine struct {
	f       *Forest
	policy  Policy
	pages   *Pool
	slots   *Pool
	mp      map[string]*modelPage
	ms      map[string]*modelSnap
	lost    map[string]bool // dropped for room; snapshots with a "+" behind
	seqs    []*modelSeq
	pins    []*modelPin
	limits  map[string]int64 // by key
	flights []*modelFlight
	freed   map[int64]int // by handle; those of two tiers differ
	now     int64
	handle  int64
	m       Match
}

const (
	modelPages  = 40
	modelSlots  = 8
	modelSeqMax = 5
)

func newMachine(policy Policy) *machine {
	pages, slots := NewPool("page", modelPages), NewPool("slot", modelSlots)
	return &machine{
		f:      NewForest(pages, slots, Options{PageBytes: 10, SlotBytes: 100, Policy: policy}),
		policy: policy, pages: pages, slots: slots,
		mp: map[string]*modelPage{}, ms: map[string]*modelSnap{}, freed: map[int64]int{}, lost: map[string]bool{}, limits: map[string]int64{},
	}
}

func name(key string, tokens []int32) string {
	b := make([]byte, 0, len(key)+1+len(tokens))
	b = append(append(b, key...), ':')
	for _, t := range tokens {
		b = append(b, byte(t))
	}
	return string(b)
}

func nameLen(s string) int { return len(s) - 2 } // keys are one letter

// letters are pages that differ at the first, a middle, or only the last token.
var letters = func() (out [4][PageTokens]int32) {
	out[1][PageTokens-1] = 1
	out[2][64] = 1
	out[3][0] = 1
	return out
}()

// drawLine draws a line of up to 6 pages, often on top of one that is in use.
func (x *machine) drawLine(t *rapid.T) (string, []int32) {
	key := rapid.SampledFrom([]string{"a", "a", "a", "b"}).Draw(t, "key")
	var line []int32
	if len(x.seqs) > 0 && rapid.Bool().Draw(t, "derive") {
		s := x.seqs[rapid.IntRange(0, len(x.seqs)-1).Draw(t, "seq")]
		key = s.key
		line = slices.Clone(s.tokens[:rapid.IntRange(0, len(s.tokens)).Draw(t, "cut")])
	}
	return key, x.grow(t, line)
}

// grow appends tokens by filling pages letter by letter.
func (x *machine) grow(t *rapid.T, line []int32) []int32 {
	want := min(len(line)+rapid.SampledFrom([]int{0, 1, 5, 100, 127, 128, 129, 256, 300}).Draw(t, "more"), 6*PageTokens)
	for len(line) < want {
		off := len(line) % PageTokens
		page := letters[rapid.IntRange(0, len(letters)-1).Draw(t, "letter")]
		line = append(line, page[off:min(PageTokens, off+want-len(line))]...)
	}
	return line
}

func (x *machine) tick() int64 { x.now++; return x.now }

func (x *machine) newHandle() int64 { x.handle++; return x.handle }

func (x *machine) pageLocked(name string) bool {
	return x.pinned(name) || slices.ContainsFunc(x.seqs, func(s *modelSeq) bool { return strings.HasPrefix(s.locked, name) })
}

func (x *machine) snapLocked(name string) bool {
	return x.snapPinned(name) || slices.ContainsFunc(x.seqs, func(s *modelSeq) bool { return s.lockSnap == name })
}

// deepest returns the name of the deepest page present with all before it.
func (x *machine) deepest(key string, tokens []int32) string {
	p := 0
	for (p+1)*PageTokens <= len(tokens) && x.mp[name(key, tokens[:(p+1)*PageTokens])] != nil {
		p++
	}
	return name(key, tokens[:p*PageTokens])
}

func (x *machine) use(path string, now int64) {
	for n, p := range x.mp {
		if strings.HasPrefix(path, n) {
			p.last = max(p.last, now)
		}
	}
}

// ---- actions

func (x *machine) match(t *rapid.T, key string, line []int32) {
	before := x.f.Dump()
	x.f.Match(key, line, &x.m)
	if after := x.f.Dump(); after != before {
		t.Fatalf("Match changed the tree:\n%s\nto\n%s", before, after)
	}
	var want Match
	limit := max(len(line)-1, 0)
	device := true
	for end := PageTokens; end <= limit; end += PageTokens {
		p := x.mp[name(key, line[:end])]
		if p == nil {
			break
		}
		want.Tokens = end
		want.Pages = append(want.Pages, Place{p.dev, p.low[Host], p.low[Disk]})
		if device = device && p.dev >= 0; device {
			want.Device = end
		}
	}
	snapshots := 0
	for at := 1; at <= limit && at < want.Tokens+PageTokens; at++ {
		if s := x.ms[name(key, line[:at])]; s != nil {
			snapshots++
			want.Found = true
			want.Snapshot = Snapshot{At: at, Slot: s.slot, Tail: s.tail, Host: s.low[Host], Disk: s.low[Disk], MTPValidFrom: s.mtp, TailTokens: line[at/PageTokens*PageTokens : at]}
		}
	}
	if got := x.f.Snapshots(key, line); got != snapshots {
		t.Fatalf("Snapshots on %d tokens: got %d, want %d", len(line), got, snapshots)
	}
	if want.Tokens > want.Snapshot.At {
		want.Branch = want.Tokens
	}
	want.Common = x.common(name(key, line[:limit]))
	want.Evicted = x.evicted(key, line[:limit], want.Tokens, want.Start())
	got := x.m
	if got.Tokens != want.Tokens || got.Device != want.Device || !slices.Equal(got.Pages, want.Pages) || got.Branch != want.Branch ||
		got.Common != want.Common || got.Evicted != want.Evicted ||
		got.Found != want.Found || fmt.Sprint(got.Snapshot) != fmt.Sprint(want.Snapshot) {
		t.Fatalf("Match of %d tokens: got %+v\nwant %+v\n%s", len(line), got, want, before)
	}
}

func (x *machine) open(t *rapid.T) {
	if len(x.seqs) == modelSeqMax {
		t.Skip("enough sequences")
	}
	key, line := x.drawLine(t)
	if len(line) == 0 {
		t.Skip("empty")
	}
	x.match(t, key, line)
	s := &modelSeq{key: key, tokens: line[:len(line)-1]}
	s.lock = x.f.Lock(&x.m)
	if x.m.node != nil {
		s.locked = name(key, line[:x.m.Tokens])
	}
	if x.m.Found {
		s.lockSnap = name(key, line[:x.m.Snapshot.At])
	}
	x.f.Touch(&x.m, x.tick())
	x.use(name(key, line[:x.m.Tokens]), x.now)
	if x.m.Found {
		x.ms[s.lockSnap].last = x.now
	}
	x.seqs = append(x.seqs, s)
	for _, p := range x.m.Pages {
		if p.Device < 0 {
			break
		}
		x.pages.Retain(p.Device)
		s.pages = append(s.pages, p.Device)
	}
	x.fill(s)
}

// fill allocates the pages that the sequence lacks, as far as there are any.
func (x *machine) fill(s *modelSeq) {
	for len(s.pages) < len(s.tokens)/PageTokens {
		id, ok := x.f.AllocPage(s.key)
		if !ok {
			s.tokens = s.tokens[:max(len(s.pages)*PageTokens, nameLen(s.locked))]
			return
		}
		s.pages = append(s.pages, id)
	}
}

func (x *machine) pickSeq(t *rapid.T) *modelSeq {
	if len(x.seqs) == 0 {
		t.Skip("no sequence")
	}
	return x.seqs[rapid.IntRange(0, len(x.seqs)-1).Draw(t, "seq")]
}

func (x *machine) extend(t *rapid.T) {
	s := x.pickSeq(t)
	s.tokens = x.grow(t, s.tokens)
	x.fill(s)
}

func (x *machine) insert(t *rapid.T) {
	s := x.pickSeq(t)
	from := rapid.IntRange(0, min(2, len(s.pages))).Draw(t, "from")
	to := rapid.IntRange(from, len(s.pages)).Draw(t, "to")
	swap := rapid.Bool().Draw(t, "swap")
	canon, err := x.f.Insert(s.key, s.tokens, from, s.pages[from:to], x.tick(), nil)
	if to > from && nameLen(x.deepest(s.key, s.tokens[:from*PageTokens])) < from*PageTokens {
		if !errors.Is(err, ErrMissing) {
			t.Fatalf("Insert from a missing page %d: %v", from, err)
		}
		return
	}
	if err != nil || len(canon) != to-from {
		t.Fatalf("Insert: %v, %d pages", err, len(canon))
	}
	for i := from; i < to; i++ {
		n := name(s.key, s.tokens[:(i+1)*PageTokens])
		p := x.mp[n]
		if p == nil {
			p = &modelPage{dev: None}
			x.mp[n] = p
		}
		if p.dev < 0 {
			p.dev = s.pages[i]
		}
		if canon[i-from] != p.dev {
			t.Fatalf("Insert page %d: canonical %d, want %d", i, canon[i-from], p.dev)
		}
		if swap && p.dev != s.pages[i] {
			x.pages.Retain(p.dev)
			x.pages.Release(s.pages[i])
			s.pages[i] = p.dev
		}
	}
	if to > from {
		x.use(name(s.key, s.tokens[:to*PageTokens]), x.now)
	}
}

func (x *machine) publish(t *rapid.T) {
	s := x.pickSeq(t)
	if len(s.tokens) == 0 {
		t.Skip("nothing consumed")
	}
	at := rapid.IntRange(1, len(s.tokens)).Draw(t, "at")
	if rapid.Bool().Draw(t, "edge") {
		at = max(at/PageTokens*PageTokens, min(PageTokens, len(s.tokens)))
	}
	snap := Snapshot{At: at, Slot: None, Tail: None, MTPValidFrom: rapid.IntRange(0, 2).Draw(t, "mtp")}
	switch rapid.IntRange(0, 5).Draw(t, "tier") {
	case 0:
		snap.Host = x.newHandle()
	case 1:
		snap.Disk = x.newHandle()
	default:
		allocSlot, allocPage := func(string) (int32, bool) { return x.slots.Alloc() }, func(string) (int32, bool) { return x.pages.Alloc() }
		if rapid.Bool().Draw(t, "charged") { // else the tree's, if it keeps them
			allocSlot, allocPage = x.f.AllocSlot, x.f.AllocPage
		}
		slot, ok := allocSlot(s.key)
		if !ok {
			t.Skip("no slot")
		}
		defer x.slots.Release(slot)
		snap.Slot = slot
		if at%PageTokens != 0 {
			tail, ok := allocPage(s.key)
			if !ok {
				t.Skip("no tail page")
			}
			defer x.pages.Release(tail)
			snap.Tail = tail
		}
	}
	kept, err := x.f.Publish(s.key, s.tokens[:at], snap, x.tick())
	if nameLen(x.deepest(s.key, s.tokens[:at])) < at/PageTokens*PageTokens {
		if !errors.Is(err, ErrMissing) {
			t.Fatalf("Publish at %d without pages: %v", at, err)
		}
		return
	}
	if err != nil {
		t.Fatalf("Publish at %d: %v", at, err)
	}
	n := name(s.key, s.tokens[:at])
	e := x.ms[n]
	if e == nil {
		e = &modelSnap{at: at, slot: None, tail: None}
		x.ms[n] = e
	}
	if want := snap.Slot >= 0 && e.slot < 0; kept != want {
		t.Fatalf("Publish at %d: kept %v, want %v", at, kept, want)
	}
	if kept {
		e.slot, e.tail = snap.Slot, snap.Tail
	}
	for tier, h := range [tiers]int64{Host: snap.Host, Disk: snap.Disk} {
		if e.low[tier] == 0 {
			e.low[tier] = h
		} else {
			x.free(h)
		}
	}
	e.mtp, e.last = max(e.mtp, snap.MTPValidFrom), x.now
	x.use(name(s.key, s.tokens[:at/PageTokens*PageTokens]), x.now)
}

func (x *machine) advance(t *rapid.T) {
	s := x.pickSeq(t)
	x.f.Advance(&s.lock, s.key, s.tokens)
	if s.lock.node != nil {
		s.locked = x.deepest(s.key, s.tokens)
	}
}

func (x *machine) unlockSnapshot(t *rapid.T) {
	s := x.pickSeq(t)
	x.f.UnlockSnapshot(&s.lock)
	s.lockSnap = ""
}

// unlock leaves the sequence its references only: the tree may lose pages that
// it still has.
func (x *machine) unlock(t *rapid.T) {
	s := x.pickSeq(t)
	x.f.Unlock(&s.lock)
	s.locked, s.lockSnap = "", ""
}

func (x *machine) close(t *rapid.T) {
	s := x.pickSeq(t)
	x.f.Unlock(&s.lock)
	x.f.Unlock(&s.lock)
	for _, p := range s.pages {
		x.pages.Release(p)
	}
	x.seqs = slices.DeleteFunc(x.seqs, func(o *modelSeq) bool { return o == s })
	if rapid.Bool().Draw(t, "put away") {
		from := rapid.SampledFrom([]Tier{Device, Device, Host}).Draw(t, "from")
		evs := x.f.EvictPath(s.key, s.tokens, from)
		path := name(s.key, s.tokens)
		for _, ev := range evs {
			n := x.picked(t, ev)
			if !strings.HasPrefix(path, n) {
				t.Fatalf("EvictPath picked another line's entry at %d", ev.At)
			}
			edge := n[:2+nameLen(n)/PageTokens*PageTokens]
			for o, p := range x.mp {
				if o != edge && strings.HasPrefix(o, edge) && (p.stays(Device) || p.stays(from)) {
					t.Fatalf("EvictPath picked an entry at %d with pages of others below", ev.At)
				}
			}
		}
	}
}

func runModel(t *rapid.T) {
	x := newMachine(rapid.SampledFrom([]Policy{ByValue, LRU}).Draw(t, "policy"))
	t.Repeat(map[string]func(*rapid.T){
		"open": x.open, "open again": x.open, "extend": x.extend,
		"insert": x.insert, "insert again": x.insert, "publish": x.publish, "publish again": x.publish,
		"advance": x.advance, "unlock snapshot": x.unlockSnapshot, "unlock": x.unlock, "close": x.close,
		"match":      func(t *rapid.T) { key, line := x.drawLine(t); x.match(t, key, line) },
		"evictPages": x.evictPages, "evictSlots": x.evictSlots,
		"evictDevice": x.evictLow(Device), "evictHost": x.evictLow(Host), "evictDisk": x.evictLow(Disk), "restore": x.restore, "forget": x.forget,
		"pin": x.pin, "unpin": x.unpin, "limit": x.limit, "evictOwn": x.evictOwn, "evictOwnKind": x.evictOwnKind,
		"settle": x.settle, "settle again": x.settle, "settle more": x.settle,
		"": x.check,
	})
	x.drain(t)
}

func TestModel(t *testing.T) {
	for name, value := range map[string]string{"rapid.steps": "150", "rapid.checks": "1000"} {
		if f := flag.Lookup(name); f.Value.String() == f.DefValue {
			flag.Set(name, value)
			defer flag.Set(name, f.DefValue)
		}
	}
	rapid.Check(t, runModel)
}

func FuzzModel(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(runModel))
}
