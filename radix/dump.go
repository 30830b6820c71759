package radix

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Dump renders all trees, for golden tests and for people. Pages that follow
// each other without a branch or a snapshot share a line; a page is a device id,
// "h" and a host handle, "d" and a disk handle, joined by "+"; "*" marks an entry that is locked, "!" one
// whose eviction is in flight. Only branches indent.
//
//	key
//	  [0,256) 0 1+h7* last 3
//	    @256 slot 0 last 3
//	    @300 h8 last 4
//	  [256,384) h9 last 5
func (f *Forest) Dump() string {
	var b strings.Builder
	type item struct {
		n      *node
		indent int
	}
	for _, key := range slices.Sorted(maps.Keys(f.roots)) {
		fmt.Fprintln(&b, key)
		todo := []item{{f.roots[key], 1}}
		for len(todo) > 0 {
			n, indent := todo[len(todo)-1].n, todo[len(todo)-1].indent
			todo = todo[:len(todo)-1]
			if n.parent != nil {
				n = dumpRun(&b, n, indent)
			}
			for _, s := range n.snaps {
				dumpSnap(&b, s, indent+1)
			}
			if n.parent != nil && len(n.kids) > 1 {
				indent++
			}
			for _, k := range slices.Backward(n.kids) {
				todo = append(todo, item{k, indent})
			}
		}
	}
	return b.String()
}

// dumpRun writes the pages from n to the next branch, snapshot or end.
func dumpRun(b *strings.Builder, n *node, indent int) *node {
	end := n
	for len(end.kids) == 1 && len(end.snaps) == 0 {
		end = end.kids[0]
	}
	run := make([]*node, 0, end.depth-n.depth+1)
	for m := end; m != n.parent; m = m.parent {
		run = append(run, m)
	}
	fmt.Fprintf(b, "%*s[%d,%d)", 2*indent, "", n.end()-PageTokens, end.end())
	for _, m := range slices.Backward(run) {
		b.WriteByte(' ')
		joint := ""
		if m.dev >= 0 {
			fmt.Fprint(b, m.dev)
			joint = "+"
		}
		if m.low[Host] != 0 {
			fmt.Fprintf(b, "%sh%d", joint, m.low[Host])
			joint = "+"
		}
		if m.low[Disk] != 0 {
			fmt.Fprintf(b, "%sd%d", joint, m.low[Disk])
		}
		dumpMarks(b, m.locks, m.ticket)
	}
	fmt.Fprintf(b, " last %d\n", end.last)
	return end
}

func dumpSnap(b *strings.Builder, s *snap, indent int) {
	fmt.Fprintf(b, "%*s@%d", 2*indent, "", s.At)
	if s.Slot >= 0 {
		fmt.Fprintf(b, " slot %d", s.Slot)
	}
	if s.Tail >= 0 {
		fmt.Fprintf(b, " tail %d", s.Tail)
	}
	if s.Host != 0 {
		fmt.Fprintf(b, " h%d", s.Host)
	}
	if s.Disk != 0 {
		fmt.Fprintf(b, " d%d", s.Disk)
	}
	dumpMarks(b, s.locks, s.ticket)
	fmt.Fprintf(b, " last %d\n", s.last)
}

func dumpMarks(b *strings.Builder, locks int32, ticket uint64) {
	if locks > 0 {
		b.WriteByte('*')
	}
	if ticket != 0 {
		b.WriteByte('!')
	}
}
