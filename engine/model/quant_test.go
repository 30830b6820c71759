package model

import (
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// nearest is the code below n whose value is closest to x.
func nearest(x float64, n int, value func(byte) float32) byte {
	best, at := math.Inf(1), byte(0)
	for c := range n {
		if d := math.Abs(x - float64(value(byte(c)))); d < best {
			best, at = d, byte(c)
		}
	}
	return at
}

func values(x tensor) []float64 {
	v, _ := (&checkpoint.Tensor{DType: x.dtype, Data: x.data}).Floats()
	return wide(v)
}

func largest(v []float64) float64 {
	top := 1e-9
	for _, x := range v {
		top = max(top, math.Abs(x))
	}
	return top
}

func scalars(v ...float64) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(x)))
	}
	return b
}

// quantise replaces the matrix name+".weight" by its quantised form.
func quantise(m map[string]tensor, name, form string) {
	x := m[name+".weight"]
	v, n, k := values(x), x.shape[0], x.shape[1]
	if form == "NVFP4" {
		global := largest(v) / (6 * 448)
		codes, scales := make([]byte, n*k/2), make([]byte, n*k/16)
		for g := range scales {
			group := v[16*g : 16*g+16]
			scales[g] = nearest(largest(group)/6/global, 127, checkpoint.E4M3)
			step := float64(checkpoint.E4M3(scales[g])) * global
			for i, w := range group {
				codes[(16*g+i)/2] |= nearest(w/max(step, 1e-30), 16, checkpoint.E2M1) << (4 * (i & 1))
			}
			scales[g] |= byte(g%2) << 7 // the sign bit of a group scale carries nothing
		}
		m[name+".weight"] = tensor{checkpoint.U8, []int{n, k / 2}, codes}
		m[name+".weight_scale"] = tensor{checkpoint.F8E4M3, []int{n, k / 16}, scales}
		m[name+".weight_scale_2"] = tensor{checkpoint.F32, nil, scalars(global)}
		m[name+".input_scale"] = tensor{checkpoint.F32, nil, scalars(1)}
		return
	}
	var stored []float64
	cols := (k + 127) / 128
	switch form {
	case "FP8 tensor":
		stored = []float64{largest(v) / 448}
	case "FP8 row":
		for i := range n {
			stored = append(stored, largest(v[i*k:(i+1)*k])/448)
		}
	case "FP8 block":
		for b := range (n + 127) / 128 * cols {
			stored = append(stored, largest(v)/448*(1+float64(b)))
		}
	}
	codes := make([]byte, n*k)
	for i := range n {
		for j := range k {
			at := map[string]int{"FP8 tensor": 0, "FP8 row": i, "FP8 block": i/128*cols + j/128}[form]
			codes[i*k+j] = nearest(math.Abs(v[i*k+j])/float64(float32(stored[at])), 127, checkpoint.E4M3)
			if v[i*k+j] < 0 {
				codes[i*k+j] |= 0x80
			}
		}
	}
	m[name+".weight"] = tensor{checkpoint.F8E4M3, x.shape, codes}
	switch form {
	case "FP8 tensor":
		m[name+".weight_scale"] = tensor{checkpoint.F32, []int{1}, scalars(stored...)}
	case "FP8 row":
		m[name+".weight_scale"] = tensor{checkpoint.F32, []int{n, 1}, scalars(stored...)}
	case "FP8 block":
		m[name+".weight_scale_inv"] = tensor{checkpoint.F32, []int{(n + 127) / 128, cols}, scalars(stored...)}
	}
}

// TestQuantisedForms loads every projection in every stored form, fused and absorbed as the graph wants them, and
// compares with the float64 reference of the very same bytes.
func TestQuantisedForms(t *testing.T) {
	for _, form := range []string{"NVFP4", "FP8 tensor", "FP8 row", "FP8 block", "mixed"} {
		t.Run(form, func(t *testing.T) {
			forms := []string{"NVFP4", "FP8 tensor", "FP8 row", "FP8 block", ""}
			n := 0
			dir := copyModel(t, fixtureDir, func(m map[string]tensor) {
				for _, name := range sortedKeys(m) {
					base, ok := strings.CutSuffix(name, "_proj.weight")
					if !ok {
						continue
					}
					f := form
					if form == "mixed" {
						f = forms[n%len(forms)]
						n++
					}
					if f != "" {
						quantise(m, base+"_proj", f)
					}
				}
			})
			m := load(t, dir, kernels.ClassF32)
			h := newHarness(t, m, 96, 1, 2, 1)
			ids := readOutputs(t, fixtureDir).ints("input_ids")
			c, src := openStored(t, dir)
			ref := newReference(t, c, src)
			_, want := ref.forward(ids)
			rows := min(ref.unsure, len(ids))
			got := h.prefill(h.seq(), ids, len(ids))
			e := worst(got[:rows], narrow(want[:rows]))
			t.Logf("%d rows: %.2e", rows, e)
			if rows < 30 || e > randomTolerance {
				t.Errorf("logits of %d rows differ by %.2e of the largest", rows, e)
			}
		})
	}
}
