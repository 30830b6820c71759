package radix

import (
	"container/heap"
	"fmt"
)

// ranked is an entry of a queue: a page or a snapshot, by tier.
type ranked interface {
	comparable
	place(t Tier) *place
	used() int64 // of equal rank what was used longest ago goes first,
	deep() int   // and of equal age the deepest
}

// place is where an entry stands in a tier's queue.
type place struct {
	key float64  // rank: the lowest goes first
	at  [2]int32 // index in the tier's queue and in the key's own, plus one; 0 not in it
}

// The queues that an entry may be in, on each tier.
const (
	ofTier = iota
	ofKey
)

// queue orders what may leave a tier by rank, of all keys or of one. It holds
// exactly the entries that are evictable there.
type queue[T ranked] struct {
	tier    Tier
	which   int // ofTier or ofKey
	entries []T
}

// at is where the entry stands, plus one.
func (q *queue[T]) at(e T) *int32 { return &e.place(q.tier).at[q.which] }

func (q *queue[T]) Len() int { return len(q.entries) }
func (q *queue[T]) Less(i, j int) bool {
	a, b := q.entries[i], q.entries[j]
	if ka, kb := a.place(q.tier).key, b.place(q.tier).key; ka != kb {
		return ka < kb
	}
	if a.used() != b.used() {
		return a.used() < b.used()
	}
	return a.deep() > b.deep()
}
func (q *queue[T]) Swap(i, j int) {
	q.entries[i], q.entries[j] = q.entries[j], q.entries[i]
	*q.at(q.entries[i]), *q.at(q.entries[j]) = int32(i)+1, int32(j)+1
}
func (q *queue[T]) Push(x any) {
	e := x.(T)
	q.entries = append(q.entries, e)
	*q.at(e) = int32(len(q.entries))
}
func (q *queue[T]) Pop() any {
	var none T
	last := len(q.entries) - 1
	e := q.entries[last]
	q.entries[last] = none
	q.entries = q.entries[:last]
	*q.at(e) = 0
	return e
}

// set puts the entry in or out of the queue, or moves it to its new rank.
func (q *queue[T]) set(e T, want bool, key float64) {
	p := e.place(q.tier)
	at := p.at[q.which]
	in := at > 0
	p.key = key
	switch {
	case in && !want:
		heap.Remove(q, int(at)-1)
	case in:
		heap.Fix(q, int(at)-1)
	case !in && want:
		heap.Push(q, e)
	}
}

// top returns the entry that goes next.
func (q *queue[T]) top() (e T, ok bool) {
	if len(q.entries) == 0 {
		return e, false
	}
	return q.entries[0], true
}

func (q *queue[T]) holds(e T) bool {
	at := int(*q.at(e)) - 1
	return at >= 0 && at < len(q.entries) && q.entries[at] == e
}

// check verifies that the queue has as many entries as are evictable, in order.
func (q *queue[T]) check(want int) error {
	if q.Len() != want {
		return fmt.Errorf("%d in the %s queue, %d are evictable", q.Len(), q.tier, want)
	}
	for i := 1; i < q.Len(); i++ {
		if q.Less(i, (i-1)/2) {
			return fmt.Errorf("the %s queue is out of order at %d", q.tier, i)
		}
	}
	return nil
}
