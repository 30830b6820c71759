package model

import (
	"fmt"
	"math"
	"strings"

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
	Unread                        string                  // tensors that loading would refuse, or ""
	Families                      map[Family]FamilyReport // "" holds what is in none

	embedBytes int64 // of Families[""]: the embedding table
	draftBytes int64 // of Families[""]: tensors of the draft layer
}

// FamilyReport is what a family's matrices are in the files.
type FamilyReport struct {
	Matrices int
	Kinds    map[string]int // matrices by how they are stored
	Bytes    int64          // scales included; of the family "", all other tensors too
}

// StepWeightBytes is the bytes of weights, as they are stored, that a decode step of rows sequences touches: what
// StepCost.WeightBytes would be on a device that keeps weights as the files do. Experts are counted as there.
func (r Report) StepWeightBytes(rows int) int64 {
	c, rest := r.Config, r.Families[""].Bytes-r.draftBytes
	if !c.TiedHead {
		rest -= r.embedBytes
	}
	rest += int64(rows) * r.embedBytes / int64(c.Vocab)
	for f, fr := range r.Families {
		switch f {
		case "", MTP:
		case RoutedExperts:
			rest += int64(math.Round(c.expertsTouched(rows) / float64(c.Experts) * float64(fr.Bytes)))
		default:
			rest += fr.Bytes
		}
	}
	return rest
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
		Layouts: map[string]Layout{}, BytesPerToken: map[string]int{}, PaddingPerPage: map[string]int{}, Families: map[Family]FamilyReport{}}
	for _, name := range ck.Names() {
		t, _ := ck.Tensor(name)
		r.Bytes[string(t.DType)] += int64(len(t.Data))
		if !ignorable(name) || strings.HasSuffix(name, ".input_scale") {
			r.tally(strings.TrimPrefix(name, src.roots.Body), int64(len(t.Data)))
		}
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

// tally counts a tensor's bytes to its family.
func (r *Report) tally(name string, n int64) {
	module := moduleOf(name, "")
	f := r.Config.FamilyOf(module)
	fr := r.family(f)
	fr.Bytes += n
	r.Families[f] = fr
	switch {
	case f != "":
	case module == "embed_tokens":
		r.embedBytes += n
	case strings.HasPrefix(module, fmt.Sprintf("layers.%d.", len(r.Config.Layers))):
		r.draftBytes += n
	}
}

func (r *Report) family(f Family) FamilyReport {
	fr := r.Families[f]
	if fr.Kinds == nil {
		fr.Kinds = map[string]int{}
	}
	return fr
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
		f := s.r.Config.FamilyOf(strings.TrimPrefix(w.Name, s.roots.Body))
		fr := s.r.family(f)
		fr.Matrices++
		fr.Kinds[w.Kind.String()]++
		s.r.Families[f] = fr
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
