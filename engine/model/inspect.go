package model

import (
	"fmt"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// Report is what a model folder holds, found without packing weights.
type Report struct {
	Dir        string
	Config     Config
	Prefix     string // of the text model's tensors
	Tensors    int
	Parameters int64            // values of the text model's weights, scales not counted
	Bytes      map[string]int64 // file bytes by element type
	Weights    map[string]int   // matrices by how they are stored: "NVFP4", "BF16", ...
	Digest     string
	Layouts    map[string]Layout // by class
	// BytesPerToken and PaddingPerPage are by class: what a token costs in the page arena, and the page's unused rest.
	BytesPerToken, PaddingPerPage map[string]int
	Unread                        string // tensors that loading would refuse, or ""
}

// Inspect reads a model folder as Load does, checks every tensor's presence, type and shape, and reports. An error is
// what Load would say.
func Inspect(dir string) (Report, error) {
	c, err := ReadConfig(dir)
	if err != nil {
		return Report{}, err
	}
	ck, err := checkpoint.Open(dir)
	if err != nil {
		return Report{}, err
	}
	defer ck.Close()
	src, err := newStored(ck)
	if err != nil {
		return Report{}, fmt.Errorf("inspect model %s: %w", dir, err)
	}
	r := Report{Dir: dir, Config: c, Prefix: src.roots.Body, Tensors: len(ck.Names()), Bytes: map[string]int64{}, Weights: map[string]int{},
		Layouts: map[string]Layout{}, BytesPerToken: map[string]int{}, PaddingPerPage: map[string]int{}}
	for _, name := range ck.Names() {
		t, _ := ck.Tensor(name)
		r.Bytes[string(t.DType)] += int64(len(t.Data))
	}
	b := &builder{c: c, src: census{src, &r}}
	b.all(&Model{layers: make([]layerWeights, len(c.Layers))})
	if err := b.runOne(); err != nil {
		return Report{}, fmt.Errorf("inspect model %s: %w", dir, err)
	}
	if err := src.unread(c); err != nil {
		r.Unread = err.Error()
	}
	r.Digest = digest(c, ck)
	for _, class := range []kernels.Class{kernels.ClassF32, kernels.ClassBF16} {
		l := LayoutOf(c, class)
		r.Layouts[class.String()] = l
		r.BytesPerToken[class.String()] = l.PageStride / l.PageTokens
		r.PaddingPerPage[class.String()] = l.PageStride - l.SlabBytes
	}
	return r, nil
}

// census is a source that counts what is read through it.
type census struct {
	*stored
	r *Report
}

func (s census) count(w checkpoint.Weight, err error) (checkpoint.Weight, error) {
	if err == nil {
		s.r.Weights[w.Kind.String()]++
		s.r.Parameters += int64(w.N) * int64(w.K)
	}
	return w, err
}

func (s census) weight(name string, n, k int) (checkpoint.Weight, error) {
	return s.count(s.stored.weight(name, n, k))
}

func (s census) plain(name string, n, k int) (checkpoint.Weight, error) {
	return s.count(s.stored.plain(name, n, k))
}

func (s census) expert(mlp string, e, experts int, which string, n, k int) (checkpoint.Weight, error) {
	return s.count(s.stored.expert(mlp, e, experts, which, n, k))
}

func (s census) vector(name string, n int) ([]float32, error) {
	v, err := s.stored.vector(name, n)
	s.r.Parameters += int64(len(v))
	return v, err
}
