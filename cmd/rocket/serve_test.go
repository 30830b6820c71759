package main

import (
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"rocket/client"
	"rocket/internal/testaddr"
)

func connect(t *testing.T, url string) *client.Client {
	t.Helper()
	api, err := client.New(url, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	return api
}

// sampled asks for n tokens with noise, so that equal tokens mean equal seeds
// and offsets too. How many are asked for changes none of them.
func sampled(n int) client.TurnRequest {
	return client.TurnRequest{MaxTokens: &n, Temperature: new(0.9), Seed: new(int64(11)), IgnoreEOS: true}
}

// endless is more tokens than come before a test has ended the turn.
const endless = 30_000

// TestKillInMidTurn: after kill -9 the session goes on from its last committed
// token and ends with the tokens of an undisturbed run; a client that followed
// knows exactly which tokens never happened.
func TestKillInMidTurn(t *testing.T) {
	data, addr := dataDirectory(t), testaddr.Free(t)
	const before, after = 300, 200 // tokens that a follower sees before the kill, and the session gets after it
	first := serve(t, "--listen", addr, "--data-dir", data)
	api := connect(t, first.url)
	ctx := testContext(t)
	prompt := "package main"
	s, err := api.Create(ctx, client.CreateRequest{Input: &prompt}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	turn, err := api.StartTurn(ctx, s.ID, sampled(endless), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// seen are the tokens by seq, as a client keeps them.
	type delta struct {
		seq    int64
		tokens []int32
	}
	var seen []delta
	count := 0
	var second *serving
	for e, err := range api.Follow(ctx, s.ID, client.Position{}, client.FollowOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == "turn.delta" {
			seen = append(seen, delta{e.Seq, e.Tokens})
			count += len(e.Tokens)
		}
		if count >= before && second == nil {
			if code := first.end(t, syscall.SIGKILL); code != -1 {
				t.Fatalf("killed server exited with %d", code)
			}
			second = serve(t, "--listen", addr, "--data-dir", data)
		}
		if e.Final() {
			if e.Type != "turn.interrupted" || e.Epoch != 2 || e.LastSeq == nil {
				t.Fatalf("the turn ended with %+v", e)
			}
			seen = slices.DeleteFunc(seen, func(d delta) bool { return d.seq > *e.LastSeq })
			break
		}
	}
	if now, err := api.Get(ctx, s.ID); err != nil || now.State != "idle" || now.Epoch != 2 {
		t.Errorf("after the crash: %+v, %v", now, err)
	}
	interrupted, err := api.Turn(ctx, s.ID, turn.ID)
	if err != nil {
		t.Fatal(err)
	}
	var kept []int32
	for _, d := range seen {
		kept = append(kept, d.tokens...)
	}
	if interrupted.State != "interrupted" || len(interrupted.Tokens) == 0 {
		t.Fatalf("interrupted turn: %s with %d tokens", interrupted.State, len(interrupted.Tokens))
	}
	if !slices.Equal(kept, interrupted.Tokens) {
		t.Errorf("the follower keeps %d tokens, the ledger %d", len(kept), len(interrupted.Tokens))
	}
	rest, err := api.RunTurn(ctx, s.ID, sampled(after), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	undisturbed, err := api.Create(ctx, client.CreateRequest{Input: &prompt}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want, err := api.RunTurn(ctx, undisturbed.ID, sampled(len(interrupted.Tokens)+after), client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := append(interrupted.Tokens, rest.Tokens...); !slices.Equal(got, want.Tokens) {
		t.Errorf("%d tokens with a crash differ from %d without", len(got), len(want.Tokens))
	}
	if code := second.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d after SIGTERM", code)
	}
}

// TestServeEndsInOrder: SIGTERM lets a short turn end and exits with 0; the
// directory is free again and nothing is lost.
func TestServeEndsInOrder(t *testing.T) {
	data := dataDirectory(t)
	one := serve(t, "--listen", "127.0.0.1:0", "--data-dir", data)
	api := connect(t, one.url)
	ctx := testContext(t)
	s, err := api.Create(ctx, client.CreateRequest{Title: "kept"}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	code, _, errOut := rocket(t, "serve", "--listen", "127.0.0.1:0", "--data-dir", data)
	if code != exitFailed || !oneLine(errOut) || !strings.Contains(errOut, "data directory") {
		t.Errorf("a second server on the directory: exit %d, %q", code, errOut)
	}
	code, _, errOut = rocket(t, "serve", "--listen", strings.TrimPrefix(one.url, "http://"), "--data-dir", dataDirectory(t))
	if code != exitFailed || !oneLine(errOut) || !strings.Contains(errOut, "is in use") {
		t.Errorf("a second server on the port: exit %d, %q", code, errOut)
	}
	input := "x"
	turn, err := api.StartTurn(ctx, s.ID, client.TurnRequest{Input: &input, MaxTokens: new(100), IgnoreEOS: true}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if code := one.end(t, os.Interrupt); code != 0 {
		t.Errorf("exit %d: %s", code, one.stderr)
	}
	two := serve(t, "--listen", "127.0.0.1:0", "--data-dir", data)
	api = connect(t, two.url)
	got, err := api.Turn(ctx, s.ID, turn.ID)
	if err != nil || got.State != "completed" || len(got.Tokens) != 100 {
		t.Errorf("turn that ran at shutdown: %+v, %v", got, err)
	}
	if code := two.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d: %s", code, two.stderr)
	}
}

// TestSessionCommands drives a server as a person would.
func TestSessionCommands(t *testing.T) {
	s := serve(t, "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t))
	do := func(args ...string) string {
		t.Helper()
		code, out, errOut := rocket(t, append([]string{"session", "--server", s.url}, args...)...)
		if code != 0 {
			t.Fatalf("rocket session %v: exit %d, %s", args, code, errOut)
		}
		return strings.TrimRight(out, "\n")
	}
	id := do("new", "--input", "func main() {", "--title", "mine", "--label", "team=a")
	text := do("turn", id, "--max-tokens", "20", "--temperature", "0")
	if strings.TrimSpace(text) == "" {
		t.Error("a turn printed nothing")
	}
	children := strings.Fields(do("fork", id, "-n", "2", "--at", "4", "--title", "child"))
	if len(children) != 2 {
		t.Fatalf("fork printed %v", children)
	}
	tree := do("tree", id)
	if strings.Count(tree, "\n") != 2 || !strings.HasPrefix(tree, id) || !strings.Contains(tree, "└─ ") || strings.Count(tree, "@4") != 2 {
		t.Errorf("tree:\n%s", tree)
	}
	if show := do("show", id); !strings.Contains(show, "func main() {") || !strings.Contains(show, "mine") {
		t.Errorf("show:\n%s", show)
	}
	api, err := client.New(s.url, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	const many = 101 // more than a page has
	for range many {
		if _, err := api.RunTurn(t.Context(), children[1], client.TurnRequest{MaxTokens: new(1)}, client.CallOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if show := do("show", children[1]); strings.Count(show, "turn_") != many {
		t.Errorf("%d turns of %d are shown", strings.Count(show, "turn_"), many)
	}
	if ls := do("ls", "--label", "team=a"); !strings.Contains(ls, id) {
		t.Errorf("ls:\n%s", ls)
	}
	do("detach", id)
	if out := do("resume", id); !strings.Contains(out, "restored") {
		t.Errorf("resume: %s", out)
	}
	var page client.SessionPage
	if err := json.Unmarshal([]byte(do("ls", "--json", "--root", id)), &page); err != nil || len(page.Data) != 3 {
		t.Errorf("ls --json: %+v, %v", page, err)
	}
	// The whole log again, up to the end of its one turn.
	if again := do("attach", id, "--all", "--no-follow"); again != text {
		t.Errorf("attach printed %q, the turn %q", again, text)
	}
	if again := do("attach", id, "--all", "--no-follow", "--sse"); again != text {
		t.Errorf("attach --sse printed %q, the turn %q", again, text)
	}
	lineageCommands(t, s.url, do, id, children)
	do("close", children[1])
	do("rm", children[0], children[1])
	code, _, errOut := rocket(t, "session", "--server", s.url, "show", children[0])
	if code != exitFailed || !oneLine(errOut) || !strings.Contains(errOut, "not_found") {
		t.Errorf("show of a deleted session: exit %d, %q", code, errOut)
	}
	for _, path := range []string{"/", "/docs", "/openapi.json", "/healthz", "/readyz", "/metrics", "/version"} {
		resp, err := http.Get(s.url + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	if code := s.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d: %s", code, s.stderr)
	}
}

func TestDoctor(t *testing.T) {
	code, out, errOut := rocket(t, "doctor", "--json", "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t))
	var report struct {
		OK     bool
		Checks []finding
	}
	if err := json.Unmarshal([]byte(out), &report); code != 0 || err != nil || !report.OK || len(report.Checks) != 6 {
		t.Errorf("exit %d, %s, %s", code, out, errOut)
	}
	code, out, _ = rocket(t, "doctor", "--listen", "192.0.2.1:1", "--model", "/no/such/model", "--database-url", "postgres://"+testaddr.Refusing(t)+"/x")
	if code != exitFailed || strings.Count(out, "FAILED") != 3 {
		t.Errorf("exit %d, %s", code, out)
	}
}
