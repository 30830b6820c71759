package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"sync"

	"rocket/engine/checkpoint"
)

// source gives the tensors of a model by the names that checkpoints use, without the body's prefix: a checkpoint, or
// random numbers. Its methods may be called from several goroutines.
type source interface {
	// weight is the matrix name+".weight", [n][k].
	weight(name string, n, k int) (checkpoint.Weight, error)
	// plain is the matrix stored under the bare name, never quantised.
	plain(name string, n, k int) (checkpoint.Weight, error)
	// expert is matrix `which` ("gate_proj", "up_proj", "down_proj") of expert e of `experts`, below layer.mlp.experts.
	expert(mlp string, e, experts int, which string, n, k int) (checkpoint.Weight, error)
	// vector is n values in FP32, whatever shape they are stored in.
	vector(name string, n int) ([]float32, error)
	has(name string) bool
}

// stored is the source that reads a checkpoint and remembers what was asked for.
type stored struct {
	c     *checkpoint.Checkpoint
	roots checkpoint.Roots

	mu   sync.Mutex
	used map[string]bool // guarded by mu
}

func newStored(c *checkpoint.Checkpoint) (*stored, error) {
	roots, err := c.Roots()
	return &stored{c: c, roots: roots, used: map[string]bool{}}, err
}

// full is the checkpoint's name of a tensor; using it counts as having understood it and the scales beside it.
func (s *stored) full(name string) string {
	root := s.roots.Body
	if strings.HasPrefix(name, "lm_head") {
		root = s.roots.Head
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, suffix := range []string{"", ".weight", ".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".input_scale"} {
		s.used[root+name+suffix] = true
	}
	return root + name
}

func (s *stored) has(name string) bool { return s.c.Has(s.roots.Body + name) }

func (s *stored) weight(name string, n, k int) (checkpoint.Weight, error) {
	return s.c.Weight(s.full(name), n, k)
}

func (s *stored) plain(name string, n, k int) (checkpoint.Weight, error) {
	return s.c.Plain(s.full(name), n, k)
}

func (s *stored) vector(name string, n int) ([]float32, error) {
	return s.c.Vector(s.full(name), n)
}

// expert reads one matrix an expert, or its part of the fused tensors gate_up_proj [E][2I][d] and down_proj [E][d][I].
func (s *stored) expert(mlp string, e, experts int, which string, n, k int) (checkpoint.Weight, error) {
	fused, rows, row0 := "gate_up_proj", 2*n, 0
	switch which {
	case "up_proj":
		row0 = n
	case "down_proj":
		fused, rows = which, n
	}
	if !s.has(mlp + "experts." + fused) {
		return s.weight(fmt.Sprintf("%sexperts.%d.%s", mlp, e, which), n, k)
	}
	w, err := s.c.Slice3(s.full(mlp+"experts."+fused), e, experts, rows, k)
	if err != nil {
		return w, err
	}
	return w.Rows(row0, row0+n)[0], nil
}

// unread names tensors of the text model that nobody asked for: a bias, a norm, a layer that this graph would leave
// out and so compute something else.
func (s *stored) unread(c Config) error {
	var left []string
	draft := fmt.Sprintf("%slayers.%d.", s.roots.Body, len(c.Layers))
	for _, name := range s.c.Names() {
		if s.used[name] || ignorable(name) {
			continue
		}
		// Some checkpoints repeat the trunk's embedding and head inside the draft layer.
		if copyOf := map[string]string{
			draft + "embed_tokens.weight":     s.roots.Body + "embed_tokens.weight",
			draft + "shared_head.head.weight": s.roots.Head + "lm_head.weight",
		}[name]; copyOf != "" && c.MTP {
			a, err := s.c.Tensor(name)
			if err != nil {
				return err
			}
			b, err := s.c.Tensor(copyOf)
			if err != nil {
				return err
			}
			if !bytes.Equal(a.Data, b.Data) {
				return fmt.Errorf("%s: tensor %q differs from %q, only a copy of it is supported", a.File, name, copyOf)
			}
			continue
		}
		t, _ := s.c.Tensor(name)
		left = append(left, fmt.Sprintf("%s: tensor %q", t.File, name))
	}
	if len(left) == 0 {
		return nil
	}
	more := ""
	if len(left) > 4 {
		more = fmt.Sprintf(" and %d more", len(left)-4)
	}
	return fmt.Errorf("tensors that the model's graph does not use, refused because they may change it: %s%s", strings.Join(left[:min(4, len(left))], ", "), more)
}

// ignorable tensors say nothing about the text model's numbers: the vision tower, activation and cache scales.
func ignorable(name string) bool {
	for _, part := range strings.Split(name, ".") {
		if slices.Contains([]string{"visual", "vision_tower", "vision_model", "multi_modal_projector"}, part) {
			return true
		}
	}
	for _, suffix := range []string{".input_scale", ".k_scale", ".v_scale", ".rotary_emb.inv_freq"} {
		if strings.HasSuffix(name, suffix) {
			return true
		}
	}
	return false
}

// random is the source of benchmarks and property tests: every tensor is a function of its name and the seed, wide
// enough that norms, gates, routers and the selection all matter.
type random struct{ seed uint64 }

// quantiles are 65,536 equally likely values of the normal distribution.
var quantiles = sync.OnceValue(func() []float32 {
	q := make([]float32, 1<<16)
	for i := range q {
		q[i] = float32(math.Sqrt2 * math.Erfinv((2*float64(i)+1)/float64(len(q))-1))
	}
	return q
})

// stream is splitmix64 from a place that depends on the tensor's name.
type stream uint64

func (r random) stream(name string) stream {
	h := fnv.New64a()
	h.Write([]byte(name))
	return stream(h.Sum64() ^ r.seed*0x9e3779b97f4a7c15)
}

func (s *stream) next() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func (r random) normal(name string, n int) []float32 {
	q, s, out := quantiles(), r.stream(name), make([]float32, n)
	for i := range out {
		out[i] = q[s.next()>>48]
	}
	return out
}

func (r random) has(string) bool { return true }

// weight draws BF16 values, four from each 64-bit number.
func (r random) weight(name string, n, k int) (checkpoint.Weight, error) {
	std := float32(math.Pow(float64(k), -0.5))
	if strings.HasSuffix(name, "embed_tokens") {
		std = 1
	}
	q := quantiles()
	table := make([]uint16, len(q))
	for i, v := range q {
		table[i] = checkpoint.ToBF16(v * std)
	}
	s, data := r.stream(name), make([]byte, 2*n*k)
	full := len(data) &^ 7
	for i := 0; i < full; i += 8 {
		z := s.next()
		v := uint64(table[z&0xffff]) | uint64(table[z>>16&0xffff])<<16 | uint64(table[z>>32&0xffff])<<32 | uint64(table[z>>48])<<48
		binary.LittleEndian.PutUint64(data[i:], v)
	}
	for i := full; i < len(data); i += 2 {
		binary.LittleEndian.PutUint16(data[i:], table[s.next()>>48])
	}
	return checkpoint.Weight{Name: name, Kind: checkpoint.KindBF16, N: n, K: k, Data: data}, nil
}

func (r random) plain(name string, n, k int) (checkpoint.Weight, error) {
	if !strings.Contains(name, "hc_") {
		return r.weight(name, n, k)
	}
	data := make([]byte, 0, 4*n*k)
	for _, v := range r.normal(name, n*k) {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v*float32(math.Pow(float64(k), -0.5))))
	}
	return checkpoint.Weight{Name: name, Kind: checkpoint.KindF32, N: n, K: k, Data: data}, nil
}

func (r random) expert(mlp string, e, _ int, which string, n, k int) (checkpoint.Weight, error) {
	return r.weight(fmt.Sprintf("%sexperts.%d.%s", mlp, e, which), n, k)
}

func (r random) vector(name string, n int) ([]float32, error) {
	v := r.normal(name, n)
	for i, x := range v {
		switch {
		case strings.HasSuffix(name, "A_log"):
			v[i] = 0.5 * x
		case strings.HasSuffix(name, "dt_bias"):
			v[i] = x - 2
		case strings.HasSuffix(name, "e_score_correction_bias"):
			v[i] = 0.1 * x
		case strings.HasSuffix(name, "_base"):
			v[i] = 0.7 * x
		case strings.HasSuffix(name, "_scale"):
			v[i] = 0.5 + 0.3*x
		case strings.HasSuffix(name, "conv1d.weight"):
			v[i] = 0.5 * x
		case strings.HasSuffix(name, ".bias"):
			v[i] = 0.2 * x
		case strings.HasSuffix(name, "_ape"):
		default: // norms
			v[i] = 1 + 0.2*x
		}
	}
	return v, nil
}
