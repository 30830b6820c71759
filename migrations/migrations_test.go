package migrations_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"rocket/internal/localpg/pgtest"
	"rocket/migrations"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// Servers that start at the same moment must not trip over each other.
func TestUpTwiceAtOnce(t *testing.T) {
	url := pgtest.New(t)
	conn := connect(t, url)
	if _, err := conn.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public"); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	for range 2 {
		go func() { errs <- migrations.Up(t.Context(), url) }()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	var tenant string
	if err := conn.QueryRow(t.Context(), "SELECT id FROM tenants").Scan(&tenant); err != nil || tenant != "local" {
		t.Errorf("tenant %q, %v", tenant, err)
	}
}

func TestUpErrors(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://%zz": "parse database url",
		"postgres://nobody@/none?host=/no/such/dir&sslmode=disable": "connect to the ledger",
	} {
		if err := migrations.Up(t.Context(), url); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", url, err, want)
		}
	}
}

// The database refuses what the state machine does not have.
func TestConstraints(t *testing.T) {
	conn := connect(t, pgtest.New(t))
	const (
		a = "00000000-0000-7000-8000-00000000000a"
		b = "00000000-0000-7000-8000-00000000000b"
		c = "00000000-0000-7000-8000-00000000000c"
	)
	session := func(id, more, values string) string {
		return "INSERT INTO sessions (tenant_id, id, root_id, model, model_digest, tokenizer_digest, parity_class, created_at, updated_at" + more +
			") VALUES ('local', '" + id + "', '" + a + "', 'm', '', '', 'f32', now(), now()" + values + ")"
	}
	turn := func(id, state, more, values string) string {
		return "INSERT INTO turns (tenant_id, id, session_id, state, request, seed, prompt, tok_from, prompt_to, created_at" + more +
			") VALUES ('local', '" + id + "', '" + a + "', '" + state + "', '{}', 1, '{1,2}', 0, 2, now()" + values + ")"
	}
	for _, step := range []struct{ sql, wantCode string }{
		{session(a, "", ""), ""},
		{session(b, ", parent_id, forked_at", ", '"+c+"', 0"), "23503"},            // no such parent
		{session(b, ", parent_id", ", '"+a+"'"), "23514"},                          // a child needs its offset
		{session(b, "", ""), "23514"},                                              // a root is its own root
		{session(b, ", parent_id, forked_at, length", ", '"+a+"', 5, 4"), "23514"}, // shorter than what it inherits
		{session(b, ", parent_id, forked_at, length", ", '"+a+"', 0, 0"), ""},
		{"UPDATE sessions SET state = 'sleeping'", "23514"},
		{"UPDATE sessions SET state = 'closed'", "23514"}, // without its time
		{"UPDATE sessions SET deleted_at = now(), kept_to = 0", "23514"},
		{"UPDATE sessions SET owner_server = '" + a + "'", "23503"},
		{turn(a, "queued", ", tok_to", ", 0"), ""},
		{turn(b, "queued", ", tok_to", ", 0"), "23505"}, // one turn at a time
		{turn(b, "completed", ", tok_to", ", 2"), "23514"},
		{"UPDATE turns SET state = 'running', tok_to = 2", "23514"},
		{"UPDATE turns SET state = 'running', tok_to = 2, started_at = now()", ""},
		{"UPDATE turns SET state = 'completed', ended_at = now()", "23514"},
		{"UPDATE turns SET state = 'completed', ended_at = now(), finish_reason = 'length'", ""},
		{turn(b, "queued", ", tok_to", ", 0"), ""},
	} {
		_, err := conn.Exec(t.Context(), step.sql)
		got := ""
		if e, ok := errors.AsType[*pgconn.PgError](err); ok {
			got = e.Code
		} else if err != nil {
			t.Fatal(err)
		}
		if got != step.wantCode {
			t.Errorf("%s: error %v, want code %q", step.sql, err, step.wantCode)
		}
	}
}
