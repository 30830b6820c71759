package sessions

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"rocket/internal/localpg/pgtest"
)

// Every mutating call, made by many at once with one key, then by many more
// after a restart, has one effect and one answer.
func TestIdempotentCallsAtOnceAndAfterARestart(t *testing.T) {
	l := newLossy(t)
	kinds := l.calls(t)
	type made struct {
		kind   lossyCall
		s      Session
		id     string
		call   Call
		answer any
	}
	var all []made
	for name, kind := range kinds {
		x := made{kind: kind, s: l.create("package main\n")}
		x.id = x.s.ID
		if kind.prepare != nil {
			x.id = kind.prepare(x.s)
		}
		x.s = l.get(x.s.ID)
		x.call = Call{Tenant: DefaultTenant, IdempotencyKey: "k", Route: name + x.id, Wait: true}
		x.answer = atOnce(t, name, func() (any, error) { return kind.call(t.Context(), x.call, x.id) })
		if err := kind.check(x.s, x.id, x.answer); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		all = append(all, x)
	}
	if err := l.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.rig = openRig(t, l.p.URL) // the calls are made on this one from now on
	for _, x := range all {
		again := atOnce(t, x.call.Route, func() (any, error) { return x.kind.call(t.Context(), x.call, x.id) })
		if diff := cmp.Diff(x.answer, again, idempotentAnswers); diff != "" {
			t.Errorf("%s: answered with something else after a restart:\n%s", x.call.Route, diff)
		}
		if err := x.kind.check(x.s, x.id, again); err != nil {
			t.Errorf("%s after a restart: %v", x.call.Route, err)
		}
	}
}

// idempotentAnswers compares answers but for where bytes are: that is reported
// after the fact, and no part of what is stored.
var idempotentAnswers = cmp.Options{cmpopts.EquateEmpty(), cmpopts.IgnoreTypes(Residency{}),
	cmpopts.IgnoreFields(ForkResult{}, "SharedTokens", "ReplayTokens")}

// atOnce makes a call five times at once and returns the one answer.
func atOnce(t *testing.T, name string, call func() (any, error)) any {
	t.Helper()
	var wg sync.WaitGroup
	answers, errs := make([]any, 5), make([]error, 5)
	for i := range answers {
		wg.Go(func() {
			answers[i], errs[i] = call()
			for ErrorCode(errs[i]) == CodeOverloaded { // one import at a time
				answers[i], errs[i] = call()
			}
		})
	}
	wg.Wait()
	for i := range answers {
		if errs[i] != nil {
			t.Fatalf("%s: %v", name, errs[i])
		}
		if diff := cmp.Diff(answers[0], answers[i], idempotentAnswers); diff != "" {
			t.Errorf("%s: two answers:\n%s", name, diff)
		}
	}
	return answers[0]
}

// Children of one fork are there together or not at all, whoever looks and
// whatever becomes of the connection: in trees, lists, counts and watches.
func TestForksAreAtomic(t *testing.T) {
	l := newLossy(t)
	root := l.create("func main() {\n")
	ctx, stop := context.WithCancel(t.Context())
	watch := l.Watch(DefaultTenant, WatchOptions{Root: root.ID})
	var lookers sync.WaitGroup
	looks := 0
	lookers.Go(func() {
		for ; ctx.Err() == nil; looks++ {
			tree, err := l.Tree(t.Context(), DefaultTenant, root.ID, nil)
			if err != nil {
				continue
			}
			wholeFamilies(t, "tree", tree.Nodes[1:], tree.Nodes[0].ChildCount, func(n Node) Session { return n.Session })
			page, err := l.List(t.Context(), DefaultTenant, ListFilter{Parent: root.ID, Limit: ListLimitMax})
			if err != nil || page.HasMore {
				continue
			}
			wholeFamilies(t, "list", page.Data, -1, func(s Session) Session { return s })
		}
	})
	want := 0
	for i := range 12 + 10*(*faults) {
		n := 1 + (i*7)%9
		set := []func(int) <-chan struct{}{l.p.LoseAt, l.p.LoseAnswerAt}[i%2]
		set(1 + i%6)
		call := Call{Tenant: DefaultTenant, Route: "fork", IdempotencyKey: fmt.Sprint(i)}
		f := until(t, "fork", func() (ForkResult, error) {
			return l.Fork(t.Context(), call, root.ID, ForkRequest{N: &n, Labels: map[string]string{"n": fmt.Sprint(n), "fork": fmt.Sprint(i)}})
		})
		if len(f.Sessions) != n {
			t.Errorf("%d children, want %d", len(f.Sessions), n)
		}
		want += n
	}
	l.p.Unset()
	stop()
	lookers.Wait()
	if got := l.get(root.ID).ChildCount; got != want {
		t.Errorf("%d children, want %d", got, want)
	}
	ctx, stop = context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	seen := map[string]bool{}
	for len(seen) < want { // a commit whose answer was lost is told of once it is known, which may be after the fork's second answer
		events, lost, err := watch.Next(ctx)
		if err != nil || lost > 0 {
			t.Fatalf("watched %d of %d children, lost %d events, %v", len(seen), want, lost, err)
		}
		for _, e := range events {
			if e.Type == EventSessionForked {
				for _, id := range e.Children {
					seen[id] = true
				}
			}
		}
	}
	if len(seen) != want {
		t.Errorf("watched %d children, want %d", len(seen), want)
	}
	if looks == 0 {
		t.Error("nobody looked")
	}
}

