package checkpoint

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"unsafe"
)

// Kind says how a weight's values are made of its bytes.
type Kind int

// F16 tensors are widened to KindF32 when read.
const (
	KindF32      Kind = iota
	KindBF16          // Data: BF16 [N][K]
	KindFP8           // Data: E4M3 [N][K]; Scale: one, or one a row (ScaleRows)
	KindFP8Block      // Data: E4M3 [N][K]; Scale: [ceil(N/128)][ceil(K/128)]
	KindNVFP4         // Data: E2M1 [N][K/2], even column = low nibble; Scale8: E4M3 [N][K/16]; Scale: one
)

// String is the kind's name in reports.
func (k Kind) String() string {
	return [...]string{"F32", "BF16", "FP8", "FP8 block", "NVFP4"}[k]
}

const (
	blockEdge  = 128 // FP8 block scales cover 128 x 128 values
	nvfp4Group = 16  // NVFP4 scales cover 16 values of a row
)

// Weight is one matrix [N][K] (out, in) with the scales that belong to it. Slices may be the mapping: read-only.
type Weight struct {
	Name      string
	Kind      Kind
	N, K      int
	Data      []byte
	Scale8    []byte
	Scale     []float32
	ScaleRows int // KindFP8: 1 or N
}

// Weight reads the matrix name+".weight", which must be [n][k], with whatever scales stand beside it.
func (c *Checkpoint) Weight(name string, n, k int) (Weight, error) {
	if c.Has(name+".weight_packed") || c.Has(name+".weight_global_scale") {
		return Weight{}, fmt.Errorf("tensor %q: compressed-tensors packing is not supported", name+".weight_packed")
	}
	t, err := c.Tensor(name + ".weight")
	if err != nil {
		return Weight{}, err
	}
	w := Weight{Name: name, N: n, K: k}
	block, scale, global := c.tensors[name+".weight_scale_inv"], c.tensors[name+".weight_scale"], c.tensors[name+".weight_scale_2"]
	plain := block == nil && scale == nil && global == nil
	switch t.DType {
	case F32, BF16, F16:
		if !plain {
			return Weight{}, t.errorf("is %s but has quantisation scales beside it", t.DType)
		}
		return c.plainWeight(t, n, k)
	case U8:
		if scale == nil || global == nil || block != nil {
			return Weight{}, t.errorf("is U8: NVFP4 wants weight_scale and weight_scale_2 beside it")
		}
		err = w.setNVFP4(t, scale, global)
		return w, err
	case F8E4M3:
		switch {
		case global != nil || (block != nil) == (scale != nil):
			return Weight{}, t.errorf("is F8_E4M3: wants either weight_scale_inv or weight_scale beside it")
		case block != nil:
			err = w.setFP8Block(t, block)
		default:
			err = w.setFP8(t, scale)
		}
		return w, err
	}
	return Weight{}, t.errorf("dtype %s is not a weight's", t.DType)
}

func (c *Checkpoint) plainWeight(t *Tensor, n, k int) (Weight, error) {
	if err := t.want(n, k); err != nil {
		return Weight{}, err
	}
	w := Weight{Name: strings.TrimSuffix(t.Name, ".weight"), N: n, K: k, Data: t.Data}
	switch t.DType {
	case BF16:
		w.Kind = KindBF16
	case F16:
		w.Data = make([]byte, 4*n*k)
		for i := range n * k {
			binary.LittleEndian.PutUint32(w.Data[4*i:], math.Float32bits(FromF16(binary.LittleEndian.Uint16(t.Data[2*i:]))))
		}
	case F32:
	default:
		return Weight{}, t.errorf("dtype %s is not a plain weight's", t.DType)
	}
	w.align()
	return w, nil
}

// Plain reads an unquantised matrix stored under its bare name (no ".weight").
func (c *Checkpoint) Plain(name string, n, k int) (Weight, error) {
	t, err := c.Tensor(name)
	if err != nil {
		return Weight{}, err
	}
	return c.plainWeight(t, n, k)
}

// Slice3 reads matrix i of a fused [count][n][k] tensor (experts), stored plain under its bare name.
func (c *Checkpoint) Slice3(name string, i, count, n, k int) (Weight, error) {
	t, err := c.Tensor(name)
	if err != nil {
		return Weight{}, err
	}
	if err := t.want(count, n, k); err != nil {
		return Weight{}, err
	}
	size := n * k * t.DType.Size()
	one := Tensor{Name: t.Name, DType: t.DType, Shape: []int{n, k}, File: t.File, Data: t.Data[i*size : (i+1)*size]}
	return c.plainWeight(&one, n, k)
}

