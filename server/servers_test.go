package server

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/coder/websocket"

	"rocket/client"
	"rocket/internal/testaddr"
)

// TestOwnerDrains: sockets through another server close with 1012, event
// streams end, calls are served where they come.
func TestOwnerDrains(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p, here := b.dial(s.ID, ""), b.dial(b.create("x").ID, "")
	p.until("session.created")
	here.send(fmt.Sprintf(`{"type":"subscribe","session_id":%q,"ref":"r"}`, s.ID))
	here.until("reply")
	next, stop := b.sse(s.ID, "")
	defer stop()
	next()
	a.stop()
	for _, p := range []*peer{p, here} {
		if code, _ := p.closed(); code != websocket.StatusServiceRestart {
			t.Errorf("closed with %d", code)
		}
	}
	for _, ok := next(); ok; _, ok = next() { // ends
	}
	if got, err := b.api.RunTurn(b.ctx(), s.ID, greedy(2), client.CallOptions{}); err != nil || got.State != "completed" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := b.api.Get(b.ctx(), s.ID); err != nil || got.Epoch != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestWrongServerDrains: it cuts what it passes on.
func TestWrongServerDrains(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	p := b.dial(s.ID, "")
	next, stop := b.sse(s.ID, "")
	defer stop()
	next()
	waited := make(chan error)
	go func() {
		_, err := b.api.RunTurn(b.ctx(), s.ID, greedy(30000), client.CallOptions{})
		waited <- err
	}()
	p.until("turn.delta")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		b.stop()
	}()
	if code, _ := p.closed(); code != websocket.StatusServiceRestart {
		t.Errorf("closed with %d", code)
	}
	<-stopped
	for _, ok := next(); ok; _, ok = next() {
	}
	if err := <-waited; client.CodeOf(err) != codeDraining {
		t.Errorf("the call that waited: %v", err)
	}
	if _, err := a.api.Cancel(a.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Errorf("the turn: %v", err)
	}
}

