package kernels

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
)

// The rig runs one op (or a small graph) over whole sequences under several schedules, instruction sets and thread
// counts, and demands the same bits from all of them; a float64 reference bounds the values.

// opCase is one row of the table.
type opCase struct {
	name      string
	seqs      []int // rows of each sequence
	slotBytes int   // stride of a slot, 0 without slots
	pageBytes int   // stride of a page, 0 without pages
	build     func(g *rig)
	want      func(g *rig, seq int) [][]float64 // by output, [rows*width]; nil: bits only
	tol       [2]float64                        // by class, relative to the largest wanted value of the output
}

type port struct {
	s     Scratch
	width int
	scale float64
}

type rig struct {
	t            *testing.T
	c            *opCase
	d            *Device
	class        Class
	p            *Plan
	ins, outs    []port
	pages        *Buffer
	slots        *Buffer
	weights      []*Weight
	values       map[*Weight][][]float32
	rnd          *rand.Rand
	writeFrom    []int32 // by sequence, nil: 0
	rows, maxPos int
}

const (
	sentinel  = 0xa5  // of bytes in arenas
	untouched = 12345 // of outputs
)

func seeded(parts ...any) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, parts...)
	return rand.New(rand.NewPCG(h.Sum64(), 1))
}

// normal is nearly a standard normal value, by integer sums: the same on every architecture, for the golden bits.
func normal(r *rand.Rand) float64 {
	sum := 0
	for range 3 {
		for u := r.Uint64(); u != 0; u >>= 16 {
			sum += int(u&0xffff) - 0x8000
		}
	}
	return float64(sum) / 65536
}

func vector(r *rand.Rand, n int, scale float64) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(normal(r) * scale)
	}
	return v
}

// in declares an input scratch; its rows depend on the sequence and position alone.
func (g *rig) in(width int, scale float64) Scratch {
	s := g.p.Scratch(width)
	g.ins = append(g.ins, port{s, width, scale})
	return s
}

func (g *rig) out(width int) Scratch {
	s := g.p.Scratch(width)
	g.outs = append(g.outs, port{s, width, 0})
	return s
}

func (g *rig) also(s Scratch, width int) { g.outs = append(g.outs, port{s, width, 0}) }

// input is what input i holds for row pos of a sequence.
func (g *rig) input(i, seq, pos int) []float32 {
	return vector(seeded(g.c.name, i, seq, pos), g.ins[i].width, g.ins[i].scale)
}

func (g *rig) vec(n int, scale float64) []float32 { return vector(g.rnd, n, scale) }

func (g *rig) around(n int, mid, scale float64) []float32 {
	v := g.vec(n, scale)
	for i := range v {
		v[i] += float32(mid)
	}
	return v
}

// weight makes a filled weight of random values in a storage type.
func (g *rig) weight(n, k int, dt DType) *Weight {
	w, err := g.d.NewWeight(n, k, dt == F32)
	if err != nil {
		g.t.Fatal(err)
	}
	m, _ := randomMatrix(g.rnd, dt, n, k)
	if err := w.Fill(0, m); err != nil {
		g.t.Fatal(err)
	}
	g.weights = append(g.weights, w)
	return w
}

// rowsOf are the dequantised rows of a weight.
func (g *rig) rowsOf(w *Weight) [][]float32 {
	if g.values == nil {
		g.values = map[*Weight][][]float32{}
	}
	if g.values[w] == nil {
		for i := range w.N() {
			g.values[w] = append(g.values[w], w.Row(i))
		}
	}
	return g.values[w]
}

// matVec is W x.
func (g *rig) matVec(w *Weight, x []float32) []float64 {
	out := make([]float64, w.N())
	for i, row := range g.rowsOf(w) {
		for j, v := range row {
			out[i] += float64(v) * float64(x[j])
		}
	}
	return out
}

func slotOf(seq int) int32 { return int32(2*seq + 1) }

func (g *rig) pageOf(seq, j int) int32 { return int32(2*(j*len(g.c.seqs)+seq) + 1) }

type result struct {
	outs  [][][]float32 // [out][seq][rows*width]
	pages []byte
	slots []byte
}

type step struct{ seq, from, n int }

