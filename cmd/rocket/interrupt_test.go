package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"rocket/client"
)

// talking is a command that prints, and that a test ends before it ends.
type talking struct {
	cmd    *exec.Cmd
	out    io.ReadCloser
	stderr bytes.Buffer
}

// talk starts a command and returns when it has printed something.
func talk(t *testing.T, args ...string) *talking {
	t.Helper()
	k := &talking{cmd: command(t, args...)}
	k.cmd.Stderr = &k.stderr
	var err error
	if k.out, err = k.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := k.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = k.cmd.Process.Kill() })
	t.Cleanup(func() { late.Stop() })
	if _, err := k.out.Read(make([]byte, 1)); err != nil {
		_ = k.cmd.Wait()
		t.Fatalf("%v printed nothing: %v, %s", args, err, &k.stderr)
	}
	return k
}

// left ends it with a signal, or by closing its standard output with none, and
// returns of which signal it died, or else its exit code, and what else it printed.
func (k *talking) left(t *testing.T, s os.Signal) (died syscall.Signal, code int, out string) {
	t.Helper()
	if s == nil {
		k.out.Close()
	} else {
		if err := k.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(k.out)
		if err != nil {
			t.Fatal(err)
		}
		out = string(text)
	}
	_ = k.cmd.Wait() // the state says it
	status := k.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !status.Signaled() {
		return 0, status.ExitStatus(), out
	}
	return status.Signal(), 0, out
}

// TestLeavingATurn: the command that started a turn cancels it when it is
// interrupted, or when nobody takes what it prints; one that only watches does
// not. Both say so.
func TestLeavingATurn(t *testing.T) {
	s := serve(t, "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t))
	api := connect(t, s.url)
	prompt := "package main"
	session, err := api.Create(testContext(t), client.CreateRequest{Input: &prompt}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := leaving{s, api, session.ID, []string{"session", "turn", session.ID, "--server", s.url, "--max-tokens", "4000", "--temperature", "0"}}
	t.Run("own", l.own)
	t.Run("watched", l.watched)
	t.Run("twice", l.twice)
	t.Run("gone", l.gone)
}

// leaving is a session whose turns are left.
type leaving struct {
	server *serving
	api    *client.Client
	id     string
	long   []string // the command for a turn that takes long
}

// cancel ends the turn that must be open.
func (l leaving) cancel(t *testing.T) {
	t.Helper()
	if turn, err := l.api.Cancel(testContext(t), l.id, client.CallOptions{}); err != nil || turn.State != "cancelled" {
		t.Errorf("the turn went on: %s, %v", turn.State, err)
	}
}

// own: a turn ends with the command that started it.
func (l leaving) own(t *testing.T) {
	ctx := testContext(t)
	newest := func() client.Turn {
		t.Helper()
		page, err := l.api.Turns(ctx, l.id, 1, "")
		if err != nil || len(page.Data) != 1 {
			t.Fatalf("%+v, %v", page, err)
		}
		return page.Data[0]
	}
	for _, c := range []struct {
		name   string
		signal os.Signal
		died   syscall.Signal
		json   bool
	}{
		{"Ctrl-C", os.Interrupt, syscall.SIGINT, false},
		{"Ctrl-C with --json", os.Interrupt, syscall.SIGINT, true},
		{"SIGTERM", syscall.SIGTERM, syscall.SIGTERM, false},
		{"closed pipe", nil, syscall.SIGPIPE, false},
		{"closed pipe with --json", nil, syscall.SIGPIPE, true},
	} {
		args := l.long
		if c.json {
			args = append([]string{"--json"}, l.long...)
		}
		k := talk(t, args...)
		died, code, out := k.left(t, c.signal)
		turn := newest()
		if died != c.died || turn.State != "cancelled" || !strings.Contains(k.stderr.String(), turn.ID+" was cancelled") {
			t.Errorf("%s: died of %v, exit %d, the turn is %s, %q", c.name, died, code, turn.State, &k.stderr)
		}
		if c.json && c.signal != nil {
			lines := strings.Split(strings.TrimSpace(out), "\n")
			var f failure
			if err := json.Unmarshal([]byte(lines[len(lines)-1]), &f); err != nil || f.Code != codeInterrupted || !strings.Contains(f.Error, turn.ID) {
				t.Errorf("%s: printed %q", c.name, lines[len(lines)-1])
			}
		}
	}
}

// watched: a turn goes on when those who watch it leave.
func (l leaving) watched(t *testing.T) {
	if _, err := l.api.StartTurn(testContext(t), l.id, client.TurnRequest{MaxTokens: new(3000), IgnoreEOS: true}, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		signal os.Signal
		more   []string
		died   syscall.Signal
	}{
		{"Ctrl-C", os.Interrupt, []string{"--all"}, 0},
		{"Ctrl-C, one turn", os.Interrupt, []string{"--no-follow"}, syscall.SIGINT},
		{"closed pipe", nil, []string{"--all", "--sse"}, syscall.SIGPIPE},
	} {
		k := talk(t, append([]string{"session", "attach", l.id, "--server", l.server.url}, c.more...)...)
		if died, code, _ := k.left(t, c.signal); died != c.died || code != 0 || !strings.Contains(k.stderr.String(), "goes on") || !strings.Contains(k.stderr.String(), "session cancel "+l.id) {
			t.Errorf("attach, %s: died of %v, exit %d, %q", c.name, died, code, &k.stderr)
		}
	}
	l.cancel(t)
}

// twice: while the server does not answer, a second signal ends the wait.
func (l leaving) twice(t *testing.T) {
	waiting := command(t, l.long...)
	out, err := waiting.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errOut, err := waiting.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := waiting.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = waiting.Process.Kill() })
	defer late.Stop()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	signals := func(p *os.Process, s os.Signal) {
		t.Helper()
		if err := p.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	signals(l.server.cmd.Process, syscall.SIGSTOP)
	signals(waiting.Process, os.Interrupt)
	said := bufio.NewReader(errOut)
	for line := ""; !strings.Contains(line, "cancelling "); {
		if line, err = said.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	signals(waiting.Process, os.Interrupt)
	rest, err := io.ReadAll(said)
	if err != nil {
		t.Fatal(err)
	}
	_ = waiting.Wait() // the state says it
	if status := waiting.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGINT || len(rest) > 0 {
		t.Errorf("twice Ctrl-C: %v, %q", waiting.ProcessState, rest)
	}
	signals(l.server.cmd.Process, syscall.SIGCONT)
	l.cancel(t)
}

// gone: with a server that is gone the command says what it does not know.
func (l leaving) gone(t *testing.T) {
	k := talk(t, l.long...)
	if err := l.server.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if died, code, _ := k.left(t, os.Interrupt); died != syscall.SIGINT || !strings.Contains(k.stderr.String(), "could not be cancelled") {
		t.Errorf("without a server: died of %v, exit %d, %q", died, code, &k.stderr)
	}
}
