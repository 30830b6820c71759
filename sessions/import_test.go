package sessions

import (
	"bytes"
	"crypto/sha256"
	"io"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"rocket/internal/localpg/pgtest"
	"rocket/migrations"
)

// A key is the whole bundle's: with one that has an answer, another bundle of
// the same beginning is refused, and the same one answered.
func TestImportKeyIsOfTheWholeBundle(t *testing.T) {
	r := newRig(t)
	s := r.create("package a\n")
	r.turn(s.ID, "b", 5)
	bundle := r.export(s.ID)
	call := Call{Tenant: DefaultTenant, IdempotencyKey: "k", Route: "import"}
	first, err := r.Import(t.Context(), call, bytes.NewReader(bundle))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(bundle), "\n")
	for name, other := range map[string][]byte{
		"cut":             bundle[:len(bundle)/2],
		"header only":     []byte(lines[0]),
		"one byte more":   append(bytes.Clone(bundle), '\n'),
		"another line":    reseal(append(lines[:1:1], lines[2:len(lines)-2]...)),
		"another trailer": []byte(strings.Join(lines[:len(lines)-2], "") + "{}\n"),
	} {
		if _, err := r.Import(t.Context(), call, bytes.NewReader(other)); ErrorCode(err) != CodeIdempotencyMismatch {
			t.Errorf("%s: %v", name, err)
		}
	}
	again, err := r.Import(t.Context(), call, bytes.NewReader(bundle))
	if err != nil || again.Session.ID != first.Session.ID {
		t.Errorf("the same: %+v, %v", again, err)
	}
	broken := io.MultiReader(bytes.NewReader(bundle[:len(bundle)/2]), brokenReader{})
	if _, err := r.Import(t.Context(), call, broken); err == nil || ErrorCode(err) == CodeIdempotencyMismatch {
		t.Errorf("a body that fails: %v", err)
	}
	// a server of before has stored the sum of the first line
	head := sha256.Sum256([]byte(lines[0]))
	r.exec("UPDATE idempotency SET body_hash = $1", head[:])
	if again, err := r.Import(t.Context(), call, bytes.NewReader(bundle)); err != nil || again.Session.ID != first.Session.ID {
		t.Errorf("stored by an older server: %+v, %v", again, err)
	}
	if n := r.count("SELECT count(*) FROM sessions"); n != 2 {
		t.Errorf("%d sessions", n)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrClosedPipe }

