package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/internal/leaktest"
	"rocket/kernels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// tiny is the smallest real checkpoint: glm5_next with the sparse selection active from 16 tokens on.
const tiny = "model/testdata/glm5-next"

// bench is what a test engine needs besides its sizes; the model is loaded once a process.
var shared = sync.OnceValues(func() (*sharedModel, error) {
	dev, err := kernels.Open("auto", 2)
	if err != nil {
		return nil, err
	}
	m, err := model.Load(dev, tiny, model.Options{Class: kernels.ClassBF16})
	if err != nil {
		return nil, err
	}
	tok, err := tokenizer.Load("../models/nano/tokenizer.json")
	return &sharedModel{dev, m, tok}, err
})

type sharedModel struct {
	dev *kernels.Device
	m   *model.Model
	tok *tokenizer.Tokenizer
}

// newTestEngine starts an engine with room for the given pages and states, checks it on cleanup, and closes it.
func newTestEngine(t testing.TB, pages, slots int, change func(*Options)) *Engine {
	t.Helper()
	sm, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	l := sm.m.Layout()
	o := Options{Device: sm.dev, Model: sm.m, Tokenizer: sm.tok, Name: "tiny", PrefillRows: 64,
		PageBytes: int64(pages * l.PageStride), SnapshotBytes: int64(slots * l.SlotStride), HostBytes: 64 << 20}
	if change != nil {
		change(&o)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		e.Close()
	})
	return e
}

func randomLine(r *rand.Rand, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(3 + r.IntN(380))
	}
	return out
}

// wait reads a run to its end.
func wait(t testing.TB, r *Run) ([]int32, RunState) {
	t.Helper()
	for {
		toks, st := r.Read(0)
		r.Ack(len(toks))
		if st.Phase == Done {
			ids := make([]int32, len(toks))
			for i, tok := range toks {
				ids[i] = tok.ID
			}
			return ids, st
		}
		<-r.Ready()
	}
}

// turn opens nothing: it starts n greedy tokens on s and waits.
func turn(t testing.TB, e *Engine, s *Seq, line []int32, n int) (*Run, []int32) {
	t.Helper()
	r, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: n, IgnoreEOS: true, Logprobs: -1, KeepLogits: true})
	if err != nil {
		t.Fatal(err)
	}
	ids, st := wait(t, r)
	if st.Finish != FinishLength {
		t.Fatalf("finish %q, error %v", st.Finish, st.Err)
	}
	return r, ids
}

// cold is the reference: the line alone, nothing reused.
func cold(t testing.TB, e *Engine, line []int32, n int) (*Run, []int32) {
	t.Helper()
	s, _, err := e.Open(t.Context(), line, OpenOptions{Fresh: true})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Release(s)
	return turn(t, e, s, line, n)
}

func sameLogits(t testing.TB, what string, a, b *Run, n int) {
	t.Helper()
	for i := range n {
		if !slices.Equal(a.Logits(i), b.Logits(i)) {
			t.Fatalf("%s: logits of generated token %d differ", what, i)
		}
	}
}

func open(t testing.TB, e *Engine, line []int32) (*Seq, Restored) {
	t.Helper()
	s, got, err := e.Open(t.Context(), line, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Release(s) })
	return s, got
}

func TestForkAnywhereEqualsReplay(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	r := rand.New(rand.NewPCG(1, 2))
	line := randomLine(r, 300)
	s, _ := open(t, e, line)
	_, ids := turn(t, e, s, line, 40)
	line = append(line, ids...)
	for _, at := range []int{len(line), len(line) - 1, 300, 301, 256, 257, 255, 129, 128, 127, 2, 1, 1 + r.IntN(339), 1 + r.IntN(339)} {
		m, err := e.Mark(t.Context(), s, at)
		if err != nil {
			t.Fatal(err)
		}
		child, err := e.Fork(t.Context(), m)
		m.Drop()
		if err != nil {
			t.Fatal(err)
		}
		got, gotIDs := turn(t, e, child, line[:at], 6)
		want, wantIDs := cold(t, e, line[:at], 6)
		if !slices.Equal(gotIDs, wantIDs) {
			t.Fatalf("fork at %d: %v, replay %v", at, gotIDs, wantIDs)
		}
		sameLogits(t, fmt.Sprintf("fork at %d", at), got, want, 6)
		if at >= 300 && at < len(line) {
			parent := line[at:min(len(line), at+6)]
			if !slices.Equal(gotIDs[:len(parent)], parent) {
				t.Fatalf("fork at %d goes on with %v, its parent with %v", at, gotIDs, parent)
			}
		}
		e.Release(child)
	}
}

