package sessions

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// logLines collects what a manager logs.
type logLines struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logLines) count(parts ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
next:
	for line := range strings.Lines(l.buf.String()) {
		for _, part := range parts {
			if !strings.Contains(line, part) {
				continue next
			}
		}
		n++
	}
	return n
}

// loggedRig is a server whose log the test reads.
func loggedRig(t *testing.T, url, address string) (*rig, *logLines) {
	t.Helper()
	eng, err := testEngine()
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	lines := &logLines{}
	return startRig(t, Options{DatabaseURL: url, Engine: eng, Template: tmpl, Address: address, Home: "home of " + address,
		Log: slog.New(slog.NewTextHandler(lines, nil)), lockWait: 50 * time.Millisecond}), lines
}

// deadServer is a row of a server whose lease has run out.
func (r *rig) deadServer() uuid.UUID {
	r.t.Helper()
	id := newID()
	r.exec(`INSERT INTO servers (id, lease_until, address) VALUES ($1, now() + interval '1 hour', 'http://127.0.0.1:1')`, id)
	return id
}

// giveTo makes a session that r has made another server's, and with running its last turn one that runs there.
func (r *rig) giveTo(server uuid.UUID, session string, running bool) {
	r.t.Helper()
	if _, err := r.Release(r.t.Context(), local, session, ReleaseRequest{}); err != nil {
		r.t.Fatal(err)
	}
	id := must(parseSession(session))
	if running {
		r.exec(`UPDATE turns SET state = 'running', ended_at = NULL, finish_reason = NULL, tok_to = prompt_to WHERE session_id = $1`, id)
	}
	r.exec(`UPDATE sessions SET owner_server = $2, rev = rev + 1, state = CASE WHEN $3 THEN 'running' ELSE state END WHERE id = $1`, id, server, running)
}

// badSessions are faults of a session, each with what makes it well again.
var badSessions = map[string]struct{ spoil, repair string }{
	"epoch":   {`UPDATE sessions SET epoch = 9007199254740991 WHERE id = $1`, `UPDATE sessions SET epoch = 1 WHERE id = $1`},
	"seq":     {`UPDATE sessions SET last_seq = 9223372036854775806 WHERE id = $1`, `UPDATE sessions SET last_seq = (SELECT max(seq) FROM events WHERE session_id = $1) WHERE id = $1`},
	"request": {`UPDATE turns SET request = '{"stop": 5}' WHERE session_id = $1`, `UPDATE turns SET request = '{}' WHERE session_id = $1`},
	"tokens": {`UPDATE token_runs SET ids[2] = NULL WHERE session_id = $1 AND cardinality(cuts) > 0`,
		`UPDATE token_runs SET ids[2] = 7 WHERE session_id = $1 AND cardinality(cuts) > 0`},
	"event": {`INSERT INTO events (tenant_id, session_id, seq, epoch, type, time) SELECT tenant_id, id, last_seq + 1, 1, 'odd', now() FROM sessions WHERE id = $1`,
		`DELETE FROM events WHERE session_id = $1 AND type = 'odd'`},
	"constraint": {`UPDATE sessions SET title = 'odd' WHERE id = $1`, `UPDATE sessions SET title = 'even' WHERE id = $1`},
}

