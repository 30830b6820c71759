package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"rocket/engine/tier"
	"rocket/radix"
)

// withDisk gives a test engine a disk tier in dir.
func withDisk(dir string) func(*Options) {
	return func(o *Options) { o.DiskDir, o.DiskBytes = dir, 256<<20 }
}

// restart closes e, as a stop without Save or a kill would leave the disk, and starts another on the same files.
func restart(t *testing.T, e *Engine, pages, slots int, change func(*Options)) *Engine {
	t.Helper()
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	e.Close()
	return newTestEngine(t, pages, slots, change)
}

func TestDetachResumeThroughDisk(t *testing.T) {
	e := newTestEngine(t, 64, 32, withDisk(t.TempDir()))
	line := randomLine(rand.New(rand.NewPCG(41, 6)), 333)
	s, _ := open(t, e, line)
	_, ids := turn(t, e, s, line, 10)
	line = append(line, ids...)
	res, err := e.Detach(t.Context(), s, TierDisk)
	if err != nil {
		t.Fatal(err)
	}
	if res.Disk != len(line)-1 || res.Device+res.Host != 0 {
		t.Fatalf("residency after detach %+v, want all %d on disk", res, len(line)-1)
	}
	if st := e.Stats(); st.PagesUsed != 0 || st.SlotsUsed != 0 || st.DiskBytes == 0 {
		t.Fatalf("%d pages and %d states still on the device, %d B on disk", st.PagesUsed, st.SlotsUsed, st.DiskBytes)
	}
	back, got := open(t, e, line)
	if got.Disk != len(line)-1 || got.Recomputed != 0 {
		t.Fatalf("restored %+v, want all %d from the disk", got, len(line)-1)
	}
	a, _ := turn(t, e, back, line, 8)
	b, _ := cold(t, e, line, 8)
	sameLogits(t, "resumed", a, b, 8)
}

// TestStowMovesWhatTheHostHas: a line that was detached to the host goes on to the disk without a timeline.
func TestStowMovesWhatTheHostHas(t *testing.T) {
	e := newTestEngine(t, 64, 32, withDisk(t.TempDir()))
	line := randomLine(rand.New(rand.NewPCG(42, 6)), 300)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	if _, err := e.Detach(t.Context(), s, TierHost); err != nil {
		t.Fatal(err)
	}
	line = line[:300] // the line's end without the generated token: its state is known
	res, err := e.Stow(t.Context(), append(line, 3), "", TierDisk)
	if err != nil || res.Disk != 300 || res.Host+res.Device != 0 {
		t.Fatalf("residency %+v, error %v: want 300 tokens on disk", res, err)
	}
	if st := e.Stats(); st.HostBytes != 0 {
		t.Errorf("%d bytes are still on the host", st.HostBytes)
	}
}

func TestDetachToDiskNeedsOne(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	s, _ := open(t, e, []int32{5, 6, 7})
	if _, err := e.Detach(t.Context(), s, TierDisk); !errors.Is(err, ErrNoDisk) {
		t.Errorf("error %v", err)
	}
	if _, err := e.Detach(t.Context(), s, "tape"); err == nil {
		t.Error("a tier that does not exist was taken")
	}
}

// TestWarmRestart: what is on disk is found after a restart, for every branch, and gives the bits of a cold run.
func TestWarmRestart(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 64, 32, withDisk(dir))
	r := rand.New(rand.NewPCG(43, 44))
	root := randomLine(r, 290)
	lines := [][]int32{root}
	for i := range 3 {
		lines = append(lines, append(slices.Clone(root[:100+60*i]), randomLine(r, 140+i)...))
	}
	for i, line := range lines {
		s, _ := open(t, e, line)
		_, ids := turn(t, e, s, line, 2)
		lines[i] = append(line, ids...)
		if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
			t.Fatal(err)
		}
	}
	e = restart(t, e, 64, 32, withDisk(dir))
	for i, line := range lines {
		s, got := open(t, e, line)
		if got.Disk+got.Device != len(line)-1 || got.Disk == 0 { // a shared beginning is on the device by then
			t.Errorf("line %d: restored %+v of %d tokens", i, got, len(line))
		}
		a, _ := turn(t, e, s, line, 4)
		b, _ := cold(t, e, line, 4)
		sameLogits(t, "after the restart", a, b, 4)
		if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSaveKeepsEverything: a planned stop puts the device's and the host's caches on disk.
func TestSaveKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 64, 32, withDisk(dir))
	r := rand.New(rand.NewPCG(45, 46))
	idle, hosted := randomLine(r, 400), randomLine(r, 270)
	s, _ := open(t, e, idle)
	_, ids := turn(t, e, s, idle, 1)
	idle = append(idle, ids...)
	e.Release(s)
	s, _ = open(t, e, hosted)
	_, ids = turn(t, e, s, hosted, 1)
	hosted = append(hosted, ids...)
	if _, err := e.Detach(t.Context(), s, TierHost); err != nil {
		t.Fatal(err)
	}
	saved, err := e.Save(t.Context())
	if err != nil || saved == 0 {
		t.Fatalf("saved %d, error %v", saved, err)
	}
	if st := e.Stats(); st.PagesUsed != 0 || st.HostBytes != 0 {
		t.Errorf("%d pages on the device and %d bytes on the host after saving", st.PagesUsed, st.HostBytes)
	}
	e = restart(t, e, 64, 32, withDisk(dir))
	for _, line := range [][]int32{idle, hosted} {
		if _, got := open(t, e, line); got.Disk != len(line)-1 {
			t.Errorf("restored %+v of %d", got, len(line))
		}
	}
}

