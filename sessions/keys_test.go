package sessions

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"rocket/internal/localpg/pgtest"
)

// nowhere is no address, which has no limit of failures.
var nowhere netip.Addr

func (r *rig) key(tenant string) NewKey {
	r.t.Helper()
	k, err := r.Keys().Create(r.t.Context(), KeyRequest{Tenant: tenant})
	if err != nil {
		r.t.Fatal(err)
	}
	return k
}

func TestKeys(t *testing.T) {
	r := newRig(t)
	ctx, keys := t.Context(), r.Keys()
	if made, err := keys.Exist(ctx); made || err != nil {
		t.Errorf("keys exist: %t, %v", made, err)
	}
	a, b := r.key("a"), r.key("b")
	admin, err := keys.Create(ctx, KeyRequest{Name: "monitor", Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	if admin.Tenant != DefaultTenant || admin.Name != "monitor" || !admin.Admin {
		t.Errorf("%+v", admin.Key)
	}
	for _, c := range []struct {
		secret string
		who    Identity
	}{{a.Secret, Identity{"a", a.ID, false}}, {b.Secret, Identity{"b", b.ID, false}}, {admin.Secret, Identity{DefaultTenant, admin.ID, true}}} {
		for range 2 { // from the ledger, from memory
			if who, err := keys.Authenticate(ctx, nowhere, c.secret); err != nil || who != c.who {
				t.Errorf("%+v, %v, want %+v", who, err, c.who)
			}
		}
	}
	for _, secret := range []string{"", "rk_", a.ID, strings.ToLower(a.Secret), a.Secret + "A", a.Secret[1:], "xx" + a.Secret[2:],
		KeySecretPrefix + strings.Repeat("A", len(a.Secret)-len(KeySecretPrefix)), strings.Repeat("\x00", len(a.Secret))} {
		who, err := keys.Authenticate(ctx, nowhere, secret)
		wantCode(t, err, CodeUnauthenticated, "")
		if who != (Identity{}) {
			t.Errorf("%q is %+v", secret, who)
		}
	}
	list, err := keys.List(ctx, "")
	if err != nil || len(list) != 3 || list[0].ID != a.ID || list[0].LastUsedAt == nil {
		t.Errorf("list %+v, %v", list, err)
	}
	if list, err = keys.List(ctx, "b"); err != nil || len(list) != 1 || list[0].ID != b.ID {
		t.Errorf("list of b: %+v, %v", list, err)
	}
	var stored string
	if err := r.pool.QueryRow(ctx, `SELECT coalesce(string_agg(k::text || e::text, ' '), '') FROM api_keys k, audit_events e`).Scan(&stored); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(stored, a.Secret) || !strings.Contains(stored, "key.created") {
		t.Errorf("the ledger has %s", stored)
	}
	for _, req := range []KeyRequest{{Tenant: "A"}, {Tenant: "a b"}, {Tenant: "-a"}, {Tenant: strings.Repeat("a", 65)}, {Tenant: "a'"}} {
		_, err := keys.Create(ctx, req)
		wantCode(t, err, CodeInvalid, "tenant")
	}
	_, err = keys.Create(ctx, KeyRequest{Name: strings.Repeat("n", KeyNameBytesMax+1)})
	wantCode(t, err, CodeInvalid, "name")

	first, err := keys.Revoke(ctx, a.ID)
	if err != nil || first.RevokedAt == nil {
		t.Fatalf("%+v, %v", first, err)
	}
	again, err := keys.Revoke(ctx, a.ID)
	if err != nil || !again.RevokedAt.Equal(*first.RevokedAt) {
		t.Errorf("revoked again: %+v, %v", again, err)
	}
	_, err = keys.Authenticate(ctx, nowhere, a.Secret)
	wantCode(t, err, CodeUnauthenticated, "")
	for _, id := range []string{"", "key_x", "key_00000000-0000-7000-8000-000000000000", a.Secret} {
		_, err := keys.Revoke(ctx, id)
		wantCode(t, err, CodeNotFound, "")
	}
	for _, k := range []NewKey{b, admin} {
		if _, err := keys.Revoke(ctx, k.ID); err != nil {
			t.Fatal(err)
		}
	}
	if made, err := keys.Exist(ctx); !made || err != nil {
		t.Errorf("with all keys revoked they exist: %t, %v", made, err)
	}
}

// TestAudit: what was done, by whom, once.
func TestAudit(t *testing.T) {
	url := pgtest.New(t)
	r := openRig(t, url)
	ctx := t.Context()
	k := r.key("a")
	call := Call{Tenant: "a", KeyID: k.ID, IdempotencyKey: "k", Route: "delete"}
	s, err := r.Create(ctx, Call{Tenant: "a", KeyID: k.ID}, CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.Delete(ctx, call, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	for range 50 {
		_, err := r.Keys().Authenticate(ctx, nowhere, "rk_guess")
		wantCode(t, err, CodeUnauthenticated, "")
	}
	if _, err := r.Keys().Revoke(ctx, k.ID); err != nil {
		t.Fatal(err)
	}
	if err := r.Shutdown(ctx); err != nil { // what is counted is written at the end
		t.Fatal(err)
	}
	check := openRig(t, url)
	rows, err := check.pool.Query(ctx, `SELECT action, coalesce(tenant_id, '-'), key_id IS NOT NULL, subject, count FROM audit_events ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	guesses := 0
	for rows.Next() {
		var action, tenant, subject string
		var byKey bool
		var n int
		if err := rows.Scan(&action, &tenant, &byKey, &subject, &n); err != nil {
			t.Fatal(err)
		}
		if action == auditAuthFailed {
			guesses += n
			continue
		}
		got = append(got, fmt.Sprintln(action, tenant, byKey, subject))
	}
	want := []string{fmt.Sprintln("key.created a false", k.ID), fmt.Sprintln("session.deleted a true", s.ID), fmt.Sprintln("key.revoked a false", k.ID)}
	if fmt.Sprint(got) != fmt.Sprint(want) || guesses != 50 {
		t.Errorf("%v and %d guesses, want %v", got, guesses, want)
	}
}

// TestAuditIsDropped: what is old goes, page by page; what is not stays.
func TestAuditIsDropped(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	if _, err := r.pool.Exec(ctx, `INSERT INTO audit_events (action, at)
			SELECT 'auth.failed', now() - $2::interval - interval '1 minute' FROM generate_series(1, $1)`, 2*auditDropMax+10, AuditKeptFor); err != nil {
		t.Fatal(err)
	}
	if _, err := r.pool.Exec(ctx, `INSERT INTO audit_events (action, at) VALUES ('auth.failed', now() - $1::interval + interval '1 minute')`, AuditKeptFor); err != nil {
		t.Fatal(err)
	}
	r.key("a")
	for range 2 {
		if err := r.dropAudit(ctx); err != nil {
			t.Fatal(err)
		}
		var left, old int
		if err := r.pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE at < now() - $1::interval) FROM audit_events`, AuditKeptFor).Scan(&left, &old); err != nil {
			t.Fatal(err)
		}
		if left != 2 || old != 0 {
			t.Errorf("%d records are left, %d of them old", left, old)
		}
	}
}

// TestKeysWithoutLedger: a key that was good a moment ago stays good while the
// ledger is away; others cannot be told, which is not the same as refused.
func TestKeysWithoutLedger(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	keys, err := OpenKeys(t.Context(), p.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer keys.Close()
	keys.cache.fresh = time.Nanosecond
	known, err := keys.Create(t.Context(), KeyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	other, err := keys.Create(t.Context(), KeyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Authenticate(t.Context(), nowhere, known.Secret); err != nil {
		t.Fatal(err)
	}
	p.Cut()
	if who, err := keys.Authenticate(t.Context(), nowhere, known.Secret); err != nil || who.KeyID != known.ID {
		t.Errorf("a known key: %+v, %v", who, err)
	}
	_, err = keys.Authenticate(t.Context(), nowhere, other.Secret)
	wantCode(t, err, CodeLedgerUnavailable, "")
}

// TestKeyCacheBound: guesses do not fill the memory, nor push good keys out.
func TestKeyCacheBound(t *testing.T) {
	k := newKeys(nil, 0)
	c := &k.cache
	good := 0
	for i := range 3 * keyCacheMax {
		var hash keyHash
		hash[0], hash[1], hash[2] = byte(i), byte(i>>8), byte(i>>16)
		c.mu.Lock()
		c.makeRoomLocked()
		e := &keyEntry{err: errNoKey()}
		if i%keyCacheMax < 100 && i < keyCacheMax {
			e.err = nil
		}
		c.entries[hash] = e
		c.mu.Unlock()
	}
	if len(c.entries) > keyCacheMax {
		t.Errorf("%d entries", len(c.entries))
	}
	for _, e := range c.entries {
		if e.err == nil {
			good++
		}
	}
	if good != 100 {
		t.Errorf("%d of 100 good keys are left", good)
	}
}

// TestRevokeRacesLookup: whoever asks after Revoke has returned is refused,
// whatever was being looked up meanwhile.
func TestRevokeRacesLookup(t *testing.T) {
	r := newRig(t)
	keys := r.Keys()
	for range 10 {
		k := r.key("a")
		var all sync.WaitGroup
		revoked := make(chan struct{})
		for range 8 {
			all.Go(func() {
				for done := false; !done; {
					select {
					case <-revoked:
						done = true
					default:
					}
					_, err := keys.Authenticate(context.Background(), nowhere, k.Secret)
					if err != nil && ErrorCode(err) != CodeUnauthenticated || done && err == nil {
						t.Errorf("after the revocation %t: %v", done, err)
						return
					}
				}
			})
		}
		if _, err := keys.Revoke(t.Context(), k.ID); err != nil {
			t.Error(err)
		}
		close(revoked)
		all.Wait()
	}
}

func TestQuotas(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	r.key("a")
	set := func(q Quotas) {
		t.Helper()
		if err := r.Keys().SetQuotas(ctx, "a", q); err != nil {
			t.Fatal(err)
		}
		r.known.mu.Lock()
		clear(r.known.rows) // rather than wait until they are read anew
		r.known.mu.Unlock()
	}
	call := Call{Tenant: "a"}
	text := "func main() {"
	create := func() (Session, error) { return r.Create(ctx, call, CreateRequest{Input: &text}) }

	set(Quotas{Sessions: ptr(3)})
	first, err := create()
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Fork(ctx, call, first.ID, ForkRequest{N: ptr(3)})
	wantCode(t, err, CodeLimit, "sessions")
	forks, err := r.Fork(ctx, call, first.ID, ForkRequest{N: ptr(2)})
	if err != nil {
		t.Fatal(err)
	}
	_, err = create()
	wantCode(t, err, CodeLimit, "sessions")
	if err := r.Delete(ctx, call, forks.Sessions[0].ID); err != nil {
		t.Fatal(err)
	}
	if _, err := create(); err != nil {
		t.Errorf("after a deletion: %v", err)
	}
	r.create("another tenant") // has its own

	set(Quotas{ConcurrentTurns: ptr(1)})
	long := TurnRequest{MaxTokens: ptr(100_000), IgnoreEOS: true}
	if _, err := r.StartTurn(ctx, call, first.ID, long); err != nil {
		t.Fatal(err)
	}
	_, err = r.StartTurn(ctx, call, forks.Sessions[1].ID, long)
	wantCode(t, err, CodeLimit, "concurrent_turns")
	other := r.create("x")
	r.turn(other.ID, "y", 1)
	if _, err := r.Cancel(ctx, call, first.ID); err != nil {
		t.Fatal(err)
	}

	set(Quotas{TokensPerMinute: ptr(60)})
	turn, err := r.StartTurn(ctx, call, forks.Sessions[1].ID, TurnRequest{MaxTokens: ptr(200), IgnoreEOS: true})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := r.WaitTurn(ctx, "a", forks.Sessions[1].ID, turn.ID); err != nil || len(out.Tokens) != 200 {
		t.Errorf("a turn that begins is not cut: %d tokens, %v", len(out.Tokens), err)
	}
	for _, fn := range []func() error{
		func() error { _, err := create(); return err },
		func() error { _, err := r.StartTurn(ctx, call, first.ID, long); return err },
	} {
		err := fn()
		wantCode(t, err, CodeLimit, "tokens_per_minute")
		var e *Error
		if errors.As(err, &e) && (e.RetryAfter < 100*time.Second || e.RetryAfter > 160*time.Second) {
			t.Errorf("retry after %v: about 140 tokens are owed, 60 come a minute", e.RetryAfter)
		}
	}
	set(Quotas{TokensPerMinute: ptr(0)})
	_, err = create()
	wantCode(t, err, CodeLimit, "tokens_per_minute")
	set(Quotas{})
	if _, err := create(); err != nil {
		t.Errorf("without quotas: %v", err)
	}
	for _, q := range []Quotas{{Sessions: ptr(-1)}, {Sessions: ptr(QuotaMax + 1)}} {
		wantCode(t, r.Keys().SetQuotas(ctx, "a", q), CodeInvalid, "sessions")
	}
	wantCode(t, r.Keys().SetQuotas(ctx, "nobody", Quotas{}), CodeNotFound, "")
}

// TestSalts: tenants do not share pages, whatever their names; the tenant of
// before there were keys finds what it had on disk.
func TestSalts(t *testing.T) {
	r := newRig(t)
	r.key("a")
	r.key("b")
	salts := map[string]bool{}
	for _, tenant := range []string{DefaultTenant, "a", "b"} {
		s, err := r.namespace(t.Context(), tenant)
		if err != nil || salts[s] {
			t.Errorf("salt of %s: %q, %v", tenant, s, err)
		}
		salts[s] = true
	}
	if !salts["local"] || salts["a"] || salts["b"] {
		t.Errorf("salts %v", salts)
	}
	text := strings.Repeat("a long prompt that fills a page and more of the cache. ", 12)
	use := func(tenant string) Usage {
		call := Call{Tenant: tenant}
		s, err := r.Create(t.Context(), call, CreateRequest{})
		if err != nil {
			t.Fatal(err)
		}
		turn, err := r.StartTurn(t.Context(), call, s.ID, TurnRequest{Input: &text, MaxTokens: ptr(1)})
		if err != nil {
			t.Fatal(err)
		}
		out, err := r.WaitTurn(t.Context(), tenant, s.ID, turn.ID)
		if err != nil {
			t.Fatal(err)
		}
		return *out.Usage
	}
	use("a")
	if u := use("b"); u.CachedTokens != 0 || u.ColdReason == "salted" {
		t.Errorf("b's first use of a's text: %+v", u)
	}
	if u := use("a"); u.CachedTokens == 0 {
		t.Errorf("a's second use of its text: %+v", u)
	}
}
