package radix

// tree is what the nodes of one key have in common, and the key's account: the
// bytes of its lines, by tier.
//
// On the device every page and slot is charged to one key from its allocation to
// its last release, once, however many hold it: sequences, marks, copies under
// way and the tree alike. One that was allocated for nobody is charged when a
// tree takes it over. On the lower tiers a copy counts from the moment when the
// tree is given its handle until it lets go of it, in Options' sizes.
type tree struct {
	key          string
	pages, slots tally
	low          [tiers]int64 // bytes on the lower tiers
	pinned       int64        // bytes of what pins name
	limit        int64        // of device and host bytes together; NoLimit
	own          *ownQueues   // nil without a limit
	over         bool         // in Forest.over
}

// tally counts the ids of a pool that are charged to a key.
type tally struct{ n int }

// NoLimit as a limit says that there is none.
const NoLimit = int64(-1)

// ownQueues are what may leave the tiers of one key's own.
type ownQueues struct {
	pages [tiers]queue[*node]
	snaps [tiers]queue[*snap]
}

// Account is what one key has, in bytes. Resident is what its limit is about.
type Account struct {
	Device, Host, Disk int64
	Pinned             int64 // of these, what pins name
	Limit              int64 // of Resident; NoLimit
}

// Resident is what is in memory: on the device and on the host.
func (a Account) Resident() int64 { return a.Device + a.Host }

// Account returns a key's account as it is now.
func (f *Forest) Account(key string) Account {
	t := f.trees[key]
	if t == nil {
		return Account{Limit: NoLimit}
	}
	return f.accountOf(t)
}

func (f *Forest) accountOf(t *tree) Account {
	return Account{Device: f.onDevice(t), Host: t.low[Host], Disk: t.low[Disk], Pinned: t.pinned, Limit: t.limit}
}

// Accounts calls yield with every key that has bytes or a limit, in no order,
// until it returns false.
func (f *Forest) Accounts(yield func(key string, a Account) bool) {
	for key, t := range f.trees {
		if !f.idle(t) && !yield(key, f.accountOf(t)) {
			return
		}
	}
}

func (f *Forest) onDevice(t *tree) int64 {
	return int64(t.pages.n)*f.opts.PageBytes + int64(t.slots.n)*f.opts.SlotBytes
}

func (f *Forest) resident(t *tree) int64 { return f.onDevice(t) + t.low[Host] }

// Excess is how many bytes a key would be over its limit with so many more; 0
// without a limit, or within it.
func (f *Forest) Excess(key string, more int64) int64 {
	if t := f.trees[key]; t != nil && t.limit != NoLimit {
		return max(0, f.resident(t)+more-t.limit)
	}
	return 0
}

// AllocPage takes a free page with one reference, charged to the key.
func (f *Forest) AllocPage(key string) (id int32, ok bool) {
	t := f.account(key)
	if id, ok = f.pages.Alloc(); ok {
		f.chargePage(t, id)
	}
	return id, ok
}

// AllocSlot takes a free slot with one reference, charged to the key.
func (f *Forest) AllocSlot(key string) (id int32, ok bool) {
	t := f.account(key)
	if id, ok = f.slots.Alloc(); ok {
		f.chargeSlot(t, id)
	}
	return id, ok
}

// HasPage says whether a page is charged to the key, HasSlot whether a slot is.
func (f *Forest) HasPage(key string, id int32) bool {
	t := f.trees[key]
	return t != nil && f.pages.charged[id] == &t.pages
}

func (f *Forest) HasSlot(key string, id int32) bool {
	t := f.trees[key]
	return t != nil && f.slots.charged[id] == &t.slots
}

func (f *Forest) chargePage(t *tree, id int32) {
	f.pages.charge(id, &t.pages)
	f.grown(t)
}

func (f *Forest) chargeSlot(t *tree, id int32) {
	f.slots.charge(id, &t.slots)
	f.grown(t)
}

// stored counts bytes that a key has more on a lower tier, or less.
func (f *Forest) stored(t *tree, on Tier, bytes int64) {
	t.low[on] += bytes
	if bytes > 0 && on == Host {
		f.grown(t)
	}
}

func (f *Forest) grown(t *tree) {
	if t.limit != NoLimit && !t.over && f.resident(t) > t.limit {
		t.over = true
		f.over = append(f.over, t)
	}
}

// Over appends the keys that are over their limits.
func (f *Forest) Over(out []string) []string {
	left := f.over[:0]
	for _, t := range f.over {
		if t.over = t.limit != NoLimit && f.resident(t) > t.limit; t.over {
			left = append(left, t)
			out = append(out, t.key)
		}
	}
	clear(f.over[len(left):])
	f.over = left
	return out
}