// TestSaveThatMayNotGoOn keeps what there was no time for where it is.
func TestSaveThatMayNotGoOn(t *testing.T) {
	e := newTestEngine(t, 64, 32, withDisk(t.TempDir()))
	line := randomLine(rand.New(rand.NewPCG(47, 46)), 300)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	e.Release(s)
	ctx, cancel := context.WithCancel(t.Context())
	used := e.Stats().PagesUsed
	if err := e.do(ctx, func() { cancel() }); err != nil {
		t.Fatal(err)
	}
	if saved, err := e.Save(ctx); err == nil || saved != 0 {
		t.Fatalf("saved %d with a context that had ended", saved)
	}
	if st := e.Stats(); st.PagesUsed != used {
		t.Errorf("%d pages in use, %d before", st.PagesUsed, used)
	}
}

// TestFullHostSpoolsToDisk: when the host fills up its oldest copies go on to the disk, and come back from there.
func TestFullHostSpoolsToDisk(t *testing.T) {
	e := newTestEngine(t, 64, 32, func(o *Options) {
		withDisk(t.TempDir())(o)
		l := o.Model.Layout()
		o.HostBytes = int64(10*l.SlabBytes + 6*l.SlotBytes)
	})
	r := rand.New(rand.NewPCG(49, 50))
	var lines [][]int32
	for range 6 {
		line := randomLine(r, 400)
		s, _ := open(t, e, line)
		turn(t, e, s, line, 1)
		if _, err := e.Detach(t.Context(), s, TierHost); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	disk := 0
	for _, line := range lines {
		s, got := open(t, e, line)
		disk += got.Disk
		a, _ := turn(t, e, s, line, 2)
		b, _ := cold(t, e, line, 2)
		sameLogits(t, "spooled", a, b, 2)
		e.Release(s)
	}
	if disk == 0 {
		t.Error("nothing came back from the disk")
	}
}

// TestCorruptDiskBytesCostAColdStart: a flipped bit in any record's payload is found and costs a recomputation.
func TestCorruptDiskBytesCostAColdStart(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 64, 32, withDisk(dir))
	line := randomLine(rand.New(rand.NewPCG(51, 52)), 300)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
		t.Fatal(err)
	}
	var handle int64
	if err := e.do(t.Context(), func() {
		e.forest.Match("", line, &e.match)
		handle = e.match.Pages[1].Disk
	}); err != nil {
		t.Fatal(err)
	}
	page := make([]byte, e.layout.SlabBytes)
	if err := e.disk.Get(handle, page); err != nil {
		t.Fatal(err)
	}
	flipOnDisk(t, dir, page[:256])
	back, got := open(t, e, line)
	if got.Disk != 0 || got.Recomputed == 0 || got.ColdReason != ColdCorrupt {
		t.Fatalf("restored %+v (%s)", got, got.ColdReason)
	}
	a, _ := turn(t, e, back, line, 3)
	b, _ := cold(t, e, line, 3)
	sameLogits(t, "after a bad record", a, b, 3)
	if st := e.Stats(); st.RestoresFailed != 1 {
		t.Errorf("%d failed restores counted", st.RestoresFailed)
	}
}

// flipOnDisk flips one bit of these bytes wherever they lie in dir's files.
func flipOnDisk(t *testing.T, dir string, pattern []byte) {
	t.Helper()
	found := false
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		at := indexOf(data, pattern)
		if at < 0 {
			return nil
		}
		found = true
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteAt([]byte{data[at] ^ 4}, int64(at))
		return err
	})
	if err != nil || !found {
		t.Fatalf("flip a bit on disk: found %v, error %v", found, err)
	}
}

func indexOf(data, pattern []byte) int {
	for i := 0; i+len(pattern) <= len(data); i += 512 { // records begin at blocks
		if slices.Equal(data[i:i+len(pattern)], pattern) {
			return i
		}
	}
	return -1
}

