package checkpoint

import (
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
)

// The reference of the encoders is written from the definitions alone: grids by fields and powers of two, every rounding
// an exhaustive search over the grid in exact rational arithmetic.

// gridE4M3 and gridE2M1 are the non-negative values by code.
var gridE4M3, gridE2M1 = func() (a, b []*big.Rat) {
	pow := func(e int) *big.Rat {
		r := big.NewRat(1, 1)
		for ; e > 0; e-- {
			r.Mul(r, big.NewRat(2, 1))
		}
		for ; e < 0; e++ {
			r.Mul(r, big.NewRat(1, 2))
		}
		return r
	}
	field := func(e, m, bits, bias int) *big.Rat {
		frac := big.NewRat(int64(m), 1<<bits)
		if e == 0 {
			return frac.Mul(frac, pow(1-bias))
		}
		return frac.Add(frac, big.NewRat(1, 1)).Mul(frac, pow(e-bias))
	}
	for c := range 127 { // 127 is NaN
		a = append(a, field(c>>3, c&7, 3, 7))
	}
	for c := range 8 {
		b = append(b, field(c>>1, c&1, 1, 1))
	}
	return a, b
}()

// nearestCode searches the whole grid for the value closest to |x|; of two equally close ones the even code.
func nearestCode(x *big.Rat, grid []*big.Rat) byte {
	x = new(big.Rat).Abs(x)
	best, at := (*big.Rat)(nil), 0
	for c, v := range grid {
		d := new(big.Rat).Sub(x, v)
		d.Abs(d)
		if best == nil || d.Cmp(best) < 0 || d.Cmp(best) == 0 && c%2 == 0 {
			best, at = d, c
		}
	}
	return byte(at)
}

func rat(f float64) *big.Rat { return new(big.Rat).SetFloat64(f) }

// round32 is the float32 nearest to x.
func round32(x *big.Rat) float32 {
	f, _ := x.Float32()
	return f
}

func signed(code byte, f float32, bit byte) byte {
	if math.Signbit(float64(f)) {
		return code | bit
	}
	return code
}

// referenceNVFP4 and referenceFP8 give codes and scales in the stored order.
func referenceNVFP4(n, k int, v []float32) (data, scale8 []byte, global float32) {
	top := 0.0
	for _, x := range v {
		top = math.Max(top, math.Abs(float64(x)))
	}
	global = 1
	if top > 0 {
		global = max(round32(new(big.Rat).Quo(rat(top), big.NewRat(6*448, 1))), math.SmallestNonzeroFloat32)
	}
	data = make([]byte, n*k/2)
	for g := 0; g < n*k; g += 16 {
		top := 0.0
		for _, x := range v[g : g+16] {
			top = math.Max(top, math.Abs(float64(x)))
		}
		code := byte(0x38) // 1
		if top > 0 {
			want := new(big.Rat).Quo(rat(top), new(big.Rat).Mul(big.NewRat(6, 1), rat(float64(global))))
			code = max(1, nearestCode(want, gridE4M3))
		}
		scale8 = append(scale8, code)
		step := new(big.Rat).Mul(gridE4M3[code], rat(float64(global)))
		for i, x := range v[g : g+16] {
			c := signed(nearestCode(new(big.Rat).Quo(rat(float64(x)), step), gridE2M1), x, 8)
			data[(g+i)/2] |= c << (4 * (i % 2))
		}
	}
	return data, scale8, global
}

