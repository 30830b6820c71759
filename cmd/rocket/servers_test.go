package main

import (
	"context"
	"encoding/json"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/internal/localpg/pgtest"
	"rocket/internal/testaddr"
)

// reading follows a session in the background, as client programs do.
type reading struct {
	events chan client.Event // closed at the end
	err    error             // after events is closed
}

func follow(ctx context.Context, api *client.Client, id string, sse bool) *reading {
	r := &reading{events: make(chan client.Event, 10_000)}
	go func() {
		defer close(r.events)
		for e, err := range api.Follow(ctx, id, client.Position{}, client.FollowOptions{SSE: sse}) {
			if err != nil {
				r.err = err
				return
			}
			r.events <- e
		}
	}()
	return r
}

// until reads up to an event of a type, and tokens, and appends to all, which
// what is told of an epoch that never happened is cut from.
func (r *reading) until(t *testing.T, all []client.Event, kind string, tokens int) []client.Event {
	t.Helper()
	for e := range r.events {
		if n := len(all); n > 0 && e.Epoch > all[n-1].Epoch {
			all = slices.DeleteFunc(all, func(x client.Event) bool { return x.Seq >= e.Seq })
		}
		if n := len(all); n > 0 && e.Seq != all[n-1].Seq+1 {
			t.Fatalf("seq %d after %d", e.Seq, all[n-1].Seq)
		}
		if all = append(all, e); e.Type == kind && (tokens == 0 || len(tokensOf(all)) >= tokens) {
			return all
		}
	}
	t.Fatalf("the reader ended before %s: %v; last %+v", kind, r.err, all[len(all)-1])
	return nil
}

// tokensOf are the tokens that a reader saw.
func tokensOf(events []client.Event) []int32 {
	var all []int32
	for _, e := range events {
		if e.Type == "turn.delta" {
			all = append(all, e.Tokens...)
		}
	}
	return all
}

// everything reads a whole log in pages.
func everything(ctx context.Context, t *testing.T, api *client.Client, id string) (all []client.Event) {
	t.Helper()
	for next := int64(1); ; {
		page, err := api.Events(ctx, id, client.Position{From: next}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, page.Data...); !page.HasMore {
			return all
		}
		next = page.Next
	}
}

