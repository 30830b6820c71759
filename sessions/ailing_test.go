package sessions

import (
	"testing"
	"time"

	"rocket/internal/localpg/pgtest"
)

// A turn in the ledger that cannot be read, started or ended keeps neither
// others from being started and ended, nor a server from starting. It is not
// tried over and over.
func TestBadTurnsDoNotHoldUpAStart(t *testing.T) {
	url, began := pgtest.New(t), time.Now()
	r, _ := loggedRig(t, url, "http://127.0.0.1:1001")
	turns := map[string]string{}
	add := func(state TurnState, request, prompt string) (session string) { // a turn that waits, or runs, at no server
		s := r.create("package a\n")
		if _, err := r.Release(t.Context(), local, s.ID, ReleaseRequest{}); err != nil {
			t.Fatal(err)
		}
		id, turn := must(parseSession(s.ID)), newID()
		r.exec(`INSERT INTO turns (tenant_id, id, session_id, state, request, seed, prompt, tok_from, prompt_to, tok_to, created_at, started_at)
			VALUES ($1, $2, $3, $4, $5, 0, $6, $7, $7 + cardinality($6::int[]), $7, now(), CASE WHEN $4 = 'running' THEN now() END)`,
			DefaultTenant, turn, id, state, request, prompt, s.Length)
		r.exec(`UPDATE sessions SET state = 'running', turn_count = 1, rev = rev + 1 WHERE id = $1`, id)
		turns[s.ID] = turnID(turn)
		return s.ID
	}
	const fine = `{"max_tokens": 3, "temperature": 0, "top_p": 1, "top_k": 0, "seed": 0, "ignore_eos": true}`
	bad := map[string]string{
		"unread":    add(TurnQueued, fine, `{NULL}`),
		"unstarted": add(TurnQueued, `{"stop": 5}`, `{}`),
		"unended":   add(TurnRunning, `{"stop": 5}`, `{}`),
	}
	waits, runs := add(TurnQueued, fine, `{}`), add(TurnRunning, fine, `{}`)

	next, lines := loggedRig(t, url, "http://127.0.0.1:1002")
	if got := next.wait(waits, turns[waits]); got.State != TurnCompleted || len(got.Tokens) != 3 {
		t.Errorf("a queued turn beside bad ones: %+v", got)
	}
	if got := next.wait(runs, turns[runs]); got.State != TurnInterrupted {
		t.Errorf("an orphan beside bad ones: %+v", got)
	}
	for range 3 {
		next.mustTakeStock()
	}
	for name, id := range bad {
		if n := lines.count("level=ERROR", id); n < 1 || n > 1+int(time.Since(began)/retryFirst) {
			t.Errorf("%s: the log names it %d times", name, n)
		}
		if got := next.get(id); got.State != StateRunning {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A session that cannot be closed when its time is up keeps no other from it.
func TestBadSessionDoesNotHoldUpExpiry(t *testing.T) {
	r := newRig(t)
	f := badSessions["event"]
	ill, well := r.create("package a\n").ID, r.create("package b\n").ID
	r.exec(f.spoil, must(parseSession(ill)))
	for _, id := range []string{ill, well} {
		if _, err := r.Release(t.Context(), local, id, ReleaseRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	r.exec(`UPDATE sessions SET ttl_seconds = 1, expires_at = now() - interval '1 second'`)
	waitFor(t, func() bool { return r.get(well).State == StateClosed && len(r.resting()) == 1 })
	if err := r.closeExpired(t.Context()); err != nil {
		t.Errorf("the one that rests: %v", err)
	}
	r.exec(f.repair, must(parseSession(ill)))
	r.ailing.done(liveKey{DefaultTenant, must(parseSession(ill))})
	waitFor(t, func() bool { return r.get(ill).State == StateClosed })
}