// schedules cut the sequences into batches.
func schedules(seqs []int) map[string][][]step {
	together, single, ragged := [][]step{{}}, [][]step{}, [][]step{}
	longest := 0
	for i, n := range seqs {
		together[0] = append(together[0], step{i, 0, n})
		longest = max(longest, n)
	}
	for pos := range longest {
		for i, n := range seqs {
			if pos < n {
				single = append(single, []step{{i, pos, 1}})
			}
		}
	}
	r, at := seeded("ragged", seqs), make([]int, len(seqs))
	for {
		var batch []step
		left := false
		for _, i := range r.Perm(len(seqs)) {
			if n := min(seqs[i]-at[i], []int{0, 1, 2, 3, 7, 16, 17, 40}[r.IntN(8)]); n > 0 {
				batch = append(batch, step{i, at[i], n})
				at[i] += n
			}
			left = left || at[i] < seqs[i]
		}
		if len(batch) > 0 {
			ragged = append(ragged, batch)
		}
		if !left {
			return map[string][][]step{"together": together, "single": single, "ragged": ragged}
		}
	}
}

// open builds the case on a device.
func (c *opCase) open(t *testing.T, d *Device, class Class) *rig {
	g := &rig{t: t, c: c, d: d, class: class, rnd: seeded(c.name)}
	for _, n := range c.seqs {
		g.rows += n
		g.maxPos = max(g.maxPos, n)
	}
	arena := func(n int) *Buffer {
		b, err := d.NewBuffer(n)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Write(0, bytes.Repeat([]byte{sentinel}, n)); err != nil {
			t.Fatal(err)
		}
		return b
	}
	if c.slotBytes > 0 {
		g.slots = arena(c.slotBytes * (2*len(c.seqs) + 1))
	}
	if c.pageBytes > 0 {
		g.pages = arena(c.pageBytes * int(g.pageOf(len(c.seqs)-1, (g.maxPos+PageTokens-1)/PageTokens)+1))
	}
	var err error
	if g.p, err = d.NewPlan(class, g.rows, len(c.seqs), g.maxPos); err != nil {
		t.Fatal(err)
	}
	c.build(g)
	if err := g.p.Err(); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *rig) close() {
	g.p.Free()
	for _, w := range g.weights {
		w.Free()
	}
	if g.pages != nil {
		g.pages.Free()
	}
	if g.slots != nil {
		g.slots.Free()
	}
}

// batch is one schedule entry as a Batch; rows of the inputs are written to the plan.
func (g *rig) batch(steps []step) *Batch {
	b := &Batch{}
	row := 0
	for _, s := range steps {
		seg := Seg{Row0: int32(row), Rows: int32(s.n), Pos0: int32(s.from), Slot: slotOf(s.seq), Table: int32(len(b.Pages))}
		if g.writeFrom != nil {
			seg.WriteFrom = g.writeFrom[s.seq]
		}
		for j := 0; j*PageTokens < s.from+s.n; j++ {
			b.Pages = append(b.Pages, g.pageOf(s.seq, j))
		}
		b.Segs = append(b.Segs, seg)
		for i, in := range g.ins {
			for k := range s.n {
				if err := g.p.Write(in.s, row+k, g.input(i, s.seq, s.from+k)); err != nil {
					g.t.Fatal(err)
				}
			}
		}
		row += s.n
	}
	return b
}

func (g *rig) run(schedule [][]step) result {
	res := result{outs: make([][][]float32, len(g.outs))}
	for o, out := range g.outs {
		for _, n := range g.c.seqs {
			res.outs[o] = append(res.outs[o], make([]float32, n*out.width))
		}
	}
	for _, steps := range schedule {
		b := g.batch(steps)
		for _, out := range g.outs { // rows past the batch must stay as they are
			if err := g.p.Write(out.s, 0, fill(g.rows*g.p.width(out.s), untouched)); err != nil && !g.isInput(out.s) {
				g.t.Fatal(err)
			}
		}
		g.rewriteInputs(steps)
		if err := g.p.Run(b); err != nil {
			g.t.Fatal(err)
		}
		row := 0
		for _, s := range steps {
			for o, out := range g.outs {
				copy(res.outs[o][s.seq][s.from*out.width:], g.p.Read(out.s, row, s.n))
			}
			row += s.n
		}
		for _, out := range g.outs {
			for i, v := range g.p.Read(out.s, row, g.rows-row) {
				if v != untouched && !g.isInput(out.s) {
					g.t.Fatalf("output %d: row %d past the batch was written", out.s, row+i/out.width)
				}
			}
		}
	}
	res.pages, res.slots = contents(g.pages), contents(g.slots)
	return res
}

