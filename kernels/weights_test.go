package kernels

import (
	"fmt"
	"math"
	"sync"
	"testing"
)

// Every E4M3 code, and every E2M1 code under every E4M3 scale, is exact.
func TestStorageTypes(t *testing.T) {
	d := open(t)
	w, err := d.NewWeight(256, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Free()
	codes := make([]byte, 256)
	for i := range codes {
		codes[i] = byte(i)
	}
	if err := w.Fill(0, Matrix{DType: FP8, N: 256, K: 1, Data: codes, Scale: []float32{1}, ScaleRows: 1}); err != nil {
		t.Fatal(err)
	}
	for i := range 256 {
		got, want := float64(w.Row(i)[0]), e4m3(byte(i))
		if got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
			t.Errorf("e4m3 %#02x: %v, want %v", i, got, want)
		}
	}
	pairs, err := d.NewWeight(256, 16, false)
	if err != nil {
		t.Fatal(err)
	}
	defer pairs.Free()
	m := Matrix{DType: NVFP4, N: 256, K: 16, Scale: []float32{0.25}}
	for s := range 256 {
		for i := range 8 {
			m.Data = append(m.Data, byte(2*i|(2*i+1)<<4)) // even column in the low nibble
		}
		m.Scale8 = append(m.Scale8, byte(s))
	}
	if err := pairs.Fill(0, m); err != nil {
		t.Fatal(err)
	}
	for s := range 256 {
		for i, got := range pairs.Row(s) {
			want := e2m1(byte(i)) * math.Abs(e4m3(byte(s))) * 0.25
			if float64(got) != want && !(math.IsNaN(float64(got)) && math.IsNaN(want)) {
				t.Errorf("e2m1 %x under %#02x: %v, want %v", i, s, got, want)
			}
		}
	}
}

