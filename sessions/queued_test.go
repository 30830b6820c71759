package sessions

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/google/uuid"
)

// TestQueuedTurnsByTurnsOfTenants: a tenant's backlog, older than everybody
// else's turns, leaves them their places; sessions of another server, deleted
// ones and turns that run are left out.
func TestQueuedTurnsByTurnsOfTenants(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	var turns []string // who is whose, in order of age
	name := map[uuid.UUID]string{}
	tx, err := r.pool.Begin(ctx) // never committed: the keeper must not run them
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	queue := func(tenant, state, set string) {
		t.Helper()
		s, err := r.Create(ctx, Call{Tenant: tenant}, CreateRequest{})
		if err != nil {
			t.Fatal(err)
		}
		id := newID()
		session, _ := parseSession(s.ID)
		name[id] = fmt.Sprintf("%s%d", tenant, len(turns))
		turns = append(turns, name[id])
		if _, err := tx.Exec(ctx, `INSERT INTO turns (tenant_id, id, session_id, state, request, seed, prompt, tok_from, prompt_to, tok_to, created_at, started_at)
			VALUES ($1, $2, $3, $4, '{}', 0, '{1,2}', 0, 2, CASE WHEN $4 = 'queued' THEN 0 ELSE 2 END, now(), CASE WHEN $4 = 'queued' THEN NULL ELSE now() END)`,
			tenant, id, session, state); err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(ctx, `UPDATE sessions SET `+set+` WHERE tenant_id = $1 AND id = $2`, tenant, session); err != nil {
			t.Fatal(err)
		}
	}
	const nobodys = "owner_server = NULL"
	r.key("a")
	r.key("b")
	for range 4 {
		queue("a", "queued", nobodys)
	}
	queue("a", "running", nobodys)
	other := uuid.New()
	if _, err := tx.Exec(ctx, `INSERT INTO servers (id, lease_until) VALUES ($1, now() + interval '1 hour')`, other); err != nil {
		t.Fatal(err)
	}
	queue("b", "queued", "owner_server = '"+other.String()+"'")
	queue("b", "queued", nobodys+", state = 'closed', closed_at = now(), deleted_at = now(), kept_to = 0")
	queue("b", "queued", nobodys)
	queue("b", "queued", nobodys)
	queue(DefaultTenant, "queued", nobodys)
	for _, c := range []struct {
		perTenant, most int
		want            []string
	}{
		{10, 100, []string{"a0", "b7", "local9", "a1", "b8", "a2", "a3"}},
		{2, 100, []string{"a0", "b7", "local9", "a1", "b8"}},
		{10, 4, []string{"a0", "b7", "local9", "a1"}},
		{1, 2, []string{"a0", "b7"}},
	} {
		list, err := r.selectQueued(ctx, tx, c.perTenant, c.most)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, x := range list {
			got = append(got, name[x.turn])
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d a tenant, %d in all: %v, want %v", c.perTenant, c.most, got, c.want)
		}
	}
}

// TestQueuedTurnOfASessionThatAForkGotFirst: a server dies with a queued turn,
// and before anybody has started that one, a fork makes the session another
// server's. The turn runs all the same.
func TestQueuedTurnOfASessionThatAForkGotFirst(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	s := r.create("func main() {")
	if _, err := r.Release(ctx, local, s.ID, ReleaseRequest{}); err != nil {
		t.Fatal(err)
	}
	req := TurnRequest{MaxTokens: ptr(3), IgnoreEOS: true}
	if err := checkTurn(&req); err != nil {
		t.Fatal(err)
	}
	request, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	session, err := parseSession(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	id := newID()
	r.exec(`INSERT INTO turns (tenant_id, id, session_id, state, request, seed, prompt, tok_from, prompt_to, tok_to, created_at)
		VALUES ($1, $2, $3, 'queued', $4, 0, '{}', $5, $5, $5, now())`, DefaultTenant, id, session, request, s.Length)
	r.exec(`UPDATE sessions SET state = 'running', turn_count = 1, rev = rev + 1, epoch = epoch + 1 WHERE id = $1`, session)
	r.fork(s.ID, ForkRequest{})
	if err := r.takeStock(ctx); err != nil {
		t.Fatal(err)
	}
	if got := r.wait(s.ID, turnID(id)); got.State != TurnCompleted || len(got.Tokens) != 3 {
		t.Errorf("%+v", got)
	}
	if err := r.takeStock(ctx); err != nil { // there is nothing more to start
		t.Fatal(err)
	}
	if got := r.get(s.ID); got.State != StateIdle || got.TurnCount != 1 || got.Length != s.Length+3 {
		t.Errorf("%+v", got)
	}
}
