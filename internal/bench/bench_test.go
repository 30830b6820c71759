package bench

import (
	"testing"

	"rocket/engine"
	"rocket/engine/model"
	"rocket/internal/leaktest"
	"rocket/kernels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// tinyEngine runs the smallest real checkpoint.
func tinyEngine(t *testing.T) (*kernels.Device, *model.Model, *engine.Engine) {
	t.Helper()
	dev, err := kernels.Open("auto", 2)
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.Load(dev, "../../engine/model/testdata/glm5-next", model.Options{Class: kernels.ClassBF16})
	if err != nil {
		t.Fatal(err)
	}
	e, err := engine.New(engine.Options{Device: dev, Model: m, PageBytes: 64 << 20, SnapshotBytes: 32 << 20, HostBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil {
			t.Error(err)
		}
		e.Close()
		m.Close()
		dev.Close()
	})
	return dev, m, e
}

func TestCheckForks(t *testing.T) {
	_, _, e := tinyEngine(t)
	steps := 0
	o := CheckOptions{Short: 25, Long: 3, ShortMin: 100, ShortMax: 300, LongLen: 500, Tokens: 3, Seed: 1}
	res, err := CheckForks(t.Context(), e, o, func(string, int, int) { steps++ })
	if err != nil {
		t.Fatal(err)
	}
	if res.Mismatched != 0 || res.Checked != 28 || res.Short != 25 || res.Long != 3 || res.Resumed == 0 || res.Cold <= res.Replayed || steps == 0 {
		t.Fatalf("%+v after %d steps", res, steps)
	}
}

// TestDifference: the comparison must see a token and a single bit of a logit.
func TestDifference(t *testing.T) {
	_, _, e := tinyEngine(t)
	run := func(line []int32) result {
		s, _, err := e.Open(t.Context(), line, engine.OpenOptions{Fresh: true})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Release(s)
		res, err := decode(t.Context(), e, s, line, 2, true)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	a, b, c := run([]int32{9, 10, 11}), run([]int32{9, 10, 11}), run([]int32{9, 10, 12})
	if text := difference(a, b, 2); text != "" {
		t.Errorf("the same line differs: %s", text)
	}
	if difference(a, c, 2) == "" {
		t.Error("another line does not differ")
	}
	if difference(a, b, 3) == "" {
		t.Error("a run that is too short does not differ")
	}
	b.run.Logits(1)[5] += 1e-6
	if difference(a, b, 2) == "" {
		t.Error("one changed logit is not seen")
	}
}

func TestMeasurementsAreFilledIn(t *testing.T) {
	dev, m, e := tinyEngine(t)
	rows, err := Forks(t.Context(), e, ForkOptions{Sizes: []int{200}, Reps: 3, Colds: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 3 || rows[0].Kind != "tip" || rows[0].ReplayTokens != 0 {
		t.Fatalf("%+v", rows)
	}
	for _, r := range rows {
		if r.EngineUS <= 0 || r.TTFTMS <= 0 || r.ColdTTFTMS <= 0 || r.Speedup <= 0 || r.Tokens != 201 {
			t.Errorf("%+v", r)
		}
	}
	rungs, err := Ladder(t.Context(), e, LadderOptions{Streams: []int{1, 3}, Prompt: 10, Tokens: 5, Rounds: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(rungs) != 2 || rungs[1].Streams != 3 || rungs[1].TokensPerSec <= 0 || rungs[1].TTFTMax < rungs[1].TTFTP50 {
		t.Errorf("%+v", rungs)
	}
	roof, err := Roofline(t.Context(), dev, m, e, []int{1}, 10, 5, nil)
	if err != nil {
		t.Fatal(err)
	}
	if s := roof.Steps[0]; roof.FMARoof <= 0 || roof.ReadRoof <= 0 || s.Fraction <= 0 || s.WeightBytes <= 0 || s.FMAs <= 0 {
		t.Errorf("%+v", roof)
	}
}
