package kernels

import (
	"bytes"
	"fmt"
	"math"
	"testing"
)

// kdaCase is one KDA layer with slots that leave a head and a tail around the layout.
func kdaCase(heads, d, conv int, lower float32, seqs []int) opCase {
	const head, tail = 128, 192
	var a KDA
	hd := heads * d
	stride := head + KDASlotBytes(heads, d, conv, ClassF32) + tail
	return opCase{
		name: fmt.Sprintf("kda/%dx%d/conv%d/%v/%v", heads, d, conv, lower, seqs), seqs: seqs, slotBytes: stride,
		build: func(g *rig) {
			a = KDA{QKV: g.in(3*hd, 1), F: g.in(hd, 1.5), B: g.in(heads, 1), G: g.in(hd, 1), Out: g.out(hd), Heads: heads, D: d, Conv: conv,
				ConvW: g.vec(3*hd*conv, 0.5), ALog: g.vec(heads, 0.5), DtBias: g.vec(hd, 1), LowerBound: lower, NormEps: 1e-5, NormW: g.around(d, 1, 0.2),
				Slots: g.slots, SlotStride: stride, SlotOff: head}
			g.p.KDA(a)
		},
		want: func(g *rig, seq int) [][]float64 {
			out := make([]float64, g.c.seqs[seq]*hd)
			for h := range heads {
				refKDA(g, seq, a, h, out)
			}
			return [][]float64{out}
		},
		tol: [2]float64{2e-5, 2e-2},
	}
}

// refKDA is models.md 1.1 for one head over a whole sequence, in float64.
func refKDA(g *rig, seq int, a KDA, h int, out []float64) {
	d, hd := a.D, a.Heads*a.D
	s := make([][]float64, d)
	for i := range s {
		s[i] = make([]float64, d)
	}
	raw := func(pos, c int) float64 {
		if pos < 0 {
			return 0
		}
		return g.class.round(float64(g.input(0, seq, pos)[c]))
	}
	conv := func(pos, part, i int) float64 {
		c, sum := part*hd+h*d+i, 0.0
		for t := range a.Conv {
			sum += float64(a.ConvW[c*a.Conv+t]) * raw(pos-a.Conv+1+t, c)
		}
		return sum * sigmoid(sum)
	}
	unit := func(x []float64) {
		ss := 1e-6
		for _, v := range x {
			ss += v * v
		}
		for i := range x {
			x[i] /= math.Sqrt(ss)
		}
	}
	for pos := range g.c.seqs[seq] {
		q, k, v := make([]float64, d), make([]float64, d), make([]float64, d)
		for i := range d {
			q[i], k[i], v[i] = conv(pos, 0, i), conv(pos, 1, i), conv(pos, 2, i)
		}
		unit(q)
		unit(k)
		f, gate := g.input(1, seq, pos)[h*d:], g.input(3, seq, pos)[h*d:]
		beta, rate := sigmoid(float64(g.input(2, seq, pos)[h])), math.Exp(float64(a.ALog[h]))
		for i := range d {
			x := float64(f[i]) + float64(a.DtBias[h*d+i])
			log := -rate * math.Log1p(math.Exp(x))
			if a.LowerBound != 0 {
				log = float64(a.LowerBound) * sigmoid(rate*x)
			}
			for j := range d {
				s[i][j] *= math.Exp(log)
			}
		}
		o := make([]float64, d)
		for j := range d {
			have := 0.0
			for i := range d {
				have += s[i][j] * k[i]
			}
			u := beta * (v[j] - have)
			for i := range d {
				s[i][j] += k[i] * u
				o[j] += s[i][j] * q[i] / math.Sqrt(float64(d))
			}
		}
		for j, y := range refNorm(o, a.NormW, float64(a.NormEps)) {
			out[pos*hd+h*d+j] = g.class.round(y * sigmoid(float64(gate[j])))
		}
	}
}

func TestKDA(t *testing.T) {
	runCases(t, []opCase{
		kdaCase(2, 16, 4, -5, []int{1}),
		kdaCase(3, 32, 4, -5, []int{37, 1, 5}),
		kdaCase(2, 48, 4, 0, []int{20, 3}),
		kdaCase(1, 128, 4, -5, []int{40}),
		kdaCase(2, 64, 2, 0, []int{9, 19}),
		kdaCase(1, 80, 3, -5, []int{18}),
	})
}

// Only the layout of slots that the batch names is written, and a fresh slot's content does not matter.
func TestKDALeavesTheRest(t *testing.T) {
	for _, class := range []Class{ClassF32, ClassBF16} {
		c := kdaCase(2, 32, 4, -5, []int{5, 3})
		d := open(t)
		g := c.open(t, d, class)
		res := g.run(schedules(c.seqs)["ragged"])
		size := KDASlotBytes(2, 32, 4, class)
		for slot := range len(res.slots) / c.slotBytes {
			bytesOf := res.slots[slot*c.slotBytes : (slot+1)*c.slotBytes]
			inside := bytesOf[128 : 128+size]
			if slot%2 == 1 && bytes.Equal(inside, bytes.Repeat([]byte{sentinel}, size)) {
				t.Errorf("%v: slot %d was not written", class, slot)
			}
			rest := append(append([]byte{}, bytesOf[:128]...), bytesOf[128+size:]...)
			if slot%2 == 0 {
				rest = bytesOf
			}
			if !bytes.Equal(rest, bytes.Repeat([]byte{sentinel}, len(rest))) {
				t.Errorf("%v: slot %d: bytes outside the layout changed", class, slot)
			}
		}
		g.close()
	}
}

// A state copied to another slot goes on with the same bits.
func TestKDAForkIsReplay(t *testing.T) {
	c := kdaCase(2, 32, 4, -5, []int{12, 12})
	d := open(t)
	g := c.open(t, d, ClassBF16)
	defer g.close()
	whole := g.run([][]step{{{0, 0, 12}}})
	g.run([][]step{{{0, 0, 5}}})
	b := g.batch([]step{{0, 5, 7}})
	b.Segs[0].Slot = 4
	if err := Copy(g.slots, 4*c.slotBytes, g.slots, int(slotOf(0))*c.slotBytes, c.slotBytes); err != nil {
		t.Fatal(err)
	}
	if err := g.p.Run(b); err != nil {
		t.Fatal(err)
	}
	got := g.p.Read(g.outs[0].s, 0, 7)
	for i, v := range whole.outs[0][0][5*g.outs[0].width:] {
		if math.Float32bits(got[i]) != math.Float32bits(v) {
			t.Fatalf("value %d: fork %v, whole %v", i, got[i], v)
		}
	}
}

// open is a device of the best instruction set with two threads, closed after the test.
func open(t testing.TB) *Device {
	d, err := Open("auto", 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}
