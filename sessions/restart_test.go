package sessions

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rocket/engine"
	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// narrow is an engine that runs one turn at a time.
func narrow(t *testing.T, queue int) *engine.Engine {
	t.Helper()
	e, err := openEngine(func(o *engine.Options) { o.MaxSeqs, o.QueueLen = 1, queue })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil {
			t.Error("engine:", err)
		}
		e.Close()
	})
	return e
}

var endless = TurnRequest{MaxTokens: ptr(1 << 20), IgnoreEOS: true}

func TestCancelInEveryPhase(t *testing.T) {
	r := openRigOn(t, pgtest.New(t), narrow(t, 1))
	busy, waits, third := r.create("a"), r.create("b"), r.create("c")
	running := r.start(busy.ID, endless)
	queued := r.start(waits.ID, TurnRequest{Input: ptr("more"), MaxTokens: ptr(5), IgnoreEOS: true})
	if queued.State != TurnQueued {
		t.Errorf("state %s behind a running turn", queued.State)
	}
	if got := r.get(waits.ID); got.State != StateRunning || got.Length != waits.Length {
		t.Errorf("session with a queued turn: %+v", got)
	}
	_, err := r.StartTurn(t.Context(), local, waits.ID, endless)
	wantCode(t, err, CodeTurnInProgress, "")
	_, err = r.Detach(t.Context(), local, waits.ID, DetachRequest{})
	wantCode(t, err, CodeTurnInProgress, "")
	_, err = r.StartTurn(t.Context(), local, third.ID, endless)
	wantCode(t, err, CodeQueueFull, "")
	if got := r.get(third.ID); got.State != StateIdle || got.TurnCount != 0 {
		t.Errorf("session whose turn was refused: %+v", got)
	}
	// a fork of a session whose turn waits has none of the waiting prompt
	if f := r.fork(waits.ID, ForkRequest{}); f.At != waits.Length {
		t.Errorf("forked at %d, want %d", f.At, waits.Length)
	}

	got, err := r.Cancel(t.Context(), local, waits.ID)
	if err != nil || got.ID != queued.ID || got.State != TurnCancelled || got.From != got.To || got.StartedAt != nil {
		t.Errorf("cancelled in the queue: %+v, %v", got, err)
	}
	if diff := cmp.Diff(must(r.tok.Encode("b"), nil), r.line(waits.ID)); diff != "" {
		t.Errorf("the prompt of a turn that never began is on the line:\n%s", diff)
	}
	if k := kinds(r.ledgerEvents(waits.ID)); k != "session.created session.forked turn.cancelled" {
		t.Errorf("events %q", k)
	}
	got, err = r.Cancel(t.Context(), local, busy.ID)
	if err != nil || got.ID != running.ID || got.State != TurnCancelled || got.To != r.get(busy.ID).Length {
		t.Errorf("cancelled while decoding: %+v, %v", got, err)
	}
	if again, err := r.Cancel(t.Context(), local, busy.ID); err != nil || again.ID != running.ID {
		t.Errorf("cancel without an open turn: %+v, %v", again, err)
	}
	_, err = r.Cancel(t.Context(), local, third.ID)
	wantCode(t, err, CodeNotFound, "")
	for _, s := range []Session{busy, waits, third} { // all go on
		if got := r.turn(s.ID, "", 3); got.State != TurnCompleted {
			t.Errorf("turn after a cancelled one: %+v", got)
		}
	}
}

func TestShutdownInterruptsAndQueuedTurnsRunLater(t *testing.T) {
	eng := narrow(t, 4)
	url := pgtest.New(t)
	r := openRigOn(t, url, eng)
	busy, waits := r.create("a"), r.create("package b\n")
	detached := r.create("c")
	if _, err := r.Detach(t.Context(), local, detached.ID, DetachRequest{}); err != nil {
		t.Fatal(err)
	}
	running := r.start(busy.ID, endless)
	log, _ := r.Log(t.Context(), DefaultTenant, busy.ID)
	if ok, err := log.Wait(t.Context(), 10); !ok || err != nil {
		t.Fatal(err)
	}
	queued := r.start(waits.ID, TurnRequest{Input: ptr("func"), MaxTokens: ptr(6), IgnoreEOS: true, Temperature: ptr(1.0), Seed: ptr(int64(7))})
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := r.Create(t.Context(), local, CreateRequest{})
	wantCode(t, err, CodeOverloaded, "")
	if err := r.Shutdown(t.Context()); err != nil {
		t.Errorf("second shutdown: %v", err)
	}

	r = openRigOn(t, url, eng)
	got := r.wait(busy.ID, running.ID)
	if got.State != TurnInterrupted || len(got.Tokens) < 8 || got.To != r.get(busy.ID).Length {
		t.Errorf("running turn: %+v", got)
	}
	if e := r.get(busy.ID).Epoch; e != 1 {
		t.Errorf("epoch %d after a clean stop, want 1", e)
	}
	end := r.wait(waits.ID, queued.ID)
	if end.State != TurnCompleted || len(end.Tokens) != 6 || end.Seed != 7 {
		t.Errorf("queued turn: %+v", end)
	}
	ref := r.create("package b\n")
	want := r.wait(ref.ID, r.start(ref.ID, TurnRequest{Input: ptr("func"), MaxTokens: ptr(6), IgnoreEOS: true, Temperature: ptr(1.0), Seed: ptr(int64(7))}).ID)
	if diff := cmp.Diff(want.Tokens, end.Tokens); diff != "" {
		t.Errorf("queued turn came to something else:\n%s", diff)
	}
	if s := r.get(detached.ID).State; s != StateDetached {
		t.Errorf("state %s, a restart does not change it", s)
	}
	if f := r.fork(busy.ID, ForkRequest{At: ptr(got.To - 3)}); len(f.Sessions) != 1 {
		t.Errorf("fork after a restart: %+v", f)
	}
}

