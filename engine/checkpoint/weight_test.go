package checkpoint

import (
	"fmt"
	"math"
	"path/filepath"
	"testing"
)

// TestE4M3 checks all 256 codes against the format's definition, computed another way: by fields and powers of two.
func TestE4M3(t *testing.T) {
	for c := range 256 {
		s, e, m := c>>7, c>>3&15, c&7
		want := math.Pow(-1, float64(s)) * math.Pow(2, float64(e-7)) * (1 + float64(m)/8)
		if e == 0 {
			want = math.Pow(-1, float64(s)) * math.Pow(2, -6) * float64(m) / 8
		}
		got := float64(E4M3(byte(c)))
		if e == 15 && m == 7 {
			if !math.IsNaN(got) {
				t.Errorf("code %#x = %v, want NaN", c, got)
			}
			continue
		}
		if got != want || math.Signbit(got) != (s == 1) {
			t.Errorf("code %#x = %v, want %v", c, got, want)
		}
		if FromBF16(ToBF16(float32(want))) != float32(want) {
			t.Errorf("code %#x is not exact in BF16", c)
		}
	}
	if E4M3(0x7e) != 448 || E4M3(1) != 1.0/512 {
		t.Error("largest or smallest value is wrong")
	}
}

func TestE2M1(t *testing.T) {
	for n := range 16 {
		s, e, m := n>>3, n>>1&3, n&1
		want := math.Pow(2, float64(e-1)) * (1 + float64(m)/2)
		if e == 0 {
			want = float64(m) / 2
		}
		if s == 1 {
			want = -want
		}
		if got := float64(E2M1(byte(n | 0xf0))); got != want {
			t.Errorf("nibble %d = %v, want %v", n, got, want)
		}
		for c := range 128 { // products of a value and a group scale are exact in BF16: the resident form relies on it
			p := E2M1(byte(n)) * E4M3(byte(c))
			if c != 127 && FromBF16(ToBF16(p)) != p {
				t.Errorf("%d * %#x = %v is not exact in BF16", n, c, p)
			}
		}
	}
}

func TestHalfWidths(t *testing.T) {
	for h := range 1 << 16 {
		s, e, m := h>>15, h>>10&31, h&1023
		want := math.Ldexp(1+float64(m)/1024, e-15)
		switch {
		case e == 0:
			want = math.Ldexp(float64(m), -24)
		case e == 31 && m == 0:
			want = math.Inf(1)
		case e == 31:
			if !math.IsNaN(float64(FromF16(uint16(h)))) {
				t.Fatalf("F16 %#x is not NaN", h)
			}
			continue
		}
		if s == 1 {
			want = -want
		}
		if got := float64(FromF16(uint16(h))); got != want {
			t.Fatalf("F16 %#x = %v, want %v", h, got, want)
		}
	}
	for _, tc := range []struct {
		in   uint32
		want uint16
	}{
		{0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
		{0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80}, {0x7f800001, 0x7fc0}, {0x00000001, 0},
	} {
		if got := ToBF16(math.Float32frombits(tc.in)); got != tc.want {
			t.Errorf("ToBF16(%#x) = %#x, want %#x", tc.in, got, tc.want)
		}
	}
}

// open writes the tensors as one file and opens it.
func open(t *testing.T, specs ...spec) *Checkpoint {
	t.Helper()
	path := filepath.Join(t.TempDir(), "model.safetensors")
	file(t, path, specs, nil)
	c, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*37 + i/16*11)
		if b[i]&0x7f == 0x7f {
			b[i] ^= 1
		}
	}
	return b
}

// groups builds one weight of every quantised form, 160 x 272 (no multiple of 128), and what row 140, column j must be.
func groups(t *testing.T) map[string]struct {
	w    Weight
	want func(i, j int) float64
} {
	const n, k = 160, 272
	fp8, nv, sc := pattern(n*k), pattern(n*k/2), pattern(n*k/16)
	var block, row []float32
	for i := range 2 * 3 {
		block = append(block, 0.25+float32(i)/7)
	}
	for i := range n {
		row = append(row, 0.5+float32(i)/3)
	}
	c := open(t,
		spec{"block.weight", F8E4M3, []int{n, k}, fp8}, spec{"block.weight_scale_inv", F32, []int{2, 3}, f32(block...)},
		spec{"tensor.weight", F8E4M3, []int{n, k}, fp8}, spec{"tensor.weight_scale", F32, nil, f32(0.3)},
		spec{"row.weight", F8E4M3, []int{n, k}, fp8}, spec{"row.weight_scale", F32, []int{n, 1}, f32(row...)},
		spec{"nv.weight", U8, []int{n, k / 2}, nv}, spec{"nv.weight_scale", F8E4M3, []int{n, k / 16}, sc}, spec{"nv.weight_scale_2", F32, nil, f32(0.01)},
		spec{"bf.weight", BF16, []int{n, k}, pattern(2 * n * k)},
	)
	out := map[string]struct {
		w    Weight
		want func(i, j int) float64
	}{}
	add := func(name string, want func(i, j int) float64) {
		w, err := c.Weight(name, n, k)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = struct {
			w    Weight
			want func(i, j int) float64
		}{w, want}
	}
	f := func(i, j int) float64 { return float64(E4M3(fp8[i*k+j])) }
	add("block", func(i, j int) float64 { return f(i, j) * float64(block[i/128*3+j/128]) })
	add("tensor", func(i, j int) float64 { return f(i, j) * float64(float32(0.3)) })
	add("row", func(i, j int) float64 { return f(i, j) * float64(row[i]) })
	add("nv", func(i, j int) float64 {
		b := nv[(i*k+j)/2]
		if j%2 == 1 {
			b >>= 4
		}
		return float64(E2M1(b)) * math.Abs(float64(E4M3(sc[i*k/16+j/16]))) * float64(float32(0.01))
	})
	bf := pattern(2 * n * k)
	add("bf", func(i, j int) float64 {
		return float64(FromBF16(uint16(bf[2*(i*k+j)]) | uint16(bf[2*(i*k+j)+1])<<8))
	})
	return out
}

