package sessions

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"rocket/engine"
	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// openAt is a server with an address of its own on a shared ledger.
func openAt(t *testing.T, url, address string, eng *engine.Engine) *rig {
	t.Helper()
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	return startRig(t, Options{DatabaseURL: url, Engine: eng, Template: tmpl, Address: address, Home: "home of " + address})
}

// twoServers share a ledger and, to save memory, an engine: they do not know of each other's timelines.
func twoServers(t *testing.T) (a, b *rig) {
	t.Helper()
	eng, err := testEngine()
	if err != nil {
		t.Fatal(err)
	}
	url := pgtest.New(t)
	return openAt(t, url, "http://127.0.0.1:1001", eng), openAt(t, url, "http://127.0.0.1:1002", eng)
}

func (r *rig) place(id string) Place {
	r.t.Helper()
	p, err := r.Place(r.t.Context(), DefaultTenant, id)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// cutLease does to a server what a death does, as far as the others can see: its lock is free, and with lapsed its
// lease has run out.
func (r *rig) cutLease(lapsed bool) {
	r.t.Helper()
	if lapsed {
		r.exec("UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1", r.me)
		return
	}
	const locks = `FROM pg_locks l, (SELECT hashtextextended($1, 0) AS h) k WHERE l.locktype = 'advisory' AND (l.classid::bigint << 32 | l.objid::bigint) = k.h`
	waitFor(r.t, func() bool {
		r.exec(`SELECT pg_terminate_backend(l.pid) `+locks, r.me.String()) // again: it may have taken its lock anew
		return r.count(`SELECT count(*) `+locks, r.me.String()) == 0
	})
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.pool.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

func TestPlace(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	if p := a.place(s.ID); !p.Here() {
		t.Errorf("the owner says %+v", p)
	}
	p := b.place(s.ID)
	if p.Address != "http://127.0.0.1:1001" || p.Server != a.me.String() || p.Alive.Err() != nil {
		t.Errorf("another server says %+v", p)
	}
	for _, id := range []string{"ses_x", "", sessionID(newID())} {
		if p := b.place(id); !p.Here() {
			t.Errorf("unknown session %q: %+v", id, p)
		}
	}
	_, err := b.StartTurn(t.Context(), local, s.ID, TurnRequest{})
	wantCode(t, err, CodeOverloaded, "")
	if _, err := a.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	if p := b.place(s.ID); !p.Here() {
		t.Errorf("a released session: %+v", p)
	}
	b.turn(s.ID, "", 3)
	if p := a.place(s.ID); p.Server != b.me.String() {
		t.Errorf("its new owner is %+v", p)
	}
	a.turn(a.fork(a.create("x").ID, ForkRequest{}).Sessions[0].ID, "", 2) // a goes on with others
}

// A server whose process is gone is taken over at once, one that lives keeps its sessions, whatever somebody says.
func TestUnreachable(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	p := b.place(s.ID)
	if taken, err := b.Unreachable(t.Context(), p.Server); taken || err != nil {
		t.Fatalf("a living server was taken over: %v, %v", taken, err)
	}
	turn := a.start(s.ID, endless)
	l, _ := a.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), turnStart+3); !ok || err != nil {
		t.Fatal(err)
	}
	watch := b.Watch(DefaultTenant, WatchOptions{Turns: true})
	waitFor(t, func() bool {
		a.cutLease(false) // it takes its lock again when it renews its lease
		taken, err := b.Unreachable(t.Context(), p.Server)
		if err != nil {
			t.Fatal(err)
		}
		return taken
	})
	if events, _, err := watch.Next(t.Context()); err != nil || len(events) != 1 || events[0].Type != EventTurnInterrupted {
		t.Errorf("watchers see %+v, %v", events, err)
	}
	got := b.wait(s.ID, turn.ID)
	if got.State != TurnInterrupted {
		t.Errorf("turn of the gone server: %+v", got)
	}
	if end := b.turn(s.ID, "", 5); end.From != got.To {
		t.Errorf("goes on at %d, want %d", end.From, got.To)
	}
	// the reader at the old server is sent away, and the old server finds out by itself
	_, err := l.Wait(t.Context(), 1<<40)
	wantCode(t, err, CodeMoved, "")
	waitFor(t, func() bool { return a.Stats().TurnsOpen == 0 })
	if p := a.place(s.ID); p.Server != b.me.String() {
		t.Errorf("the old server places it at %+v", p)
	}
	waitFor(t, func() bool { // it is a server again
		_, err := a.Create(t.Context(), local, CreateRequest{})
		return err == nil
	})
}

