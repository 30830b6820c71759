package kernels

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
)

// ---- storage types, written from their definitions ----

func e4m3(b byte) float64 {
	sign, e, m := 1.0, int(b>>3&15), float64(b&7)
	if b >= 128 {
		sign = -1
	}
	switch {
	case e == 15 && m == 7:
		return math.NaN()
	case e == 0:
		return sign * m / 8 * math.Pow(2, -6)
	}
	return sign * (1 + m/8) * math.Pow(2, float64(e-7))
}

func e2m1(n byte) float64 {
	sign := 1.0
	if n&8 != 0 {
		sign = -1
	}
	if e, m := int(n>>1&3), float64(n&1); e == 0 {
		return sign * m / 2
	} else {
		return sign * (1 + m/2) * math.Pow(2, float64(e-1))
	}
}

// bf16 rounds to the nearest BF16 value, ties to even.
func bf16(v float64) float64 {
	f := float32(v)
	u := math.Float32bits(f)
	u += 0x7fff + u>>16&1
	return float64(math.Float32frombits(u &^ 0xffff))
}

func (c Class) round(v float64) float64 {
	if c == ClassBF16 {
		return bf16(v)
	}
	return v
}

// randomMatrix makes a part and its values.
func randomMatrix(r *rand.Rand, dt DType, n, k int) (Matrix, [][]float64) {
	m := Matrix{DType: dt, N: n, K: k}
	rows := make([][]float64, n)
	size := 1 / math.Sqrt(float64(k))
	for i := range rows {
		rows[i] = make([]float64, k)
	}
	finite := func() byte {
		for {
			if b := byte(r.Uint32()); b&0x7f != 0x7f {
				return b
			}
		}
	}
	switch dt {
	case F32, BF16:
		for i := range rows {
			for j := range rows[i] {
				v := float32(normal(r) * size)
				if dt == BF16 {
					v = float32(bf16(float64(v)))
					m.Data = binary.LittleEndian.AppendUint16(m.Data, uint16(math.Float32bits(v)>>16))
				} else {
					m.Data = binary.LittleEndian.AppendUint32(m.Data, math.Float32bits(v))
				}
				rows[i][j] = float64(v)
			}
		}
	case FP8, FP8Block:
		m.ScaleRows = 1
		if r.IntN(2) == 0 {
			m.ScaleRows = n
		}
		blocks := (k + 127) / 128
		for range max(n, (n+127)/128*blocks) {
			m.Scale = append(m.Scale, float32((0.5+r.Float64())*size/100))
		}
		for i := range rows {
			for j := range rows[i] {
				b := finite()
				m.Data = append(m.Data, b)
				at := i % m.ScaleRows
				if dt == FP8Block {
					at = i/128*blocks + j/128
				}
				rows[i][j] = e4m3(b) * float64(m.Scale[at])
			}
		}
	case NVFP4:
		m.Scale = []float32{float32(size / 50)}
		m.Data, m.Scale8 = make([]byte, n*k/2), make([]byte, n*k/16)
		for i := range m.Data {
			m.Data[i] = byte(r.Uint32())
		}
		for i := range m.Scale8 {
			m.Scale8[i] = finite()
		}
		for i := range rows {
			for j := range rows[i] {
				nib := m.Data[i*k/2+j/2] >> (4 * (j % 2)) & 15
				rows[i][j] = e2m1(nib) * math.Abs(e4m3(m.Scale8[i*k/16+j/16])) * float64(m.Scale[0])
			}
		}
	}
	return m, rows
}
