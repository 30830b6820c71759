package replay

import (
	"testing"

	"rocket/engine"
	"rocket/engine/model"
	"rocket/internal/leaktest"
	"rocket/kernels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestRunAgrees: the real engine reuses, request for request, what the walk says, and keeps as many snapshots.
func TestRunAgrees(t *testing.T) {
	dev, err := kernels.Open("auto", 2)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	m, err := model.Load(dev, "../../engine/model/testdata/glm5-next", model.Options{Class: kernels.ClassBF16})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	l := m.Layout()
	g := Geometry{Name: "tiny", State: "f32", PageBytes: int64(l.PageStride), TokenBytes: int64(l.SlabBytes / pageTokens), SlotBytes: int64(l.SlotStride)}
	for _, tr := range []*Trace{excerpt(t, "bailian", "bailian_made.jsonl"), excerpt(t, "tot", "tot_part.json.gz")} {
		part := tr.Prefix(60, m.ContextLimit())
		need := walk(t, part, Options{Geometry: g})
		e, err := engine.New(engine.Options{Device: dev, Model: m, PageBytes: int64(need.PeakPages+64) * g.PageBytes,
			SnapshotBytes: int64(need.PeakStates+64) * g.SlotBytes, HostBytes: -1})
		if err != nil {
			t.Fatal(err)
		}
		res, err := Run(t.Context(), e, part, g, nil)
		if err == nil {
			err = e.Check()
		}
		e.Close()
		if err != nil {
			t.Fatal(err)
		}
		if len(res.Differences) > 0 || res.Cached != res.Predicted || res.Cached == 0 || res.Requests != len(part.Requests) {
			t.Errorf("%s: %+v", tr.Format, res)
		}
		if res.Snapshots != int64(res.WalkCaptures) || res.CopyOnExtend != int64(res.WalkCopies) {
			t.Errorf("%s: %d snapshots and %d copies, the walk says %d and %d", tr.Format, res.Snapshots, res.CopyOnExtend, res.WalkCaptures, res.WalkCopies)
		}
	}
}

// TestNanoGeometry: the constants are those of the model in this repository.
func TestNanoGeometry(t *testing.T) {
	c, err := model.ReadConfig("../../models/nano")
	if err != nil {
		t.Fatal(err)
	}
	l := model.LayoutOf(c, kernels.ClassBF16)
	g := geometry(t, "nano", "f32")
	if g.PageBytes != int64(l.PageStride) || g.TokenBytes != int64(l.SlabBytes/pageTokens) || g.SlotBytes != int64(l.SlotStride) {
		t.Errorf("%+v, the layout has pages of %d (%d used) and slots of %d", g, l.PageStride, l.SlabBytes, l.SlotStride)
	}
}
