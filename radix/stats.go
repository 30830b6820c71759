package radix

// Stats are the accounts. Counts by tier are indexed by Tier; an entry on both
// tiers counts on both.
type Stats struct {
	Keys      int
	Pages     [tiers]int   // full pages
	Snapshots [tiers]int   // state slots
	Tails     [tiers]int   // snapshots among them with a tail page
	Bytes     [tiers]int64 // of all of these

	LockedPages     int   // device pages that are in use
	LockedSnapshots int   // device slots that are in use
	LockedBytes     int64 // of these; tails of locked snapshots not counted
	PinnedPages     int   // pages, on any tier, and tails that pins name
	PinnedSnapshots int   // snapshots that pins name
	EvictableBytes  int64 // device bytes but the locked ones
	InFlight        int   // evictions of dropped entries still to be settled

	Lookups   int64        // matches reported by Touch
	Hits      int64        // those with a snapshot
	HitTokens [tiers]int64 // tokens that hits did not have to compute
	Demoted   Evicted
	Dropped   Evicted // evictions that gave up a copy, host copies too
}

// Evicted counts settled evictions.
type Evicted struct {
	Pages, Snapshots int64
}

// Stats returns the accounts as they are now.
func (f *Forest) Stats() Stats {
	s := f.stats
	s.Keys = len(f.roots)
	s.InFlight = len(f.orphans)
	for t := range tiers {
		s.Bytes[t] = int64(s.Pages[t]+s.Tails[t])*f.opts.PageBytes + int64(s.Snapshots[t])*f.opts.SlotBytes
	}
	s.LockedBytes = int64(s.LockedPages)*f.opts.PageBytes + int64(s.LockedSnapshots)*f.opts.SlotBytes
	s.EvictableBytes = s.Bytes[Device] - s.LockedBytes
	return s
}