// An import that another server has under way: a call with the same key gets
// its answer, any other one new ids.
func TestImportWhileAnotherServerImports(t *testing.T) {
	a, b := twoServers(t)
	source := newRig(t)
	for _, x := range []struct{ first, second string }{{"k", "k"}, {"k1", "k2"}, {"", ""}} {
		s := source.create("package a\n")
		source.turn(s.ID, "b", 5)
		bundle := source.export(s.ID)
		call := func(key string) Call { return Call{Tenant: DefaultTenant, Route: "import", IdempotencyKey: key} }
		slow := &stuck{bytes.NewReader(bundle[:len(bundle)/2]), make(chan struct{}), make(chan struct{})}
		type answer struct {
			ImportResult
			error
		}
		one, two := make(chan answer, 1), make(chan answer, 1)
		go func() {
			got, err := a.Import(t.Context(), call(x.first), io.MultiReader(slow, bytes.NewReader(bundle[len(bundle)/2:])))
			one <- answer{got, err}
		}()
		<-slow.reads
		go func() {
			got, err := b.Import(t.Context(), call(x.second), bytes.NewReader(bundle))
			two <- answer{got, err}
		}()
		waitFor(t, func() bool { return a.count("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0 })
		close(slow.end)
		first, second := <-one, <-two
		if first.error != nil || first.NewIDs || first.Session.ID != s.ID {
			t.Errorf("%v: the first %+v", x, first)
		}
		if same := x.first != "" && x.first == x.second; second.error != nil || second.NewIDs == same || (second.Session.ID == s.ID) != same {
			t.Errorf("%v: the second %+v", x, second)
		}
		if err := a.Prune(t.Context(), local, s.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// An import's tokens are a prompt's: they count, and a tenant that has used up
// its own has no import; an answer that is stored costs nothing.
func TestImportCountsAsAPrompt(t *testing.T) {
	r := newRig(t)
	s := r.create("package a\n")
	r.turn(s.ID, "b", 20)
	bundle := r.export(s.ID)
	if err := r.Keys().SetQuotas(t.Context(), DefaultTenant, Quotas{TokensPerMinute: ptr(10)}); err != nil {
		t.Fatal(err)
	}
	r.forgetTenants()
	call := Call{Tenant: DefaultTenant, IdempotencyKey: "k", Route: "import"}
	for range 2 {
		if _, err := r.Import(t.Context(), call, bytes.NewReader(bundle)); err != nil {
			t.Fatal(err)
		}
	}
	_, err := r.Import(t.Context(), local, bytes.NewReader(bundle))
	wantCode(t, err, CodeLimit, "tokens_per_minute")
	_, err = r.Create(t.Context(), local, CreateRequest{})
	wantCode(t, err, CodeLimit, "tokens_per_minute")
	if n := r.count("SELECT count(*) FROM sessions"); n != 2 {
		t.Errorf("%d sessions", n)
	}
}

// forgetTenants makes the server read quotas anew.
func (r *rig) forgetTenants() {
	r.known.mu.Lock()
	defer r.known.mu.Unlock()
	clear(r.known.rows)
}

// A value that its column cannot hold is the bundle's fault, not the ledger's.
func TestImportBlamesTheBundleForItsValues(t *testing.T) {
	r := newRig(t)
	for name, row := range map[string][]any{
		"an integer":    {"t1", int64(1) << 40},
		"a text":        {"t\x00", 1},
		"a constraint":  {"", 1},
		"another type":  {"t2", "many"},
		"not even text": {struct{}{}, 1},
	} {
		_, err := r.pool.CopyFrom(t.Context(), pgx.Identifier{"tenants"}, []string{"id", "sessions"}, pgx.CopyFromRows([][]any{row}))
		i := &importing{b: newBundleReader(strings.NewReader(""), r.info, r.tok)}
		if err == nil {
			t.Fatalf("%s was taken", name)
		}
		if got := ledgerError("import", i.refused(err)); ErrorCode(got) != CodeInvalid {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A turn without a prompt that is not over goes with a child that was forked in
// the middle of it.
func TestExportOfAForkOfARunningTurn(t *testing.T) {
	r := newRig(t)
	s := r.create("package a\n")
	endless := endless
	endless.Input = ptr("")
	r.start(s.ID, endless)
	r.events(s.ID, 1, 5)
	length := s.Length + 3
	waitFor(t, func() bool { return r.get(s.ID).Length >= length })
	child := r.fork(s.ID, ForkRequest{At: &length}).Sessions[0].ID
	bundle := r.export(child)
	if !r.reads("of a running turn", bundle) {
		t.Fatal(string(bundle))
	}
	want := r.line(child)
	if err := r.Prune(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
	got, err := r.Import(t.Context(), local, bytes.NewReader(bundle))
	if err != nil || string(idBytes(r.line(got.Session.ID))) != string(idBytes(want)) {
		t.Errorf("%+v, %v", got, err)
	}
	if page, err := r.Turns(t.Context(), DefaultTenant, child, TurnFilter{}); err != nil || len(page.Data) != 1 || page.Data[0].To != length {
		t.Errorf("turns %+v, %v", page, err)
	}
}

func idBytes(ids []int32) (out []byte) {
	for _, id := range ids {
		out = append(out, byte(id), byte(id>>8), byte(id>>16))
	}
	return out
}

// A ledger that an import of before has given the largest epoch there is can be
// taken over after the upgrade, and the ledger takes no such epoch any more.
func TestUpgradeBoundsEpochs(t *testing.T) {
	r := newRig(t)
	s := r.create("package a\n")
	r.turn(s.ID, "b", 5)
	if err := r.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), r.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	exec := func(sql string, args ...any) error {
		_, err := conn.Exec(t.Context(), sql, args...)
		return err
	}
	const (
		largest = int64(1<<63 - 1)
		most    = int64(1) << 53
	)
	for _, sql := range []string{"UPDATE sessions SET epoch = $1", "UPDATE events SET epoch = $1", "UPDATE token_runs SET epoch = $1"} {
		if err := exec(sql, most); err == nil {
			t.Errorf("%s was taken", sql)
		}
	}
	for _, sql := range []string{
		`ALTER TABLE sessions DROP CONSTRAINT sessions_epoch_max`, `ALTER TABLE events DROP CONSTRAINT events_epoch_max`,
		`ALTER TABLE token_runs DROP CONSTRAINT token_runs_epoch_max`, `DELETE FROM goose_db_version WHERE version_id >= 7`,
	} {
		if err := exec(sql); err != nil {
			t.Fatal(err)
		}
	}
	for _, sql := range []string{`UPDATE sessions SET epoch = $1`, `UPDATE events SET epoch = $1 WHERE seq >= 3`, `UPDATE token_runs SET epoch = $1 WHERE cuts <> '{}'`} {
		if err := exec(sql, largest); err != nil {
			t.Fatal(err)
		}
	}
	if err := migrations.Up(t.Context(), r.url); err != nil {
		t.Fatal(err)
	}
	again := openRig(t, r.url)
	dead := newID()
	again.exec(`INSERT INTO servers (id, lease_until) VALUES ($1, now() - interval '1 hour')`, dead)
	again.exec(`UPDATE sessions SET owner_server = $1, rev = rev + 1`, dead)
	if taken, err := again.takeOver(t.Context(), dead, false); err != nil || !taken {
		t.Fatalf("taken over: %v, %v", taken, err)
	}
	if got := again.get(s.ID).Epoch; got != 1<<40+1 {
		t.Errorf("epoch %d", got)
	}
	again.turn(s.ID, "c", 3)
	if !again.reads("the export", again.export(s.ID)) {
		t.Error("what was upgraded cannot be imported")
	}
	if err := again.Check(t.Context(), DefaultTenant); err != nil {
		t.Error(err)
	}
}

// Exports that stand still leave other tenants theirs, and give way.
func TestSlowExportsLeaveOthersTheirs(t *testing.T) {
	r := openRig(t, pgtest.New(t))
	ids := map[string]string{}
	tenants := []string{"t0", "t1", "t2", "t3", "t4"}
	for _, tenant := range tenants {
		r.exec("INSERT INTO tenants (id) VALUES ($1)", tenant)
		s, err := r.Create(t.Context(), Call{Tenant: tenant}, CreateRequest{Input: ptr("package a\n")})
		if err != nil {
			t.Fatal(err)
		}
		ids[tenant] = s.ID
	}
	late := tenants[exportsMax]
	var slow []stuckWriter
	ends := make([]chan error, exportsMax)
	for i, tenant := range tenants[:exportsMax] {
		w := stuckWriter{make(chan struct{}), make(chan struct{})}
		slow, ends[i] = append(slow, w), make(chan error, 1)
		go func() { ends[i] <- r.Export(t.Context(), tenant, ids[tenant], w) }()
		<-w.writes
		wantCode(t, r.Export(t.Context(), tenant, ids[tenant], io.Discard), CodeOverloaded, "")
		if i < exportsMax-1 {
			if err := r.Export(t.Context(), late, ids[late], io.Discard); err != nil {
				t.Errorf("beside %d slow ones: %v", i+1, err)
			}
		}
	}
	wantCode(t, r.Export(t.Context(), late, ids[late], io.Discard), CodeOverloaded, "")
	r.exports.mu.Lock() // nobody has waited for long by now, but two are said to, and one of them has got much
	r.exports.places["t1"].waited = 2 * bundlePatience
	r.exports.places["t2"].waited, r.exports.places["t2"].passed = 3*bundlePatience, 1<<30
	r.exports.mu.Unlock()
	wantCode(t, r.Export(t.Context(), late, ids[late], io.Discard), CodeOverloaded, "")
	for i := range slow {
		close(slow[i].end)
		if err := <-ends[i]; (ErrorCode(err) == CodeOverloaded) != (i == 1) || i != 1 && err != nil {
			t.Errorf("slow export %d ended with %v", i, err)
		}
	}
	if err := r.Export(t.Context(), late, ids[late], io.Discard); err != nil || len(r.exports.places) != 0 {
		t.Errorf("afterwards: %v, %d places", err, len(r.exports.places))
	}
}

// stuckWriter says when it is written to, and waits.
type stuckWriter struct{ writes, end chan struct{} }

func (w stuckWriter) Write(p []byte) (int, error) {
	close(w.writes)
	<-w.end
	return len(p), nil
}

// Ids of turns that are there while those of their sessions are not.
func TestImportOfTurnsThatOthersHave(t *testing.T) {
	r := newRig(t)
	s := r.create("package a\n")
	r.turn(s.ID, "b", 2)
	bundle := r.export(s.ID)
	other := bytes.ReplaceAll(bundle, []byte(s.ID), []byte(sessionID(newID())))
	lines := strings.SplitAfter(string(other), "\n")
	_, err := r.Import(t.Context(), local, bytes.NewReader(reseal(lines[:len(lines)-2])))
	wantCode(t, err, CodeInvalid, "bundle")
	if err == nil || !strings.Contains(err.Error(), "ids of turns that other sessions have here") {
		t.Error(err)
	}
}
