package radix

import "slices"

// Place is where a page's bytes are: a device page id (None if not there), a
// host and a disk handle (0 if not there). At least one is set.
type Place struct {
	Device     int32
	Host, Disk int64
}

// Match is what the tree knows about a line. Reuse one: Pages keeps its room.
type Match struct {
	Tokens   int      // tokens in full pages present from 0, on any tier; below the line's length
	Device   int      // the first of them that are all on the device
	Pages    []Place  // Tokens/128 places
	Found    bool     // there is a usable snapshot
	Snapshot Snapshot // the deepest one: At may be past Tokens by an exact tail
	Branch   int      // the page edge where pages go deeper than the snapshot: one here would pay; 0 none
	Common   int      // tokens in common with the nearest known path: past Tokens by a part of a page
	Parts    bool     // there something known goes on in another way: the line diverged from it
	Evicted  bool     // the next page, or a deeper snapshot, was there and was dropped for room

	forest  *Forest
	node    *node
	snap    *snap
	version uint64
}

// Start returns how many tokens need no computing: the snapshot's position.
func (m *Match) Start() int {
	if m.Found {
		return m.Snapshot.At
	}
	return 0
}

// Match looks up a whole line, its pending last token included: it reports at
// most len(line)-1 consumed tokens, so the caller always has a token to compute.
// It changes nothing in the tree. What m says holds until an eviction is
// settled; Lock it before.
func (f *Forest) Match(key string, line []int32, m *Match) {
	pages := m.Pages[:0]
	*m = Match{forest: f, version: f.version}
	n := f.roots[key]
	if n == nil || len(line) == 0 {
		m.Pages = pages
		m.Evicted = n == nil && len(line) > PageTokens && f.lost.has(chain(keyHash(key), line[:PageTokens]))
		return
	}
	limit := len(line) - 1
	device := true
	for {
		if s := n.longest(line[n.end():min(limit, n.end()+PageTokens-1)], Device, tiers); s != nil {
			m.snap = s
		}
		if n.end()+PageTokens > limit {
			break
		}
		k := n.child(pageOf(line, int(n.depth)))
		if k == nil {
			break
		}
		n = k
		pages = append(pages, Place{Device: n.dev, Host: n.low[Host], Disk: n.low[Disk]})
		if device = device && n.dev >= 0; device {
			m.Device = n.end()
		}
	}
	m.node, m.Pages, m.Tokens = n, pages, n.end()
	if m.snap != nil {
		m.Found, m.Snapshot = true, m.snap.Snapshot
	}
	if m.Tokens > m.Start() {
		m.Branch = m.Tokens
	}
	m.Common, m.Parts = n.common(line, limit)
	m.Evicted = f.evicted(n, line, limit, m.Start())
}

// Snapshots counts the usable snapshots on a line: those that Match could choose
// for it or for a beginning of it.
func (f *Forest) Snapshots(key string, line []int32) int {
	n := f.roots[key]
	count := 0
	for n != nil && len(line) > 0 {
		for _, s := range n.snaps {
			if s.At < len(line) && s.extendsTo(line) {
				count++
			}
		}
		if n.end()+PageTokens >= len(line) {
			break
		}
		n = n.child(pageOf(line, int(n.depth)))
	}
	return count
}

// extendsTo says whether the line goes on from the snapshot's page edge with all
// of its tail. The pages below are the walker's business.
func (s *snap) extendsTo(line []int32) bool {
	return slices.Equal(s.TailTokens, line[s.At-len(s.TailTokens):s.At])
}

// Touch records that a match was used (or that it found nothing): recency of
// its pages and its snapshot, and the hit counts.
func (f *Forest) Touch(m *Match, now int64) {
	f.stats.Lookups++
	if m.node != nil && !m.node.gone {
		f.touch(m.node, now)
	}
	if m.snap == nil || m.snap.gone {
		return
	}
	s := m.snap
	f.use(&s.touched, now)
	if !s.end[tierOf(s.Slot >= 0, s.Host)] {
		s.hits++ // a line parts here
	}
	f.placeSnap(s)
	if s.node != m.node && !s.node.gone {
		f.touch(s.node, now)
	}
	f.stats.Hits++
	for _, p := range m.Pages[:s.At/PageTokens] {
		f.stats.HitTokens[tierOf(p.Device >= 0, p.Host)] += PageTokens
	}
	f.stats.HitTokens[tierOf(m.Snapshot.Slot >= 0, m.Snapshot.Host)] += int64(len(s.TailTokens))
}

// tierOf names the fastest tier that has the bytes.
func tierOf(device bool, host int64) Tier {
	switch {
	case device:
		return Device
	case host != 0:
		return Host
	}
	return Disk
}

// Lock keeps a path's pages, and the snapshot that its user starts from, where
// they are. The zero Lock holds nothing.
type Lock struct {
	node *node
	snap *snap
}

// Lock locks a match: all its pages and its snapshot. It must follow Match in
// the same step: if anything that the match reports may have gone since, it
// panics, because going on would compute from other sequences' bytes.
func (f *Forest) Lock(m *Match) Lock {
	if m.forest != f || m.version != f.version {
		panic("radix: lock of a match that is out of date: lock before anything is evicted")
	}
	l := Lock{node: m.node, snap: m.snap}
	f.lockNode(l.node)
	if l.snap != nil {
		f.lockSnap(l.snap)
	}
	return l
}

// Advance moves the lock down to the deepest page that the tree has for these
// consumed tokens, which must go on from the locked path.
func (f *Forest) Advance(l *Lock, key string, tokens []int32) {
	n := f.walk(key, tokens, len(tokens)/PageTokens)
	for up := n; l.node != nil && up != l.node; up = up.parent {
		if up == nil || up.depth <= l.node.depth {
			panic("radix: advance of a lock to another line")
		}
	}
	if n == l.node {
		return
	}
	f.lockNode(n)
	f.unlockNode(l.node)
	l.node = n
}

// UnlockSnapshot lets go of the snapshot alone, once its state has been copied.
func (f *Forest) UnlockSnapshot(l *Lock) {
	if s := l.snap; s != nil {
		s.locks--
		if s.locks == 0 && s.Slot >= 0 {
			f.stats.LockedSnapshots--
		}
		f.placeSnap(s)
		l.snap = nil
	}
}

// Unlock lets go of everything; unlocking again does nothing.
func (f *Forest) Unlock(l *Lock) {
	f.UnlockSnapshot(l)
	n := l.node
	l.node = nil
	f.unlockNode(n)
}

func (f *Forest) lockSnap(s *snap) {
	s.locks++
	if s.locks == 1 && s.Slot >= 0 {
		f.stats.LockedSnapshots++
	}
	f.placeSnap(s)
}

func (f *Forest) lockNode(n *node) {
	for ; n != nil; n = n.parent {
		n.locks++
		if n.locks > 1 {
			return
		}
		f.lockChanged(n, 1)
	}
}

func (f *Forest) unlockNode(n *node) {
	for ; n != nil; n = n.parent {
		n.locks--
		if n.locks > 0 {
			return
		}
		f.lockChanged(n, -1)
		f.pruneRoot(n)
	}
}

func (f *Forest) lockChanged(n *node, by int) {
	if n.dev >= 0 {
		f.stats.LockedPages += by
	}
	f.placePage(n)
}
