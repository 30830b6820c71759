package server

import (
	"net/http"
	"slices"
	"testing"

	"rocket/client"
	"rocket/internal/localpg/pgtest"
)

// TestLedgerLostInMidTurn: while Postgres is away the server says so, with a
// code; when it is back the turn goes on and has the tokens of an undisturbed
// one.
func TestLedgerLostInMidTurn(t *testing.T) {
	var c *pgtest.Proxy
	w := start(t, worldOptions{database: func(dsn string) string {
		c = pgtest.NewProxy(t, dsn)
		return c.URL
	}})
	const n = 600
	want := w.turn(w.create("package main").ID, n)
	s := w.create("package main")
	p := w.dial(s.ID, "")
	turn, err := w.api.StartTurn(w.ctx(), s.ID, greedy(n), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.until("turn.delta")
	c.Cut()
	a := w.do("GET", "/readyz", "")
	wantProblem(t, a.header, a.body, http.StatusServiceUnavailable, "ledger_unavailable", "")
	w.do("GET", "/healthz", "").into(t, http.StatusOK, nil)
	for _, call := range [][3]string{{"POST", pathSessions, "{}"}, {"GET", pathSessions, ""}} {
		a := w.do(call[0], call[1], call[2])
		wantProblem(t, a.header, a.body, http.StatusServiceUnavailable, "ledger_unavailable", "")
	}
	if a := w.do("GET", "/metrics", ""); a.status != http.StatusOK {
		t.Errorf("/metrics without the ledger: %d %s", a.status, a.body)
	}
	c.Restore()
	done, _ := p.until("turn.completed")
	if done["turn_id"] != turn.ID {
		t.Errorf("completed %v", done)
	}
	got, err := w.api.Turn(w.ctx(), s.ID, turn.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Tokens, want.Tokens) {
		t.Errorf("%d tokens after the fault differ from %d without", len(got.Tokens), len(want.Tokens))
	}
	for ctx := w.ctx(); ; {
		if err := w.api.Ready(w.ctx()); err == nil {
			break
		} else if ctx.Err() != nil {
			t.Fatalf("not ready again: %v", err)
		}
	}
}