// Parts of several storage types share one weight and are filled by several goroutines.
func TestWeightParts(t *testing.T) {
	d := open(t)
	const k = 272
	w, err := d.NewWeight(300, k, false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Free()
	rows := make([][]float64, 300)
	var wg sync.WaitGroup
	row := 0
	for i, n := range []int{7, 140, 1, 30, 16, 106} {
		m, values := randomMatrix(seeded("parts", i), []DType{BF16, FP8Block, FP8, NVFP4, FP8, BF16}[i], n, k)
		copy(rows[row:], values)
		at := row
		wg.Go(func() {
			if err := w.Fill(at, m); err != nil {
				t.Error(err)
			}
		})
		row += n
	}
	wg.Wait()
	for i, want := range rows {
		for j, got := range w.Row(i) {
			if diff := math.Abs(float64(got) - want[j]); diff > 1e-7*math.Abs(want[j]) {
				t.Fatalf("row %d column %d: %v, want %v", i, j, got, want[j])
			}
		}
	}
	if w.Bytes() < 300*k*2 || w.Bytes() > 330*(k*2+4+4*3)+4096 {
		t.Errorf("%d bytes resident", w.Bytes())
	}
}

func TestEmbedLogitsKeepLast(t *testing.T) {
	const vocab, width = 131, 40
	for _, dt := range []DType{BF16, F32, FP8} {
		for _, s := range setups() {
			d, err := Open(s.isa, s.threads)
			if err != nil {
				t.Fatal(err)
			}
			w, _ := d.NewWeight(vocab, width, dt == F32)
			m, _ := randomMatrix(seeded("embed"), dt, vocab, width)
			if err := w.Fill(0, m); err != nil {
				t.Fatal(err)
			}
			slots, err := d.NewBuffer(3 * 256)
			if err != nil {
				t.Fatal(err)
			}
			p, err := d.NewPlan(ClassF32, 20, 2, 64)
			if err != nil {
				t.Fatal(err)
			}
			x := p.Scratch(width)
			p.Embed(w, x)
			p.Barrier()
			p.KeepLast(x, width, slots, 256, 32)
			p.Logits(x, w)
			b := &Batch{Segs: []Seg{{Rows: 12, Slot: 2}, {Row0: 12, Rows: 8}}, OutRows: []int32{19, 0, 11, 11}}
			for i := range 20 {
				b.Tokens = append(b.Tokens, int32(i*37%vocab))
			}
			b.Logits = fill(5*vocab, untouched)
			if err := p.Run(b); err != nil {
				t.Fatal(err)
			}
			embedded := p.Read(x, 0, 20)
			for i, tok := range b.Tokens {
				for j, v := range w.Row(int(tok)) {
					if embedded[i*width+j] != v {
						t.Fatalf("%v: row %d is not token %d", s, i, tok)
					}
				}
			}
			for i, row := range b.OutRows {
				want := make([]float64, vocab)
				for n := range want {
					for j, v := range w.Row(n) {
						want[n] += float64(v) * float64(embedded[int(row)*width+j])
					}
				}
				if err := near(b.Logits[i*vocab:(i+1)*vocab], want, 2e-6); err != nil {
					t.Errorf("%v: logits %d: %v", s, i, err)
				}
			}
			for i, v := range b.Logits[4*vocab:] {
				if v != untouched {
					t.Fatalf("logits past the last row: value %d written", i)
				}
			}
			kept := f32s(contents(slots))
			for seg, row := range map[int]int{2: 11, 0: 19} {
				for j := range width {
					if kept[seg*64+8+j] != embedded[row*width+j] {
						t.Fatalf("slot %d does not hold row %d", seg, row)
					}
				}
			}
			for i, v := range kept {
				if in := i%64 >= 8 && i%64 < 8+width && i/64 != 1; !in && v != 0 {
					t.Fatalf("slot value %d outside the kept rows was written", i)
				}
			}
			b.OutRows, b.Logits = nil, nil
			if err := p.Run(b); err != nil {
				t.Errorf("no logits wanted: %v", err)
			}
			p.Free()
			w.Free()
			slots.Free()
			d.Close()
		}
	}
}

// exp and sigmoid through silu, over every binade and at the edges; the same bits everywhere.
func TestElementary(t *testing.T) {
	var x []float32
	for e := -149; e < 128; e++ {
		for i := range 8 {
			v := float32(math.Ldexp(1+float64(i)/8, e))
			x = append(x, v, -v)
		}
	}
	for v := float32(-110); v < 110; v += 0.0371 {
		x = append(x, v)
	}
	x = append(x, 0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.NaN()))
	n := len(x)
	var base []float32
	for _, s := range setups() {
		d, err := Open(s.isa, s.threads)
		if err != nil {
			t.Fatal(err)
		}
		p, err := d.NewPlan(ClassF32, 1, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		in, out := p.Scratch(2*n), p.Scratch(n)
		p.SwiGLU(in, out, n, 0)
		if err := p.Write(in, 0, append(append([]float32{}, x...), fill(n, 1)...)); err != nil {
			t.Fatal(err)
		}
		if err := p.Run(&Batch{Segs: []Seg{{Rows: 1}}}); err != nil {
			t.Fatal(err)
		}
		got := p.Read(out, 0, 1)
		for i, v := range got {
			if base != nil {
				if math.Float32bits(v) != math.Float32bits(base[i]) && !(v != v && base[i] != base[i]) {
					t.Fatalf("%v: silu(%v) = %v, another instruction set gives %v", s, x[i], v, base[i])
				}
				continue
			}
			f := float64(x[i])
			want := f / (1 + math.Exp(-f))
			if math.IsNaN(f) {
				if v == v {
					t.Errorf("silu(NaN) = %v", v)
				}
				continue
			}
			// 3 ulp, and what FP32 cannot hold below its smallest normal.
			if tol := 3*math.Abs(want)/(1<<23) + 1e-37; f > -87 && math.Abs(float64(v)-want) > tol && !math.IsInf(want, 1) {
				t.Errorf("silu(%v) = %v, want %v", f, v, want)
			}
			if f <= -87 && math.Abs(float64(v)) > 2e-36 {
				t.Errorf("silu(%v) = %v, want almost 0", f, v)
			}
		}
		if base == nil {
			base = got
		}
		p.Free()
		d.Close()
	}
}

func TestBuffers(t *testing.T) {
	d := open(t)
	b, err := d.NewBuffer(100)
	if err != nil {
		t.Fatal(err)
	}
	if b.Size() != 100 || string(contents(b)) != string(make([]byte, 100)) {
		t.Error("a new buffer is not 100 zero bytes")
	}
	if err := b.Write(10, []byte("abcdef")); err != nil {
		t.Fatal(err)
	}
	if err := Copy(b, 12, b, 10, 6); err != nil { // overlapping
		t.Fatal(err)
	}
	if got := string(contents(b)[10:18]); got != "ababcdef" {
		t.Errorf("after the copy: %q", got)
	}
	for name, err := range map[string]error{
		"write past the end": b.Write(95, make([]byte, 6)),
		"negative offset":    b.Write(-1, make([]byte, 1)),
		"read past the end":  b.Read(101, nil),
		"copy past the end":  Copy(b, 0, b, 50, 51),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := d.NewBuffer(1 << 60); err == nil {
		t.Error("an exabyte was allocated")
	}
	b.Free()
	b.Free()
}

// Objects may be freed in any order; a plan keeps what it uses alive.
func TestFreeInAnyOrder(t *testing.T) {
	d, err := Open("auto", 2)
	if err != nil {
		t.Fatal(err)
	}
	w := constant(t, d, 16, 16, 2)
	p, err := d.NewPlan(ClassF32, 4, 1, 8)
	if err != nil {
		t.Fatal(err)
	}
	in, out := p.Scratch(16), p.Scratch(16)
	p.Linear(in, 0, w, out, 0)
	w.Free()
	if err := p.Write(in, 0, fill(16, 1)); err != nil {
		t.Fatal(err)
	}
	if err := p.Run(&Batch{Segs: []Seg{{Rows: 1}}}); err != nil {
		t.Fatal(err)
	}
	if got := p.Read(out, 0, 1)[3]; got != 32 {
		t.Errorf("got %v, want 32", got)
	}
	d.Close()
	if err := p.Run(&Batch{Segs: []Seg{{Rows: 1}}}); err == nil {
		t.Error("a plan ran on a closed device")
	}
	p.Free()
}

// More threads than cores, several plans and goroutines: every run is complete when it returns.
func TestPoolOversubscribed(t *testing.T) {
	d, err := Open("auto", 9)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var wg sync.WaitGroup
	for n := range 3 {
		wg.Go(func() {
			w := constant(t, d, 64, 32, float32(n+1))
			defer w.Free()
			p, err := d.NewPlan(ClassF32, 40, 1, 64)
			if err != nil {
				t.Error(err)
				return
			}
			defer p.Free()
			a, b := p.Scratch(32), p.Scratch(64)
			p.Linear(a, 0, w, b, 0)
			p.Barrier()
			p.Add(b, b, b)
			for rep := range 300 {
				rows := 1 + rep%40
				v := float32(rep%17 - 8)
				if err := p.Write(a, 0, fill(rows*32, v)); err != nil {
					t.Error(err)
					return
				}
				if err := p.Run(&Batch{Segs: []Seg{{Rows: int32(rows)}}}); err != nil {
					t.Error(err)
					return
				}
				for i, got := range p.Read(b, 0, rows) {
					if want := 64 * v * float32(n+1); got != want {
						t.Errorf("plan %d, run %d, value %d: %v, want %v", n, rep, i, got, want)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		isa     string
		threads int
		ok      bool
	}{{"auto", 0, true}, {"auto", 1, true}, {"portable", 2, true}, {"sse9", 1, false}, {"auto", -1, false}, {"auto", 100000, false}} {
		d, err := Open(c.isa, c.threads)
		if (err == nil) != c.ok {
			t.Errorf("%v: error %v", c, err)
		}
		if err != nil {
			continue
		}
		if d.Arithmetic() != "cpu-fma32/1" || d.ISA() == "" || (c.threads > 0 && d.Threads() != c.threads) || d.Threads() < 1 {
			t.Errorf("%v: %s, %d threads, %s", c, d.ISA(), d.Threads(), d.Arithmetic())
		}
		d.Close()
		d.Close()
	}
	d := open(t)
	if r := d.MeasureRead(8<<20, 1); !(r > 0) {
		t.Errorf("read rate %v", r)
	}
	if r := d.MeasureFMA(1); !(r > 0) {
		t.Errorf("fma rate %v", r)
	}
	_ = fmt.Sprint(ClassF32, ClassBF16)
}
