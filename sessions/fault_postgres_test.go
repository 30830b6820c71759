package sessions

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"rocket/internal/linear"
	"rocket/internal/localpg"
	"rocket/migrations"
)

// durableRig is a manager on a cluster with durability on.
func durableRig(t *testing.T, settings map[string]string) (*lossy, *localpg.Cluster) {
	t.Helper()
	pg := durableClusterWith(t, settings)
	return &lossy{rig: openRig(t, pg.URL())}, pg
}

// Postgres is killed again and again under load, in its recovery too, and
// comes back: what was acknowledged stays, the rest happened once or never.
func TestPostgresKilledUnderLoad(t *testing.T) {
	if *faults == 0 {
		t.Skip("a short run has TestPostgresKilledInMidTurn")
	}
	seed := firstSeed(t)
	kills, operations, events := 0, 0, 0
	for n := range uint64(*faults) {
		l, pg := durableRig(t, nil)
		h := linear.NewHistory()
		load := l.load(seed+n, h, 3)
		load.Clients, load.Calls = 6, 25
		load.Do = l.patient(load.Do)
		x := l.reader()
		for _, id := range load.Alive() {
			x.follow(id)
		}
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for ctx.Err() == nil {
				before := pg.PID()
				// the children notice that the postmaster is gone; a new one recovers
				if err := syscall.Kill(before, syscall.SIGKILL); err == nil {
					kills++
				}
				for pg.PID() == before && t.Context().Err() == nil {
					time.Sleep(time.Millisecond)
				}
				if kills%3 == 0 { // once more, in its recovery perhaps
					continue
				}
				select {
				case <-time.After(time.Duration(100+(seed+uint64(kills)*37)%900) * time.Millisecond):
				case <-ctx.Done():
				}
			}
		})
		load.Run(t.Context(), h)
		stop()
		wg.Wait()
		until(t, "ready", func() (any, error) { return nil, l.Ready(t.Context()) })
		l.settled()
		l.checkLinear(h, load)
		events += x.check()
		a, _ := h.Len()
		operations += a
	}
	t.Logf("%d kills, %d calls, %d events read", kills, operations, events)
}

// patient makes a client wait for the ledger after a call without an answer: a
// history of calls of which nobody knows anything proves nothing, and the
// search for its sequence takes for ever.
func (r *rig) patient(do linearDo) linearDo {
	return func(ctx context.Context, client int, id string, c linear.Call) (linear.Answer, []string) {
		a, children := do(ctx, client, id, c)
		for a.Unknown && r.Ready(ctx) != nil && ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
		return a, children
	}
}

type linearDo = func(ctx context.Context, client int, id string, c linear.Call) (linear.Answer, []string)