// TestDeleteSubtreeOfSeveralServers: they let go of it, then it goes at once.
func TestDeleteSubtreeOfSeveralServers(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{server: Options{RequireKeys: true}})
	k, api := a.key("alice", false)
	elsewhere, err := client.New(b.base, client.Options{APIKey: k.Secret, Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close()
	top := a.createBy(api, "func main() {")
	forked, err := api.Fork(a.ctx(), top.ID, client.ForkRequest{N: new(3)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kids := forked.Sessions
	if got, err := elsewhere.Release(a.ctx(), kids[0].ID, client.ReleaseRequest{}); err != nil || got.Released != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := elsewhere.StartTurn(a.ctx(), kids[0].ID, greedy(30000), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := b.manager.Stats().TurnsOpen; n != 1 {
		t.Fatalf("%d open turns at b", n)
	}
	if err := elsewhere.Prune(a.ctx(), top.ID, client.CallOptions{}); err != nil { // goes to a, which asks b
		t.Fatal(err)
	}
	for _, s := range append(kids, top) {
		for _, c := range []*client.Client{api, elsewhere} {
			if _, err := c.Get(a.ctx(), s.ID); client.CodeOf(err) != "not_found" {
				t.Errorf("%s: %v", s.ID, err)
			}
		}
	}
}

// TestRefusedDeletionCancelsNothing: as long as one of several servers does not
// let go of its part of a subtree, nobody's turns in it end.
func TestRefusedDeletionCancelsNothing(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	top := a.create("func main() {")
	forked, err := a.api.Fork(a.ctx(), top.ID, client.ForkRequest{N: new(3)}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kids := forked.Sessions
	for i, s := range []client.Session{top, kids[0]} { // turns at a and at b
		if _, err := b.api.Release(a.ctx(), s.ID, client.ReleaseRequest{}); err != nil {
			t.Fatal(err)
		}
		if _, err := []*world{a, b}[i].api.StartTurn(a.ctx(), s.ID, greedy(30000), client.CallOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	refusing := a.giveAway(kids[1].ID, "http://"+testaddr.Refusing(t), true)
	still := func(code string, err error) {
		t.Helper()
		if client.CodeOf(err) != code {
			t.Errorf("%v, want %s", err, code)
		}
		if n, m := a.manager.Stats().TurnsOpen, b.manager.Stats().TurnsOpen; n != 1 || m != 1 {
			t.Errorf("%d and %d turns are left", n, m)
		}
	}
	still(codePeerGone, a.api.Prune(a.ctx(), top.ID, client.CallOptions{}))
	refusing.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1`, refusing.id)
	refusing.exec(`UPDATE sessions SET epoch = 9007199254740991 WHERE 'ses_' || id = $1`, kids[1].ID)
	still("session_quarantined", a.api.Prune(a.ctx(), top.ID, client.CallOptions{}))
	refusing.exec(`UPDATE sessions SET epoch = 1 WHERE 'ses_' || id = $1`, kids[1].ID)
	refusing.exec(`UPDATE servers SET lease_until = now() + interval '1 hour' WHERE id = $1`, refusing.id)
	refusing.exec(`UPDATE sessions SET owner_server = NULL WHERE owner_server = $1`, refusing.id)
	if err := a.api.Prune(a.ctx(), top.ID, client.CallOptions{}); err != nil {
		t.Error(err)
	}
}

// TestQuarantinedSession: a session that no server can take over is read, and
// whatever else is asked of it is refused clearly; the server is well.
func TestQuarantinedSession(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("package main")
	f := w.giveAway(s.ID, "http://"+testaddr.Refusing(t), false)
	f.exec(`UPDATE sessions SET epoch = 9007199254740991 WHERE 'ses_' || id = $1`, s.ID)
	f.exec(`UPDATE servers SET lease_until = now() - interval '1 second' WHERE id = $1`, f.id)
	path := pathSessions + "/" + s.ID
	for _, c := range []struct{ method, path, body, accept string }{
		{"POST", "/turns", "{}", ""}, {"PATCH", "", "{}", ""}, {"DELETE", "", "", ""}, {"POST", "/release", "", ""}, {"GET", "/events", "", "text/event-stream"},
	} {
		got := w.do(c.method, path+c.path, c.body, "Accept", c.accept)
		wantProblem(t, got.header, got.body, http.StatusConflict, "session_quarantined", "")
		if got.status != http.StatusConflict {
			t.Errorf("%s %s: %d", c.method, c.path, got.status)
		}
	}
	if _, resp, err := websocket.Dial(w.ctx(), w.base+path+"/stream", nil); err == nil || resp.StatusCode != http.StatusConflict {
		t.Errorf("socket: %v", err)
	}
	p := w.dial(w.create("x").ID, "")
	p.send(fmt.Sprintf(`{"type":"resume","session_id":%q,"ref":"r"}`, s.ID))
	if f, _ := p.until("error"); f["code"] != "session_quarantined" || f["ref"] != "r" {
		t.Errorf("frame: %v", f)
	}
	for _, c := range []string{path, path + "/events", path + "/turns", "/readyz"} {
		w.do("GET", c, "").into(t, http.StatusOK, nil)
	}
	f.exec(`UPDATE sessions SET epoch = 1 WHERE 'ses_' || id = $1`, s.ID)
}

// TestReleaseRepeatedElsewhere: a release that is repeated with its key, as the
// client does whose answer was lost, does nothing to the session's next server.
func TestReleaseRepeatedElsewhere(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	s := a.create("package main")
	path := pathSessions + "/" + s.ID + "/release"
	for _, w := range []*world{a, a, b} { // the second is proxied to b by then
		var got client.ReleaseResult
		if w.do("POST", path, `{"cancel":true}`, "Idempotency-Key", "k").into(t, http.StatusOK, &got); got.Released != 1 {
			t.Errorf("%+v", got)
		}
		if b.manager.Stats().TurnsOpen == 0 {
			if _, err := b.api.StartTurn(b.ctx(), s.ID, greedy(30000), client.CallOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := a.do("POST", path, `{"subtree":true}`, "Idempotency-Key", "k")
	wantProblem(t, got.header, got.body, http.StatusUnprocessableEntity, "idempotency_mismatch", "Idempotency-Key")
	if turn, err := b.api.Cancel(b.ctx(), s.ID, client.CallOptions{}); err != nil || turn.State != "cancelled" {
		t.Errorf("the turn of the next server: %+v, %v", turn, err)
	}
}

// TestServersRoute lists them to an admin.
func TestServersRoute(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	list, err := b.api.Servers(b.ctx())
	if err != nil || len(list) != 2 || list[0].Address != a.base || list[1].Address != b.base || list[0].Self || !list[1].Self || !list[0].Alive {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestWatchSeesAllServers: those that are there at the start, come, and go.
func TestWatchSeesAllServers(t *testing.T) {
	a, b := twoWorlds(t, worldOptions{})
	root := a.create("func main() {")
	dial := func(id string) *peer {
		conn, err := b.api.DialWatch(b.ctx(), id, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.CloseNow() })
		p := &peer{b, conn}
		if _, before := p.until("watch.ready"); len(before) > 0 {
			t.Errorf("before watch.ready: %v", before)
		}
		return p
	}
	all, one := dial(""), dial(root.ID)
	hop, _, err := websocket.Dial(b.ctx(), b.base+pathWatch, &websocket.DialOptions{HTTPHeader: http.Header{hopHeader: {a.manager.ID()}}})
	if err != nil {
		t.Fatal(err)
	}
	defer hop.CloseNow()
	own := &peer{b, hop}
	own.until("watch.ready")
	turn := a.turn(root.ID, 2)
	here := b.create("package main")
	// What happens at two servers comes in any order.
	if f := all.all("turn.completed", "session.created"); f["turn.completed"]["turn_id"] != turn.ID || f["session.created"]["session_id"] != here.ID {
		t.Errorf("%v", f)
	}
	if f, before := one.until("turn.completed"); f["turn_id"] != turn.ID || len(before) != 1 {
		t.Errorf("%v after %v", f, before)
	}
	if f, err := own.read(); err != nil || f["session_id"] != here.ID {
		t.Errorf("what a server shows to another: %v, %v", f, err)
	}
	c := start(t, worldOptions{beside: a})
	all.until("watch.lost") // events of the new one may have been missed
	there := c.create("x")
	if f, _ := all.until("session.created"); f["session_id"] != there.ID {
		t.Errorf("%v", f)
	}
	c.stop()
	all.until("watch.lost")
}
