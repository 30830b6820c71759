package engine

import (
	"math/rand/v2"
	"slices"
	"testing"

	"rocket/radix"
)

// cached fills an engine with a few related lines and returns them.
func cached(t *testing.T, e *Engine, seed uint64) [][]int32 {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 60))
	root := randomLine(r, 300)
	lines := [][]int32{root, append(slices.Clone(root[:200]), randomLine(r, 150)...), randomLine(r, 130)}
	for _, line := range lines {
		s, _ := open(t, e, line)
		turn(t, e, s, line, 2)
		e.Release(s)
	}
	return lines
}

func TestCheckCacheOfASoundCache(t *testing.T) {
	e := newTestEngine(t, 64, 32, withDisk(t.TempDir()))
	lines := cached(t, e, 61)
	for _, to := range []Tier{TierHost, TierDisk} { // snapshots on every tier
		if _, err := e.Stow(t.Context(), lines[0], "", to); err != nil {
			t.Fatal(err)
		}
		got, err := e.CheckCache(t.Context(), 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		if got.Snapshots < 6 || got.Sampled != got.Snapshots || got.Recomputed != got.Sampled || got.Pages == 0 || got.Stored == 0 || len(got.Mismatches) > 0 {
			t.Errorf("check after %s: %+v", to, got)
		}
	}
	if got, err := e.CheckCache(t.Context(), 1e-9, 7); err != nil || got.Sampled != 1 {
		t.Errorf("a tiny sample looked at %d snapshots, error %v; want one", got.Sampled, err)
	}
	for _, sample := range []float64{0, -1, 1.5} {
		if _, err := e.CheckCache(t.Context(), sample, 1); err == nil {
			t.Errorf("a sample of %v was taken", sample)
		}
	}
}

// TestCheckCacheFindsWhatIsWrong flips one bit of a cached state, of a cached page and of a copy on the host: each is
// found, dropped, and the next turn on that line is right.
func TestCheckCacheFindsWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(*Engine, *radix.Match)
	}{
		{"state", func(e *Engine, m *radix.Match) {
			flip(t, e.slots.Read, e.slots.Write, int(m.Snapshot.Slot)*e.layout.SlotStride+100)
		}},
		{"page", func(e *Engine, m *radix.Match) {
			flip(t, e.pages.Read, e.pages.Write, int(m.Pages[1].Device)*e.layout.PageStride+100)
		}},
		{"copy on the host", func(e *Engine, m *radix.Match) {
			parts, err := e.host.Get(m.Snapshot.Host)
			if err != nil {
				t.Fatal(err)
			}
			parts[0][77] ^= 1
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newTestEngine(t, 64, 32, nil)
			line := cached(t, e, 62)[0]
			if c.name == "copy on the host" {
				if _, err := e.Stow(t.Context(), line, "", TierHost); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.do(t.Context(), func() {
				e.forest.Match("", line, &e.match)
				c.harm(e, &e.match)
			}); err != nil {
				t.Fatal(err)
			}
			got, err := e.CheckCache(t.Context(), 1, 1)
			if err != nil || len(got.Mismatches) == 0 {
				t.Fatalf("check: %+v, error %v", got, err)
			}
			if st := e.Stats(); st.CheckMismatches == 0 {
				t.Error("the mismatch was not counted")
			}
			s, _ := open(t, e, line)
			a, _ := turn(t, e, s, line, 3)
			b, _ := cold(t, e, line, 3)
			sameLogits(t, "after the check", a, b, 3)
			if got, err := e.CheckCache(t.Context(), 1, 1); err != nil || len(got.Mismatches) != 0 {
				t.Errorf("a second check: %+v, error %v", got, err)
			}
		})
	}
}

// TestCheckCacheForgivesACopyThatLeaves: a copy on the host may go while it is looked for, because the device has the
// state too. That is no mismatch.
func TestCheckCacheForgivesACopyThatLeaves(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	line := cached(t, e, 63)[0]
	if _, err := e.Stow(t.Context(), line, "", TierHost); err != nil {
		t.Fatal(err)
	}
	open(t, e, line) // now it is on both
	a := &audit{}
	if err := e.do(t.Context(), func() {
		e.forest.Match("", line, &e.match)
		a.line = line[:e.match.Start()]
		if !e.beginAudit(a) || a.target.Slot == radix.None || a.target.Host == 0 {
			t.Errorf("the snapshot is not on both tiers: %+v", a.target)
		}
		for _, v := range e.forest.EvictHost(1<<40, e.now()) {
			e.forest.Dropped(v)
		}
		e.letGo()
	}); err != nil {
		t.Fatal(err)
	}
	out := CacheCheck{}
	if faults := e.auditStored(a, &out); len(faults) != 0 || out.Stored != 0 {
		t.Errorf("%d copies verified, faults %q", out.Stored, faults)
	}
	if err := e.do(t.Context(), func() { e.endAudit(a) }); err != nil {
		t.Fatal(err)
	}
}

// TestCheckedTimelineStaysWhileCompared: its state is read off the loop, so it must not be parked for somebody's room.
func TestCheckedTimelineStaysWhileCompared(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	a := &audit{line: cached(t, e, 64)[2][:130]}
	a.line = a.line[:128]
	var job *restoring
	if err := e.do(t.Context(), func() {
		if !e.beginAudit(a) {
			t.Error("no snapshot at the page edge")
			return
		}
		job = e.beginAuditSeq(a)
	}); err != nil || job == nil {
		t.Fatalf("job %v, error %v", job, err)
	}
	e.copyIn(job)
	if err := e.do(t.Context(), func() {
		e.endRestore(a.seq, job)
		e.fill(a)
	}); err != nil {
		t.Fatal(err)
	}
	<-a.filled
	if err := e.do(t.Context(), func() {
		if _, _, full := e.beginComparing(a); !full {
			t.Error("nothing to compare")
		}
		if e.parkIdle(func(*Seq) bool { return true }) {
			t.Error("parked while its bytes are read")
		}
		if e.alone(&Run{seq: a.seq}) {
			t.Error("a turn without room would fail rather than wait for the check's end")
		}
		e.endAudit(a)
	}); err != nil {
		t.Fatal(err)
	}
}

func flip(t *testing.T, read, write func(int, []byte) error, at int) {
	t.Helper()
	b := make([]byte, 1)
	if err := read(at, b); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 16
	if err := write(at, b); err != nil {
		t.Fatal(err)
	}
}