// TestFailTheIthOperation fails the i-th allocation or copy of a scenario that uses all of them, for i = 1, 2, ...
// until it gets through: no failure may cost more than a recomputation, and everything must check afterwards.
func TestFailTheIthOperation(t *testing.T) {
	boom := errors.New("injected")
	r := rand.New(rand.NewPCG(53, 54))
	line := randomLine(r, 150)
	other := append(slices.Clone(line[:130]), randomLine(r, 20)...)
	ref := newTestEngine(t, 64, 32, nil)
	wantA, _ := cold(t, ref, line, 3)
	wantB, _ := cold(t, ref, other, 3)
	e := newTestEngine(t, 64, 32, withDisk(t.TempDir()))
	var n, failing atomic.Int64
	e.fail = func(string) error {
		if n.Add(1) == failing.Load() {
			return boom
		}
		return nil
	}
	for i := 1; ; i++ {
		ns := fmt.Sprint(i) // a cache of its own
		failing.Store(int64(i))
		n.Store(0)
		for round, to := range []Tier{TierHost, TierDisk} {
			for _, c := range []struct {
				line []int32
				want *Run
			}{{line, wantA}, {other, wantB}} {
				s, _, err := e.Open(t.Context(), c.line, OpenOptions{Namespace: ns, Lazy: round == 1})
				if err != nil {
					t.Fatalf("operation %d failed: open: %v", i, err)
				}
				run, err := e.Start(t.Context(), s, TurnRequest{Line: c.line, MaxTokens: 3, IgnoreEOS: true, Logprobs: -1, KeepLogits: true})
				if err != nil {
					t.Fatalf("operation %d failed: start: %v", i, err)
				}
				if _, st := wait(t, run); st.Finish == FinishLength {
					sameLogits(t, "after a failure", run, c.want, 3)
				} else if !errors.Is(st.Err, boom) && !errors.Is(st.Err, ErrPoolFull) {
					t.Fatalf("operation %d failed: turn ended with %q, %v", i, st.Finish, st.Err)
				}
				if _, err := e.Detach(t.Context(), s, to); err != nil {
					t.Fatalf("operation %d failed: detach: %v", i, err)
				}
				if err := e.Check(); err != nil {
					t.Fatalf("operation %d failed: %v", i, err)
				}
			}
		}
		if n.Load() < int64(i) {
			if i < 20 {
				t.Errorf("the scenario has only %d operations", i-1)
			}
			return
		}
	}
}

