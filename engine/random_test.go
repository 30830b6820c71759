package engine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"rocket/engine/tier"
)

var (
	randomSeed  = flag.Uint64("random.seed", 0, "seed of TestRandomOperations; 0: a few fixed ones")
	randomSteps = flag.Int("random.steps", 60, "operations a seed")
)

// TestRandomOperations runs random trees of timelines through a pool that is too small for them, against the naive
// model: the line alone, computed cold, nothing shared. Tokens and logits must be equal and every structure must check
// after every operation.
func TestRandomOperations(t *testing.T) {
	seeds := []uint64{1, 2, 3, 4}
	if *randomSeed != 0 {
		seeds = []uint64{*randomSeed}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := &world{t: t, r: rand.New(rand.NewPCG(seed, 99)), truth: map[string]*Run{}, disk: t.TempDir()}
			w.start()
			w.ref = newTestEngine(t, 64, 8, nil)
			for step := range *randomSteps {
				w.step(step)
				if err := w.e.Check(); err != nil {
					t.Fatalf("after operation %d: %v", step, err)
				}
			}
			w.log()
			for _, n := range slices.Clone(w.nodes) {
				w.release(n)
			}
		})
	}
}

type world struct {
	t     *testing.T
	r     *rand.Rand
	e     *Engine
	ref   *Engine
	nodes []*timeline
	truth map[string]*Run // cold runs by line
	disk  string
}

// start opens an engine with tiers that are too small as well.
func (w *world) start() {
	w.e = newTestEngine(w.t, 14, 9, func(o *Options) {
		l := o.Model.Layout()
		o.HostBytes = int64(20*l.SlabBytes + 8*l.SlotBytes)
		o.DiskDir, o.DiskBytes = w.disk, int64(80*l.PageStride)
		o.PrefillRows = 48
	})
}

func (w *world) log() {
	st := w.e.Stats()
	w.t.Logf("%d forks, %d snapshots, evicted %d pages and %d snapshots, for the limit %d, tokens: %d from the device, %d from the host, %d from the disk, %d recomputed",
		st.Forks, st.Snapshots, st.EvictedPages, st.EvictedSnapshots, st.QuotaEvicted, st.TokensDevice, st.TokensHost, st.TokensDisk, st.TokensRecomputed)
}

// crash ends the engine, at times after saving, and starts another one on the same disk. Only lines survive.
func (w *world) crash() {
	w.log()
	for _, n := range w.nodes {
		if n.s != nil {
			w.e.Release(n.s)
			n.s = nil
		}
	}
	if w.r.IntN(2) == 0 {
		if _, err := w.e.Save(w.t.Context()); err != nil && !errors.Is(err, tier.ErrFull) {
			w.t.Fatal(err)
		}
	}
	w.e.Close()
	w.start()
}

// limit bounds what all of it may take, or lifts the bound.
func (w *world) limit() {
	bytes := int64(-1)
	if w.r.IntN(3) > 0 {
		bytes = int64(1+w.r.IntN(12)) * (w.e.pageKind.bytes + w.e.slotKind.bytes)
	}
	if err := w.e.SetNamespaceLimit(w.t.Context(), "", bytes); err != nil {
		w.t.Fatal(err)
	}
}

// check proves a sample of the cache.
func (w *world) check() {
	got, err := w.e.CheckCache(w.t.Context(), 0.3, w.r.Uint64())
	if err != nil || len(got.Mismatches) > 0 {
		w.t.Fatalf("cache check %+v, error %v", got, err)
	}
}

type timeline struct {
	s    *Seq // nil while detached
	line []int32
}

func (w *world) step(n int) {
	w.t.Helper()
	if len(w.nodes) == 0 {
		w.open()
		return
	}
	node := w.nodes[w.r.IntN(len(w.nodes))]
	switch k := w.r.IntN(50); {
	case k == 49:
		w.crash()
		return
	case k >= 47:
		w.check()
		return
	case k >= 45:
		w.limit()
		return
	}
	switch k := w.r.IntN(12); {
	case k == 0 && len(w.nodes) < 8:
		w.open()
	case k <= 3 && len(w.nodes) < 10:
		w.fork(node)
	case k == 4:
		w.detach(node)
	case k == 5:
		w.release(node)
	case k == 6:
		w.cancel(node)
	default:
		w.turn(node)
	}
}

