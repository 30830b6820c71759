package engine

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"rocket/radix"
)

// tenantWorld drives timelines of namespaces that are under limits.
type tenantWorld struct {
	*testing.T
	e           *Engine
	r           *rand.Rand
	page, state int64
}

func newTenantWorld(t *testing.T, pages, slots int, change func(*Options)) *tenantWorld {
	e := newTestEngine(t, pages, slots, change)
	return &tenantWorld{t, e, rand.New(rand.NewPCG(77, 78)), e.pageKind.bytes, e.slotKind.bytes}
}

func (w *tenantWorld) limit(ns string, bytes int64) {
	w.Helper()
	if err := w.e.SetNamespaceLimit(w.Context(), ns, bytes); err != nil {
		w.Fatal(err)
	}
}

func (w *tenantWorld) open(ns string, line []int32) *Seq {
	w.Helper()
	s, _, err := w.e.Open(w.Context(), line, OpenOptions{Namespace: ns, Lazy: true})
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// use runs a turn of two tokens on a line and puts it away again. It returns how many tokens were not computed.
func (w *tenantWorld) use(ns string, line []int32) int {
	w.Helper()
	s := w.open(ns, line)
	defer w.e.Release(s)
	r, err := w.e.Start(w.Context(), s, TurnRequest{Line: line, MaxTokens: 2, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		w.Fatal(err)
	}
	_, st := wait(w, r)
	if st.Err != nil {
		w.Fatal(st.Err)
	}
	w.check()
	return st.Usage.CachedTokens
}

func (w *tenantWorld) check() {
	w.Helper()
	if err := w.e.Check(); err != nil {
		w.Fatal(err)
	}
}

func (w *tenantWorld) resident(ns string) int64 {
	a := w.e.Namespaces()[ns]
	return a.Device + a.Host
}

// spooled waits until nothing is on its way to the disk.
func (w *tenantWorld) spooled() {
	w.Helper()
	for left := 1; left > 0; runtime.Gosched() {
		if err := w.e.do(w.Context(), func() { left = len(w.e.leaving) }); err != nil {
			w.Fatal(err)
		}
	}
}

// held starts a turn and stops it while it decodes.
func (w *tenantWorld) held(ns string, line []int32, tokens int) (*Seq, *Run) {
	w.Helper()
	s := w.open(ns, line)
	r, err := w.e.Start(w.Context(), s, TurnRequest{Line: line, MaxTokens: tokens, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		w.Fatal(err)
	}
	for {
		if _, st := r.Read(0); st.Phase == Decoding {
			break
		}
		<-r.Ready()
	}
	r.Hold(true)
	w.Cleanup(func() { w.e.Release(s) })
	return s, r
}

// TestFloodAtTheLimitLeavesOthersTheirHits: one namespace floods the cache at its limit and stays within it; its own
// newest line and all of the other's are found again.
func TestFloodAtTheLimitLeavesOthersTheirHits(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Options)
	}{
		{"device and host", nil},
		{"device only", func(o *Options) { o.HostBytes = -1 }},
		{"with a disk", func(o *Options) { o.DiskDir, o.DiskBytes = t.TempDir(), 64<<20 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newTenantWorld(t, 40, 24, c.change)
			quiet := [][]int32{randomLine(w.r, 400), randomLine(w.r, 300)}
			var hits []int
			for range 2 {
				hits = hits[:0]
				for _, l := range quiet {
					hits = append(hits, w.use("quiet", l))
				}
			}
			before := w.e.Namespaces()["quiet"]
			limit := 8*w.page + 5*w.state
			w.limit("flood", limit)
			var first, last []int32
			for range 12 {
				if last = randomLine(w.r, 300); first == nil {
					first = last
				}
				w.use("flood", last)
				if w.e.disk == nil && w.resident("flood") > limit {
					t.Fatalf("flood has %d bytes, its limit is %d", w.resident("flood"), limit)
				}
			}
			if w.e.disk != nil {
				w.spooled()
				if got := w.e.Namespaces()["flood"]; got.Device+got.Host > limit || got.Disk == 0 {
					t.Errorf("flood has %+v, its limit is %d", got, limit)
				}
				if st := w.e.Stats(); w.use("flood", first) < radix.PageTokens || w.e.Stats().TokensDisk == st.TokensDisk {
					t.Error("the first line of the flood is not found on the disk")
				}
			}
			if got := w.use("flood", last); got < 299-radix.PageTokens {
				t.Errorf("flood finds %d tokens of its last line", got)
			}
			if after := w.e.Namespaces()["quiet"]; after != before {
				t.Errorf("quiet has %+v, had %+v", after, before)
			}
			for i, l := range quiet {
				if got := w.use("quiet", l); got != hits[i] || got < 256 {
					t.Errorf("quiet finds %d tokens of a line of %d, found %d", got, len(l), hits[i])
				}
			}
			st := w.e.Stats()
			if st.QuotaEvicted == 0 || st.NamespacesLimited != 1 || st.QuotaRefused != 0 {
				t.Errorf("evicted %d for quotas, %d limited, %d refused", st.QuotaEvicted, st.NamespacesLimited, st.QuotaRefused)
			}
		})
	}
}

// TestLimitIsAsked: a lowered limit makes room at once, also of timelines that wait for their next turn and of pins, and
// a lifted one nothing.
func TestLimitIsAsked(t *testing.T) {
	w := newTenantWorld(t, 64, 32, nil)
	lines := [][]int32{randomLine(w.r, 300), randomLine(w.r, 300), randomLine(w.r, 300)}
	var seqs []*Seq
	for _, l := range lines {
		s := w.open("a", l)
		t.Cleanup(func() { w.e.Release(s) })
		turn(t, w.e, s, l, 2)
		w.e.Pin(s, true)
		seqs = append(seqs, s)
	}
	w.use("b", lines[0])
	b := w.resident("b")
	for _, pages := range []int64{12, 6, 3, 0} {
		limit := pages*w.page + pages/3*w.state
		w.limit("a", limit)
		w.check()
		if got := w.resident("a"); got > limit {
			t.Errorf("%d bytes under a limit of %d", got, limit)
		}
	}
	if w.resident("b") != b {
		t.Error("b gave way")
	}
	w.limit("a", -1)
	for i, s := range seqs { // and they go on as if nothing had been
		got, _ := turn(t, w.e, s, append(slices.Clone(lines[i]), s.line[len(lines[i]):]...), 3)
		want, _ := cold(t, w.e, s.line[:len(s.line)-3], 3)
		sameLogits(t, "after the limit", got, want, 3)
	}
}

// TestOpenTurnsAloneAreRefused: what is inactive gives way first; only when the open turns fill the limit is a further
// one refused, and those that run go on past it to their ends.
func TestOpenTurnsAloneAreRefused(t *testing.T) {
	w := newTenantWorld(t, 64, 32, nil)
	limit := 6*w.page + 3*w.state
	w.limit("a", limit)
	for range 4 {
		w.use("a", randomLine(w.r, 300)) // fills it with inactive lines
	}
	_, first := w.held("a", randomLine(w.r, 300), 400)
	_, second := w.held("a", randomLine(w.r, 300), 40) // 6 pages and 2 states: less than the limit
	third := randomLine(w.r, 300)
	s := w.open("a", third)
	defer w.e.Release(s)
	run, err := w.e.Start(t.Context(), s, TurnRequest{Line: third, MaxTokens: 2, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatalf("a turn with room for a state: %v", err)
	}
	if _, st := wait(t, run); st.Err != nil {
		t.Fatal(st.Err)
	}
	for first.Hold(false); ; <-first.Ready() { // it grows over the limit
		toks, st := first.Read(0)
		first.Ack(len(toks))
		if st.Phase == Done {
			t.Fatalf("the turn ended: %+v", st)
		}
		if len(toks) > 300 {
			break
		}
	}
	first.Hold(true)
	w.check()
	if _, err := w.e.Start(t.Context(), s, TurnRequest{Line: append(slices.Clone(s.line), 5), MaxTokens: 2, Logprobs: -1}); !errors.Is(err, ErrQuota) {
		t.Errorf("a turn past the limit: %v", err)
	}
	if _, _, err := w.e.Open(t.Context(), third, OpenOptions{Namespace: "a"}); !errors.Is(err, ErrQuota) {
		t.Errorf("a timeline past the limit: %v", err)
	}
	w.use("b", third) // not b's limit
	for _, r := range []*Run{first, second} {
		r.Hold(false)
		if ids, st := wait(t, r); st.Finish != FinishLength {
			t.Errorf("a running turn ended %q after %d tokens, %v", st.Finish, len(ids), st.Err)
		}
	}
	w.check()
	if got := w.resident("a"); got > limit {
		t.Errorf("%d bytes stay under a limit of %d", got, limit)
	}
	if got := w.use("a", third); got < 0 {
		t.Error("no turn")
	}
	if st := w.e.Stats(); st.QuotaRefused != 2 {
		t.Errorf("%d refused", st.QuotaRefused)
	}
}

// TestTurnsOverTheLimitTakeTurns: where the pool is full, the turns of a namespace over its limit make each other wait,
// and no one else's cache goes. The answers are those of a run alone.
func TestTurnsOverTheLimitTakeTurns(t *testing.T) {
	w := newTenantWorld(t, 24, 24, func(o *Options) { o.HostBytes = -1 })
	w.limit("a", 6*w.page+3*w.state)
	for range 2 {
		w.use("quiet", randomLine(w.r, 5*radix.PageTokens+1))
	}
	before := w.e.Namespaces()["quiet"]
	lines := [][]int32{randomLine(w.r, 100), randomLine(w.r, 120)}
	runs := make([]*Run, len(lines))
	for i, l := range lines {
		s := w.open("a", l)
		defer w.e.Release(s)
		var err error
		if runs[i], err = w.e.Start(t.Context(), s, TurnRequest{Line: l, MaxTokens: 800, IgnoreEOS: true, Logprobs: -1, KeepLogits: true}); err != nil {
			t.Fatal(err)
		}
	}
	for i, r := range runs {
		if ids, st := wait(t, r); st.Finish != FinishLength {
			t.Fatalf("turn %d: %q after %d tokens, %v", i, st.Finish, len(ids), st.Err)
		}
	}
	w.check()
	if after := w.e.Namespaces()["quiet"]; after != before {
		t.Errorf("quiet has %+v, had %+v", after, before)
	}
	if st := w.e.Stats(); st.Preemptions == 0 {
		t.Error("no turn has waited: the pool was not full")
	}
	ref := newTestEngine(t, 64, 8, nil)
	for i, r := range runs {
		want, _ := cold(t, ref, lines[i], 800)
		sameLogits(t, "over the limit", r, want, 800)
	}
}