// TestRestockIgnoresOrphans: records whose beginning was lost cannot be reached; they are dropped, and the rest works.
func TestRestockIgnoresOrphans(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 64, 32, withDisk(dir))
	line := randomLine(rand.New(rand.NewPCG(55, 56)), 400)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
		t.Fatal(err)
	}
	before := e.disk.Len()
	if err := e.do(t.Context(), func() {
		e.forest.Match("", line, &e.match)
		if err := e.disk.Drop(e.match.Pages[0].Disk); err != nil { // behind the tree's back
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	e = restart(t, e, 64, 32, withDisk(dir))
	if got := e.disk.Len(); before == 0 || got != 0 {
		t.Errorf("%d records of %d left after the first page was lost", got, before)
	}
	if _, got := open(t, e, line); got.Recomputed != len(line)-1 {
		t.Errorf("restored %+v", got)
	}
	if err := e.do(t.Context(), func() {
		if st := e.forest.Stats(); st.Pages[radix.Disk] != 0 {
			t.Errorf("%d pages on disk in the tree", st.Pages[radix.Disk])
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestSharedPagesAreOnDiskToo: what a detached line shares with one that stays gets a copy on disk, or the line's own
// part could not be reached after a restart.
func TestSharedPagesAreOnDiskToo(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 64, 32, withDisk(dir))
	r := rand.New(rand.NewPCG(57, 58))
	line := randomLine(r, 300)
	s, _ := open(t, e, line)
	_, ids := turn(t, e, s, line, 2)
	line = append(line, ids...)
	m, err := e.Mark(t.Context(), s, -1)
	if err != nil {
		t.Fatal(err)
	}
	twin, err := e.Fork(t.Context(), m) // has not diverged: shares even the state
	m.Drop()
	if err != nil {
		t.Fatal(err)
	}
	res, err := e.Detach(t.Context(), s, TierDisk)
	if err != nil || res.Device != len(line)-1 {
		t.Fatalf("residency %+v, error %v: the twin keeps it on the device", res, err)
	}
	a, _ := turn(t, e, twin, line, 2)
	e.Release(twin)
	e = restart(t, e, 64, 32, withDisk(dir))
	back, got := open(t, e, line)
	if got.Disk != len(line)-1 {
		t.Fatalf("restored %+v of %d", got, len(line))
	}
	b, _ := turn(t, e, back, line, 2)
	sameLogits(t, "after the restart", a, b, 2)
}

// diskOf gives a test engine a disk tier with room for so many pages.
func diskOf(dir string, pages int) func(*Options) {
	return func(o *Options) {
		o.DiskDir = dir
		o.DiskBytes = int64(pages*(o.Model.Layout().SlabBytes+2*4096) + 4096)
	}
}

// TestFullDiskKeepsWholeBeginnings: what goes from a full disk leaves nothing behind that a restart could not reach,
// although the device has a copy of its beginning.
func TestFullDiskKeepsWholeBeginnings(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 96, 48, diskOf(dir, 40))
	r := rand.New(rand.NewPCG(59, 60))
	root := randomLine(r, 700)
	twin, _ := open(t, e, root)
	turn(t, e, twin, root, 1)
	for i := range 8 {
		line := randomLine(r, 300)
		if i%3 == 0 {
			line = append(slices.Clone(root[:640]), line...)
		}
		s, _ := open(t, e, line)
		turn(t, e, s, line, 1)
		if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
			t.Fatal(err)
		}
	}
	before := e.disk.Len()
	e = restart(t, e, 96, 48, diskOf(dir, 40))
	if got := e.disk.Len(); before == 0 || got != before {
		t.Errorf("%d of %d records could be reached", got, before)
	}
}

// TestLineLongerThanTheDisk: the disk gets its beginning, which is of use after a restart; the rest stays.
func TestLineLongerThanTheDisk(t *testing.T) {
	dir := t.TempDir()
	e := newTestEngine(t, 96, 48, diskOf(dir, 30))
	line := randomLine(rand.New(rand.NewPCG(61, 60)), 3000)
	s, _ := open(t, e, line)
	turn(t, e, s, line, 1)
	res, err := e.Detach(t.Context(), s, TierDisk)
	if err != nil || res.Disk == 0 || res.Device == 0 {
		t.Fatalf("residency %+v, error %v", res, err)
	}
	before := e.disk.Len()
	e = restart(t, e, 96, 48, diskOf(dir, 30))
	if got := e.disk.Len(); got != before {
		t.Errorf("%d of %d records could be reached", got, before)
	}
	if _, got := open(t, e, line); got.Disk == 0 {
		t.Errorf("restored %+v", got)
	}
}

// TestDiskRoomIsWhatIsNeeded: room is made for what will be written, in the disk's units, not for what the device pads
// it to; and enough of it.
func TestDiskRoomIsWhatIsNeeded(t *testing.T) {
	e := newTestEngine(t, 96, 48, diskOf(t.TempDir(), 40))
	r := rand.New(rand.NewPCG(63, 60))
	page, state := radix.Eviction{At: 128}, radix.Eviction{Snapshot: true, At: 130}
	for range 6 {
		line := randomLine(r, 500)
		s, _ := open(t, e, line)
		turn(t, e, s, line, 1)
		if _, err := e.Detach(t.Context(), s, TierDisk); err != nil {
			t.Fatal(err)
		}
	}
	for _, v := range []radix.Eviction{page, state, page, page} {
		var freed, none []int64
		if err := e.do(t.Context(), func() { freed = e.diskRoom([]radix.Eviction{v}, e.forest.EvictDisk) }); err != nil {
			t.Fatal(err)
		}
		e.dropOnDisk(freed)
		room := e.disk.Max() - e.disk.Bytes()
		if room < e.diskCost(v) {
			t.Errorf("%d bytes free, %+v takes %d", room, v, e.diskCost(v))
		}
		if err := e.do(t.Context(), func() { none = e.diskRoom([]radix.Eviction{v}, e.forest.EvictDisk) }); err != nil || len(none) > 0 {
			t.Errorf("%d more records freed although there was room", len(none))
		}
	}
}

// TestFullDiskIsTriedOnce: of what does not fit one entry is tried all the same, because only that finds out that a
// file system which was full has room again; the rest is not.
func TestFullDiskIsTriedOnce(t *testing.T) {
	e := newTestEngine(t, 64, 32, diskOf(t.TempDir(), 1))
	var tries atomic.Int64
	e.fail = func(what string) error {
		if what == "write to disk" {
			tries.Add(1)
			return errors.New("injected")
		}
		return nil
	}
	big := radix.Eviction{Snapshot: true, At: 128, Slot: 0, Page: radix.None}
	j := &copying{victims: []radix.Eviction{big, big, big}, records: make([]tier.Record, 3)}
	if e.diskCost(big) <= e.disk.Max() {
		t.Fatalf("a state takes %d, the disk has %d", e.diskCost(big), e.disk.Max())
	}
	outcomes := e.copyToDisk(t.Context(), j)
	if tries.Load() != 1 || !errors.Is(outcomes[2].err, tier.ErrFull) {
		t.Errorf("%d tries, the last: %v", tries.Load(), outcomes[2].err)
	}
}