func TestWeightRows(t *testing.T) {
	for name, g := range groups(t) {
		t.Run(name, func(t *testing.T) {
			check := func(w Weight, row, i int) {
				got := make([]float32, w.K)
				w.Row(row, got)
				for j, v := range got {
					if want := float32(g.want(i, j)); math.Float32bits(v) != math.Float32bits(want) {
						t.Fatalf("row %d column %d: %v, want %v", i, j, v, want)
					}
				}
			}
			for i := range g.w.N {
				check(g.w, i, i)
			}
			for _, cut := range [][2]int{{0, 160}, {0, 1}, {5, 9}, {100, 140}, {128, 160}, {127, 129}, {159, 160}} {
				i := cut[0]
				for _, p := range g.w.Rows(cut[0], cut[1]) {
					for r := range p.N {
						check(p, r, i)
						i++
					}
				}
				if i != cut[1] {
					t.Fatalf("Rows(%v) ends at %d", cut, i)
				}
			}
			tr, scale := g.w.Transposed()
			got := make([]float32, tr.K)
			for j := range tr.N {
				tr.Row(j, got)
				for i, v := range got {
					if want := float32(g.want(i, j)); math.Abs(float64(v)*float64(scale)-float64(want)) > 1e-7*math.Abs(float64(want)) {
						t.Fatalf("transposed (%d, %d): %v * %v, want %v", j, i, v, scale, want)
					}
				}
			}
		})
	}
}

func TestWeightRefusals(t *testing.T) {
	w := spec{"x.weight", F8E4M3, []int{2, 32}, pattern(64)}
	u := spec{"x.weight", U8, []int{2, 16}, pattern(32)}
	sc := spec{"x.weight_scale", F8E4M3, []int{2, 2}, []byte{8, 8, 8, 8}}
	gl := spec{"x.weight_scale_2", F32, nil, f32(1)}
	for i, tc := range []struct {
		specs []spec
		want  []string
	}{
		{[]spec{{"y.weight", F32, []int{1}, f32(1)}}, []string{`"x.weight"`, "missing"}},
		{[]spec{{"x.weight", F32, []int{2, 31}, f32(make([]float32, 62)...)}}, []string{`"x.weight"`, "shape [2 31], want [2 32]"}},
		{[]spec{{"x.weight", F32, []int{64}, f32(make([]float32, 64)...)}}, []string{"shape [64]"}},
		{[]spec{{"x.weight", I32, []int{2, 32}, make([]byte, 256)}}, []string{"dtype I32"}},
		{[]spec{{"x.weight", BF16, []int{2, 32}, make([]byte, 128)}, gl}, []string{"quantisation scales"}},
		{[]spec{w}, []string{"weight_scale"}},
		{[]spec{w, {"x.weight_scale_inv", F32, []int{2, 1}, f32(1, 1)}}, []string{`"x.weight_scale_inv"`, "want [1 1]"}},
		{[]spec{w, {"x.weight_scale", F32, []int{3}, f32(1, 1, 1)}}, []string{`"x.weight_scale"`, "[3]"}},
		{[]spec{w, {"x.weight_scale", F32, nil, f32(float32(math.NaN()))}}, []string{`"x.weight_scale"`, "NaN"}},
		{[]spec{w, {"x.weight_scale", F32, nil, f32(1)}, {"x.weight_scale_inv", F32, []int{1, 1}, f32(1)}}, []string{"either"}},
		{[]spec{u, sc}, []string{"NVFP4"}},
		{[]spec{u, gl}, []string{"NVFP4"}},
		{[]spec{u, gl, {"x.weight_scale", F8E4M3, []int{2, 1}, []byte{8, 8}}}, []string{`"x.weight_scale"`, "want [2 2]"}},
		{[]spec{u, gl, {"x.weight_scale", F8E4M3, []int{2, 2}, []byte{8, 0x7f, 8, 8}}}, []string{`"x.weight_scale"`, "NaN"}},
		{[]spec{u, sc, {"x.weight_scale_2", F32, []int{2}, f32(1, 1)}}, []string{`"x.weight_scale_2"`}},
		{[]spec{{"x.weight_packed", U8, []int{2, 16}, pattern(32)}}, []string{"compressed-tensors"}},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			_, err := open(t, tc.specs...).Weight("x", 2, 32)
			wantError(t, err, tc.want...)
		})
	}
	c := open(t, u, spec{"x.weight_scale", U8, []int{2, 2}, []byte{8, 0x88, 8, 8}}, gl, spec{"e", BF16, []int{3, 2, 2}, bf16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)})
	if _, err := c.Weight("x", 2, 32); err != nil {
		t.Fatal("U8 scale codes:", err)
	}
	e, err := c.Slice3("e", 2, 3, 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]float32, 2)
	if e.Row(1, got); got[0] != 10 || got[1] != 11 {
		t.Fatal(got)
	}
	_, err = c.Slice3("e", 0, 4, 2, 2)
	wantError(t, err, `"e"`, "want [4 2 2]")
}
