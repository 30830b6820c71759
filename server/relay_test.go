package server

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"rocket/sessions"
)

// TestRelayWhileAnotherTakesOver: a socket's server takes no connection, and
// while its takeover waits for the one that somebody else is doing, it is said
// to be gone. Then the session is this server's: the client is not told of a
// call that was given up.
func TestRelayWhileAnotherTakesOver(t *testing.T) {
	w := start(t, worldOptions{})
	db, err := pgx.Connect(t.Context(), w.url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(context.WithoutCancel(t.Context()))
	dead := uuid.New()
	if _, err := db.Exec(t.Context(), `INSERT INTO servers (id, lease_until) VALUES ($1, now() + interval '1 hour')`, dead); err != nil {
		t.Fatal(err)
	}
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM servers WHERE id = $1 FOR UPDATE`, dead); err != nil {
		t.Fatal(err)
	}
	alive, gone := context.WithCancel(t.Context())
	type opened struct {
		here bool
		err  error
	}
	done := make(chan opened)
	go func() {
		nobody := sessions.Place{Server: dead.String(), Address: "http://127.0.0.1:1", Alive: alive}
		_, here, err := w.server.openRelay(t.Context(), nobody, "/v1/sessions/x/stream", "", http.Header{})
		done <- opened{here, err}
	}()
	for waiting, began := 0, time.Now(); waiting == 0; {
		if err := tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks
			WHERE NOT granted AND locktype = 'transactionid' AND transactionid = pg_current_xact_id()::xid`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > patience {
			t.Fatal("nobody waits to take the server over")
		}
	}
	gone()
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := <-done; !got.here || got.err != nil {
		t.Errorf("%+v", got)
	}
}
