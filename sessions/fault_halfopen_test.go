package sessions

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// impatient is a manager behind a proxy whose reads wait for little.
func impatient(t *testing.T) *lossy {
	t.Helper()
	eng, err := testEngine()
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	p := pgtest.NewProxy(t, pgtest.New(t))
	return &lossy{startRig(t, Options{DatabaseURL: p.URL, Engine: eng, Template: tmpl, readMax: 300 * time.Millisecond}), p}
}

// Connections that swallow what they are given, and nobody is told: what only
// reads is answered in time, whatever the caller's patience, and afterwards
// the connections that are dead cost nobody more than a look.
func TestReadsOverHalfOpenConnections(t *testing.T) {
	l := impatient(t) // on a busy machine it may find the ledger too slow
	s := until(t, "create", func() (Session, error) {
		return l.Create(t.Context(), local, CreateRequest{Input: ptr("func main() {\n")})
	})
	turn := until(t, "turn", func() (Turn, error) {
		return l.StartTurn(t.Context(), local, s.ID, TurnRequest{MaxTokens: ptr(5), IgnoreEOS: true})
	})
	until(t, "wait", func() (Turn, error) { return l.WaitTurn(t.Context(), DefaultTenant, s.ID, turn.ID) })
	l.p.HalfOpen()
	var wg sync.WaitGroup
	for range poolConnsMax { // all places of the pool are taken by connections that never come about
		wg.Go(func() { l.Get(t.Context(), DefaultTenant, s.ID) })
	}
	for name, read := range map[string]func(ctx context.Context) error{
		"get": func(ctx context.Context) error {
			_, err := l.Get(ctx, DefaultTenant, s.ID)
			return err
		},
		"list": func(ctx context.Context) error {
			_, err := l.List(ctx, DefaultTenant, ListFilter{})
			return err
		},
		"tree": func(ctx context.Context) error {
			_, err := l.Tree(ctx, DefaultTenant, s.ID, nil)
			return err
		},
		"tokens": func(ctx context.Context) error {
			_, err := l.Tokens(ctx, DefaultTenant, s.ID, nil, nil)
			return err
		},
		"turn": func(ctx context.Context) error {
			_, err := l.Turn(ctx, DefaultTenant, s.ID, turn.ID)
			return err
		},
		"log": func(ctx context.Context) error { // one that is not in memory
			_, err := l.Log(ctx, DefaultTenant, sessionID(newID()))
			return err
		},
		"ready": l.Ready,
	} {
		wg.Go(func() {
			if err := read(t.Context()); ErrorCode(err) != CodeLedgerUnavailable {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	wg.Wait()
	l.p.Restore()
	waitFor(t, func() bool { return l.Ready(t.Context()) == nil })
	l.p.Reset() // or the pool waits at its end for the dead ones to say goodbye
	until(t, "turn", func() (Turn, error) {
		return l.StartTurn(t.Context(), local, s.ID, TurnRequest{MaxTokens: ptr(3), IgnoreEOS: true})
	})
	l.settled()
	for range poolConnsMax { // those that the reset has cost the pool
		until(t, "check", func() (any, error) { return nil, l.Check(t.Context(), DefaultTenant) })
	}
}

// A server whose lost connection keeps its lock for a while takes the lock when
// it is free: without it others take the server for dead as soon as they cannot
// connect.
func TestLockOfALostConnection(t *testing.T) {
	if *faults == 0 {
		t.Skip("waits for renewals of the lease")
	}
	url := pgtest.New(t)
	p := pgtest.NewProxy(t, url)
	l := &lossy{openRig(t, p.URL), p}
	beside := must(pgx.Connect(t.Context(), url))
	defer beside.Close(t.Context())
	locks := func() (n int) {
		err := beside.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks k JOIN pg_stat_activity a USING (pid)
			WHERE k.locktype = 'advisory' AND k.granted AND a.application_name = $1`, "rocket "+l.me.String()).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	renewed := func() { // twice: one may have been under way
		for range 2 {
			var was, now time.Time
			waitFor(t, func() bool {
				if err := beside.QueryRow(t.Context(), `SELECT lease_until FROM servers WHERE id = $1`, l.me).Scan(&now); err != nil {
					t.Fatal(err)
				}
				if was.IsZero() {
					was = now
				}
				return now.After(was)
			})
		}
	}
	p.CloseLate(true)
	p.Drop()
	renewed()          // over a new connection
	p.CloseLate(false) // the old one ends, and the lock with it
	renewed()
	if n := locks(); n != 1 {
		t.Errorf("%d connections of a living server have its lock", n)
	}
	until(t, "check", func() (any, error) { return nil, l.Check(t.Context(), DefaultTenant) })
}

// A turn whose commits are swallowed stands still when it is time, not when
// the first of them is given up, and comes to its end when the ledger is back.
func TestTurnsOverHalfOpenConnections(t *testing.T) {
	if *faults == 0 {
		t.Skip("waits until a commit is given up")
	}
	l := newLossy(t)
	s := l.create("func main() {\n")
	want := l.turn(l.fork(s.ID, ForkRequest{}).Sessions[0].ID, "", 800)
	l.writer.holdAfter = 50 * time.Millisecond
	turn := l.start(s.ID, TurnRequest{MaxTokens: ptr(800), IgnoreEOS: true})
	log, err := l.Log(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := log.Wait(t.Context(), turnStart+5); err != nil || !ok {
		t.Fatal(err)
	}
	l.p.HalfOpen()
	waitFor(t, func() bool { // two looks at a quarter of a second with nothing between them
		before := l.eng.Stats().Steps
		time.Sleep(250 * time.Millisecond)
		return l.eng.Stats().Steps == before
	})
	if n := l.Stats().TokensPending; n >= 700 {
		t.Errorf("it stood still only behind %d tokens", n)
	}
	if l.writer.downSince.Load() != 0 {
		t.Error("it stood still only when a commit was given up")
	}
	if err := l.Ready(t.Context()); ErrorCode(err) != CodeLedgerUnavailable {
		t.Errorf("ready: %v", err)
	}
	l.p.Restore()
	l.p.Reset() // the dead connections are found out
	got := until(t, "wait", func() (Turn, error) { return l.WaitTurn(t.Context(), DefaultTenant, s.ID, turn.ID) })
	if diff := cmp.Diff(want.Tokens, got.Tokens); diff != "" || got.State != TurnCompleted {
		t.Errorf("turn %s, tokens:\n%s", got.State, diff)
	}
}