// What is wrong with one session, whatever it is, keeps neither the others nor
// other dead servers' from being taken over, nor a server from starting. Calls
// on it are refused clearly; it is tried again ever more seldom, and taken once
// it can be.
func TestBadSessionsDoNotHoldUpATakeover(t *testing.T) {
	url, ctx := pgtest.New(t), t.Context()
	r, lines := loggedRig(t, url, "http://127.0.0.1:1001")
	dead, other := r.deadServer(), r.deadServer()
	var good []string
	bad := map[string]string{}
	session := func(server uuid.UUID, running bool) string {
		s := r.create("package a\n")
		r.turn(s.ID, "", 4)
		r.giveTo(server, s.ID, running)
		return s.ID
	}
	for name, f := range badSessions {
		good = append(good, session(dead, len(good)%2 == 0))
		bad[name] = session(dead, name != "epoch")
		r.exec(f.spoil, must(parseSession(bad[name])))
	}
	good = append(good, session(dead, true), session(other, true))
	bad["locked"] = session(dead, false)
	r.exec(`ALTER TABLE sessions ADD CONSTRAINT odd CHECK (title <> 'odd') NOT VALID`)
	unlock := holdRow(t, url, bad["locked"])

	began := time.Now()
	r.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = ANY($1)`, []uuid.UUID{dead, other})
	r.mustTakeStock()
	for _, id := range good {
		if got := r.get(id); got.Epoch != 2 || got.State != StateIdle {
			t.Errorf("beside bad ones: %+v", got)
		}
		r.turn(id, "", 2)
	}
	refused := func(by *rig, lines *logLines) {
		t.Helper()
		for name, id := range bad {
			if _, err := by.Place(ctx, DefaultTenant, id); ErrorCode(err) != CodeQuarantined {
				t.Errorf("%s: %v", name, err)
			}
			if n := lines.count("level=ERROR", id, "taken over"); n < 1 || n > 1+int(time.Since(began)/retryFirst) {
				t.Errorf("%s: the log names %s %d times", name, id, n)
			}
			if n := r.count(`SELECT count(*) FROM sessions WHERE id = $1 AND owner_server = $2`, must(parseSession(id)), dead); n != 1 {
				t.Errorf("%s: it is not its server's any more", name)
			}
		}
		if err := by.Ready(ctx); err != nil {
			t.Error(err)
		}
	}
	refused(r, lines)
	r.mustTakeStock()
	refused(r, lines) // and not tried again already
	next, lines := loggedRig(t, url, "http://127.0.0.1:1002")
	refused(next, lines)
	if list := must(r.Servers(ctx)); len(list) != 3 || list[1].id != dead || !list[1].remnant || list[1].Alive {
		t.Errorf("servers %+v", list)
	}

	unlock()
	for name, f := range badSessions {
		r.exec(`ALTER TABLE sessions DROP CONSTRAINT IF EXISTS odd`)
		r.exec(f.repair, must(parseSession(bad[name])))
	}
	r.remnants.done(dead) // the keeper would come back by itself
	for _, id := range bad {
		r.untaken.done(liveKey{DefaultTenant, must(parseSession(id))})
	}
	r.mustTakeStock()
	if n := r.count(`SELECT count(*) FROM servers WHERE id = $1`, dead); n != 0 {
		t.Error("the dead server is still there")
	}
	for name, id := range bad {
		if got := r.get(id); got.Epoch != 2 || got.State != StateIdle {
			t.Errorf("%s, after it was repaired: %+v", name, got)
		}
		r.turn(id, "", 2)
	}
}

// A takeover whose commit had no answer is told of like another.
func TestTakeoverSettledLater(t *testing.T) {
	l := newLossy(t)
	s := l.create("package a\n")
	l.turn(s.ID, "", 4)
	dead := l.deadServer()
	l.giveTo(dead, s.ID, true)
	w := l.Watch(DefaultTenant, WatchOptions{Turns: true})
	l.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1`, dead)
	hit, pass := l.p.Hold(1, "commit")
	defer pass()
	_, err := l.Place(t.Context(), DefaultTenant, s.ID)
	if !done(hit) {
		t.Fatalf("no commit was lost: %v", err)
	}
	pass()
	events, _, err := w.Next(t.Context())
	if err != nil || events[0].Type != EventTurnInterrupted {
		t.Errorf("%+v, %v", events, err)
	}
	if got := l.get(s.ID); got.Epoch != 2 || got.State != StateIdle {
		t.Errorf("%+v", got)
	}
}

// A takeover that has no more time to look for who is to blame leaves the rest to
// the next, which comes at once.
func TestTakeoverGoesOn(t *testing.T) {
	r, lines := loggedRig(t, pgtest.New(t), "http://127.0.0.1:1001")
	dead := r.deadServer()
	var ids []string
	for range 4 {
		ids = append(ids, r.create("package a\n").ID)
		r.giveTo(dead, ids[len(ids)-1], false)
	}
	f := badSessions["epoch"]
	r.exec(f.spoil, must(parseSession(ids[0])))
	late := &takeover{m: r.Manager, server: dead}
	if err := pgx.BeginFunc(t.Context(), r.pool, func(tx pgx.Tx) error { return late.run(t.Context(), tx) }); err != nil {
		t.Fatal(err)
	}
	late.report()
	if late.later != 4 || !r.remnants.due(dead) || lines.count("not finished") != 1 {
		t.Errorf("%d are left for later", late.later)
	}
	r.mustTakeStock()
	for i, id := range ids {
		if got := r.get(id); got.Epoch == 2 != (i > 0) {
			t.Errorf("session %d: %+v", i, got)
		}
	}
	r.exec(f.repair, must(parseSession(ids[0])))
}

// holdRow locks a session's row until it is told to let go.
func holdRow(t *testing.T, url, session string) (unlock func()) {
	t.Helper()
	conn := must(pgx.Connect(t.Context(), url))
	tx := must(conn.Begin(t.Context()))
	if _, err := tx.Exec(t.Context(), `SELECT FROM sessions WHERE id = $1 FOR UPDATE`, must(parseSession(session))); err != nil {
		t.Fatal(err)
	}
	unlock = sync.OnceFunc(func() { _ = conn.Close(context.Background()) })
	t.Cleanup(unlock)
	return unlock
}

// A server that only slept, and of which a session could not be taken, gives up
// the others and goes on with that one.
func TestRemnantWakesUp(t *testing.T) {
	a, b := twoServers(t)
	well, ill := a.create("package a\n"), a.create("package b\n")
	f := badSessions["epoch"]
	a.exec(f.spoil, must(parseSession(ill.ID)))
	l, err := a.Log(t.Context(), DefaultTenant, well.ID)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		a.cutLease(true) // it may be renewed before b looks
		b.mustTakeStock()
		return b.get(well.ID).Epoch == 2
	})
	_, err = l.Wait(t.Context(), 1<<40) // its reader is sent away when it renews its lease
	wantCode(t, err, CodeMoved, "")
	b.turn(well.ID, "", 2)
	if p := a.place(well.ID); p.Server != b.me.String() {
		t.Errorf("the one that was taken is placed at %+v", p)
	}
	waitFor(t, func() bool {
		p, err := b.Place(t.Context(), DefaultTenant, ill.ID)
		return err == nil && p.Server == a.me.String()
	})
	a.exec(f.repair, must(parseSession(ill.ID)))
	if got := a.turn(ill.ID, "", 2); got.State != TurnCompleted {
		t.Errorf("the one that was left: %+v", got)
	}
	if n := a.count(`SELECT count(*) FROM servers`); n != 2 {
		t.Errorf("%d servers", n)
	}
}
