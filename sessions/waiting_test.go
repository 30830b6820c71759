package sessions

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"rocket/internal/localpg/pgtest"
)

// Turns that wait in the ledger because no server has room for them are ended like others.
func TestEndTurnsThatWaitForAServer(t *testing.T) {
	eng, url := narrow(t, 8), pgtest.New(t)
	r := openRigOn(t, url, eng)
	busy := r.create("a")
	r.start(busy.ID, endless)
	var ids, turns []string
	for range 5 {
		s := r.create("b")
		ids = append(ids, s.ID)
		turns = append(turns, r.start(s.ID, endless).ID)
	}
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	full := narrow(t, 0) // another ledger's turn has the only place
	other := openRigOn(t, pgtest.New(t), full)
	other.start(other.create("a").ID, endless)

	r = openRigOn(t, url, full)
	for i, id := range ids {
		if got := r.get(id); got.State != StateRunning {
			t.Fatalf("session %d with a queued turn: %+v", i, got)
		}
	}
	got, err := r.Cancel(t.Context(), local, ids[0])
	if err != nil || got.ID != turns[0] || got.State != TurnCancelled || got.From != got.To {
		t.Errorf("cancel: %+v, %v", got, err)
	}
	if s := r.get(ids[0]); s.State != StateIdle {
		t.Errorf("after the cancel: %+v", s)
	}
	if s, err := r.Close(t.Context(), local, ids[1]); err != nil || s.State != StateClosed {
		t.Errorf("close: %+v, %v", s, err)
	}
	if got, err := r.Turn(t.Context(), DefaultTenant, ids[1], turns[1]); err != nil || got.State != TurnCancelled {
		t.Errorf("turn of the closed session: %+v, %v", got, err)
	}
	if err := r.Delete(t.Context(), local, ids[2]); err != nil {
		t.Error("delete:", err)
	}
	if err := r.Prune(t.Context(), local, ids[3]); err != nil {
		t.Error("prune:", err)
	}
	if k := kinds(r.ledgerEvents(ids[1])); k != "session.created turn.cancelled session.closed" {
		t.Errorf("events %q", k)
	}
	other.Shutdown(t.Context())
	r.mustTakeStock() // now there is room
	if got, err := r.Cancel(t.Context(), local, ids[4]); err != nil || got.State != TurnCancelled {
		t.Errorf("cancelled after it began: %+v, %v", got, err)
	}
	if got := r.turn(ids[0], "", 3); got.State != TurnCompleted {
		t.Errorf("turn after a cancelled one: %+v", got)
	}
}

// A turn that this server gave up, and that the ledger has as running, is ended by a cancel, if that comes before the
// keeper.
func TestCancelEndsAnOrphan(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	turn := r.start(s.ID, endless)
	l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
	if ok, err := l.Wait(t.Context(), turnStart+3); !ok || err != nil {
		t.Fatal(err)
	}
	x, err := r.hold(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { // its start is committed
		got, err := r.Turn(t.Context(), DefaultTenant, s.ID, turn.ID)
		return err == nil && got.State == TurnRunning
	})
	x.fence()
	x.ops.unlock()
	var got Turn
	waitFor(t, func() bool { // a commit of what it had decoded may have been under way
		got, err = r.Cancel(t.Context(), local, s.ID)
		return ErrorCode(err) != CodeOverloaded
	})
	if err != nil || got.State != TurnInterrupted {
		t.Errorf("cancel: %+v, %v", got, err)
	}
	if got := r.turn(s.ID, "", 3); got.State != TurnCompleted {
		t.Errorf("turn after it: %+v", got)
	}
}

