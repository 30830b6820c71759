package sessions

import (
	"testing"

	"rocket/internal/localpg/pgtest"
)

// A release that is repeated with its key, wherever it comes to, has no other
// effect: not on the server either that has the session by then.
func TestReleaseRepeated(t *testing.T) {
	a, b := twoServers(t)
	for name, c := range map[string]struct{ mine bool }{"what it had": {true}, "nobody's": {false}} {
		s := a.create("package a\n")
		if !c.mine {
			must(a.Release(t.Context(), local, s.ID, ReleaseRequest{}))
		}
		call := Call{Tenant: DefaultTenant, IdempotencyKey: "k", Route: "release " + s.ID, BodyHash: []byte{1}}
		first := must(a.Release(t.Context(), call, s.ID, ReleaseRequest{Cancel: true}))
		if first.Released == 1 != c.mine {
			t.Errorf("%s: released %+v", name, first)
		}
		turn := b.start(s.ID, endless)
		for _, r := range []*rig{a, b} {
			if again, err := r.Release(t.Context(), call, s.ID, ReleaseRequest{Cancel: true}); err != nil || again != first {
				t.Errorf("%s: repeated: %+v, %v", name, again, err)
			}
			other := call
			other.BodyHash = []byte{2}
			_, err := r.Release(t.Context(), other, s.ID, ReleaseRequest{})
			wantCode(t, err, CodeIdempotencyMismatch, "Idempotency-Key")
		}
		if got := b.get(s.ID); got.State != StateRunning {
			t.Errorf("%s: the turn of the next server: %+v", name, got)
		}
		if got := must(b.Cancel(t.Context(), local, s.ID)); got.ID != turn.ID || got.State != TurnCancelled {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A subtree is released as a whole or not at all, and a check changes nothing.
func TestReleaseAllOrNothing(t *testing.T) {
	r := newRig(t)
	top := r.create("package a\n")
	kids := r.fork(top.ID, ForkRequest{N: ptr(3)}).Sessions
	r.start(kids[1].ID, endless)
	owned := func() int { return r.count("SELECT count(*) FROM sessions WHERE owner_server IS NOT NULL") }
	_, err := r.Release(t.Context(), local, top.ID, ReleaseRequest{Subtree: true, Check: true})
	wantCode(t, err, CodeTurnInProgress, "")
	_, err = r.Release(t.Context(), local, top.ID, ReleaseRequest{Subtree: true})
	wantCode(t, err, CodeTurnInProgress, "")
	got, err := r.Release(t.Context(), local, top.ID, ReleaseRequest{Subtree: true, Cancel: true, Check: true})
	if err != nil || got.Released != 4 || owned() != 4 || r.get(kids[1].ID).State != StateRunning {
		t.Errorf("check: %+v, %v; %d are owned", got, err, owned())
	}
	got, err = r.Release(t.Context(), local, top.ID, ReleaseRequest{Subtree: true, Cancel: true})
	if err != nil || got.Released != 4 || owned() != 0 {
		t.Errorf("%+v, %v; %d are owned", got, err, owned())
	}
	if n := r.Stats().SessionsLive; n != 0 {
		t.Errorf("%d are in memory", n)
	}
}

// A release whose commit had no answer leaves nobody waiting at a server that
// takes the session for its own: its readers hear of the next one that has it.
func TestReaderOfAReleaseSettledLater(t *testing.T) {
	url := pgtest.New(t)
	p := pgtest.NewProxy(t, url)
	l, b := &lossy{openAt(t, p.URL, "http://127.0.0.1:1001", must(testEngine())), p}, openAt(t, url, "http://127.0.0.1:1002", must(testEngine()))
	s := l.create("package a\n")
	seqs := l.Stats().Engine.Seqs
	log := must(l.Log(t.Context(), DefaultTenant, s.ID))
	end := make(chan error)
	go func() {
		next := l.get(s.ID).LastSeq + 1
		for {
			if _, err := log.Wait(t.Context(), next); err != nil {
				end <- err
				return
			}
			events, err := log.Read(t.Context(), next, 0)
			if err != nil {
				end <- err
				return
			}
			next += int64(len(events))
		}
	}()
	waitFor(t, func() bool { return l.Stats().Readers == 1 })
	call := Call{Tenant: DefaultTenant, IdempotencyKey: "the release"}
	l.lateCommit(t, 2, call.IdempotencyKey, func() error {
		_, err := l.Release(t.Context(), call, s.ID, ReleaseRequest{})
		return err
	})()
	waitFor(t, func() bool { return l.Stats().Engine.Seqs < seqs })
	b.turn(s.ID, "", 3)
	wantCode(t, <-end, CodeMoved, "")
	if got := l.place(s.ID); got.Server != b.me.String() {
		t.Errorf("placed at %+v", got)
	}
	if got, err := l.Release(t.Context(), call, s.ID, ReleaseRequest{}); err != nil || got.Released != 1 {
		t.Errorf("repeated: %+v, %v", got, err)
	}
}