// rewriteInputs restores inputs that are outputs too (in-place ops) after the sentinel fill.
func (g *rig) rewriteInputs(steps []step) {
	row := 0
	for _, s := range steps {
		for i, in := range g.ins {
			for k := 0; k < s.n && g.isInput(in.s); k++ {
				g.p.Write(in.s, row+k, g.input(i, s.seq, s.from+k))
			}
		}
		row += s.n
	}
}

func (g *rig) isInput(s Scratch) bool {
	for _, in := range g.ins {
		if in.s == s {
			return true
		}
	}
	return false
}

func contents(b *Buffer) []byte {
	if b == nil {
		return nil
	}
	p := make([]byte, b.Size())
	if err := b.Read(0, p); err != nil {
		panic(err)
	}
	return p
}

func fill(n int, v float32) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = v
	}
	return s
}

type setup struct {
	isa     string
	threads int
}

// setups are the instruction sets of this machine, the best one with several thread counts.
func setups() []setup {
	best := "portable"
	if d, err := Open("auto", 1); err == nil {
		best = d.ISA()
		d.Close()
	}
	s := []setup{{best, 2}, {best, 1}, {best, 3}}
	for _, isa := range []string{"portable", "avx2", "avx512"} {
		if isa == best || (isa == "portable" && runtime.GOARCH == "arm64") {
			continue
		}
		if d, err := Open(isa, 1); err == nil {
			d.Close()
			s = append(s, setup{isa, 2})
		}
	}
	return s
}

// equal demands the same bits.
func (a result) equal(b result) error {
	for o := range a.outs {
		for s := range a.outs[o] {
			for i := range a.outs[o][s] {
				if x, y := a.outs[o][s][i], b.outs[o][s][i]; math.Float32bits(x) != math.Float32bits(y) {
					return fmt.Errorf("output %d, sequence %d, value %d: %v (%x) and %v (%x)", o, s, i, x, math.Float32bits(x), y, math.Float32bits(y))
				}
			}
		}
	}
	for name, ab := range map[string][2][]byte{"pages": {a.pages, b.pages}, "slots": {a.slots, b.slots}} {
		for i := range ab[0] {
			if ab[0][i] != ab[1][i] {
				return fmt.Errorf("%s differ at byte %d", name, i)
			}
		}
	}
	return nil
}

// near compares with the reference, relative to the output's largest value.
func near(got []float32, want []float64, tol float64) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d values, want %d", len(got), len(want))
	}
	top := 1e-30
	for _, v := range want {
		if v != untouched {
			top = math.Max(top, math.Abs(v))
		}
	}
	for i := range got {
		if want[i] == untouched && got[i] != untouched {
			return fmt.Errorf("value %d was written: %v", i, got[i])
		}
		if diff := math.Abs(float64(got[i]) - want[i]); !(diff <= tol*top) {
			return fmt.Errorf("value %d: got %v, want %v (off %.3g of the largest, %.3g allowed)", i, got[i], want[i], diff/top, tol)
		}
	}
	return nil
}

func runCases(t *testing.T, cases []opCase) {
	for _, c := range cases {
		for _, class := range []Class{ClassF32, ClassBF16} {
			t.Run(c.name+"/"+class.String(), func(t *testing.T) {
				var base *result
				for _, s := range setups() {
					d, err := Open(s.isa, s.threads)
					if err != nil {
						t.Fatal(err)
					}
					for name, schedule := range schedules(c.seqs) {
						if base == nil {
							name, schedule = "together", schedules(c.seqs)["together"]
						} else if s.isa == "portable" && name == "single" && testing.Short() {
							continue
						}
						g := c.open(t, d, class)
						res := g.run(schedule)
						if base == nil {
							base = &res
							if c.want != nil {
								for seq := range c.seqs {
									for o, want := range c.want(g, seq) {
										if err := near(res.outs[o][seq], want, c.tol[class]); err != nil {
											t.Errorf("output %d, sequence %d: %v", o, seq, err)
										}
									}
								}
							}
						} else if err := base.equal(res); err != nil {
							t.Errorf("%s with %d threads, %s: %v", s.isa, s.threads, name, err)
						}
						g.close()
					}
					d.Close()
				}
			})
		}
	}
}
