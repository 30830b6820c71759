package radix

import "fmt"

// Restore adds the full page [len(tokens)-128, len(tokens)) as present on a lower
// tier: how the index comes back after a restart, parents first. A page that is
// known gains the copy; if the tier has one already the handle is let go of
// (TakeFreed). Snapshots come back by Publish.
//
// ErrMissing: the pages before it are not there; the handle stays the caller's.
func (f *Forest) Restore(key string, tokens []int32, t Tier, handle int64, now int64) error {
	depth := len(tokens) / PageTokens
	if t == Device || t >= tiers || handle == 0 || depth == 0 || len(tokens)%PageTokens != 0 {
		return fmt.Errorf("radix: restore a page ending at %d with handle %d on the %s", len(tokens), handle, t)
	}
	n := f.walk(key, tokens, depth-1)
	if n == nil && depth == 1 {
		n = f.root(key)
	}
	if n == nil || int(n.depth) < depth-1 {
		return fmt.Errorf("restore the page ending at %d: %w", len(tokens), ErrMissing)
	}
	page := pageOf(tokens, depth-1)
	k := n.child(page)
	if k == nil {
		k = f.grow(n, page)
	}
	if k.on(t) {
		if k.low[t] != handle {
			f.free(t, handle)
		}
		return nil
	}
	f.setLow(k, t, handle)
	f.refresh(k)
	f.touch(k, now)
	return nil
}

// ForgetStored gives up what a line has on the lower tiers only, because the
// bytes there proved to be bad: the first page
// without a device copy goes with all that hangs below it, and so do the line's snapshots without a slot. What is
// locked or on its way out stays.
func (f *Forest) ForgetStored(key string, line []int32) {
	n := f.roots[key]
	for n != nil {
		for i := len(n.snaps) - 1; i >= 0; i-- {
			if s := n.snaps[i]; s.Slot < 0 && s.ticket == 0 && s.locks == 0 && s.At <= len(line) && s.extendsTo(line) {
				f.removeSnap(s)
				f.stats.Dropped.Snapshots++
			}
		}
		if n.gone || n.end()+PageTokens > len(line) {
			return
		}
		k := n.child(pageOf(line, int(n.depth)))
		if k != nil && k.dev < 0 {
			if k.locks == 0 && k.ticket == 0 {
				f.remove(k)
				f.stats.Dropped.Pages++
			}
			return
		}
		n = k
	}
}