// Calls for a session of a server whose lease has run out take it over and go on.
func TestPlaceTakesOverTheLapsed(t *testing.T) {
	a, b := twoServers(t)
	s, other := a.create("package a\n"), a.create("package b\n")
	alive := b.place(s.ID).Alive
	waitFor(t, func() bool {
		a.cutLease(true) // it may be renewed before b looks
		return b.place(s.ID).Here()
	})
	b.turn(s.ID, "", 3)
	if got := b.get(other.ID); got.Epoch != 2 {
		t.Errorf("the other session of the dead server: %+v", got)
	}
	b.mustTakeStock()
	if alive.Err() == nil {
		t.Error("the dead server counts as alive")
	}
}

func (r *rig) mustTakeStock() {
	r.t.Helper()
	if err := r.takeStock(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// A server that starts with the home of another one, at another address, takes its sessions as soon as its lock is free,
// and not before.
func TestHomeIsOneProcess(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	look := func(home string) (doubtful bool) {
		t.Helper()
		a.exec("UPDATE servers SET home = $2 WHERE id = $1", a.me, home)
		doubtful, err := b.lookAround(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return doubtful
	}
	if !look(b.opts.Home) || b.get(s.ID).Epoch != 1 {
		t.Error("a server that lives was taken over for its home")
	}
	a.cutLease(false)
	if look(a.opts.Home) || look("") || b.get(s.ID).Epoch != 1 {
		t.Error("a server with a home of its own was taken over")
	}
	waitFor(t, func() bool { // it may have its lock again
		a.cutLease(false)
		look(b.opts.Home)
		return b.get(s.ID).Epoch == 2
	})
}

// After an outage of the ledger everybody's lease has run out: nobody is taken for dead before they could renew it.
func TestNoTakeoverRightAfterAnOutage(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	b.reg.recovered.Store(new(time.Now()))
	a.cutLease(true)
	b.mustTakeStock()
	if got := b.get(s.ID); got.Epoch != 1 {
		t.Errorf("taken over in the grace time: %+v", got)
	}
}

// A reader of a session that nobody has learns when another server takes it.
func TestReaderHearsOfNewOwner(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	if _, err := a.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	l, err := b.Log(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	last := b.get(s.ID).LastSeq
	end := make(chan error)
	go func() {
		next := last + 1
		_, err := l.Wait(t.Context(), next)
		for err == nil { // what the new owner had committed by then
			var events []Event
			if events, err = l.Read(t.Context(), next, 0); err == nil {
				next += int64(len(events))
				_, err = l.Wait(t.Context(), next)
			}
		}
		end <- err
	}()
	waitFor(t, func() bool { return b.Stats().Readers == 1 })
	turn := a.turn(s.ID, "", 3)
	wantCode(t, <-end, CodeMoved, "")
	// what is committed can be read anywhere
	events, err := l.Read(t.Context(), last+1, 0)
	if err != nil || len(events) == 0 || events[len(events)-1].Type != EventTurnCompleted {
		t.Errorf("events %+v, %v", events, err)
	}
	if got := b.wait(s.ID, turn.ID); got.State != TurnCompleted {
		t.Errorf("turn %+v", got)
	}
}

// A reader of a session that nobody has learns when another server prunes it.
func TestReaderHearsOfAPrune(t *testing.T) {
	a, b := twoServers(t)
	top := a.create("package a\n")
	s := a.fork(top.ID, ForkRequest{}).Sessions[0]
	must(a.Release(t.Context(), local, s.ID, ReleaseRequest{}))
	l := must(b.Log(t.Context(), DefaultTenant, s.ID))
	there := make(chan bool)
	go func() {
		ok, err := l.Wait(t.Context(), 1<<40)
		there <- ok || err != nil
	}()
	waitFor(t, func() bool { return b.Stats().Readers == 1 })
	if err := a.Prune(t.Context(), local, top.ID); err != nil {
		t.Fatal(err)
	}
	if <-there {
		t.Error("it does not learn that the session is gone")
	}
}

// Two servers want a session that nobody has: one gets it, the other says so.
func TestOneOfTwoTakesASession(t *testing.T) {
	a, b := twoServers(t)
	for range 5 {
		s := a.create("package a\n")
		if _, err := a.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		var errs [2]error
		for i, r := range []*rig{a, b} {
			wg.Go(func() {
				_, errs[i] = r.Patch(context.Background(), local, s.ID, PatchRequest{Title: ptr(r.opts.Address)})
			})
		}
		wg.Wait()
		won := 0
		for i, r := range []*rig{a, b} {
			if errs[i] == nil {
				won++
				continue
			}
			wantCode(t, errs[i], CodeOverloaded, "")
			if p := r.place(s.ID); p.Here() {
				t.Errorf("the one that lost places it here")
			}
		}
		if won != 1 {
			t.Errorf("%d servers took the session: %v", won, errs)
		}
	}
}

func TestReleaseAndPruneAcrossServers(t *testing.T) {
	a, b := twoServers(t)
	top := a.create("package a\n")
	kids := a.fork(top.ID, ForkRequest{N: ptr(3)}).Sessions
	turn := a.start(kids[2].ID, endless)
	_, err := a.Release(t.Context(), local, kids[2].ID, ReleaseRequest{})
	wantCode(t, err, CodeTurnInProgress, "")
	if got, err := a.Release(t.Context(), local, top.ID, ReleaseRequest{}); err != nil || got.Released != 1 {
		t.Fatalf("released %+v, %v", got, err)
	}
	b.turn(top.ID, "", 3)
	err = b.Prune(t.Context(), local, top.ID)
	wantCode(t, err, CodeOverloaded, "")
	if !errors.Is(err, ErrForeign) {
		t.Errorf("%v does not say that another server has it", err)
	}
	owners, err := b.SubtreeOwners(t.Context(), DefaultTenant, top.ID)
	if err != nil || len(owners) != 3 || owners[0].Server != a.me.String() || owners[0].Session == "" {
		t.Fatalf("owners %+v, %v", owners, err)
	}
	got, err := a.Release(t.Context(), local, top.ID, ReleaseRequest{Subtree: true, Cancel: true})
	if err != nil || got.Released != 3 {
		t.Fatalf("released %+v, %v", got, err)
	}
	if got := b.wait(kids[2].ID, turn.ID); got.State != TurnCancelled {
		t.Errorf("turn %+v", got)
	}
	if err := b.Prune(t.Context(), local, top.ID); err != nil {
		t.Fatal(err)
	}
	_, err = a.Get(t.Context(), DefaultTenant, kids[0].ID)
	wantCode(t, err, CodeNotFound, "")
}

// A session of another model, or of another numeric class, is kept, and not mistaken for one of this server's.
func TestSessionsOfAnotherModel(t *testing.T) {
	r := newRig(t)
	for _, test := range []struct {
		set      string
		readable bool
	}{{"parity_class = 'f32'", true}, {"model_digest = 'x'", true}, {"tokenizer_digest = 'x'", false}} {
		s := r.create("package a\n")
		turn := r.turn(s.ID, "", 2)
		if _, err := r.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
			t.Fatal(err)
		}
		r.exec("UPDATE sessions SET " + test.set + ", rev = rev + 1")
		_, err := r.StartTurn(t.Context(), local, s.ID, TurnRequest{})
		wantCode(t, err, CodeModelMismatch, "")
		_, err = r.Fork(t.Context(), local, s.ID, ForkRequest{})
		wantCode(t, err, CodeModelMismatch, "")
		_, err = r.Resume(t.Context(), local, s.ID)
		wantCode(t, err, CodeModelMismatch, "")
		_, tokens := r.Tokens(t.Context(), DefaultTenant, s.ID, nil, nil)
		_, one := r.Turn(t.Context(), DefaultTenant, s.ID, turn.ID)
		_, list := r.Turns(t.Context(), DefaultTenant, s.ID, TurnFilter{})
		_, log := r.Log(t.Context(), DefaultTenant, s.ID)
		for what, err := range map[string]error{"tokens": tokens, "turn": one, "turns": list, "log": log} {
			if test.readable && err != nil || !test.readable && ErrorCode(err) != CodeModelMismatch {
				t.Errorf("%s: %s: %v", test.set, what, err)
			}
		}
		if _, err := r.Patch(t.Context(), local, s.ID, PatchRequest{Title: ptr("kept")}); err != nil {
			t.Error(err)
		}
		if err := r.Delete(t.Context(), local, s.ID); err != nil {
			t.Error(err)
		}
	}
}

// A server that stood still past its lease does not answer from what it remembers.
func TestWakingServerLooks(t *testing.T) {
	a, b := twoServers(t)
	s := a.create("package a\n")
	a.start(s.ID, endless)
	l, _ := a.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), turnStart+1); !ok || err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		a.cutLease(true) // it may be renewed before b looks
		b.mustTakeStock()
		return b.get(s.ID).Epoch == 2
	})
	_, err := a.StartTurn(t.Context(), local, s.ID, TurnRequest{})
	if c := ErrorCode(err); c != CodeTurnInProgress && c != CodeOverloaded { // overloaded: the turn has met the ledger already
		t.Errorf("before it knows that it stood still: %v", err)
	}
	long := time.Now().Add(-2 * leaseTime)
	a.reg.renewed.Store(&long)
	_, err = a.StartTurn(t.Context(), local, s.ID, TurnRequest{})
	if c := ErrorCode(err); c != CodeOverloaded && err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if p := b.place(s.ID); !p.Here() && p.Server != a.me.String() {
		t.Errorf("placed at %+v", p)
	}
}
