package radix

// Snapshots counts the usable snapshots on a line: those that Match could choose for it or for a beginning of it.
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