func referenceFP8(n, k int, v []float32) (data []byte, scale []float32) {
	data = make([]byte, n*k)
	for i0 := 0; i0 < n; i0 += 128 {
		for j0 := 0; j0 < k; j0 += 128 {
			top := 0.0
			each := func(f func(at int)) {
				for i := i0; i < n && i < i0+128; i++ {
					for j := j0; j < k && j < j0+128; j++ {
						f(i*k + j)
					}
				}
			}
			each(func(at int) { top = math.Max(top, math.Abs(float64(v[at]))) })
			s := float32(1)
			if top > 0 {
				s = max(round32(new(big.Rat).Quo(rat(top), big.NewRat(448, 1))), math.SmallestNonzeroFloat32)
			}
			scale = append(scale, s)
			each(func(at int) {
				data[at] = signed(nearestCode(new(big.Rat).Quo(rat(float64(v[at])), rat(float64(s))), gridE4M3), v[at], 0x80)
			})
		}
	}
	return data, scale
}

// TestToGrids: every code comes back, every midpoint goes to the even neighbour, a hair beside it to the nearer one.
func TestToGrids(t *testing.T) {
	for _, f := range []struct {
		name string
		to   func(float64) byte
		grid []*big.Rat
		sign byte
	}{{"E4M3", ToE4M3, gridE4M3, 0x80}, {"E2M1", ToE2M1, gridE2M1, 8}} {
		for c := range f.grid {
			x, _ := f.grid[c].Float64()
			if got := f.to(x); got != byte(c) {
				t.Errorf("%s: %v = code %#x, want %#x", f.name, x, got, c)
			}
			if got := f.to(-x); got != byte(c)|f.sign {
				t.Errorf("%s: %v = code %#x, want %#x", f.name, -x, got, byte(c)|f.sign)
			}
			if c+1 == len(f.grid) {
				continue
			}
			y, _ := f.grid[c+1].Float64()
			mid := (x + y) / 2
			for _, p := range []float64{mid, math.Nextafter(mid, 0), math.Nextafter(mid, 1e9), x + (y-x)*0.3, x + (y-x)*0.8} {
				if got, want := f.to(p), nearestCode(rat(p), f.grid); got != want {
					t.Errorf("%s: %v = code %#x, want %#x", f.name, p, got, want)
				}
			}
		}
		last := byte(len(f.grid) - 1)
		for _, x := range []float64{460, 464, 465, 1e30, math.Inf(1)} {
			if got := f.to(x); got != last {
				t.Errorf("%s: %v = code %#x, want the largest, %#x", f.name, x, got, last)
			}
		}
		if got := f.to(math.Copysign(0, -1)); got != f.sign {
			t.Errorf("%s: -0 = code %#x, want %#x", f.name, got, f.sign)
		}
	}
	for c := range 256 {
		if v := E4M3(byte(c)); v == v && ToE4M3(float64(v)) != byte(c) {
			t.Errorf("E4M3 code %#x reads %v and comes back as %#x", c, v, ToE4M3(float64(v)))
		}
	}
	if ToE4M3(math.NaN())&0x7f != 0x7f {
		t.Error("NaN has a finite E4M3 code")
	}
}

// matrices are what the encoders meet, and what they should not stumble over.
func matrices() map[string]struct {
	n, k int
	v    []float32
} {
	r := rand.New(rand.NewPCG(1, 2))
	normal := func(n, k int, size float64) []float32 {
		v := make([]float32, n*k)
		for i := range v {
			v[i] = FromBF16(ToBF16(float32(r.NormFloat64() * size)))
		}
		return v
	}
	ties := make([]float32, 2*32)
	for i := range ties { // amax 6*448 makes the global scale 1 and groups of amax 6 a scale of 1: every midpoint is met
		ties[i] = []float32{6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, float32(math.Copysign(0, -1))}[i%16]
	}
	ties[63] = 6 * 448
	fp8ties := make([]float32, 256)
	for c := range 126 {
		fp8ties[c] = (E4M3(byte(c)) + E4M3(byte(c+1))) / 2
		fp8ties[c+128] = -fp8ties[c]
	}
	fp8ties[126] = 448
	outlier := normal(4, 64, 1)
	outlier[70] = 3e4 // leaves other groups' scales at the bottom of the grid, or under it
	zeros := normal(3, 48, 0.1)
	for i := 16; i < 48; i++ {
		zeros[i] = 0
	}
	type m = struct {
		n, k int
		v    []float32
	}
	return map[string]m{
		"normal":      {40, 160, normal(40, 160, 0.05)},
		"part blocks": {130, 144, normal(130, 144, 1)},
		"ties":        {2, 32, ties},
		"FP8 ties":    {1, 256, fp8ties},
		"outlier":     {4, 64, outlier},
		"zero groups": {3, 48, zeros},
		"all zero":    {2, 16, make([]float32, 32)},
		"tiny":        {2, 16, normal(2, 16, 1e-37)},
		"denormal":    {2, 16, append(make([]float32, 31), 3*math.SmallestNonzeroFloat32)},
		"huge":        {2, 16, normal(2, 16, 5e37)},
	}
}

