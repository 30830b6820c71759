package kernels

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"
)

// Benchmarks report the fraction of this machine's measured roof: memory reads for what streams, FMAs for what computes.

var roofs struct {
	once      sync.Once
	read, fma float64
}

func roof(b *testing.B, d *Device) (read, fma float64) {
	b.Helper()
	roofs.once.Do(func() {
		roofs.read = d.MeasureRead(512<<20, 2*time.Second)
		roofs.fma = d.MeasureFMA(time.Second)
	})
	return roofs.read, roofs.fma
}

func benchDevice(b *testing.B) *Device {
	d, err := Open("auto", 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(d.Close)
	return d
}

// noise fills a weight with random BF16 values.
func noise(b *testing.B, d *Device, n, k int, f32 bool) *Weight {
	w, err := d.NewWeight(n, k, f32)
	if err != nil {
		b.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	const rows = 256
	data := make([]uint16, rows*k)
	for i := range data {
		data[i] = uint16(0x3c00 | r.Uint32()&0x80ff)
	}
	for row := 0; row < n; row += rows {
		m := Matrix{DType: BF16, N: min(rows, n-row), K: k}
		m.Data = unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), m.N*k*2)
		if err := w.Fill(row, m); err != nil {
			b.Fatal(err)
		}
	}
	b.Cleanup(w.Free)
	return w
}

func run(b *testing.B, p *Plan, batch *Batch) time.Duration {
	if err := p.Err(); err != nil {
		b.Fatal(err)
	}
	if err := p.Run(batch); err != nil {
		b.Fatal(err)
	}
	best := time.Duration(1 << 62)
	b.ResetTimer()
	for b.Loop() {
		start := time.Now()
		if err := p.Run(batch); err != nil {
			b.Fatal(err)
		}
		best = min(best, time.Since(start))
	}
	return best
}

func newPlan(b *testing.B, d *Device, class Class, rows, segs, pos int) *Plan {
	p, err := d.NewPlan(class, rows, segs, pos)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Free)
	return p
}

// BenchmarkGEMV streams a 512 MiB weight for few rows.
func BenchmarkGEMV(b *testing.B) {
	d := benchDevice(b)
	read, _ := roof(b, d)
	for _, f32 := range []bool{false, true} {
		const k = 4096
		n := 512 << 20 / (2 * k)
		if f32 {
			n /= 2
		}
		w := noise(b, d, n, k, f32)
		for _, rows := range []int{1, 2, 3, 4, 6} {
			b.Run(fmt.Sprintf("f32=%v/rows=%d", f32, rows), func(b *testing.B) {
				p := newPlan(b, d, ClassBF16, rows, 1, 64)
				p.Linear(p.Scratch(k), 0, w, p.Scratch(n), 0)
				t := run(b, p, &Batch{Segs: []Seg{{Rows: int32(rows)}}})
				b.ReportMetric(float64(w.Bytes())/t.Seconds()/read, "of_read")
				b.ReportMetric(float64(w.Bytes())/t.Seconds()/1e9, "GB/s")
			})
		}
	}
}

// BenchmarkGEMM is a prefill product.
func BenchmarkGEMM(b *testing.B) {
	d := benchDevice(b)
	_, fma := roof(b, d)
	for _, c := range []struct{ m, n, k int }{{256, 1024, 1024}, {256, 4096, 1024}, {64, 4096, 1024}, {16, 4096, 1024}, {8, 4096, 1024}, {256, 1024, 4096}} {
		w := noise(b, d, c.n, c.k, false)
		b.Run(fmt.Sprintf("%dx%dx%d", c.m, c.n, c.k), func(b *testing.B) {
			p := newPlan(b, d, ClassBF16, c.m, 1, 4096)
			in := p.Scratch(c.k)
			p.Linear(in, 0, w, p.Scratch(c.n), 0)
			t := run(b, p, &Batch{Segs: []Seg{{Rows: int32(c.m)}}})
			b.ReportMetric(float64(c.m)*float64(c.n)*float64(c.k)/t.Seconds()/fma, "of_fma")
		})
	}
}