// TestForkOfRunningSequence forks a decoding timeline again and again; parent and children must not disturb each other.
func TestForkOfRunningSequence(t *testing.T) {
	e := newTestEngine(t, 128, 64, nil)
	line := randomLine(rand.New(rand.NewPCG(3, 4)), 200)
	_, want := cold(t, e, line, 120)
	s, _ := open(t, e, line)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 120, IgnoreEOS: true, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		<-run.Ready()
		m, err := e.Mark(t.Context(), s, -1)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			child, err := e.Fork(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			rest := 320 - m.At
			if rest <= 0 {
				e.Release(child)
				continue
			}
			wg.Go(func() {
				defer e.Release(child)
				r, err := e.Start(context.Background(), child, TurnRequest{Line: m.Line, MaxTokens: rest, IgnoreEOS: true, Logprobs: -1})
				if err != nil {
					t.Error(err)
					return
				}
				ids, _ := wait(t, r)
				if !slices.Equal(ids, want[max(0, m.At-200):]) {
					t.Errorf("child at %d differs from the replay", m.At)
				}
			})
		}
		m.Drop()
	}
	ids, _ := wait(t, run)
	if !slices.Equal(ids, want) {
		t.Error("parent differs from the replay")
	}
	wg.Wait()
}

func TestDetachResumeThroughHost(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(5, 6)), 333)
	s, _ := open(t, e, line)
	_, ids := turn(t, e, s, line, 10)
	line = append(line, ids...)
	res, err := e.Detach(t.Context(), s, TierHost)
	if err != nil {
		t.Fatal(err)
	}
	if res.Host != len(line)-1 || res.Device != 0 {
		t.Fatalf("residency after detach %+v, want all %d on the host", res, len(line)-1)
	}
	if st := e.Stats(); st.PagesUsed != 0 || st.SlotsUsed != 0 {
		t.Fatalf("%d pages and %d states still on the device", st.PagesUsed, st.SlotsUsed)
	}
	back, got := open(t, e, line)
	if got.Host != len(line)-1 || got.Recomputed != 0 {
		t.Fatalf("restored %+v, want all %d from the host", got, len(line)-1)
	}
	a, _ := turn(t, e, back, line, 8)
	b, _ := cold(t, e, line, 8)
	sameLogits(t, "resumed", a, b, 8)
}

// TestDetachKeepsWhatSiblingsHold: shared pages stay on the device for the sibling, exclusive ones go.
func TestDetachKeepsWhatSiblingsHold(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(7, 8)), 300)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	m, err := e.Mark(t.Context(), s, 280)
	if err != nil {
		t.Fatal(err)
	}
	child, err := e.Fork(t.Context(), m)
	m.Drop()
	if err != nil {
		t.Fatal(err)
	}
	_, ids := turn(t, e, child, line[:280], 150)
	res, err := e.Detach(t.Context(), child, TierHost)
	if err != nil {
		t.Fatal(err)
	}
	if res.Device < 256 || res.Host < 100 {
		t.Fatalf("residency %+v: want the shared 256 tokens on the device and the own ones on the host", res)
	}
	whole := append(slices.Clone(line[:280]), ids...)
	back, _ := open(t, e, whole)
	a, _ := turn(t, e, back, whole, 4)
	b, _ := cold(t, e, whole, 4)
	sameLogits(t, "resumed child", a, b, 4)
}

// TestABA is the pattern that other servers fail: the same request, another one, the same again; also with hits.
func TestABA(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	r := rand.New(rand.NewPCG(9, 10))
	for _, n := range []int{2, 127, 128, 129, 255, 256, 257, 300} {
		a, b := randomLine(r, n), randomLine(r, n)
		copy(b[:n/2], a[:n/2])
		want, _ := cold(t, e, a, 5)
		for i, line := range [][]int32{a, b, a, a} {
			s, got := open(t, e, line)
			run, _ := turn(t, e, s, line, 5)
			if i != 1 {
				sameLogits(t, fmt.Sprintf("length %d, request %d", n, i), run, want, 5)
			}
			if i == 3 && n > 128 && got.Device == 0 {
				t.Errorf("length %d: the identical prompt found nothing", n)
			}
			e.Release(s)
		}
	}
}

