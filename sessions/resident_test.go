package sessions

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"rocket/engine/chat"
	"rocket/internal/localpg/pgtest"
)

// bytesOf is what the tenant has, as the engine counts it.
func (r *rig) bytesOf(tenant string) TenantBytes {
	r.t.Helper()
	list := r.TenantBytes()
	i := slices.IndexFunc(list, func(b TenantBytes) bool { return b.Tenant == tenant })
	if i < 0 {
		r.t.Fatalf("nothing is known of tenant %s", tenant)
	}
	return list[i]
}

// TestResidentQuota: the engine gets a tenant's limit with its first use and with every change, also when the tenant
// makes no calls; turns are refused only while an open one fills it.
func TestResidentQuota(t *testing.T) {
	eng, err := openEngine()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(eng.Close)
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	r := startRig(t, Options{DatabaseURL: pgtest.New(t), Engine: eng, Template: tmpl, KeyFreshFor: 20 * time.Millisecond})
	ctx := t.Context()
	r.key("a")
	r.key("b")
	st := eng.Stats()
	limit := 3*st.PageBytes + 2*st.SlotBytes
	salt, err := r.namespace(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	set := func(q Quotas) { // and wait until the keeper has told the engine
		t.Helper()
		if err := r.Keys().SetQuotas(ctx, "a", q); err != nil {
			t.Fatal(err)
		}
		want := noResidentLimit
		if q.ResidentBytes != nil {
			want = *q.ResidentBytes
		}
		for got, ok := eng.Namespaces()[salt]; ok && got.Limit != want || !ok && want != noResidentLimit; got, ok = eng.Namespaces()[salt] {
			if ctx.Err() != nil {
				t.Fatalf("the engine has limit %d, not %d", got.Limit, want)
			}
			runtime.Gosched()
		}
	}
	set(Quotas{ResidentBytes: &limit})
	if got, err := r.Keys().Quotas(ctx, "a"); err != nil || *got.ResidentBytes != limit {
		t.Errorf("quotas %+v, %v", got, err)
	}
	long := TurnRequest{Input: ptr("package main; func main() {"), MaxTokens: ptr(100_000), IgnoreEOS: true}
	used := 0
	use := func(tenant string) {
		t.Helper()
		used++
		call := Call{Tenant: tenant}
		text := fmt.Sprint(used, strings.Repeat(fmt.Sprintf(" line %d of a text that fills pages,", used), 30))
		s, err := r.Create(ctx, call, CreateRequest{Input: &text})
		if err != nil {
			t.Fatal(err)
		}
		turn, err := r.StartTurn(ctx, call, s.ID, TurnRequest{MaxTokens: ptr(1)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.WaitTurn(ctx, tenant, s.ID, turn.ID); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		use("a")
		use("b")
	}
	if got := r.bytesOf("a"); got.Device+got.Host > limit || got.Device == 0 || got.Limit == nil || *got.Limit != limit {
		t.Errorf("a has %+v, its limit is %d", got, limit)
	}
	if got := r.bytesOf("b"); got.Device <= limit || got.Limit != nil {
		t.Errorf("b has %+v without a limit", got)
	}

	set(Quotas{ResidentBytes: ptr(int64(1))}) // one open turn fills it
	if got := r.bytesOf("a"); got.Device+got.Host != 0 {
		t.Errorf("a has %+v with a limit of 1", got)
	}
	a := Call{Tenant: "a"}
	var open []Session
	for _, text := range []*string{nil, nil, ptr("package main")} {
		s, err := r.Create(ctx, a, CreateRequest{Input: text})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	first, err := r.StartTurn(ctx, a, open[0].ID, long)
	if err != nil {
		t.Fatalf("the only turn: %v", err)
	}
	_, err = r.StartTurn(ctx, a, open[1].ID, long)
	wantCode(t, err, CodeLimit, "resident_bytes")
	_, err = r.Resume(ctx, a, open[1].ID)
	wantCode(t, err, CodeLimit, "resident_bytes")
	if _, err := r.Fork(ctx, a, open[2].ID, ForkRequest{}); err != nil {
		t.Errorf("a fork needs no memory: %v", err)
	}
	use("b")
	if _, err := r.Cancel(ctx, a, open[0].ID); err != nil {
		t.Fatal(err)
	}
	if out, err := r.WaitTurn(ctx, "a", open[0].ID, first.ID); err != nil || out.State != TurnCancelled {
		t.Errorf("the open turn is %+v, %v", out.State, err)
	}
	use("a")
	set(Quotas{ResidentBytes: ptr(int64(0))})
	_, err = r.StartTurn(ctx, a, open[1].ID, long)
	wantCode(t, err, CodeLimit, "resident_bytes")
	set(Quotas{})
	use("a")
	if got := r.bytesOf("a"); got.Limit != nil || got.Device == 0 {
		t.Errorf("a has %+v without a limit", got)
	}
	for _, n := range []int64{-1, ResidentBytesMax + 1} {
		wantCode(t, r.Keys().SetQuotas(ctx, "a", Quotas{ResidentBytes: &n}), CodeInvalid, "resident_bytes")
	}
	if err := eng.Check(); err != nil {
		t.Error(err)
	}
}