// Vector reads n values as float32, whatever the tensor's rank: [n], [1,1,n,1] and [n,1,w] with n = all values are
// the same bytes.
func (c *Checkpoint) Vector(name string, n int) ([]float32, error) {
	t, err := c.Tensor(name)
	if err != nil {
		return nil, err
	}
	size := 1
	for _, d := range t.Shape {
		size *= d
	}
	if size != n {
		return nil, t.errorf("shape %v has %d values, want %d", t.Shape, size, n)
	}
	return t.Floats()
}

// Floats widens every value of an F32, BF16 or F16 tensor.
func (t *Tensor) Floats() ([]float32, error) {
	switch t.DType {
	case F32, BF16, F16:
	default:
		return nil, t.errorf("dtype %s cannot be read as plain numbers", t.DType)
	}
	out := make([]float32, len(t.Data)/t.DType.Size())
	for i := range out {
		switch t.DType {
		case F32:
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		case BF16:
			out[i] = FromBF16(binary.LittleEndian.Uint16(t.Data[2*i:]))
		case F16:
			out[i] = FromF16(binary.LittleEndian.Uint16(t.Data[2*i:]))
		}
	}
	return out, nil
}

// Ints reads every value of an I32 tensor.
func (t *Tensor) Ints() ([]int32, error) {
	if t.DType != I32 {
		return nil, t.errorf("dtype %s, want I32", t.DType)
	}
	out := make([]int32, len(t.Data)/4)
	for i := range out {
		out[i] = int32(binary.LittleEndian.Uint32(t.Data[4*i:]))
	}
	return out, nil
}

func (t *Tensor) want(shape ...int) error {
	ok := len(t.Shape) == len(shape)
	for i := 0; ok && i < len(shape); i++ {
		ok = t.Shape[i] == shape[i]
	}
	if !ok {
		return t.errorf("shape %v, want %v", t.Shape, shape)
	}
	return nil
}

// scales widens a scale tensor of `want` values; a scalar may be [] or [1].
func (t *Tensor) scales(want int) ([]float32, error) {
	s, err := t.Floats()
	if err != nil {
		return nil, err
	}
	if len(s) != want {
		return nil, t.errorf("shape %v has %d scales, want %d", t.Shape, len(s), want)
	}
	for i, v := range s {
		if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
			return nil, t.errorf("scale %d is %v", i, v)
		}
	}
	return s, nil
}

func (w *Weight) setNVFP4(t, scale, global *Tensor) (err error) {
	if w.K%nvfp4Group != 0 {
		return t.errorf("%d columns: NVFP4 groups want a multiple of %d", w.K, nvfp4Group)
	}
	if err = t.want(w.N, w.K/2); err != nil {
		return err
	}
	if scale.DType != F8E4M3 && scale.DType != U8 { // some writers call the codes U8
		return scale.errorf("dtype %s, want F8_E4M3", scale.DType)
	}
	if err = scale.want(w.N, w.K/nvfp4Group); err != nil {
		return err
	}
	for i, c := range scale.Data {
		if c&0x7f == 0x7f {
			return scale.errorf("scale %d is NaN", i)
		}
	}
	w.Kind, w.Data, w.Scale8 = KindNVFP4, t.Data, scale.Data
	w.Scale, err = global.scales(1)
	return err
}

func (w *Weight) setFP8Block(t, block *Tensor) (err error) {
	if err = t.want(w.N, w.K); err != nil {
		return err
	}
	rows, cols := (w.N+blockEdge-1)/blockEdge, (w.K+blockEdge-1)/blockEdge
	if err = block.want(rows, cols); err != nil {
		return err
	}
	w.Kind, w.Data = KindFP8Block, t.Data
	w.Scale, err = block.scales(rows * cols)
	return err
}

func (w *Weight) setFP8(t, scale *Tensor) (err error) {
	if err = t.want(w.N, w.K); err != nil {
		return err
	}
	w.Kind, w.Data, w.ScaleRows = KindFP8, t.Data, 1
	switch {
	case len(scale.Shape) == 0, len(scale.Shape) == 1 && scale.Shape[0] == 1:
	case scale.want(w.N) == nil, scale.want(w.N, 1) == nil:
		w.ScaleRows = w.N
	default:
		return scale.errorf("shape %v, want a scalar or one scale a row (%d)", scale.Shape, w.N)
	}
	w.Scale, err = scale.scales(w.ScaleRows)
	return err
}

