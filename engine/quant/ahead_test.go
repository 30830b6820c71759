package quant

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"rocket/engine/checkpoint"
)

// TestAhead: every group is made once, comes back as itself with its error, and few wait for being written.
func TestAhead(t *testing.T) {
	const n = 50
	var waiting, calls atomic.Int64
	broken := errors.New("broken")
	var groups []checkpoint.TensorGroup
	for i := range n {
		name := fmt.Sprintf("%02d", n-1-i) // not in order
		groups = append(groups, checkpoint.TensorGroup{Tensors: []checkpoint.TensorInfo{{Name: name}}, Make: func() ([][]byte, error) {
			waiting.Add(1)
			calls.Add(1)
			if name == "33" {
				return nil, broken
			}
			return [][]byte{[]byte(name)}, nil
		}})
	}
	a, ready := newAhead(groups)
	if !slices.IsSortedFunc(ready, func(x, y checkpoint.TensorGroup) int { return strings.Compare(x.Tensors[0].Name, y.Tensors[0].Name) }) {
		t.Fatal("not in the order of names")
	}
	for _, g := range ready {
		if w := waiting.Load(); w > int64(runtime.GOMAXPROCS(0)) {
			t.Fatalf("%d are made and not taken", w)
		}
		made, err := g.Make()
		waiting.Add(-1)
		if name := g.Tensors[0].Name; name == "33" && err != broken || name != "33" && (err != nil || string(made[0]) != name) {
			t.Errorf("%s: %q, %v", name, made, err)
		}
	}
	if a.running.Wait(); calls.Load() != n {
		t.Errorf("%d calls for %d groups", calls.Load(), n)
	}
}
