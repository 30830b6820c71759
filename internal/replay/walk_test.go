package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"rocket/radix"
)

func walk(t testing.TB, tr *Trace, o Options) Result {
	t.Helper()
	r, err := Walk(context.Background(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func text(t testing.TB, r Result) string {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func geometry(t testing.TB, name, state string) Geometry {
	t.Helper()
	g, err := GeometryOf(name, state)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func smallC32(t testing.TB, root int) *Trace {
	t.Helper()
	tr, err := C32{Root: root, Lanes: 2, Sessions: 24, Seed: 7, Waiting: 0.2}.Trace()
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func TestGeometry(t *testing.T) {
	for _, c := range []struct {
		name, state       string
		token, page, slot int64
	}{
		{"glm-5.3-flash", "f32", 16896, 2162688, 147619840},
		{"glm-5.3-flash", "bf16", 16896, 2162688, 76316672},
		{"kimi-linear", "f32", 8064, 1 << 20, 43417600},
	} {
		g := geometry(t, c.name, c.state)
		if g.TokenBytes != c.token || g.PageBytes != c.page || g.SlotBytes != c.slot {
			t.Errorf("%s %s: %+v, want %+v", c.name, c.state, g, c)
		}
	}
	for _, c := range [][2]string{{"nano", "bf16"}, {"nano", "f64"}, {"gpt", "f32"}} {
		if _, err := GeometryOf(c[0], c[1]); err == nil {
			t.Errorf("%v: no error", c)
		}
	}
}

// TestIdealAgrees: without a budget the radix code finds, request for request in sum, exactly the pages that a map of
// prefix hashes finds.
func TestIdealAgrees(t *testing.T) {
	traces := excerpts(t)
	traces["c32"] = smallC32(t, 3000)
	for name, tr := range traces {
		for _, g := range []Geometry{geometry(t, "nano", "f32"), geometry(t, "glm-5.3-flash", "f32")} {
			r := walk(t, tr, Options{Geometry: g, CheckEvery: 100})
			if u := Ideal(tr); r.PromptTokens != u.Prompt || r.KnownTokens != u.Cached {
				t.Errorf("%s on %s: the walk knew %d of %d tokens, the ideal is %d of %d", name, g.Name, r.KnownTokens, r.PromptTokens, u.Cached, u.Prompt)
			}
			if r.EvictedPages+r.EvictedSnapshots+r.Refused+r.Waited+r.Parked > 0 {
				t.Errorf("%s: something had to go without a budget: %+v", name, r)
			}
		}
	}
}

// TestBudgets: at any budget the walk stays inside it, keeps the tree whole, serves every request, and is the same
// each time. More memory may not cost many hits.
func TestBudgets(t *testing.T) {
	traces := excerpts(t)
	traces["c32"] = smallC32(t, 3000)
	for name, tr := range traces {
		g := geometry(t, "nano", "f32")
		free := walk(t, tr, Options{Geometry: g})
		for _, policy := range Policies {
			for _, percent := range []int64{5, 20, 100} {
				o := Options{Geometry: g, Budget: max(free.PeakBytes*percent/100, 4*(g.PageBytes+g.SlotBytes)), Policy: policy, CheckEvery: 100}
				r := walk(t, tr, o)
				if r.PeakBytes > o.Budget || r.PeakBytes == 0 {
					t.Errorf("%s %s %d%%: peak %d over the budget %d", name, policy, percent, r.PeakBytes, o.Budget)
				}
				if r.PromptTokens != free.PromptTokens || r.Requests != len(tr.Requests) {
					t.Errorf("%s %s %d%%: %d prompt tokens, want %d", name, policy, percent, r.PromptTokens, free.PromptTokens)
				}
				if percent == 20 {
					o.CheckEvery = 0
					if a, b := text(t, r), text(t, walk(t, tr, o)); a != b {
						t.Errorf("%s %s %d%%: two walks differ:\n%s\n%s", name, policy, percent, a, b)
					}
				}
				if percent == 100 && r.CachedTokens != free.CachedTokens {
					t.Errorf("%s %s: %d tokens cached in the whole peak, %d without a budget", name, policy, r.CachedTokens, free.CachedTokens)
				}
			}
		}
	}
}

// TestPressureEvicts: the budgets of TestBudgets are felt.
func TestPressureEvicts(t *testing.T) {
	tr := excerpt(t, "kvct", "kvct_0019.json.gz", "kvct_0277_part.json.gz")
	g := geometry(t, "glm-5.3-flash", "f32")
	free := walk(t, tr, Options{Geometry: g})
	r := walk(t, tr, Options{Geometry: g, Budget: free.PeakBytes / 5})
	if r.EvictedSnapshots == 0 || r.CachedTokens >= free.CachedTokens {
		t.Errorf("evicted %d states and %d pages, cached %d of %d tokens", r.EvictedSnapshots, r.EvictedPages, r.CachedTokens, free.CachedTokens)
	}
}

// TestTooSmall: what cannot run at all is refused, by name or one by one, and nothing hangs.
func TestTooSmall(t *testing.T) {
	tr := excerpt(t, "mooncake", "mooncake_part.jsonl.gz")
	g := geometry(t, "glm-5.3-flash", "f32")
	if _, err := Walk(context.Background(), tr, Options{Geometry: g, Budget: g.SlotBytes}); err == nil {
		t.Error("one state is enough")
	}
	r := walk(t, tr, Options{Geometry: g, Budget: 3 * g.SlotBytes, CheckEvery: 10})
	if r.Refused == 0 {
		t.Error("no request was refused")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Walk(ctx, tr, Options{Geometry: g}); err == nil {
		t.Error("a cancelled walk ended well")
	}
}

// TestServed: a short trace whose numbers can be told by hand. Nano's snapshots are about 395 tokens apart.
func TestServed(t *testing.T) {
	line := func(n int) []Seg { return []Seg{{ID: 1, N: int32(n)}} }
	tr := &Trace{Format: "made"}
	for i, r := range []Request{
		{Prompt: line(300), Output: []Seg{{ID: 1, Off: 300, N: 20}}}, // 320 tokens: the last is pending
		{Prompt: line(300)},                                   // a state at the page edge 256
		{Prompt: line(320)},                                   // the exact end, 319
		{Prompt: append(line(319), Seg{ID: 9, N: 50})},        // the same
		{Prompt: append(line(318), Seg{ID: 9, N: 50})},        // the exact end of the second
		{Prompt: []Seg{{ID: 2, N: 200}}, Output: line(5)[:1]}, // nothing
	} {
		r.At, r.Done, r.Session = int64(i), int64(i), -1
		if err := tr.add(r); err != nil {
			t.Fatal(err)
		}
	}
	tr.finish()
	var got []int
	r := walk(t, tr, Options{Geometry: geometry(t, "nano", "f32"), CheckEvery: 1, Served: func(i int, s Served) { got = append(got, s.Cached) }})
	if want := fmt.Sprint([]int{0, 256, 319, 319, 299, 0}); fmt.Sprint(got) != want {
		t.Errorf("cached %v, want %v", got, want)
	}
	if r.CopyOnExtend == 0 {
		t.Error("going on from an exact end copied no page")
	}
}

// TestWaiting: requests at the same time that do not fit together wait for each other.
func TestWaiting(t *testing.T) {
	g := geometry(t, "nano", "f32")
	tr := &Trace{Format: "made"}
	for i := range 4 {
		if err := tr.add(Request{At: 0, Done: 100, Session: -1, Prompt: []Seg{{ID: uint64(i), N: 20 * radix.PageTokens}}}); err != nil {
			t.Fatal(err)
		}
	}
	tr.finish()
	r := walk(t, tr, Options{Geometry: g, Budget: 50*g.PageBytes + 4*g.SlotBytes, CheckEvery: 1})
	if r.Waited != 2 || r.Refused != 0 {
		t.Errorf("%d waited and %d were refused, want 2 and 0", r.Waited, r.Refused)
	}
}

// TestC32Means: the made workload has the means that it is made for, in page tables as the published table counts.
func TestC32Means(t *testing.T) {
	tr, err := C32{Root: 8192, Lanes: DefaultLanes, Sessions: DefaultSessions, Seed: 1}.Trace()
	if err != nil {
		t.Fatal(err)
	}
	s := walk(t, tr, Options{Geometry: geometry(t, "glm-5.3-flash", "bf16")}).Sessions
	if s.Live != DefaultSessions || s.FurtherTokens < 33_380 || s.FurtherTokens > 33_420 || s.OwnTokens < 13_060 || s.OwnTokens > 13_096 {
		t.Errorf("%d sessions of %.0f tokens past the root, %.0f their own; want 555, 33400, 13078", s.Live, s.FurtherTokens, s.OwnTokens)
	}
	const budget = 3273 << 30 / 100
	if s.fit(budget); s.FitUnshared != 45 || s.FitSpread != 118 || s.FitShared != 117 {
		t.Errorf("fit %d unshared, %d with the root spread, %d with it once; want 45, 118, 117", s.FitUnshared, s.FitSpread, s.FitShared)
	}
}

// TestC32Resident: the published number of sessions is resident at once in the walk itself, and more when idle forks
// keep only the state at their branch point.
func TestC32Resident(t *testing.T) {
	const budget = 3273 << 30 / 100
	tr, err := C32{Root: 8192, Lanes: 10, Sessions: 173, Seed: 1}.Trace() // the same lanes, no more than can matter
	if err != nil {
		t.Fatal(err)
	}
	g := geometry(t, "glm-5.3-flash", "f32")
	own := walk(t, tr, Options{Geometry: g, Budget: budget}).Sessions
	shed := walk(t, tr, Options{Geometry: g, Budget: budget, ShedStates: true}).Sessions
	if own.FitResident < 95 {
		t.Errorf("%d sessions were resident with a state each, want 95", own.FitResident)
	}
	if shed.ResidentMax < own.ResidentMax*5/4 || shed.ReplayMean > 12_000 {
		t.Errorf("%d sessions were resident with a state a branch point, replay %.0f; %d with a state each", shed.ResidentMax, shed.ReplayMean, own.ResidentMax)
	}
}