func (w *world) open() {
	line := randomLine(w.r, 2+w.r.IntN(300))
	if len(w.nodes) > 0 { // often a line with a known beginning
		other := w.nodes[w.r.IntN(len(w.nodes))].line
		n := w.r.IntN(len(other) + 1)
		line = append(slices.Clone(other[:n]), line[:2+w.r.IntN(min(100, len(line)-1))]...)
	}
	if len(line) > 500 {
		line = line[:500]
	}
	node := &timeline{line: line}
	w.resume(node)
	w.nodes = append(w.nodes, node)
}

func (w *world) resume(node *timeline) {
	if node.s != nil {
		return
	}
	s, got, err := w.e.Open(w.t.Context(), node.line, OpenOptions{Lazy: w.r.IntN(2) == 0})
	if err != nil {
		w.t.Fatal(err)
	}
	if sum := got.Device + got.Host + got.Disk + got.Recomputed; sum != len(node.line)-1 {
		w.t.Fatalf("restored %+v of a line of %d", got, len(node.line))
	}
	node.s = s
}

func (w *world) fork(node *timeline) {
	w.resume(node)
	m, err := w.e.Mark(w.t.Context(), node.s, 1+w.r.IntN(len(node.line)))
	if err != nil {
		w.t.Fatal(err)
	}
	defer m.Drop()
	for range 1 + w.r.IntN(2) {
		s, err := w.e.Fork(w.t.Context(), m)
		if err != nil {
			w.t.Fatal(err)
		}
		w.nodes = append(w.nodes, &timeline{s: s, line: slices.Clone(m.Line)})
	}
}

func (w *world) detach(node *timeline) {
	if node.s == nil {
		return
	}
	to := TierHost
	if w.r.IntN(2) == 0 {
		to = TierDisk
	}
	res, err := w.e.Detach(w.t.Context(), node.s, to)
	if err != nil {
		w.t.Fatal(err)
	}
	if res.Device+res.Host+res.Disk > len(node.line)-1 {
		w.t.Fatalf("residency %+v of a line of %d", res, len(node.line))
	}
	node.s = nil
}

func (w *world) release(node *timeline) {
	if node.s != nil {
		w.e.Release(node.s)
	}
	w.nodes = slices.DeleteFunc(w.nodes, func(x *timeline) bool { return x == node })
}

// turn adds a prompt and compares the answer with the cold run of the same line.
func (w *world) turn(node *timeline) {
	w.resume(node)
	if len(node.line) > 700 {
		return
	}
	line := append(slices.Clone(node.line), randomLine(w.r, w.r.IntN(90))...)
	const n = 4
	run, err := w.e.Start(w.t.Context(), node.s, TurnRequest{Line: line, MaxTokens: n, IgnoreEOS: true, Logprobs: -1, KeepLogits: true})
	if err != nil {
		w.t.Fatal(err)
	}
	ids, st := wait(w.t, run)
	if errors.Is(st.Err, ErrPoolFull) { // a lone line that fits must never fail
		w.t.Fatalf("line of %d: %v", len(line), st.Err)
	}
	key := fmt.Sprint(line)
	want := w.truth[key]
	if want == nil {
		want, _ = cold(w.t, w.ref, line, n)
		w.truth[key] = want
	}
	sameLogits(w.t, fmt.Sprintf("line of %d", len(line)), run, want, n)
	node.line = append(line, ids...)
}

// cancel ends a turn somewhere on its way.
func (w *world) cancel(node *timeline) {
	w.resume(node)
	if len(node.line) > 700 {
		return
	}
	line := append(slices.Clone(node.line), randomLine(w.r, w.r.IntN(200))...)
	run, err := w.e.Start(context.Background(), node.s, TurnRequest{Line: line, MaxTokens: 1000, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		w.t.Fatal(err)
	}
	for range w.r.IntN(4) {
		<-run.Ready()
	}
	run.Cancel()
	ids, st := wait(w.t, run)
	if st.Finish != FinishCancelled {
		w.t.Fatalf("finish %q, error %v", st.Finish, st.Err)
	}
	node.line = append(line, ids...)
}
