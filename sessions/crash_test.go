package sessions

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"rocket/engine/chat"
	"rocket/internal/localpg"
	"rocket/migrations"
)

// crashEnv holds the database's URL in the process that is to be killed.
const crashEnv = "ROCKET_TEST_CRASH_SERVER"

// crashRest is how many tokens the session of a killed server gets afterwards.
const crashRest = 200

// crashServer runs a turn until it is killed, and a session with a queued one
// behind it. It prints what it has.
func crashServer() {
	ctx := context.Background()
	fatal := func(err error) {
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
	}
	eng, err := openEngine()
	fatal(err)
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	fatal(err)
	m, err := Open(ctx, Options{DatabaseURL: os.Getenv(crashEnv), Engine: eng, Template: tmpl, DeltaInterval: 1})
	fatal(err)
	s, err := m.Create(ctx, local, CreateRequest{Input: ptr("func main() {\n")})
	fatal(err)
	idle, err := m.Create(ctx, local, CreateRequest{Input: ptr("package b\n")})
	fatal(err)
	t, err := m.StartTurn(ctx, local, s.ID, TurnRequest{MaxTokens: ptr(1 << 20), IgnoreEOS: true, Temperature: ptr(0.9), Seed: ptr(int64(42))})
	fatal(err)
	l, err := m.Log(ctx, DefaultTenant, s.ID)
	fatal(err)
	fmt.Println("started", s.ID, t.ID, idle.ID)
	for next := int64(1); ; {
		_, err := l.Wait(ctx, next)
		fatal(err)
		events, err := l.Read(ctx, next, ReadMax)
		fatal(err)
		next += int64(len(events))
		for _, e := range events {
			text, err := json.Marshal(e)
			fatal(err)
			fmt.Println("event", string(text))
		}
		now, err := m.Get(ctx, DefaultTenant, s.ID)
		fatal(err)
		fmt.Println("committed", now.Length-s.Length)
	}
}

// The whole promise, with durability on: a server killed with -9 in mid-turn
// loses no committed token, says that the turn was interrupted, and the same
// seed goes on to the tokens of an undisturbed run.
func TestKillInMidTurn(t *testing.T) {
	pg := durableCluster(t)
	session, turn, idle, seen := killInMidTurn(t, pg.URL())

	r := openRig(t, pg.URL())
	got := r.get(session)
	if got.State != StateIdle || got.Epoch != 2 {
		t.Errorf("after the crash: %+v", got)
	}
	cut := r.wait(session, turn)
	if cut.State != TurnInterrupted || *cut.FinishReason != FinishInterrupted || cut.To != got.Length || cut.EndedAt == nil {
		t.Errorf("turn after the crash: %+v", cut)
	}
	if len(cut.Tokens) == 0 {
		t.Error("no tokens were committed")
	}
	checkCrashLog(t, r, session, got, seen)
	if other := r.get(idle); other.State != StateIdle || other.Epoch != 2 {
		t.Errorf("idle session after the crash: %+v", other)
	}

	end := r.wait(session, r.start(session, TurnRequest{MaxTokens: ptr(crashRest), IgnoreEOS: true, Temperature: ptr(0.9), Seed: &cut.Seed}).ID)
	ref := r.create("func main() {\n")
	want := r.wait(ref.ID, r.start(ref.ID, TurnRequest{MaxTokens: ptr(len(cut.Tokens) + crashRest), IgnoreEOS: true, Temperature: ptr(0.9), Seed: ptr(int64(42))}).ID)
	if diff := cmp.Diff(want.Tokens, append(cut.Tokens, end.Tokens...)); diff != "" {
		t.Errorf("tokens differ from those of an undisturbed run:\n%s", diff)
	}
	if e := r.ledgerEvents(session); e[len(e)-1].Epoch != 2 {
		t.Errorf("last event %+v", e[len(e)-1])
	}
}

// durableCluster is a ledger with durability on, as a server has it.
func durableCluster(t testing.TB) *localpg.Cluster {
	t.Helper()
	return durableClusterWith(t, nil)
}

