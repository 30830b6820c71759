// Package radix keeps the accounts of everything that inference has cached:
// which pages of 128 tokens and which snapshots of recurrent state exist, on
// which tier their bytes are, who uses them and which go first. It moves no
// bytes. One goroutine, the engine loop, owns a Forest and its Pools; nothing
// here locks, waits, reads a clock or does I/O. Time is an argument, in any
// unit, as long as it does not run backwards.
//
// # Shape
//
// A Forest has one prefix tree a namespace key (model digest, numeric class,
// tenant salt). A node is one full page, its tokens compared as a whole:
// siblings may share up to 127 first tokens. Because a node is a page, a run of
// pages is a chain of nodes, and no edge is ever split or merged. A page is on
// the device (a page id), on the host or the disk (handles), or on several. Snapshots hang on
// the node where their last full page ends: at the page edge itself, or past it
// with a partial page (an exact tail, matched only as a whole).
//
// # Whose bytes
//
// Every key has an account: pages and slots charged to it from AllocPage and
// AllocSlot to their last release (or from when a tree took them over), whoever
// holds them and however many do, and its copies on the lower tiers. SetLimit
// bounds what a key should have on the device and the host together. A key over
// it is in Over, and EvictOwn picks what it gives up, its own things only. A pool's
// id is never two keys'.
//
// # Counts
//
// A line of n tokens has consumed n-1; the last is pending. Match takes the
// whole line and never reports more than n-1, so one token is always left to
// compute. Insert and Publish take consumed tokens.
//
// # A turn, in calls
//
//	f.Match(key, line, &m)               // read-only; m.Pages, m.Snapshot, m.Branch
//	lock := f.Lock(&m)                   // in the same step, before anything may be evicted
//	f.Touch(&m, now)                     // recency and hit counts
//	...restore, prefill, cutting the scan at CapturePoints(...)
//	canon, err = f.Insert(key, line[:p], from, pages, now, canon[:0])
//	f.Publish(key, line[:p], Snapshot{At: p, ...}, now)
//	f.Advance(&lock, key, line[:p])      // the path lock follows
//	f.Unlock(&lock)
//
// Room is made in two steps, so that the bytes can be copied in between, off
// the loop if need be:
//
//	for _, ev := range f.EvictPages(n, now) { // or EvictSlots, EvictDevice, EvictHost, EvictDisk, EvictPath
//		f.Demoted(ev, Host, handle)       // copied to a slower tier; or
//		f.Dropped(ev)                     // not worth a copy, or no room; or
//		f.Keep(ev)                        // the copy failed
//	}
//	for _, h := range f.TakeFreed(Host, nil) { ... } // handles that nobody names any more
//
// After a restart the index comes back from the records on the disk: Restore for
// pages, parents first, and Publish for snapshots.
//
// # Who owns what
//
// The tree holds one reference of its own in the Pool for every device page,
// tail page and slot that it names; Insert and Publish retain what they keep
// and never consume the caller's reference. A handle given to Publish, Demoted or
// Restore belongs to the tree. Handles of two tiers have nothing to do with each
// other. Every handle that the tree lets go of comes out
// of TakeFreed exactly once. While an eviction is in flight its references stay
// held, also if its page is dropped with an ancestor meanwhile.
//
// # Invariants (Forest.Check verifies them)
//
//   - Every page is on a tier at least, and so are all its ancestors, if not on
//     the same one. So what Match walks is contiguous from token 0.
//   - A copy leaves a tier only where a faster tier has one too, or where nobody
//     uses it and nothing below it is on that tier or a faster one.
//   - What Insert keeps, Match finds, by the same walk and the same comparison.
//   - A snapshot's position is floor(At/128) pages deep, its tail is At%128
//     tokens, and it is whole on at least one tier: a slot, a tail page where
//     there is a tail, or a handle.
//   - Two siblings differ; two snapshots of one node differ in their tails.
//   - A dropped snapshot hides nothing: deeper snapshots stay usable, and pages
//     without a snapshot stay to plan the next one (Match.Branch).
//   - A node is locked while a Lock names it or anything below it. A locked
//     page is never evicted, nor a page with device pages below it: so a node
//     with several children on the device stays.
//   - What goes first is a matter of rank alone (see value.go), never of a scan: the
//     queues hold exactly what may go, in order.
//   - Pins hold half of each pool at most, and of their key's limit; what they
//     name is locked too.
//   - Locked and evictable counts, counts by tier and the candidates' heaps
//     equal what a full walk finds; so do the accounts of every key.
//   - Match changes nothing.
package radix