func TestManyPrefillsAtOnceEqualAlone(t *testing.T) {
	e := newTestEngine(t, 200, 64, nil)
	r := rand.New(rand.NewPCG(11, 12))
	var wg sync.WaitGroup
	for i := range 12 {
		line := randomLine(r, 30+r.IntN(300))
		wg.Go(func() {
			s, _, err := e.Open(context.Background(), line, OpenOptions{Lazy: i%2 == 0})
			if err != nil {
				t.Error(err)
				return
			}
			defer e.Release(s)
			run, ids := turn(t, e, s, line, 10)
			ref, refIDs := cold(t, e, line, 10)
			if !slices.Equal(ids, refIDs) {
				t.Errorf("run %d: %v, alone %v", i, ids, refIDs)
			}
			sameLogits(t, fmt.Sprintf("run %d", i), run, ref, 10)
		})
	}
	wg.Wait()
}

func TestSmallPoolPreemptsAndStaysExact(t *testing.T) {
	e := newTestEngine(t, 9, 6, nil) // 9 pages: two lines of 3 to 4 pages at once, not four
	r := rand.New(rand.NewPCG(13, 14))
	var wg sync.WaitGroup
	for i := range 4 {
		line := randomLine(r, 250+i)
		wg.Go(func() {
			s, _, err := e.Open(context.Background(), line, OpenOptions{Lazy: true})
			if err != nil {
				t.Error(err)
				return
			}
			defer e.Release(s)
			_, ids := turn(t, e, s, line, 160)
			t.Logf("run %d: %v...", i, ids[:4])
			s2, _, err := e.Open(context.Background(), line, OpenOptions{Fresh: true, Lazy: true})
			if err != nil {
				t.Error(err)
				return
			}
			defer e.Release(s2)
			_, want := turn(t, e, s2, line, 160)
			if !slices.Equal(ids, want) {
				t.Errorf("run %d differs from its replay", i)
			}
		})
	}
	wg.Wait()
	if st := e.Stats(); st.Preemptions == 0 {
		t.Errorf("nothing was preempted: the test is too easy: %+v", st)
	}
}

func TestLineLargerThanThePoolFails(t *testing.T) {
	e := newTestEngine(t, 3, 4, nil)
	line := randomLine(rand.New(rand.NewPCG(15, 16)), 600)
	s, _, err := e.Open(t.Context(), line, OpenOptions{Lazy: true})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Release(s)
	run, err := e.Start(t.Context(), s, TurnRequest{Line: line, MaxTokens: 1, Logprobs: -1})
	if err != nil {
		t.Fatal(err)
	}
	if _, st := wait(t, run); st.Finish != FinishError || !errors.Is(st.Err, ErrPoolFull) {
		t.Fatalf("finish %q, error %v", st.Finish, st.Err)
	}
}

// TestStateBehindCaches: a line whose caches go deeper than its state (after a hit without a near snapshot) is parked,
// forked and published from there.
func TestStateBehindCaches(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := randomLine(rand.New(rand.NewPCG(25, 26)), 600)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	for _, at := range []int{500, 450, 300} {
		m, err := e.Mark(t.Context(), s, at)
		if err != nil {
			t.Fatal(err)
		}
		if m.Replay == 0 {
			t.Fatalf("fork at %d replays nothing: the test is too easy", at)
		}
		var children []*Seq
		for range 3 {
			c, err := e.Fork(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			children = append(children, c)
		}
		m.Drop()
		want, _ := cold(t, e, line[:at], 3)
		for _, c := range children { // the second finds what the first computed, the third comes back from the host
			got, _ := turn(t, e, c, line[:at], 3)
			sameLogits(t, fmt.Sprintf("fork at %d", at), got, want, 3)
			if _, err := e.Detach(t.Context(), c, TierHost); err != nil {
				t.Fatal(err)
			}
		}
	}
}