// Postgres is stopped for longer than turns may decode without it and wait for
// it: turns fail with the ledger's code, and say so once it is back.
func TestPostgresStoppedForLong(t *testing.T) {
	if *faults == 0 {
		t.Skip("waits until a commit is given up")
	}
	l, pg := durableRig(t, nil)
	l.writer.holdAfter, l.writer.awayMax = 50*time.Millisecond, 400*time.Millisecond
	var turns []Turn
	var ids []string
	for i := range 3 {
		s := l.create(fmt.Sprint("package p", i, "\n"))
		ids = append(ids, s.ID)
		turns = append(turns, l.start(s.ID, endless))
	}
	for _, id := range ids {
		log, err := l.Log(t.Context(), DefaultTenant, id)
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := log.Wait(t.Context(), 6); err != nil || !ok {
			t.Fatal(err)
		}
	}
	x := l.reader()
	for _, id := range ids {
		x.follow(id)
	}
	if err := syscall.Kill(pg.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopBackends(t, pg.PID(), syscall.SIGSTOP)
	for i := range turns {
		_, err := l.WaitTurn(t.Context(), DefaultTenant, ids[i], turns[i].ID)
		wantCode(t, err, CodeLedgerUnavailable, "")
	}
	stopBackends(t, pg.PID(), syscall.SIGCONT)
	if err := syscall.Kill(pg.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	l.settled()
	for i := range turns {
		got := until(t, "turn", func() (Turn, error) { return l.Turn(t.Context(), DefaultTenant, ids[i], turns[i].ID) })
		if got.State != TurnFailed || got.Error == nil || got.Error.Code != CodeLedgerUnavailable {
			t.Errorf("turn %+v", got)
		}
		if next := l.turn(ids[i], "", 3); next.From != got.To {
			t.Errorf("the next turn starts at %d, want %d", next.From, got.To)
		}
	}
	x.check()
}

// stopBackends sends a signal to the children of a postmaster.
func stopBackends(t *testing.T, postmaster int, sig syscall.Signal) {
	t.Helper()
	out, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", postmaster, postmaster))
	if err != nil {
		t.Skip("cannot list the processes of Postgres here: ", err)
	}
	for _, pid := range strings.Fields(string(out)) {
		var n int
		fmt.Sscan(pid, &n)
		syscall.Kill(n, sig) // one that has ended meanwhile is none
	}
}

// The disk under Postgres fills up in mid-turn and has room again: turns wait,
// nothing that was acknowledged is lost, and the server goes on.
func TestDiskOfPostgresFull(t *testing.T) {
	if *faults == 0 {
		t.Skip("mounts a file system")
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	dir, err := os.MkdirTemp("/tmp", "rocket-full-")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=140m,mode=0755", "tmpfs", dir).CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		t.Skipf("cannot mount a small file system here: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("unmount: %v: %s", err, out)
		}
		os.RemoveAll(dir)
	})
	pg, err := localpg.Start(t.Context(), localpg.Options{Dir: dir, DieWithParent: true,
		Settings: map[string]string{"min_wal_size": "32MB", "max_wal_size": "64MB", "shared_buffers": "16MB"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pg.Stop(context.Background()) })
	if err := migrations.Up(t.Context(), pg.URL()); err != nil {
		t.Fatal(err)
	}
	l := &lossy{rig: openRig(t, pg.URL())}
	s := l.create("func main() {\n")
	const tokens = 3000
	want := l.turn(l.fork(s.ID, ForkRequest{}).Sessions[0].ID, "", tokens)
	x := l.reader()
	x.follow(s.ID)
	turn := l.start(s.ID, TurnRequest{MaxTokens: ptr(tokens), IgnoreEOS: true})
	ballast := filepath.Join(dir, "ballast")
	fill(t, ballast)
	refused, full := map[Code]int{}, 0
	waitFor(t, func() bool { // until both the writer and a call have met the full disk
		title := strings.Repeat("x", TitleBytesMax)
		_, err := l.Create(t.Context(), local, CreateRequest{Title: title, Input: ptr(strings.Repeat("some text ", 2000))})
		refused[ErrorCode(err)]++
		if err != nil && strings.Contains(err.Error(), "SQLSTATE 53100") {
			full++
		}
		return l.writer.downSince.Load() != 0 && refused[CodeLedgerUnavailable] > 0
	})
	if refused[CodeInternal] > 0 {
		t.Errorf("refused with %v", refused)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	got := until(t, "wait", func() (Turn, error) { return l.WaitTurn(t.Context(), DefaultTenant, s.ID, turn.ID) })
	if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" || got.State != TurnCompleted {
		t.Errorf("turn %s (%+v) with other tokens:\n%s", got.State, got.Error, diff)
	}
	until(t, "ready", func() (any, error) { return nil, l.Ready(t.Context()) })
	x.check()
	t.Logf("calls beside it: %v, of them %d because of the full disk", refused, full)
}

// fill writes a file until there is no room for more.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); len(block) > 0; {
		if _, err := f.Write(block); err != nil {
			block = block[:len(block)/2]
		}
	}
}