// An orphan's end whose commit had no answer is not taken for one that did not happen.
func TestEndOfAnOrphanSettledLater(t *testing.T) {
	l := newLossy(t)
	s := l.create("a")
	turn := l.start(s.ID, endless)
	x, err := l.hold(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { // its start is committed
		got, err := l.Turn(t.Context(), DefaultTenant, s.ID, turn.ID)
		return err == nil && got.State == TurnRunning
	})
	if err := x.wlock.lock(t.Context()); err != nil { // nothing of it is being written
		t.Fatal(err)
	}
	hit, pass := l.p.Hold(1, "commit")
	defer pass()
	x.fence()
	x.wlock.unlock()
	x.ops.unlock() // the keeper comes, or the cancel
	_, err = l.Cancel(t.Context(), local, s.ID)
	if c := ErrorCode(err); err != nil && c != CodeLedgerUnavailable {
		t.Fatal(err)
	}
	if !done(hit) {
		t.Fatal("no commit was lost")
	}
	pass()
	got := until(t, "cancel", func() (Turn, error) { return l.Cancel(t.Context(), local, s.ID) })
	if got.State != TurnInterrupted {
		t.Errorf("%+v", got)
	}
	if got := l.turn(s.ID, "", 3); got.State != TurnCompleted {
		t.Errorf("turn after it: %+v", got)
	}
}

// A session is read anew after its orphan was ended; one whose row cannot be read then is forgotten, and the next call
// reads it.
func TestReload(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	x, err := r.hold(t.Context(), DefaultTenant, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer x.ops.unlock()
	r.exec("UPDATE sessions SET title = 'other', rev = rev + 1") // memory has it as this server's, and is not asked to look
	if err := x.refresh(t.Context()); err != nil || x.row.title != "" {
		t.Errorf("refreshed to %q, %v", x.row.title, err)
	}
	if err := x.reload(t.Context()); err != nil || x.row.title != "other" || x.row.rev != 2 || !x.mineLocked() {
		t.Errorf("reloaded to %+v, %v", x.row, err)
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := x.reload(late); err == nil || !x.gone {
		t.Errorf("after a reading that failed: gone %v, %v", x.gone, err)
	}
}

// A turn that this server gave up, and that the ledger has as running, ends without anybody's call: the keeper is told.
func TestOrphansEnd(t *testing.T) {
	r := newRig(t)
	for name, set := range map[string]string{
		"of this server":    "rev = rev + 1",
		"of nobody":         "rev = rev + 1, owner_server = NULL",
		"of another model":  "rev = rev + 1, model_digest = 'x', tokenizer_digest = 'x'",
		"in a higher epoch": "rev = rev + 1, epoch = epoch + 1",
	} {
		t.Run(name, func(t *testing.T) {
			s := r.create("a")
			turn := r.start(s.ID, endless)
			l, _ := r.Log(t.Context(), DefaultTenant, s.ID)
			if ok, err := l.Wait(t.Context(), turnStart+3); !ok || err != nil {
				t.Fatal(err)
			}
			u, _ := parseSession(s.ID)
			r.exec("UPDATE sessions SET "+set+" WHERE id = $1", u) // the writer finds it so
			_, err := l.Wait(t.Context(), 1<<40)
			wantCode(t, err, CodeMoved, "")
			waitFor(t, func() bool { return r.get(s.ID).State == StateIdle })
			var state, turnState string
			err = r.pool.QueryRow(t.Context(), `SELECT s.state, t.state FROM sessions s JOIN turns t ON t.session_id = s.id WHERE s.id = $1`,
				u).Scan(&state, &turnState)
			if err != nil || state != "idle" || turnState != "interrupted" {
				t.Errorf("the ledger has session %s, turn %s (%s), %v", state, turnState, turn.ID, err)
			}
			if name == "of another model" {
				r.exec("UPDATE sessions SET model_digest = $2, tokenizer_digest = $3, rev = rev + 1 WHERE id = $1", u, r.info.Digest, r.info.TokenizerDigest)
			} else if got := r.turn(s.ID, "", 3); got.State != TurnCompleted {
				t.Errorf("turn after it: %+v", got)
			}
		})
	}
}

// What a server left as running when it gave its sessions back is ended before the next one answers.
func TestOrphansEndAtStart(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	r.turn(s.ID, "", 3)
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), r.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, sql := range []string{"UPDATE turns SET state = 'running', finish_reason = NULL, ended_at = NULL", "UPDATE sessions SET state = 'running'"} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	r = openRig(t, r.url)
	if got := r.get(s.ID); got.State != StateIdle || got.Epoch != 2 {
		t.Errorf("after the start: %+v", got)
	}
}
