package radix

import "container/heap"

// queue orders the pages that may leave a tier: least recently used first, and
// of one age the deepest first.
type queue struct {
	tier  Tier
	nodes []*node
}

func (q *queue) Len() int { return len(q.nodes) }
func (q *queue) Less(i, j int) bool {
	a, b := q.nodes[i], q.nodes[j]
	if a.last != b.last {
		return a.last < b.last
	}
	return a.depth > b.depth
}
func (q *queue) Swap(i, j int) {
	q.nodes[i], q.nodes[j] = q.nodes[j], q.nodes[i]
	q.nodes[i].pos[q.tier], q.nodes[j].pos[q.tier] = int32(i), int32(j)
}
func (q *queue) Push(x any) {
	n := x.(*node)
	n.pos[q.tier] = int32(len(q.nodes))
	q.nodes = append(q.nodes, n)
}
func (q *queue) Pop() any {
	n := q.nodes[len(q.nodes)-1]
	q.nodes[len(q.nodes)-1] = nil
	q.nodes = q.nodes[:len(q.nodes)-1]
	n.pos[q.tier] = -1
	return n
}

// place puts the node in or out of the queue, or moves it to its new age.
func (q *queue) place(n *node) {
	in, want := n.pos[q.tier] >= 0, n.evictable(q.tier)
	switch {
	case in && want:
		heap.Fix(q, int(n.pos[q.tier]))
	case in:
		heap.Remove(q, int(n.pos[q.tier]))
	case want:
		heap.Push(q, n)
	}
}
