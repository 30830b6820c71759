package radix

// SnapshotCount is the number of snapshots in all trees.
func (f *Forest) SnapshotCount() int { return len(f.snaps) }

// SnapshotLine returns the key and a copy of all consumed tokens of snapshot i of SnapshotCount. The order means nothing and
// changes with every change of the tree.
func (f *Forest) SnapshotLine(i int) (key string, tokens []int32) {
	s := f.snaps[i]
	ev := Eviction{At: s.At, node: s.node, snap: s}
	return ev.Key(), ev.Line(nil)
}

// Forget gives up the snapshot after exactly these consumed tokens, the full page that ends there, and all that goes
// on from them: what proved to be wrong, and what may have been computed from it. It returns false when some of that
// is in use and had to stay.
func (f *Forest) Forget(key string, tokens []int32) bool {
	n := f.walk(key, tokens, len(tokens)/PageTokens)
	if n == nil || int(n.depth) < len(tokens)/PageTokens {
		return false
	}
	all := true
	tail := tokens[n.end():]
	for i := len(n.snaps) - 1; i >= 0; i-- {
		s := n.snaps[i]
		switch {
		case !hasPrefix(s.TailTokens, tail):
		case s.locks > 0 || s.pins > 0:
			all = false
		default:
			f.removeSnap(s)
			f.stats.Dropped.Snapshots++
		}
	}
	for i := len(n.kids) - 1; i >= 0; i-- {
		if k := n.kids[i]; hasPrefix(k.tokens[:], tail) {
			all = f.forgetPage(k) && all
		}
	}
	if len(tail) == 0 && n.parent != nil {
		all = f.forgetPage(n) && all
	}
	return all
}

func (f *Forest) forgetPage(n *node) bool {
	if n.locks > 0 || n.pins > 0 {
		return false
	}
	f.remove(n)
	f.stats.Dropped.Pages++
	return true
}
