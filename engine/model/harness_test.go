package model

import (
	"math"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// device is shared by all tests: worker pools are not free.
var device = sync.OnceValues(func() (*kernels.Device, error) { return kernels.Open("auto", 0) })

func openDevice(t testing.TB) *kernels.Device {
	t.Helper()
	d, err := device()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// testLimit bounds the context in tests, so that plans stay small whatever a config allows.
const testLimit = 2048

func load(t testing.TB, dir string, class kernels.Class) *Model {
	t.Helper()
	m, err := Load(openDevice(t), dir, Options{Class: class, ContextLimit: testLimit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// harness runs a model's trunk on arenas of its own. Pages and slots are handed out in order and never returned.
type harness struct {
	t            rapid.TB
	m            *Model
	layout       Layout
	pages, slots *kernels.Buffer
	plan         *kernels.Plan
	nextPage     int32
	nextSlot     int32
}

func newHarness(t testing.TB, m *Model, maxRows, maxSegs, pages, slots int) *harness {
	t.Helper()
	h := &harness{t: t, m: m, layout: m.Layout()}
	var err error
	if h.pages, err = m.dev.NewBuffer(pages * h.layout.PageStride); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.pages.Free)
	if h.slots, err = m.dev.NewBuffer(slots * h.layout.SlotStride); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.slots.Free)
	if h.plan, err = m.Plan(h.pages, h.slots, maxRows, maxSegs); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.plan.Free)
	return h
}

// seq is a sequence: n tokens consumed.
type seq struct {
	slot  int32
	table []int32
	n     int
}

func (h *harness) seq() *seq {
	h.nextSlot++
	return &seq{slot: h.nextSlot - 1}
}

// fork copies a sequence's slot and partial page; whole pages are shared.
func (h *harness) fork(s *seq) *seq {
	h.t.Helper()
	f := h.seq()
	f.n, f.table = s.n, append([]int32{}, s.table...)
	h.copy(h.slots, int(f.slot)*h.layout.SlotStride, h.slots, int(s.slot)*h.layout.SlotStride, h.layout.SlotStride)
	if s.n%pageTokens != 0 {
		last := len(f.table) - 1
		f.table[last] = h.nextPage
		h.nextPage++
		h.copy(h.pages, int(f.table[last])*h.layout.PageStride, h.pages, int(s.table[last])*h.layout.PageStride, h.layout.PageStride)
	}
	return f
}

func (h *harness) copy(dst *kernels.Buffer, dstOff int, src *kernels.Buffer, srcOff, n int) {
	h.t.Helper()
	if err := kernels.Copy(dst, dstOff, src, srcOff, n); err != nil {
		h.t.Fatal(err)
	}
}

// span is a run of tokens of one sequence; positions below writeFrom do not write caches.
type span struct {
	s         *seq
	tokens    []int32
	writeFrom int
}

// step runs one batch and gives the logits of all its rows, in order.
func (h *harness) step(spans ...span) [][]float32 {
	h.t.Helper()
	var b kernels.Batch
	for _, sp := range spans {
		for len(sp.s.table)*pageTokens < sp.s.n+len(sp.tokens) {
			sp.s.table = append(sp.s.table, h.nextPage)
			h.nextPage++
		}
		b.Segs = append(b.Segs, kernels.Seg{Row0: int32(len(b.Tokens)), Rows: int32(len(sp.tokens)), Pos0: int32(sp.s.n),
			Slot: sp.s.slot, Table: int32(len(b.Pages)), WriteFrom: int32(sp.writeFrom)})
		b.Tokens = append(b.Tokens, sp.tokens...)
		b.Pages = append(b.Pages, sp.s.table...)
		sp.s.n += len(sp.tokens)
	}
	for i := range b.Tokens {
		b.OutRows = append(b.OutRows, int32(i))
	}
	v := h.m.Vocab()
	b.Logits = make([]float32, len(b.Tokens)*v)
	if err := h.plan.Run(&b); err != nil {
		h.t.Fatal(err)
	}
	rows := make([][]float32, len(b.Tokens))
	for i := range rows {
		rows[i] = b.Logits[i*v : (i+1)*v]
	}
	return rows
}

// prefill runs tokens in the given chunk sizes, the last one repeated; the rows' logits come back joined.
func (h *harness) prefill(s *seq, tokens []int32, chunks ...int) (rows [][]float32) {
	h.t.Helper()
	for i := 0; len(tokens) > 0; i++ {
		n := min(chunks[min(i, len(chunks)-1)], len(tokens))
		rows = append(rows, h.step(span{s: s, tokens: tokens[:n]})...)
		tokens = tokens[n:]
	}
	return rows
}

// hidden is the final normed hidden row that the slot keeps.
func (h *harness) hidden(s *seq) []float32 {
	h.t.Helper()
	b := make([]byte, 4*h.m.Config.Hidden)
	if err := h.slots.Read(int(s.slot)*h.layout.SlotStride+h.layout.HiddenOff, b); err != nil {
		h.t.Fatal(err)
	}
	t := checkpoint.Tensor{DType: checkpoint.F32, Data: b}
	v, _ := t.Floats()
	return v
}

// greedy continues from the last row's logits.
func (h *harness) greedy(s *seq, last []float32, n int) (ids []int32) {
	h.t.Helper()
	for {
		ids = append(ids, argmax(last))
		if len(ids) == n {
			return ids
		}
		last = h.step(span{s: s, tokens: ids[len(ids)-1:]})[0]
	}
}

func argmax(v []float32) int32 {
	best := 0
	for i, x := range v {
		if x > v[best] {
			best = i
		}
	}
	return int32(best)
}

// sameBits fails at the first differing bit.
func sameBits(t rapid.TB, what string, got, want [][]float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d rows, want %d", what, len(got), len(want))
	}
	for i := range got {
		for j := range got[i] {
			if math.Float32bits(got[i][j]) != math.Float32bits(want[i][j]) {
				t.Fatalf("%s: row %d column %d: %v, want %v bit for bit", what, i, j, got[i][j], want[i][j])
			}
		}
	}
}

// worst is the largest difference over the largest wanted value.
func worst(got, want [][]float32) float64 { return slices.Max(rowErrors(got, want)) }

// outputs are the tensors of a reference file.
type outputs struct {
	t  testing.TB
	ck *checkpoint.Checkpoint
}

func readOutputs(t testing.TB, dir string) outputs {
	t.Helper()
	ck, err := checkpoint.OpenFile(filepath.Join(dir, "reference.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ck.Close() })
	return outputs{t, ck}
}

func (o outputs) ints(name string) []int32 {
	o.t.Helper()
	x, err := o.ck.Tensor(name)
	if err != nil {
		o.t.Fatal(err)
	}
	v, err := x.Ints()
	if err != nil {
		o.t.Fatal(err)
	}
	return v
}

func (o outputs) rows(name string) (rows [][]float32) {
	o.t.Helper()
	x, err := o.ck.Tensor(name)
	if err != nil {
		o.t.Fatal(err)
	}
	v, err := x.Floats()
	if err != nil {
		o.t.Fatal(err)
	}
	w := x.Shape[1]
	for i := range x.Shape[0] {
		rows = append(rows, v[i*w:(i+1)*w])
	}
	return rows
}

// narrow turns reference rows into FP32 for comparing.
func narrow(m mat) [][]float32 {
	out := make([][]float32, len(m))
	for i, row := range m {
		for _, x := range row {
			out[i] = append(out[i], float32(x))
		}
	}
	return out
}