func TestEncodeMatchesReference(t *testing.T) {
	for name, m := range matrices() {
		t.Run(name, func(t *testing.T) {
			w, err := EncodeNVFP4("x", m.n, m.k, m.v)
			if err != nil {
				t.Fatal(err)
			}
			data, scale8, global := referenceNVFP4(m.n, m.k, m.v)
			if string(w.Data) != string(data) || string(w.Scale8) != string(scale8) || len(w.Scale) != 1 || w.Scale[0] != global {
				t.Errorf("NVFP4 differs from the reference")
			}
			f, err := EncodeFP8Block("x", m.n, m.k, m.v)
			if err != nil {
				t.Fatal(err)
			}
			codes, scale := referenceFP8(m.n, m.k, m.v)
			if string(f.Data) != string(codes) || len(f.Scale) != len(scale) {
				t.Fatalf("FP8 differs from the reference")
			}
			for i := range scale {
				if f.Scale[i] != scale[i] {
					t.Errorf("FP8 scale %d: %v, want %v", i, f.Scale[i], scale[i])
				}
			}
		})
	}
}

// TestEncodeError: what is read back is close, as close as the grids allow.
func TestEncodeError(t *testing.T) {
	m := matrices()["normal"]
	relative := func(w Weight) float64 {
		row, err, all := make([]float32, w.K), 0.0, 0.0
		for i := range w.N {
			w.Row(i, row)
			for j, x := range row {
				d := float64(x) - float64(m.v[i*w.K+j])
				err, all = err+d*d, all+float64(m.v[i*w.K+j])*float64(m.v[i*w.K+j])
			}
		}
		return math.Sqrt(err / all)
	}
	four, _ := EncodeNVFP4("x", m.n, m.k, m.v)
	eight, _ := EncodeFP8Block("x", m.n, m.k, m.v)
	// Values of a normal distribution: about 9.5 % in groups of 16 FP4 values, 2.6 % in E4M3.
	if e := relative(four); e < 0.05 || e > 0.12 {
		t.Errorf("NVFP4: relative error %.3f", e)
	}
	if e := relative(eight); e < 0.01 || e > 0.04 {
		t.Errorf("FP8: relative error %.3f", e)
	}
}

func TestEncodeRefuses(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(-1))
	for _, bad := range []float32{nan, inf, float32(math.Inf(1))} {
		v := make([]float32, 4*32)
		v[2*32+5] = bad
		for _, encode := range []func(string, int, int, []float32) (Weight, error){EncodeNVFP4, EncodeFP8Block} {
			if _, err := encode("layers.0.x.weight", 4, 32, v); err == nil || !strings.Contains(err.Error(), `"layers.0.x.weight": row 2 column 5`) {
				t.Errorf("%v: error %v", bad, err)
			}
		}
	}
	if _, err := EncodeNVFP4("layers.0.x.weight", 2, 24, make([]float32, 48)); err == nil || !strings.Contains(err.Error(), "24 columns") {
		t.Error("24 columns:", err)
	}
	if _, err := EncodeFP8Block("x", 2, 24, make([]float32, 48)); err != nil {
		t.Error("FP8 takes part blocks:", err)
	}
}
