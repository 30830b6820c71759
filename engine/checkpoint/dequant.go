package checkpoint

import "math"

// e4m3 holds the value of every E4M3 code (1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinities, NaN at
// S.1111.111) and e2m1 of every FP4 nibble. All of them are exact in float32 and in BF16.
var (
	e4m3 [256]float32
	e2m1 = [16]float32{0, 0.5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -0.5, -1, -1.5, -2, -3, -4, -6}
)

func init() {
	for c := range e4m3 {
		exp, man := c>>3&15, c&7
		v := math.Ldexp(float64(8+man), exp-10)
		if exp == 0 {
			v = math.Ldexp(float64(man), -9)
		}
		if c&0x7f == 0x7f {
			v = math.NaN()
		}
		if c&0x80 != 0 {
			v = math.Copysign(v, -1)
		}
		e4m3[c] = float32(v)
	}
}

// E4M3 is the value of an FP8 E4M3 code.
func E4M3(code byte) float32 { return e4m3[code] }

// E2M1 is the value of an FP4 E2M1 code; only the low four bits count.
func E2M1(nibble byte) float32 { return e2m1[nibble&15] }

// FromBF16 widens one BF16 value: exact.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// ToBF16 rounds to the nearest BF16, ties to even; NaN stays a (quiet) NaN.
func ToBF16(f float32) uint16 {
	u := math.Float32bits(f)
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// FromF16 widens one IEEE half: exact.
func FromF16(h uint16) float32 {
	sign, exp, man := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&1023)
	switch exp {
	case 0:
		return math.Float32frombits(sign | math.Float32bits(float32(man)*(1.0/(1<<24))))
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | man<<13)
}
