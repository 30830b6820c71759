package model

import (
	"math"
	"path/filepath"
	"strings"
	"testing"

	"rocket/kernels"
)

// traceOf runs tokens through a trace and gives the logits of all rows with what the taps saw.
func traceOf(t *testing.T, m *Model, ids []int32) (rows [][]float32, taps map[string][]float32, kinds map[TapKind]int, hidden []float32, h *harness) {
	t.Helper()
	h = newHarness(t, m, 1, 1, 4, 1)
	tr, err := m.Trace(h.pages, h.slots, len(ids), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Free)
	h.plan = tr.Plan
	rows = h.prefill(h.seq(), ids, len(ids))
	taps, kinds = map[string][]float32{}, map[TapKind]int{}
	for _, tap := range tr.Taps {
		v, err := tr.Rows(tap, len(ids))
		if err != nil {
			t.Fatal(err)
		}
		if len(v) != len(ids)*tap.Width || taps[tap.Name] != nil {
			t.Fatalf("tap %s: %d values for %d rows of %d, or twice", tap.Name, len(v), len(ids), tap.Width)
		}
		taps[tap.Name] = v
		kinds[tap.Kind]++
	}
	return rows, taps, kinds, tr.Read(tr.Hidden, 0, len(ids)), h
}

// TestTrace: a trace computes the plan's bits, and its taps hold what the weights make of each other.
func TestTrace(t *testing.T) {
	for _, name := range fixtures {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata", name)
			m := load(t, dir, kernels.ClassF32)
			ids := readOutputs(t, dir).ints("input_ids")
			plain := newHarness(t, m, len(ids), 1, 4, 1)
			s := plain.seq()
			want := plain.prefill(s, ids, len(ids))
			rows, taps, kinds, hidden, h := traceOf(t, m, ids)
			sameBits(t, "trace", rows, want)
			last := plain.hidden(s)
			sameBits(t, "hidden", [][]float32{hidden[len(hidden)-len(last):]}, [][]float32{last})

			c, linear, full, sparse := m.Config, 0, 0, 0
			for i, l := range c.Layers {
				if l.Kind == LayerKDA {
					linear++
				} else {
					full++
				}
				if l.MLP == MLPSparse {
					sparse++
				}
				checkOutput(t, m, i, taps)
			}
			if kinds[TapLinear] != 6*linear || kinds[TapLinearOut] != linear || kinds[TapFull] != 4*full || kinds[TapFullOut] != full || kinds[TapRouter] != sparse || kinds[TapMLP] != len(c.Layers) {
				t.Errorf("taps %v", kinds)
			}
			if got := m.StateLayers(); len(got) != linear {
				t.Errorf("layers with a state: %v", got)
			}
			for i := range m.StateLayers() {
				a, errA := m.RecurrentState(h.slots, 0, i)
				b, errB := m.RecurrentState(plain.slots, int(s.slot), i)
				if errA != nil || errB != nil {
					t.Fatal(errA, errB)
				}
				sameBits(t, "state", [][]float32{a}, [][]float32{b})
				if len(a) != c.KDAHeads*c.KDADim*c.KDADim || largest(wide(a)) < 1e-6 {
					t.Errorf("state %d has %d values, largest %g", i, len(a), largest(wide(a)))
				}
			}
		})
	}
}

// checkOutput: o_proj of a layer's tapped attention output is its tapped projection, on the first and last row.
func checkOutput(t *testing.T, m *Model, i int, taps map[string][]float32) {
	t.Helper()
	at := "layers." + string(rune('0'+i)) + ".self_attn."
	in, w := taps[at+"o_norm"], (*kernels.Weight)(nil)
	if k := m.layers[i].kda; k != nil {
		w = k.out
	} else {
		in, w = taps[at+"attention"], m.layers[i].mla.out
	}
	out := taps[at+"o_proj"]
	rows := len(in) / w.K()
	for _, r := range []int{0, rows - 1} {
		for n := range w.N() {
			sum := 0.0
			for k, x := range w.Row(n) {
				sum += float64(x) * float64(in[r*w.K()+k])
			}
			if got := float64(out[r*w.N()+n]); math.Abs(got-sum) > 1e-4*(1+math.Abs(sum)) {
				t.Fatalf("layer %d row %d: o_proj gives %g, of the tapped input it is %g", i, r, got, sum)
			}
		}
	}
}

// TestLoadMixed: no family is the base, all of them are the other, one alone changes what comes after it and no more.
func TestLoadMixed(t *testing.T) {
	other := copyModel(t, fixtureDir, func(m map[string]tensor) {
		for _, name := range sortedKeys(m) {
			c, _ := ReadConfig(fixtureDir)
			if c.FamilyOf(moduleOf(name, "model.language_model.")) != "" {
				quantise(m, strings.TrimSuffix(name, ".weight"), "NVFP4")
			}
		}
	})
	ids := readOutputs(t, fixtureDir).ints("input_ids")
	run := func(families ...Family) ([][]float32, string) {
		m, err := LoadMixed(openDevice(t), fixtureDir, other, families, Options{ContextLimit: testLimit})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		h := newHarness(t, m, len(ids), 1, 1, 1)
		return h.prefill(h.seq(), ids, len(ids)), m.Digest
	}
	plain := func(dir string) [][]float32 {
		m := load(t, dir, kernels.ClassF32)
		h := newHarness(t, m, len(ids), 1, 1, 1)
		return h.prefill(h.seq(), ids, len(ids))
	}
	base, _ := run()
	sameBits(t, "no family", base, plain(fixtureDir))
	all, _ := run(Families...)
	sameBits(t, "every family", all, plain(other))
	digests := map[string]bool{}
	for _, f := range Families[:5] {
		rows, digest := run(f)
		if e := worst(rows, base); e == 0 || e > 2 {
			t.Errorf("%s alone changes the logits by %g", f, e)
		}
		digests[digest] = true
	}
	if len(digests) != 5 {
		t.Error("mixed models share a digest")
	}
	if _, err := LoadMixed(openDevice(t), fixtureDir, filepath.Join("testdata", "glm5-next"), Families, Options{}); err == nil || !strings.Contains(err.Error(), "different models") {
		t.Error(err)
	}
}
