package kernels

import (
	"bytes"
	"encoding/binary"
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

func vector(r *rand.Rand, n int, scale float64) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(r.NormFloat64() * scale)
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
				v := float32(r.NormFloat64() * size)
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
