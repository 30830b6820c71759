package tokenizer

import (
	"container/heap"
	"hash/maphash"
	"sync/atomic"
)

const (
	// cacheSlots is the number of words that the cache holds; a new word replaces the one in its slot.
	cacheSlots = 1 << 15
	// cacheWordBytes limits the words that are cached; longer ones are seldom seen twice.
	cacheWordBytes = 32
	// scanBytes limits the words that are merged by scanning, which is quadratic but has no overhead.
	scanBytes = 64
)

// bpe merges the bytes of a word, lowest rank first, the leftmost of equal ones first.
type bpe struct {
	byteIDs      [256]int32
	merges       mergeTable
	whole        map[string]int32 // by bytes; only with ignore_merges: words that are tokens are taken as they are
	seed         maphash.Seed
	cache        []atomic.Pointer[cachedWord]
	ignoreMerges bool
}

type cachedWord struct {
	word string
	ids  []int32
}

// mergeTable maps a pair of ids to its merge: a hash table with open addressing, at most half full.
type mergeTable struct {
	slots []mergeSlot
	mask  uint64
}

type mergeSlot struct {
	pair   uint64 // left<<32 | right, noPair when free
	rank   int32
	merged int32
}

const (
	noPair = ^uint64(0)
	noRank = int32(1<<31 - 1)
)

func newMergeTable(n int) mergeTable {
	size := 16
	for size < 2*n {
		size *= 2
	}
	t := mergeTable{slots: make([]mergeSlot, size), mask: uint64(size - 1)}
	for i := range t.slots {
		t.slots[i].pair = noPair
	}
	return t
}

func pairOf(left, right int32) uint64 { return uint64(uint32(left))<<32 | uint64(uint32(right)) }

func pairHash(p uint64) uint64 {
	p *= 0x9e3779b97f4a7c15
	return p ^ p>>29
}

// put adds a merge; a pair that is there already keeps its first, lower rank and put reports false.
func (t *mergeTable) put(left, right, rank, merged int32) bool {
	p := pairOf(left, right)
	for i := pairHash(p) & t.mask; ; i = (i + 1) & t.mask {
		switch t.slots[i].pair {
		case p:
			return false
		case noPair:
			t.slots[i] = mergeSlot{p, rank, merged}
			return true
		}
	}
}

// get returns the rank of the pair and the id it merges to; noRank if it does not merge.
func (t *mergeTable) get(left, right int32) (rank, merged int32) {
	p := pairOf(left, right)
	for i := pairHash(p) & t.mask; ; i = (i + 1) & t.mask {
		s := &t.slots[i]
		if s.pair == p {
			return s.rank, s.merged
		}
		if s.pair == noPair {
			return noRank, 0
		}
	}
}

// append adds the ids of one word to out.
func (b *bpe) append(out []int32, word string) []int32 {
	if len(word) == 1 {
		return append(out, b.byteIDs[word[0]])
	}
	if b.ignoreMerges {
		if id, ok := b.whole[word]; ok {
			return append(out, id)
		}
	}
	if len(word) > cacheWordBytes {
		return b.merge(out, word)
	}
	slot := &b.cache[maphash.String(b.seed, word)%cacheSlots]
	if c := slot.Load(); c != nil && c.word == word {
		return append(out, c.ids...)
	}
	from := len(out)
	out = b.merge(out, word)
	ids := make([]int32, len(out)-from)
	copy(ids, out[from:])
	// The word is copied: a piece of a long text would keep the whole text alive.
	slot.Store(&cachedWord{word: string([]byte(word)), ids: ids})
	return out
}

func (b *bpe) merge(out []int32, word string) []int32 {
	if len(word) <= scanBytes {
		return b.mergeScan(out, word)
	}
	return b.mergeHeap(out, word)
}

// mergeScan looks for the lowest rank again after each merge.
func (b *bpe) mergeScan(out []int32, word string) []int32 {
	var ids, ranks, to [scanBytes]int32 // ranks[i], to[i]: of the pair (i, i+1)
	n := len(word)
	for i := 0; i < n; i++ {
		ids[i] = b.byteIDs[word[i]]
	}
	for i := 0; i+1 < n; i++ {
		ranks[i], to[i] = b.merges.get(ids[i], ids[i+1])
	}
	for n > 1 {
		at, best := 0, noRank
		for i, r := range ranks[:n-1] {
			if r < best {
				at, best = i, r
			}
		}
		if best == noRank {
			break
		}
		ids[at] = to[at]
		copy(ids[at+1:n-1], ids[at+2:n])
		copy(ranks[at:n-2], ranks[at+1:n-1])
		copy(to[at:n-2], to[at+1:n-1])
		n--
		if at+1 < n {
			ranks[at], to[at] = b.merges.get(ids[at], ids[at+1])
		}
		if at > 0 {
			ranks[at-1], to[at-1] = b.merges.get(ids[at-1], ids[at])
		}
	}
	return append(out, ids[:n]...)
}

// mergeHeap keeps the candidates in a heap and the symbols in a linked list: n log n for long words.
func (b *bpe) mergeHeap(out []int32, word string) []int32 {
	syms := make([]symbol, len(word))
	h := make(candidates, 0, len(word))
	for i := range syms {
		syms[i] = symbol{id: b.byteIDs[word[i]], prev: int32(i - 1), next: int32(i + 1)}
	}
	syms[len(syms)-1].next = -1
	for i := 0; i+1 < len(syms); i++ {
		if rank, merged := b.merges.get(syms[i].id, syms[i+1].id); rank != noRank {
			h = append(h, candidate{rank, int32(i), pairOf(syms[i].id, syms[i+1].id), merged})
		}
	}
	heap.Init(&h)
	push := func(i int32) {
		if i < 0 || syms[i].next < 0 {
			return
		}
		r := syms[i].next
		if rank, merged := b.merges.get(syms[i].id, syms[r].id); rank != noRank {
			heap.Push(&h, candidate{rank, i, pairOf(syms[i].id, syms[r].id), merged})
		}
	}
	for len(h) > 0 {
		c := heap.Pop(&h).(candidate)
		left := &syms[c.at]
		// A candidate is stale when one of its two symbols has been merged since.
		if left.id < 0 || left.next < 0 || pairOf(left.id, syms[left.next].id) != c.pair {
			continue
		}
		right := &syms[left.next]
		left.id, left.next = c.merged, right.next
		right.id = -1
		if left.next >= 0 {
			syms[left.next].prev = c.at
		}
		push(left.prev)
		push(c.at)
	}
	for i := int32(0); i >= 0; i = syms[i].next {
		out = append(out, syms[i].id)
	}
	return out
}

type symbol struct{ id, prev, next int32 }

type candidate struct {
	rank, at int32
	pair     uint64
	merged   int32
}

type candidates []candidate

func (c candidates) Len() int { return len(c) }
func (c candidates) Less(i, j int) bool {
	return c[i].rank < c[j].rank || c[i].rank == c[j].rank && c[i].at < c[j].at
}
func (c candidates) Swap(i, j int) { c[i], c[j] = c[j], c[i] }
func (c *candidates) Push(x any)   { *c = append(*c, x.(candidate)) }
func (c *candidates) Pop() any {
	last := len(*c) - 1
	x := (*c)[last]
	*c = (*c)[:last]
	return x
}
