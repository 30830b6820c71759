package radix

import "fmt"

// None stands for "no device page" or "no slot".
const None = int32(-1)

// Pool counts the references of n ids (device pages or state slots). An id with
// no reference is free. Misuse is a programming error and panics: a page that
// is freed twice would be written by two sequences.
type Pool struct {
	name string
	refs []int32
	free []int32 // a stack: the id freed last is the warmest in the caches

	charged []*tally // by id: whose it is; nil: nobody's
}

// NewPool returns a pool with the ids 0..n-1, all free; name is for panics.
func NewPool(name string, n int) *Pool {
	p := &Pool{name: name, refs: make([]int32, n), free: make([]int32, n), charged: make([]*tally, n)}
	for i := range p.free {
		p.free[i] = int32(n - 1 - i)
	}
	return p
}

// Alloc takes a free id with one reference; ok is false when none is left.
func (p *Pool) Alloc() (id int32, ok bool) {
	if len(p.free) == 0 {
		return None, false
	}
	id = p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	p.refs[id] = 1
	return id, true
}

// Retain adds a reference to an id that has one.
func (p *Pool) Retain(id int32) {
	p.mustHold("retain", id)
	p.refs[id]++
}

// Release drops a reference and says whether it was the last one.
func (p *Pool) Release(id int32) (freed bool) {
	p.mustHold("release", id)
	p.refs[id]--
	if p.refs[id] > 0 {
		return false
	}
	p.free = append(p.free, id)
	if t := p.charged[id]; t != nil {
		t.n--
		p.charged[id] = nil
	}
	return true
}

// charge counts an id for somebody until it is free. One that is another's
// already would be shared by two keys.
func (p *Pool) charge(id int32, to *tally) {
	switch p.charged[id] {
	case to:
	case nil:
		p.charged[id] = to
		to.n++
	default:
		panic(fmt.Sprintf("radix: %s %d is another key's", p.name, id))
	}
}

// tallied counts the ids by whose they are.
func (p *Pool) tallied() map[*tally]int {
	out := map[*tally]int{}
	for _, t := range p.charged {
		if t != nil {
			out[t]++
		}
	}
	return out
}

func (p *Pool) mustHold(verb string, id int32) {
	if id < 0 || int(id) >= len(p.refs) {
		panic(fmt.Sprintf("radix: %s of %s %d: the pool has ids 0..%d", verb, p.name, id, len(p.refs)-1))
	}
	if p.refs[id] == 0 {
		panic(fmt.Sprintf("radix: %s of %s %d, which is free", verb, p.name, id))
	}
}

// Refs returns the references of an id, 0 for a free one.
func (p *Pool) Refs(id int32) int { return int(p.refs[id]) }

// Size returns how many ids there are.
func (p *Pool) Size() int { return len(p.refs) }

// Used returns how many ids have a reference.
func (p *Pool) Used() int { return len(p.refs) - len(p.free) }

// Free returns how many ids have none.
func (p *Pool) Free() int { return len(p.free) }

// Check verifies that each id is either referenced or on the free stack once.
func (p *Pool) Check() error {
	seen := make([]bool, len(p.refs))
	for _, id := range p.free {
		switch {
		case id < 0 || int(id) >= len(p.refs):
			return fmt.Errorf("pool %s: free id %d out of range", p.name, id)
		case seen[id]:
			return fmt.Errorf("pool %s: id %d is free twice", p.name, id)
		case p.refs[id] != 0 || p.charged[id] != nil:
			return fmt.Errorf("pool %s: free id %d has %d references, or is somebody's", p.name, id, p.refs[id])
		}
		seen[id] = true
	}
	for id, n := range p.refs {
		if n < 0 || n == 0 && !seen[id] {
			return fmt.Errorf("pool %s: id %d has %d references and is not free", p.name, id, n)
		}
	}
	return nil
}