// wholeFamilies checks that each fork of which one child is seen is seen whole.
func wholeFamilies[T any](t *testing.T, where string, list []T, count int, of func(T) Session) {
	t.Helper()
	have, want := map[string]int{}, map[string]string{}
	for _, x := range list {
		s := of(x)
		have[s.Labels["fork"]]++
		want[s.Labels["fork"]] = s.Labels["n"]
	}
	for fork, n := range have {
		if fmt.Sprint(n) != want[fork] {
			t.Errorf("%s: %d of %s children of fork %s", where, n, want[fork], fork)
		}
	}
	if count >= 0 && count != len(list) {
		t.Errorf("%s: %d children, the parent says %d", where, len(list), count)
	}
}

// A key and its tenant and its audit event are there together or not at all,
// and a key that was acknowledged is good.
func TestEveryMessageOfKeyCallsLost(t *testing.T) {
	p := pgtest.NewProxy(t, pgtest.New(t))
	l := &lossy{openRig(t, p.URL), p}
	k := l.Keys()
	n := 0
	l.everyLoss(t, func(fault string, arm func()) {
		n++
		tenant := fmt.Sprintf("t%d", n)
		arm()
		key, err := k.Create(t.Context(), KeyRequest{Tenant: tenant})
		if err != nil {
			wantCode(t, err, CodeLedgerUnavailable, "")
			l.p.Unset()
			l.wholeKeys(tenant)
			return
		}
		revoked := until(t, fault, func() (Key, error) { return k.Revoke(t.Context(), key.ID) })
		if revoked.RevokedAt == nil {
			t.Errorf("%s: %+v", fault, revoked)
		}
		until(t, fault, func() (any, error) { return nil, k.SetQuotas(t.Context(), tenant, Quotas{Sessions: ptr(n)}) })
		list := until(t, fault, func() ([]Key, error) { return k.List(t.Context(), tenant) })
		if len(list) != 1 || list[0].RevokedAt == nil {
			t.Errorf("%s: %+v", fault, list)
		}
		l.p.Unset()
		if q, err := k.Quotas(t.Context(), tenant); err != nil || *q.Sessions != n {
			t.Errorf("%s: quotas %+v, %v", fault, q, err)
		}
		l.wholeKeys(tenant)
	})
}

// wholeKeys compares a tenant's keys with the audit of them.
func (l *lossy) wholeKeys(tenant string) {
	l.t.Helper()
	var tenants, keys, created, revoked, told int
	err := l.pool.QueryRow(l.t.Context(), `SELECT (SELECT count(*) FROM tenants WHERE id = $1),
			(SELECT count(*) FROM api_keys WHERE tenant_id = $1), (SELECT count(*) FROM audit_events WHERE tenant_id = $1 AND action = $2),
			(SELECT count(*) FROM api_keys WHERE tenant_id = $1 AND revoked_at IS NOT NULL),
			(SELECT count(*) FROM audit_events WHERE tenant_id = $1 AND action = $3)`, tenant, auditKeyCreated, auditKeyRevoked).
		Scan(&tenants, &keys, &created, &revoked, &told)
	if err != nil {
		l.t.Fatal(err)
	}
	if tenants != keys || keys != created || revoked != told {
		l.t.Errorf("%s: %d tenants, %d keys, %d creations, %d revoked, %d revocations told", tenant, tenants, keys, created, revoked, told)
	}
}