// TestServersThatStop: of two servers on one ledger one stands still, wakes up,
// and is killed, each time in the middle of a turn. Readers at either of them see
// each event once and what the ledger keeps, the line goes on as if nothing had
// been, and the server that woke up has changed nothing.
func TestServersThatStop(t *testing.T) {
	url := pgtest.New(t)
	args := []string{"--database-url", url, "--disk-bytes", "0", "--threads", "1", "--listen"}
	a, b := serve(t, append(args, testaddr.Free(t))...), serve(t, append(args, testaddr.Free(t))...)
	atA, atB := connect(t, a.url), connect(t, b.url)
	ctx := testContext(t)
	if list, err := atB.Servers(ctx); err != nil || len(list) != 2 || list[0].Address != a.url || list[1].Address != b.url {
		t.Fatalf("servers %+v, %v", list, err)
	}
	const n = 75 // tokens that readers see before a server stops, and that the line gets afterwards
	prompt := "package main"
	create := func(api *client.Client) string {
		s, err := api.Create(ctx, client.CreateRequest{Input: &prompt}, client.CallOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s.ID
	}
	id := create(atA)
	all, cancel := context.WithCancel(ctx)
	defer cancel()
	readers := []*reading{follow(all, atA, id, false), follow(all, atA, id, true), follow(all, atB, id, false), follow(all, atB, id, true)}
	seen := make([][]client.Event, len(readers))
	see := func(kind string, tokens int, some ...int) {
		t.Helper()
		for _, i := range some {
			seen[i] = readers[i].until(t, seen[i], kind, tokens)
		}
	}
	if _, err := atB.StartTurn(ctx, id, sampled(endless), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	see("turn.delta", n, 0, 1, 2, 3)
	conn := ledger(ctx, t, url)
	awaitCommit(ctx, t, conn, id)

	// A process that stands still renews no lease. The test does not wait for that to show.
	tell(t, a, syscall.SIGSTOP)
	expire(ctx, t, conn, a.url)
	after, err := atB.Get(ctx, id)
	for err == nil && after.Epoch == 1 { // while that may be what a had answered
		after, err = atB.Get(ctx, id)
	}
	if err != nil || after.State != "idle" || after.Epoch != 2 {
		t.Fatalf("%+v, %v", after, err)
	}
	see("turn.interrupted", 0, 2, 3)
	had := len(tokensOf(seen[2]))
	if had == 0 {
		t.Fatal("nothing is left of the turn")
	}
	if _, err := atB.RunTurn(ctx, id, sampled(n), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	tell(t, a, syscall.SIGCONT) // it goes on with the turn that is not its own any more
	see("turn.completed", 0, 0, 1, 2, 3)
	kept := everything(ctx, t, atA, id)
	for i := range seen {
		if diff := cmp.Diff(kept, seen[i]); diff != "" {
			t.Errorf("reader %d (-ledger +reader): %.2000s", i, diff)
		}
	}
	want, err := atB.RunTurn(ctx, create(atB), sampled(had+n), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(tokensOf(kept), want.Tokens) {
		t.Error("the line is not that of one server")
	}

	// b dies in the middle of a turn that was asked for at a.
	if _, err := atA.StartTurn(ctx, id, sampled(endless), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	see("turn.delta", had+n+n, 0, 1)
	if code := b.end(t, syscall.SIGKILL); code != -1 {
		t.Fatalf("exit %d", code)
	}
	see("turn.interrupted", 0, 0, 1)
	got, err := atA.RunTurn(ctx, id, sampled(3), client.CallOptions{})
	if err != nil || len(got.Tokens) != 3 {
		t.Fatalf("%+v, %v", got, err)
	}
	see("turn.completed", 0, 0, 1)
	kept = everything(ctx, t, atA, id)
	for i := range 2 {
		if diff := cmp.Diff(kept, seen[i]); diff != "" {
			t.Errorf("reader %d after the death (-ledger +reader): %.2000s", i, diff)
		}
	}
	cancel()
	serversCommands(t, a, id)
	if code := a.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d", code)
	}
}

// serversCommands are those about servers.
func serversCommands(t *testing.T, a *serving, id string) {
	t.Helper()
	code, out, errOut := rocket(t, "servers", "--server", a.url)
	if code != 0 || strings.Count(out, "\n") != 2 || !strings.Contains(out, "yes, here  "+a.url) {
		t.Errorf("exit %d, %q, %q", code, out, errOut)
	}
	var list client.ServerList
	code, out, _ = rocket(t, "--json", "servers", "--server", a.url)
	if err := json.Unmarshal([]byte(out), &list); code != 0 || err != nil || len(list.Data) != 1 || !list.Data[0].Self {
		t.Errorf("exit %d, %q, %v", code, out, err)
	}
	if code, out, errOut := rocket(t, "session", "--server", a.url, "release", id); code != 0 || out != "1 sessions released\n" {
		t.Errorf("exit %d, %q, %q", code, out, errOut)
	}
}

func tell(t *testing.T, s *serving, number syscall.Signal) {
	t.Helper()
	if err := s.cmd.Process.Signal(number); err != nil {
		t.Fatal(err)
	}
}

// ledger is a connection to the servers' ledger.
func ledger(ctx context.Context, t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// awaitCommit returns when some of a turn's tokens are in the ledger.
func awaitCommit(ctx context.Context, t *testing.T, conn *pgx.Conn, session string) {
	t.Helper()
	for there := false; !there; {
		err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM token_runs r JOIN turns t ON t.id = r.turn_id
			WHERE 'ses_' || r.session_id = $1 AND t.state = 'running')`, session).Scan(&there)
		if err != nil {
			t.Fatal(err)
		}
	}
}

// expire lets the lease of the server with an address run out.
func expire(ctx context.Context, t *testing.T, conn *pgx.Conn, address string) {
	t.Helper()
	tag, err := conn.Exec(ctx, `UPDATE servers SET lease_until = now() - interval '1 second' WHERE address = $1`, address)
	if err != nil || tag.RowsAffected() != 1 {
		t.Fatalf("%v, %v", tag, err)
	}
}

// TestAdvertise: what others are told is the listen address where they can use it.
func TestAdvertise(t *testing.T) {
	for _, c := range []struct {
		s    serveCmd
		ip   string
		want string
	}{
		{serveCmd{DatabaseURL: "x"}, "127.0.0.1", "http://127.0.0.1:80"},
		{serveCmd{DatabaseURL: "x"}, "10.0.0.5", "http://10.0.0.5:80"},
		{serveCmd{DatabaseURL: "x"}, "fd00::1", "http://[fd00::1]:80"},
		{serveCmd{DatabaseURL: "x", TLSCert: "x"}, "10.0.0.5", "https://10.0.0.5:80"},
		{serveCmd{DatabaseURL: "x"}, "0.0.0.0", ""},
		{serveCmd{DatabaseURL: "x"}, "::", ""},
		{serveCmd{}, "10.0.0.5", ""}, // a private ledger
		{serveCmd{Advertise: "https://rocket.test/"}, "0.0.0.0", "https://rocket.test"},
	} {
		if got := c.s.advertised(&net.TCPAddr{IP: net.ParseIP(c.ip), Port: 80}); got != c.want {
			t.Errorf("%s with %q: %q, want %q", c.ip, c.s.Advertise, got, c.want)
		}
	}
	for _, bad := range []string{"10.0.0.5:80", "ftp://a", "http://", "http://u@a", "http://a?x", "http://a/b", "http://0.0.0.0:80", "http://[::]:80", "%"} {
		if (serveCmd{Advertise: bad}).checkAdvertise() == nil {
			t.Errorf("--advertise %s is accepted", bad)
		}
	}
}
