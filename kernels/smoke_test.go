package kernels

import "testing"

func TestSmoke(t *testing.T) {
	for _, isa := range []string{"portable", "avx2"} {
		d, err := Open(isa, 2)
		if err != nil {
			t.Fatal(err)
		}
		w, err := d.NewWeight(33, 130, true)
		if err != nil {
			t.Fatal(err)
		}
		data := make([]byte, 33*130*4)
		for i := 0; i < 33*130; i++ {
			data[4*i+3], data[4*i+2] = 0x3f, 0x80
		}
		if err := w.Fill(0, Matrix{DType: F32, N: 33, K: 130, Data: data}); err != nil {
			t.Fatal(err)
		}
		p, err := d.NewPlan(ClassF32, 8, 1, 128)
		if err != nil {
			t.Fatal(err)
		}
		in, out := p.Scratch(130), p.Scratch(33)
		p.Linear(in, 0, w, out, 0)
		if p.Err() != nil {
			t.Fatal(p.Err())
		}
		src := make([]float32, 8*130)
		for i := range src {
			src[i] = float32(i / 130)
		}
		if err := p.Write(in, 0, src); err != nil {
			t.Fatal(err)
		}
		for rep := 0; rep < 1000; rep++ {
			if err := p.Run(&Batch{Segs: []Seg{{Rows: int32(1 + rep%8)}}}); err != nil {
				t.Fatal(err)
			}
		}
		for i, v := range p.Read(out, 0, 8) {
			if v != float32(i/33*130) {
				t.Fatalf("%s: %d: %v", isa, i, v)
			}
		}
		p.Free()
		w.Free()
		d.Close()
	}
}