func durableClusterWith(t testing.TB, settings map[string]string) *localpg.Cluster {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "rocket-crash-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	pg, err := localpg.Start(t.Context(), localpg.Options{Dir: dir, DieWithParent: true, Settings: settings})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pg.Stop(context.Background()) })
	if err := migrations.Up(t.Context(), pg.URL()); err != nil {
		t.Fatal(err)
	}
	return pg
}

// A ledger that crashes under a running server: it is started again, and the
// turn goes on to what it would have come to.
func TestPostgresKilledInMidTurn(t *testing.T) {
	pg := durableCluster(t)
	r := openRig(t, pg.URL())
	s := r.create("func main() {\n")
	undisturbed := r.fork(s.ID, ForkRequest{}).Sessions[0].ID
	turn := r.start(s.ID, endless)
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), turnStart+20); !ok || err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pg.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "ready", func() (any, error) { return nil, r.Ready(t.Context()) })
	r.pool.Reset() // connections that were lost while nobody used them
	until(t, "cancel", func() (Turn, error) { return r.Cancel(t.Context(), local, s.ID) })
	got := r.wait(s.ID, turn.ID)
	want := r.turn(undisturbed, "", len(got.Tokens))
	if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" || got.State != TurnCancelled {
		t.Errorf("turn %s with other tokens:\n%s", got.State, diff)
	}
	if got := r.turn(s.ID, "", 3); got.State != TurnCompleted {
		t.Errorf("turn after it: %+v", got)
	}
}

// checkCrashLog compares the log with what the killed server's reader saw: up
// to last_seq every reader sees the same, later ones of the old epoch are void.
func checkCrashLog(t *testing.T, r *rig, session string, got Session, seen []Event) {
	t.Helper()
	log, err := r.Log(t.Context(), DefaultTenant, session)
	if err != nil {
		t.Fatal(err)
	}
	last := seen[len(seen)-1]
	start, err := log.Start(t.Context(), last.Seq+1, last.Epoch)
	if err != nil {
		t.Fatal(err)
	}
	// the reader may have been behind what was committed: then it first gets the rest of the old epoch
	if start > got.LastSeq {
		t.Fatalf("stream starts at %d of %d", start, got.LastSeq)
	}
	end := r.events(session, got.LastSeq, got.LastSeq)[0]
	if end.Type != EventTurnInterrupted || end.Epoch != 2 || end.LastSeq == nil || *end.LastSeq != got.LastSeq-1 {
		t.Errorf("the new epoch begins with %+v", end)
	}
	if epoch2, _ := log.Start(t.Context(), got.LastSeq+100, 1); epoch2 != got.LastSeq {
		t.Errorf("a reader of epoch 1 starts at %d, want %d", epoch2, got.LastSeq)
	}
	if same, _ := log.Start(t.Context(), got.LastSeq+100, 2); same != got.LastSeq+100 {
		t.Errorf("a reader of epoch 2 starts at %d", same)
	}
	kept := r.events(session, 1, *end.LastSeq)
	n := min(len(kept), len(seen))
	if diff := cmp.Diff(seen[:n], kept[:n], cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("committed events differ from what was seen live:\n%s", diff)
	}
}

// killInMidTurn starts a server process and kills it once its reader has seen
// fifty events and the ledger has some tokens.
func killInMidTurn(t *testing.T, url string) (session, turn, idle string, seen []Event) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashEnv+"="+url)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	committed := 0
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		kind, rest, _ := strings.Cut(lines.Text(), " ")
		switch kind {
		case "error":
			t.Error(rest)
		case "started":
			fmt.Sscan(rest, &session, &turn, &idle)
		case "event":
			var e Event
			if err := json.Unmarshal([]byte(rest), &e); err != nil {
				t.Error(err)
			}
			seen = append(seen, e)
		case "committed":
			fmt.Sscan(rest, &committed)
		}
		if len(seen) >= 50 && committed > 0 {
			cmd.Process.Kill()
		}
	}
	if err := cmd.Wait(); err == nil || session == "" || len(seen) < 50 {
		t.Fatalf("the server ended by itself: %v, session %q, %d events", err, session, len(seen))
	}
	return session, turn, idle, seen
}
