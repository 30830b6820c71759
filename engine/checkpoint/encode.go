package checkpoint

import (
	"fmt"
	"math"
)

// Largest magnitudes of the two grids.
const (
	e4m3Max = 448
	e2m1Max = 6
)

// ToE4M3 rounds to the nearest E4M3 value, ties to the even code, magnitudes above 448 to 448. The sign survives, also
// of a zero and of what rounds to zero. NaN gives the NaN code.
func ToE4M3(x float64) byte {
	sign := byte(0)
	if math.Signbit(x) {
		sign, x = 0x80, -x
	}
	switch {
	case x != x:
		return sign | 0x7f
	case x >= e4m3Max:
		return sign | 0x7e
	case x < 1.0/64: // subnormal: multiples of 2^-9; 8 of them are the code of the smallest normal number
		return sign | byte(math.RoundToEven(x*512))
	}
	f, exp := math.Frexp(x) // x = f * 2^exp, f in [0.5, 1)
	man := int(math.RoundToEven(f * 16))
	code := (exp+6)<<3 + man - 8 // man == 16 carries into the exponent, which is the next code
	return sign | byte(min(code, 0x7e))
}

// ToE2M1 rounds to the nearest FP4 value, ties to the even code, magnitudes above 6 to 6; the sign survives. x must not
// be NaN.
func ToE2M1(x float64) byte {
	sign := byte(0)
	if math.Signbit(x) {
		sign, x = 8, -x
	}
	switch { // midpoints between neighbours belong to the even one of the two codes
	case x <= 0.25:
		return sign
	case x < 0.75:
		return sign | 1
	case x <= 1.25:
		return sign | 2
	case x < 1.75:
		return sign | 3
	case x <= 2.5:
		return sign | 4
	case x < 3.5:
		return sign | 5
	case x <= 5:
		return sign | 6
	}
	return sign | 7
}

// finite gives the largest magnitude, or the place of the first value that is NaN or infinite.
func finite(v []float32) (top float32, bad int) {
	for i, x := range v {
		if x < 0 {
			x = -x
		}
		if !(x <= math.MaxFloat32) {
			return 0, i
		}
		top = max(top, x)
	}
	return top, -1
}

func checkFinite(name string, k int, v []float32) (float32, error) {
	top, bad := finite(v)
	if bad >= 0 {
		return 0, fmt.Errorf("tensor %q: row %d column %d is %v, which no quantised format can hold", name, bad/k, bad%k, v[bad])
	}
	return top, nil
}

// EncodeNVFP4 quantises the matrix [n][k] as ModelOpt stores NVFP4. Global scale g = amax/(6*448) in FP32; a group's
// scale is the E4M3 nearest to its amax/(6*g); a value's code is the E2M1 nearest to value/(scale*g). Quotients are
// taken in float64, where they cannot fall on a tie that the exact quotient is not on, so rounding is exact. A group of
// zeros has scale 1; another one never has scale 0, but at least the smallest E4M3. A matrix of zeros has g = 1.
func EncodeNVFP4(name string, n, k int, values []float32) (Weight, error) {
	if k%nvfp4Group != 0 {
		return Weight{}, fmt.Errorf("tensor %q: %d columns: NVFP4 groups want a multiple of %d", name, k, nvfp4Group)
	}
	amax, err := checkFinite(name, k, values)
	if err != nil {
		return Weight{}, err
	}
	global := float32(float64(amax) / (e2m1Max * e4m3Max))
	if global == 0 {
		global = 1
		if amax > 0 {
			global = math.SmallestNonzeroFloat32
		}
	}
	w := Weight{Name: name, Kind: KindNVFP4, N: n, K: k, Data: make([]byte, n*k/2), Scale8: make([]byte, n*k/nvfp4Group), Scale: []float32{global}}
	for g := range w.Scale8 {
		group := values[g*nvfp4Group : (g+1)*nvfp4Group]
		top, _ := finite(group)
		code := ToE4M3(1)
		if top > 0 {
			code = max(ToE4M3(float64(top)/(e2m1Max*float64(global))), 1)
		}
		w.Scale8[g] = code
		step := float64(e4m3[code]) * float64(global)
		for i, x := range group {
			w.Data[(g*nvfp4Group+i)/2] |= ToE2M1(float64(x)/step) << (4 * (i & 1))
		}
	}
	return w, nil
}

// EncodeFP8Block quantises the matrix [n][k] in blocks of 128 x 128 values, those at the edges smaller: a block's scale
// is amax/448 in FP32 (1 for a block of zeros), a value's code the E4M3 nearest to value/scale, taken in float64.
func EncodeFP8Block(name string, n, k int, values []float32) (Weight, error) {
	if _, err := checkFinite(name, k, values); err != nil {
		return Weight{}, err
	}
	rows, cols := (n+blockEdge-1)/blockEdge, (k+blockEdge-1)/blockEdge
	w := Weight{Name: name, Kind: KindFP8Block, N: n, K: k, Data: make([]byte, n*k), Scale: make([]float32, rows*cols)}
	for b := range w.Scale {
		i0, j0 := b/cols*blockEdge, b%cols*blockEdge
		i1, j1 := min(i0+blockEdge, n), min(j0+blockEdge, k)
		top := float32(0)
		for i := i0; i < i1; i++ {
			t, _ := finite(values[i*k+j0 : i*k+j1])
			top = max(top, t)
		}
		scale := float32(float64(top) / e4m3Max)
		if scale == 0 {
			scale = 1
			if top > 0 {
				scale = math.SmallestNonzeroFloat32
			}
		}
		w.Scale[b] = scale
		for i := i0; i < i1; i++ {
			for j := j0; j < j1; j++ {
				w.Data[i*k+j] = ToE4M3(float64(values[i*k+j]) / float64(scale))
			}
		}
	}
	return w, nil
}