// align copies data that a header of odd length has left off its natural alignment, so that C may read it typed.
func (w *Weight) align() {
	if len(w.Data) > 0 && uintptr(unsafe.Pointer(&w.Data[0]))%4 != 0 {
		w.Data = append(make([]byte, 0, len(w.Data)), w.Data...)
	}
}

// Rows cuts rows [a, b) out of the weight, in parts of one scale row each where block scales do not start at a.
// The parts in order are the rows; they share the weight's memory.
func (w Weight) Rows(a, b int) []Weight {
	if w.Kind == KindFP8Block && a%blockEdge != 0 {
		cut := min(b, (a/blockEdge+1)*blockEdge)
		first := w.cut(a, cut)
		if cut == b {
			return []Weight{first}
		}
		return append([]Weight{first}, w.Rows(cut, b)...)
	}
	return []Weight{w.cut(a, b)}
}

func (w Weight) cut(a, b int) Weight {
	row := len(w.Data) / w.N
	out := w
	out.N, out.Data = b-a, w.Data[a*row:b*row]
	switch w.Kind {
	case KindNVFP4:
		g := w.K / nvfp4Group
		out.Scale8 = w.Scale8[a*g : b*g]
	case KindFP8:
		if w.ScaleRows > 1 || w.N == 1 {
			out.Scale, out.ScaleRows = w.Scale[a:b], b-a
		}
	case KindFP8Block:
		cols := (w.K + blockEdge - 1) / blockEdge
		out.Scale = w.Scale[a/blockEdge*cols : (b+blockEdge-1)/blockEdge*cols]
	}
	return out
}

// Row dequantises one row into dst: the product of the parts in float64, rounded once to float32.
func (w Weight) Row(i int, dst []float32) {
	for j := range w.K {
		v, s := w.value(i, j)
		dst[j] = float32(v * s)
	}
}

// value is element (i, j) as an exact number and the scale that still multiplies it.
func (w Weight) value(i, j int) (v, scale float64) {
	at := i*w.K + j
	switch w.Kind {
	case KindF32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(w.Data[4*at:]))), 1
	case KindBF16:
		return float64(FromBF16(binary.LittleEndian.Uint16(w.Data[2*at:]))), 1
	case KindFP8:
		if w.ScaleRows > 1 {
			return float64(e4m3[w.Data[at]]), float64(w.Scale[i])
		}
		return float64(e4m3[w.Data[at]]), float64(w.Scale[0])
	case KindFP8Block:
		cols := (w.K + blockEdge - 1) / blockEdge
		return float64(e4m3[w.Data[at]]), float64(w.Scale[i/blockEdge*cols+j/blockEdge])
	}
	code := w.Data[at/2] >> (4 * (j & 1))
	group := w.Scale8[at/nvfp4Group] & 0x7f // ModelOpt's group scales are magnitudes: the sign bit carries nothing
	return float64(e2m1[code&15]) * float64(e4m3[group]), float64(w.Scale[0])
}

// Transposed turns the weight [N][K] into [K][N]. Where one scale covers the whole tensor (or none does), the values
// stay exact in BF16 and the scale is returned beside them; otherwise the result is F32 with the scales multiplied in
// and the scale returned is 1.
func (w Weight) Transposed() (Weight, float32) {
	out := Weight{Name: w.Name, N: w.K, K: w.N, Kind: KindF32}
	scale := float32(1)
	if w.Kind == KindBF16 || w.Kind == KindNVFP4 || w.Kind == KindFP8 && w.ScaleRows == 1 {
		out.Kind = KindBF16
		if len(w.Scale) == 1 {
			scale = w.Scale[0]
		}
	}
	size := 4
	if out.Kind == KindBF16 {
		size = 2
	}
	out.Data = make([]byte, w.N*w.K*size)
	for i := range w.N {
		for j := range w.K {
			v, s := w.value(i, j)
			at := (j*w.N + i) * size
			if out.Kind == KindBF16 {
				binary.LittleEndian.PutUint16(out.Data[at:], ToBF16(float32(v)))
			} else {
				binary.LittleEndian.PutUint32(out.Data[at:], math.Float32bits(float32(v*s)))
			}
		}
	}
	return out, scale
}
