package server

import (
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"rocket/client"
)

// cutWire stands between the server and its database and can take it away.
type cutWire struct {
	target string
	ln     net.Listener

	mu    sync.Mutex
	cut   bool                  // guarded by mu
	conns map[net.Conn]struct{} // guarded by mu
	all   sync.WaitGroup
}

// wire puts a cutWire before the database at dsn and returns it with the new
// address.
func wire(t *testing.T, dsn string) (*cutWire, string) {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	const socket = ".s.PGSQL.5432"
	c := &cutWire{target: filepath.Join(q.Get("host"), socket), conns: map[net.Conn]struct{}{}}
	dir := t.TempDir()
	if c.ln, err = net.Listen("unix", filepath.Join(dir, socket)); err != nil {
		t.Fatal(err)
	}
	c.all.Go(c.accept)
	t.Cleanup(func() {
		c.ln.Close()
		c.set(true)
		c.all.Wait()
	})
	q.Set("host", dir)
	u.RawQuery = q.Encode()
	return c, u.String()
}

func (c *cutWire) accept() {
	for {
		in, err := c.ln.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("unix", c.target)
		if err != nil {
			in.Close()
			continue
		}
		c.mu.Lock()
		if c.cut {
			in.Close()
			out.Close()
		} else {
			c.conns[in], c.conns[out] = struct{}{}, struct{}{}
			c.all.Go(func() { c.pump(in, out) })
			c.all.Go(func() { c.pump(out, in) })
		}
		c.mu.Unlock()
	}
}

func (c *cutWire) pump(from, to net.Conn) {
	_, _ = io.Copy(to, from) // either end going is the point
	from.Close()
	to.Close()
	c.mu.Lock()
	delete(c.conns, from)
	c.mu.Unlock()
}

// set cuts the wire or mends it.
func (c *cutWire) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if cut {
		for conn := range c.conns {
			conn.Close()
		}
	}
}

// TestLedgerLostInMidTurn: while Postgres is away the server says so, with a
// code; when it is back the turn goes on and has the tokens of an undisturbed
// one.
func TestLedgerLostInMidTurn(t *testing.T) {
	var c *cutWire
	w := start(t, worldOptions{database: func(dsn string) string {
		var through string
		c, through = wire(t, dsn)
		return through
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
	c.set(true)
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
	c.set(false)
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
	for {
		if err := w.api.Ready(w.ctx()); err == nil {
			break
		} else if w.ctx().Err() != nil {
			t.Fatalf("not ready again: %v", err)
		}
	}
}
