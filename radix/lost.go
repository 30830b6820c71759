package radix

// lostEntries bounds what is remembered of entries dropped for room: one hash
// each in a table of this many places (512 KiB). A later one with the same place
// replaces an earlier one, whose line then reads as never seen.
const lostEntries = 1 << 16

// lost remembers dropped pages and snapshots by the hash of all their tokens, so
// that a cold line can say whether room was the reason. It is a hint: a wrong
// answer changes a report, nothing else.
type lost []uint64

func (l lost) add(hash uint64)      { l[hash%lostEntries] = hash }
func (l lost) has(hash uint64) bool { return l[hash%lostEntries] == hash }

// lostSnap sets the hashes of snapshots apart from those of pages.
const lostSnap = 0xa5a5a5a5a5a5a5a5

// keyHash is where the chains of a namespace key begin.
func keyHash(key string) uint64 {
	var hash uint64
	for i := range len(key) {
		hash = chain(hash, []int32{int32(key[i])})
	}
	return hash
}

// chain goes on with the hash of a line from its beginning.
func chain(hash uint64, tokens []int32) uint64 {
	for _, t := range tokens {
		hash = (hash ^ uint64(uint32(t)) ^ 1<<40) * 0x9e3779b97f4a7c15
		hash ^= hash >> 32
	}
	return hash
}

// lose remembers a snapshot that is dropped for room.
func (f *Forest) lose(s *snap) {
	f.lost.add(chain(s.node.hash, s.TailTokens) ^ lostSnap)
	s.node.lostSnaps = true
}

// loseBelow remembers a page that is dropped for room with all that hangs on it.
func (f *Forest) loseBelow(n *node) {
	f.lost.add(n.hash)
	for _, s := range n.snaps {
		f.lose(s)
	}
	for _, k := range n.kids {
		f.loseBelow(k)
	}
}

// evicted says whether a line that ends its walk at n, and may consume limit
// tokens, would have used something that was dropped: the page after n, or a
// snapshot past start.
func (f *Forest) evicted(n *node, line []int32, limit, start int) bool {
	if next := n.end() + PageTokens; next <= limit && f.lost.has(chain(n.hash, line[n.end():next])) {
		return true
	}
	for left := lostChecks; n != nil && n.end()+PageTokens > start && left > 0; n = n.parent {
		if !n.lostSnaps {
			continue
		}
		left--
		hash := n.hash
		for at := n.end(); ; at++ {
			if at > start && f.lost.has(hash^lostSnap) {
				return true
			}
			if at == limit || at == n.end()+PageTokens-1 {
				break
			}
			hash = chain(hash, line[at:at+1])
		}
	}
	return false
}

// lostChecks bounds how many pages of a line are asked about dropped snapshots,
// from its end on: each may have lost other lines' only.
const lostChecks = 8

// common is how many tokens, at most limit, the line shares with what is known
// beyond n: the nearest of its children and of its snapshots' tails. parts says
// that something known goes on in another way there, rather than ending.
func (n *node) common(line []int32, limit int) (tokens int, parts bool) {
	rest := line[n.end():limit]
	if len(rest) > PageTokens {
		rest = rest[:PageTokens]
	}
	best := 0
	// Of sorted pages the nearest are those beside the place of the rest.
	lo, hi := 0, len(n.kids)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if shared := prefix(n.kids[mid].tokens[:], rest); shared == len(rest) {
			return n.end() + shared, false
		} else if n.kids[mid].tokens[shared] < rest[shared] {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	see := func(known []int32) {
		switch shared := prefix(known, rest); {
		case shared > best:
			best, parts = shared, len(known) > shared
		case shared == best && len(known) > shared:
			parts = true
		}
	}
	for _, k := range n.kids[max(lo-1, 0):min(lo+1, len(n.kids))] {
		see(k.tokens[:])
	}
	for _, s := range n.snaps {
		see(s.TailTokens)
	}
	return n.end() + best, parts && best < len(rest)
}

func prefix(a, b []int32) int {
	b = b[:min(len(a), len(b))]
	for i := range b {
		if a[i] != b[i] {
			return i
		}
	}
	return len(b)
}

// OtherKey says whether the line's first page is known under another key only: a
// line that is cold because its namespace differs.
func (f *Forest) OtherKey(key string, line []int32) bool {
	if len(line) <= PageTokens {
		return false
	}
	page := pageOf(line, 0)
	if n := f.roots[key]; n != nil && n.child(page) != nil {
		return false
	}
	for other, n := range f.roots {
		if other != key && n.child(page) != nil {
			return true
		}
	}
	return false
}
