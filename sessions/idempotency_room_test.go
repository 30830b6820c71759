package sessions

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

func (r *rig) keyed(n int) Call {
	return Call{Tenant: DefaultTenant, Route: "create", IdempotencyKey: fmt.Sprint("key ", n)}
}

// A tenant's keys are bounded: old ones go, those of the last hour do not, and when all are of that, new ones are refused.
func TestIdempotencyKeysAreBounded(t *testing.T) {
	r := newRig(t)
	const most = 20
	r.keyRoom.most = most
	create := func(n int) (Session, error) { return r.Create(t.Context(), r.keyed(n), CreateRequest{}) }
	var all []Session
	for n := range most {
		s, err := create(n)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	forget := func() { // what the server has counted
		r.keyRoom.mu.Lock()
		defer r.keyRoom.mu.Unlock()
		clear(r.keyRoom.counts)
	}
	for range 2 {
		_, err := create(most)
		wantCode(t, err, CodeLimit, "idempotency_keys")
		if e, ok := errors.AsType[*Error](err); !ok || e.RetryAfter != keyRetryAfter {
			t.Errorf("it says to come back after %v", err)
		}
		forget() // a server that starts counts for itself
	}
	for n, want := range all {
		if got, err := create(n); err != nil || got.ID != want.ID {
			t.Fatalf("key %d has another answer: %+v, %v", n, got, err)
		}
	}
	if _, err := r.Create(t.Context(), local, CreateRequest{}); err != nil {
		t.Error("without a key:", err)
	}
	r.exec("INSERT INTO tenants (id) VALUES ('other')")
	other := r.keyed(0)
	other.Tenant = "other"
	if got, err := r.Create(t.Context(), other, CreateRequest{}); err != nil || got.ID == all[0].ID {
		t.Errorf("another tenant: %+v, %v", got, err)
	}
	// three are older than an hour: the oldest of them gives way
	r.exec(`UPDATE idempotency SET expires_at = now() + interval '22 hours' + right(key, 1)::int * interval '1 minute'
		WHERE tenant_id = 'local' AND key IN ('key 4', 'key 5', 'key 6')`)
	forget()
	if _, err := create(most); err != nil {
		t.Error("with an old one:", err)
	}
	if n := r.count("SELECT count(*) FROM idempotency WHERE tenant_id = 'local' AND key = 'key 4'"); n != 0 {
		t.Error("the oldest key is there")
	}
	if n := r.count("SELECT count(*) FROM idempotency WHERE tenant_id = 'local'"); n != most {
		t.Errorf("%d keys", n)
	}
	if got, err := create(5); err != nil || got.ID != all[5].ID {
		t.Errorf("the second oldest: %+v, %v", got, err)
	}
}

// A key whose time is up is no key: the call is made, whether somebody has swept or not, and a sweep leaves nothing.
func TestIdempotencyKeysExpire(t *testing.T) {
	r := newRig(t)
	first, err := r.Create(t.Context(), r.keyed(0), CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if n := r.count("SELECT count(*) FROM idempotency WHERE expires_at = created_at + interval '24 hours'"); n != 1 {
		t.Errorf("%d keys for 24 hours", n)
	}
	late := func() {
		r.exec("UPDATE idempotency SET expires_at = now()")
		if _, found, err := stored[Session](t.Context(), r.Manager, r.keyed(0)); found || err != nil {
			t.Errorf("an expired answer: %v, %v", found, err)
		}
	}
	late()
	if again, err := r.Create(t.Context(), r.keyed(0), CreateRequest{}); err != nil || again.ID == first.ID {
		t.Errorf("after its time: %+v, %v", again, err)
	}
	late()
	r.exec(`INSERT INTO idempotency SELECT 'local', 'x', n::text, '', '{}', now(), now() - interval '1 hour' FROM generate_series(1, $1) n`, expiredAtOnce+1)
	if _, err := r.Create(t.Context(), r.keyed(1), CreateRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := r.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.count("SELECT count(*) FROM idempotency"); n != 1 {
		t.Errorf("%d keys are left", n)
	}
}

func TestKeyRoom(t *testing.T) {
	r := keyRoom{most: 100}
	at := time.Unix(1000, 0)
	want := func(what string, ok, look bool) {
		t.Helper()
		if gotOK, gotLook := r.take("a", at); gotOK != ok || gotLook != look {
			t.Errorf("%s: %v, %v", what, gotOK, gotLook)
		}
	}
	want("the first", false, true)
	want("while somebody counts", true, false)
	r.counted("a", 98, at, nil)
	want("below the limit", true, false)
	want("the last", true, false)
	want("full, as far as this server knows", false, false)
	at = at.Add(keyFullAge)
	want("full, but counted a while ago", false, true)
	for range r.spare() {
		want("while somebody makes room", true, false)
	}
	want("too many meanwhile", false, false)
	r.counted("a", 0, at, errors.New("the ledger is away"))
	want("nobody knows", false, true)
	r.counted("a", 95, at, nil)
	want("there is room", true, false)
	at = at.Add(keyCountAge)
	want("counted long ago", false, true)
}