// Two servers on one ledger: the second has nothing of the first's until that
// is dead, and a server that was taken over loses its writes, not the ledger's
// order.
func TestTakeoverFencesTheOldOwner(t *testing.T) {
	url := pgtest.New(t)
	old := openRigOn(t, url, narrow(t, 4))
	s := old.create("func main() {\n")
	turn := old.start(s.ID, endless)
	log, _ := old.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := log.Wait(t.Context(), 8); !ok || err != nil {
		t.Fatal(err)
	}
	r := openRigOn(t, url, narrow(t, 4))
	_, err := r.Fork(t.Context(), local, s.ID, ForkRequest{})
	wantCode(t, err, CodeOverloaded, "")

	// the old server is presumed dead: its lease and its lock are gone
	waitFor(t, func() bool {
		old.cutLease(true) // it may be renewed before the other one looks
		taken, err := r.takeOver(t.Context(), old.me, false)
		if err != nil {
			t.Fatal(err)
		}
		return taken
	})
	got := r.wait(s.ID, turn.ID)
	if got.State != TurnInterrupted || r.get(s.ID).Epoch != 2 {
		t.Errorf("turn of the old owner: %+v, session %+v", got, r.get(s.ID))
	}
	end := r.turn(s.ID, "", 10)
	if end.From != got.To {
		t.Errorf("the new owner's turn starts at %d, want %d", end.From, got.To)
	}
	waitFor(t, func() bool { return old.Stats().TurnsOpen == 0 }) // fenced at its next write
	line := r.line(s.ID)
	if len(line) != end.To {
		t.Errorf("line of %d tokens, want %d", len(line), end.To)
	}
	_, err = old.StartTurn(t.Context(), local, s.ID, endless)
	wantCode(t, err, CodeOverloaded, "")
}

func openRigOn(t *testing.T, url string, eng *engine.Engine) *rig {
	t.Helper()
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	return startRig(t, Options{DatabaseURL: url, Engine: eng, Template: tmpl})
}

// TestDetachToDiskOutlivesTheServer: what was put on disk comes back in the next server, and the ledger says where it is
// until then.
func TestDetachToDiskOutlivesTheServer(t *testing.T) {
	url, dir := pgtest.New(t), t.TempDir()
	open := func() *engine.Engine {
		e, err := openEngine(func(o *engine.Options) { o.DiskDir, o.DiskBytes = dir, 256<<20 })
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	e := open()
	r := openRigOn(t, url, e)
	s := r.create(strings.Repeat("func main() { fmt.Println(1) }\n", 30))
	want := r.turn(s.ID, "", 5)
	d, err := r.Detach(t.Context(), local, s.ID, DetachRequest{Tier: "disk"})
	if err != nil || d.Residency.Disk != want.To-1 {
		t.Fatalf("detach: %+v, %v", d, err)
	}
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.Close()
	e = open()
	defer e.Close()
	r = openRigOn(t, url, e)
	if got := r.get(s.ID); got.Residency != d.Residency || got.State != StateDetached {
		t.Errorf("after the restart: %+v", got)
	}
	back, err := r.Resume(t.Context(), local, s.ID)
	if err != nil || back.Restored.Disk != want.To-1 || back.Restored.Recomputed != 0 {
		t.Errorf("resume: %+v, %v", back, err)
	}
	if got := r.get(s.ID); got.Residency.Disk != 0 {
		t.Errorf("a resumed session says %+v", got.Residency)
	}
	r.Shutdown(t.Context()) // before its engine
}
