package quant

import (
	"cmp"
	"runtime"
	"slices"
	"sync"

	"rocket/engine/checkpoint"
)

// ahead encodes groups on all cores while they are written one after the other: as many are under way or waiting to be
// written as there are cores, so memory is bounded by the largest of so many matrices. Groups are asked for in the order
// of their names, as checkpoint.Write does, once each and by one goroutine.
type ahead struct {
	groups  []checkpoint.TensorGroup
	made    []chan made
	started int
	running sync.WaitGroup // to be waited for before the source is closed
}

type made struct {
	data [][]byte
	err  error
}

// newAhead puts itself in the way of the groups' Make.
func newAhead(groups []checkpoint.TensorGroup) (*ahead, []checkpoint.TensorGroup) {
	slices.SortFunc(groups, func(a, b checkpoint.TensorGroup) int { return cmp.Compare(a.Tensors[0].Name, b.Tensors[0].Name) })
	a, out := &ahead{groups: groups, made: make([]chan made, len(groups))}, slices.Clone(groups)
	for i := range out {
		a.made[i] = make(chan made, 1)
		out[i].Make = func() ([][]byte, error) { return a.get(i) }
	}
	return a, out
}

func (a *ahead) get(i int) ([][]byte, error) {
	for ; a.started < min(i+runtime.GOMAXPROCS(0), len(a.groups)); a.started++ {
		to, encode := a.made[a.started], a.groups[a.started].Make
		a.running.Go(func() {
			data, err := encode()
			to <- made{data, err}
		})
	}
	m := <-a.made[i]
	return m.data, m.err
}