// BenchmarkKDA decodes one row of many sequences (state from memory), and prefills one sequence.
func BenchmarkKDA(b *testing.B) {
	d := benchDevice(b)
	read, fma := roof(b, d)
	const heads, dim = 16, 128
	for _, c := range []struct{ segs, rows int }{{64, 1}, {1, 1}, {1, 256}} {
		b.Run(fmt.Sprintf("segs=%d/rows=%d", c.segs, c.rows), func(b *testing.B) {
			p := newPlan(b, d, ClassBF16, c.segs*c.rows, c.segs, 4096)
			size := (KDASlotBytes(heads, dim, 4, ClassBF16) + 63) / 64 * 64
			slots, err := d.NewBuffer(size * c.segs)
			if err != nil {
				b.Fatal(err)
			}
			defer slots.Free()
			hd := heads * dim
			p.KDA(KDA{QKV: p.Scratch(3 * hd), F: p.Scratch(hd), B: p.Scratch(heads), G: p.Scratch(hd), Out: p.Scratch(hd), Heads: heads, D: dim, Conv: 4,
				ConvW: make([]float32, 3*hd*4), ALog: make([]float32, heads), DtBias: make([]float32, hd), LowerBound: -5, NormEps: 1e-5, NormW: make([]float32, dim),
				Slots: slots, SlotStride: size})
			batch := &Batch{}
			for i := range c.segs {
				batch.Segs = append(batch.Segs, Seg{Row0: int32(i * c.rows), Rows: int32(c.rows), Pos0: 1, Slot: int32(i)})
			}
			t := run(b, p, batch)
			state := 2 * float64(heads*dim*dim*4) // read and written
			b.ReportMetric(state*float64(c.segs)/t.Seconds()/read, "of_read")
			b.ReportMetric(float64(heads*dim*dim*3)*float64(c.segs*c.rows)/t.Seconds()/fma, "of_fma")
		})
	}
}

// BenchmarkAttend is absorbed attention over a dense context of the GLM-5.3-Flash shape, fewer heads.
func BenchmarkAttend(b *testing.B) {
	d := benchDevice(b)
	_, fma := roof(b, d)
	const latent, heads, ctx = 512, 32, 2048
	for _, rows := range []int{1, 16} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			p := newPlan(b, d, ClassBF16, rows, 1, ctx)
			stride := MLASlabBytes(latent, 0, 1, ClassBF16)
			pages, err := d.NewBuffer(stride * (ctx / PageTokens))
			if err != nil {
				b.Fatal(err)
			}
			defer pages.Free()
			c := Cache{Pages: pages, PageStride: stride, Latent: latent, Pool: 1}
			sel := p.Selection(ctx, 1)
			p.MLAIndex(c, NoScratch, NoScratch, 0, ctx, true, sel)
			p.Barrier()
			p.MLAAttend(c, p.Scratch(heads*latent), heads, 1, sel, p.Scratch(heads*latent))
			batch := &Batch{Segs: []Seg{{Rows: int32(rows), Pos0: int32(ctx - rows)}}}
			for i := range ctx / PageTokens {
				batch.Pages = append(batch.Pages, int32(i))
			}
			t := run(b, p, batch)
			b.ReportMetric(2*float64(rows)*heads*latent*ctx/t.Seconds()/fma, "of_fma")
		})
	}
}

// BenchmarkMoE streams the touched experts of a decode batch.
func BenchmarkMoE(b *testing.B) {
	d := benchDevice(b)
	read, _ := roof(b, d)
	const experts, topk, dim, inter = 32, 4, 1024, 1024
	var gu, dn []*Weight
	for range experts {
		gu, dn = append(gu, noise(b, d, 2*inter, dim, false)), append(dn, noise(b, d, dim, inter, false))
	}
	for _, rows := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			p := newPlan(b, d, ClassBF16, rows, 1, 64)
			logits, in, route := p.Scratch(experts), p.Scratch(dim), p.RouteScratch(topk)
			p.Route(Router{Logits: logits, Experts: experts, TopK: topk, NGroup: 1, TopKGroup: 1, Norm: true, Scaling: 1, Bias: make([]float32, experts), Route: route})
			p.Barrier()
			p.MoE(MoE{In: in, Shared: NoScratch, Out: p.Scratch(dim), Route: route, Experts: experts, TopK: topk, D: dim, Inter: inter, GateUp: gu, Down: dn})
			r := rand.New(rand.NewPCG(3, 4))
			x, touched := make([]float32, rows*experts), map[int]bool{}
			for i := range x {
				x[i] = float32(r.NormFloat64())
			}
			for row := range rows {
				ids, _ := refRoute(routerShape{experts, topk, 1, 1, true}, x[row*experts:(row+1)*experts], make([]float32, experts), 1)
				for _, e := range ids {
					touched[e] = true
				}
			}
			if err := p.Write(logits, 0, x); err != nil {
				b.Fatal(err)
			}
			t := run(b, p, &Batch{Segs: []Seg{{Rows: int32(rows)}}})
			b.ReportMetric(float64(len(touched))*float64(gu[0].Bytes()+dn[0].Bytes())/t.Seconds()/read, "of_read")
		})
	}
}