// SetLimit bounds what a key should have on the device and on the host
// together; NoLimit lifts it. Nothing is evicted by itself: see Over, and
// EvictOwn.
func (f *Forest) SetLimit(key string, bytes int64) {
	t := f.account(key)
	t.limit = max(bytes, NoLimit)
	switch {
	case t.limit == NoLimit:
		f.disown(t)
		f.pruneAccount(t)
	case t.own == nil:
		t.own = &ownQueues{}
		for on := range tiers {
			t.own.pages[on] = queue[*node]{tier: on, which: ofKey}
			t.own.snaps[on] = queue[*snap]{tier: on, which: ofKey}
		}
		f.replace(t)
	}
	f.grown(t)
}

// replace puts every entry of a tree in or out of its queues.
func (f *Forest) replace(t *tree) {
	root := f.roots[t.key]
	if root == nil {
		return
	}
	for todo := []*node{root}; len(todo) > 0; {
		n := todo[len(todo)-1]
		todo = append(todo[:len(todo)-1], n.kids...)
		for _, s := range n.snaps {
			f.placeSnap(s)
		}
		f.placePage(n)
	}
}

// disown takes a tree's queues of its own away.
func (f *Forest) disown(t *tree) {
	if t.own == nil {
		return
	}
	for on := range tiers {
		for _, n := range t.own.pages[on].entries {
			n.places[on].at[ofKey] = 0
		}
		for _, s := range t.own.snaps[on].entries {
			s.places[on].at[ofKey] = 0
		}
	}
	t.own = nil
}

// account returns the key's tree, a new one if need be.
func (f *Forest) account(key string) *tree {
	t := f.trees[key]
	if t == nil {
		if len(f.trees) >= f.sweepAt { // what a pool let go of last is not seen otherwise
			for _, old := range f.trees {
				f.pruneAccount(old)
			}
			f.sweepAt = max(2*len(f.trees), accountsMin)
		}
		t = &tree{key: key, limit: NoLimit}
		f.trees[key] = t
	}
	return t
}

// accountsMin is how many accounts there are before those that are empty are
// looked for; later they are at most as many as the others.
const accountsMin = 64

func (f *Forest) idle(t *tree) bool {
	return t.pages.n == 0 && t.slots.n == 0 && t.low == [tiers]int64{} && t.limit == NoLimit
}

// pruneAccount forgets an account that says nothing.
func (f *Forest) pruneAccount(t *tree) {
	if f.idle(t) && f.roots[t.key] == nil && !t.over {
		delete(f.trees, t.key)
	}
}

// EvictOwn picks what a key has on the device and on the host, of at least the
// given bytes or what there is: first host copies of what the device has too,
// then by rank, each tier's in turnovers of its own. To demote a pick from the
// device to the host would gain nothing. Settle the picks in order.
func (f *Forest) EvictOwn(key string, bytes int64, now int64) []Eviction {
	t := f.trees[key]
	if t == nil || t.own == nil {
		return nil
	}
	var out []Eviction
	from := [...]picker{f.ownPicker(t, Device), f.ownPicker(t, Host)}
	for got := int64(0); got < bytes; got += out[len(out)-1].Bytes {
		var best candidate
		for i := range from {
			if c := from[i].next(); c.there() && (!best.there() || c.life < best.life) {
				best = c
			}
		}
		if !best.there() {
			break
		}
		out = append(out, f.pick1(best))
	}
	from[Device].done()
	from[Host].done()
	return out
}

// EvictOwnPages is EvictPages among what the key has.
func (f *Forest) EvictOwnPages(key string, n int, now int64) []Eviction {
	if t := f.trees[key]; t != nil && t.own != nil {
		return f.evictPages(f.ownPicker(t, Device), n)
	}
	return nil
}

// EvictOwnSlots is EvictSlots among what the key has.
func (f *Forest) EvictOwnSlots(key string, n int, now int64) []Eviction {
	if t := f.trees[key]; t != nil && t.own != nil {
		return f.evictSlots(f.ownPicker(t, Device), n)
	}
	return nil
}

// EvictOwnDisk is EvictDisk among what the key has.
func (f *Forest) EvictOwnDisk(key string, bytes int64, now int64) []Eviction {
	if t := f.trees[key]; t != nil && t.own != nil {
		return f.evict(f.ownPicker(t, Disk), bytes)
	}
	return nil
}

func (f *Forest) ownPicker(t *tree, from Tier) picker {
	return picker{f: f, t: from, pageQueue: &t.own.pages[from], snapQueue: &t.own.snaps[from]}
}

// life makes ranks of two tiers comparable: how many turnovers of its tier an
// entry has left, against one that is used now and saves nothing. Of host copies
// that the device has too it is less than of anything else.
func (f *Forest) life(key float64, t Tier) float64 {
	if f.opts.Policy == LRU {
		return key
	}
	return key - f.clock[t]
}
