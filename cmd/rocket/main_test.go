package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"rocket/internal/testaddr"
)

// asRocket makes the test binary behave as the command, so that tests kill
// real processes without building another one.
const asRocket = "ROCKET_TEST_AS_COMMAND"

// patience bounds waits for what must happen.
const patience = time.Minute

func TestMain(m *testing.M) {
	if os.Getenv(asRocket) != "" {
		os.Unsetenv(asRocket)
		main()
		return
	}
	os.Exit(m.Run())
}

// command is rocket with args, with nothing of this process's environment that
// could configure it.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "ROCKET_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, asRocket+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// rocket runs a command to its end.
func rocket(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := command(t, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// serving is a `rocket serve` process.
type serving struct {
	cmd    *exec.Cmd
	url    string
	stderr *bytes.Buffer
}

// serve starts a server and returns when it has said where it is.
func serve(t *testing.T, args ...string) *serving {
	t.Helper()
	return serveWith(t, func(*exec.Cmd) {}, args...)
}

// serveWith is serve of a command that was changed.
func serveWith(t *testing.T, change func(*exec.Cmd), args ...string) *serving {
	t.Helper()
	cmd := command(t, append([]string{"serve", "--json", "--threads", "2", "--page-bytes", "64MiB", "--snapshot-bytes", "64MiB", "--host-bytes", "64MiB"}, args...)...)
	change(cmd)
	s := &serving{cmd: cmd, stderr: &bytes.Buffer{}}
	cmd.Stderr = s.stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // ended already, in a good run
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("server: %s", s.stderr)
		}
	})
	var hello struct{ URL, Model string }
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	if err := json.NewDecoder(out).Decode(&hello); err != nil {
		_ = cmd.Wait()
		t.Fatalf("serve: %v: %s", err, s.stderr)
	}
	s.url = hello.URL
	return s
}

// end sends a signal and returns the exit code.
func (s *serving) end(t *testing.T, signal os.Signal) int {
	t.Helper()
	if err := s.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { _ = s.cmd.Process.Kill() })
	defer late.Stop()
	_ = s.cmd.Wait() // the exit code says it
	return s.cmd.ProcessState.ExitCode()
}

// dataDirectory is a data directory that the user who runs Postgres in place
// of root can reach. A postmaster that a failed test leaves is stopped.
func dataDirectory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "rocket-cmd-test-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	t.Cleanup(func() {
		if text, err := os.ReadFile(filepath.Join(data, "pg", "postmaster.pid")); err == nil {
			if pid, err := strconv.Atoi(strings.SplitN(string(text), "\n", 2)[0]); err == nil {
				_ = syscall.Kill(pid, syscall.SIGQUIT)
			}
		}
		os.RemoveAll(dir)
	})
	return data
}

// testContext bounds all that a test waits for.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	t.Cleanup(cancel)
	return ctx
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"serve", "--help"}, {"session", "--help"}, {"session", "fork", "--help"}, {"key", "--help"}, {"key", "create", "--help"}, {"generate", "--help"}, {"model", "--help"}, {"doctor", "--help"}, {"version", "--help"}} {
		code, out, errOut := rocket(t, args...)
		if code != 0 || !strings.Contains(out, "Usage: rocket") || errOut != "" {
			t.Errorf("rocket %v: exit %d, %q, %q", args, code, out, errOut)
		}
	}
	_, out, _ := rocket(t, "--help")
	for _, later := range []string{"static-fire", "quantize"} {
		if strings.Contains(out, "\n  "+later) {
			t.Errorf("--help shows %s, which does not work yet", later)
		}
	}
}

func TestWrongUse(t *testing.T) {
	for _, args := range [][]string{
		{"launch"}, {"--verbose"}, {"serve", "--class", "int3"}, {"serve", "--page-bytes", "much"}, {"serve", "--page-bytes", "-5"}, {"serve", "--log-format", "xml"},
		{"serve", "--threads", "x"}, {"serve", "--events-retention=-1h"}, {"serve", "--auth", "maybe"}, {"serve", "--advertise", "10.0.0.1:8080"}, {"serve", "--advertise", "http://0.0.0.0:8080"}, {"serve", "--advertise", "http://a/b"}, {"serve", "--listen", "0.0.0.0:0", "--auth", "off"}, {"serve", "--tls-cert", "x"}, {"key"}, {"key", "revoke"}, {"session"}, {"session", "show"}, {"session", "fork", "id", "--at", "x"}, {"session", "ls", "--server", "nowhere"},
		{"session", "turn", "id", "--chat"}, {"generate"}, {"generate", "--prompt", "x", "--max-tokens", "0"}, {"generate", "--prompt", "x", "--max-tokens", "-1"},
		{"generate", "--prompt", "x", "--temperature=-1"}, {"generate", "--prompt", "x", "--top-p", "2"}, {"generate", "--prompt", ""}, {"generate", "--prompt", "x", "--threads", "-1"},
	} {
		code, out, errOut := rocket(t, args...)
		if code != exitUsage || out != "" || !oneLine(errOut) {
			t.Errorf("rocket %v: exit %d, %q, %q", args, code, out, errOut)
		}
	}
}

func oneLine(s string) bool {
	return strings.HasPrefix(s, "rocket: ") && strings.Count(s, "\n") == 1 && strings.HasSuffix(s, "\n")
}

// TestFailures: what goes wrong is said in one line that names it, exit code 1.
func TestFailures(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty, broken := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(broken, "config.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	nowhere := testaddr.Refusing(t)
	for _, c := range []struct {
		name  string
		args  []string
		names string // must be in the message
	}{
		{"port in use", []string{"serve", "--listen", taken.Addr().String()}, "is in use"},
		{"no certificate", []string{"serve", "--tls-cert", "/nowhere/cert", "--tls-key", file}, "/nowhere/cert"},
		{"a certificate that is none", []string{"serve", "--tls-cert", file, "--tls-key", file}, file},
		{"no certificate of peers", []string{"serve", "--peer-ca", "/nowhere/ca"}, "/nowhere/ca"},
		{"certificates of peers that are none", []string{"serve", "--peer-ca", file}, file},
		{"no port", []string{"serve", "--listen", "127.0.0.1"}, "127.0.0.1"},
		{"no such model", []string{"generate", "--model", "/no/such/model", "--prompt", "x"}, "/no/such/model"},
		{"model that is a file", []string{"generate", "--model", file, "--prompt", "x"}, file},
		{"model without config", []string{"generate", "--model", empty, "--prompt", "x"}, empty},
		{"model with a broken config", []string{"generate", "--model", broken, "--prompt", "x"}, broken},
		{"no such model to serve", []string{"serve", "--model", "/no/such/model", "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t)}, "/no/such/model"},
		{"no such model to inspect", []string{"model", "inspect", "/no/such/model"}, "/no/such/model"},
		{"no database", []string{"serve", "--listen", "127.0.0.1:0", "--database-url", "postgres://" + nowhere + "/x?sslmode=disable"}, "ledger"},
		{"database url that is none", []string{"serve", "--listen", "127.0.0.1:0", "--database-url", "nonsense"}, "database url"},
		{"no server", []string{"session", "ls", "--server", "http://" + nowhere}, nowhere},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errOut := rocket(t, c.args...)
			if code != exitFailed || !oneLine(errOut) || !strings.Contains(errOut, c.names) {
				t.Errorf("exit %d, %q", code, errOut)
			}
			if out != "" {
				t.Errorf("standard output has %q", out)
			}
		})
	}
	code, out, _ := rocket(t, "--json", "model", "inspect", "/no/such/model")
	var e struct{ Error string }
	if err := json.Unmarshal([]byte(out), &e); code != exitFailed || err != nil || !strings.Contains(e.Error, "/no/such/model") {
		t.Errorf("with --json: exit %d, %q", code, out)
	}
}

// TestEnvironment: flags win over variables, variables over defaults.
func TestEnvironment(t *testing.T) {
	for _, c := range []struct {
		args  []string
		names string
	}{
		{[]string{"generate", "--prompt", "x"}, "/from/env"},
		{[]string{"generate", "--prompt", "x", "--model", "/from/flag"}, "/from/flag"},
		{[]string{"session", "ls"}, "env.invalid"},
		{[]string{"session", "ls", "--server", "http://flag.invalid"}, "flag.invalid"},
	} {
		cmd := command(t, c.args...)
		cmd.Env = append(cmd.Env, "ROCKET_MODEL=/from/env", "ROCKET_SERVER=http://env.invalid")
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != exitFailed || !strings.Contains(string(out), c.names) {
			t.Errorf("rocket %v: exit %d, %s", c.args, code, out)
		}
	}
}

func TestVersion(t *testing.T) {
	var v struct{ Version, Go, OS string }
	code, out, _ := rocket(t, "version", "--json")
	if err := json.Unmarshal([]byte(out), &v); code != 0 || err != nil || v.Version == "" || v.Go == "" || v.OS == "" {
		t.Errorf("exit %d, %q", code, out)
	}
	if code, out, _ := rocket(t, "version"); code != 0 || !strings.HasPrefix(out, "rocket ") || strings.Count(out, "\n") != 1 {
		t.Errorf("exit %d, %q", code, out)
	}
}

func TestModelInspect(t *testing.T) {
	var m inspected
	code, out, errOut := rocket(t, "model", "inspect", "--json")
	if err := json.Unmarshal([]byte(out), &m); code != 0 || err != nil {
		t.Fatalf("exit %d, %q, %q", code, out, errOut)
	}
	if m.Name != "nano" || m.Family != "glm5_next" || m.Digest == "" || m.Parameters < 1e6 || m.Classes["bf16"].PageBytes == 0 {
		t.Errorf("%+v", m)
	}
}

func TestGenerate(t *testing.T) {
	args := []string{"generate", "--threads", "2", "--page-bytes", "64MiB", "--snapshot-bytes", "64MiB", "--prompt", "func main() {", "--max-tokens", "40"}
	code, text, errOut := rocket(t, args...)
	if code != 0 || len(strings.TrimSpace(text)) == 0 || errOut != "" {
		t.Fatalf("exit %d, %q, %q", code, text, errOut)
	}
	run := func(more ...string) generated {
		t.Helper()
		code, out, errOut := rocket(t, append(append([]string{"--json"}, args...), more...)...)
		var g generated
		if err := json.Unmarshal([]byte(out), &g); code != 0 || err != nil {
			t.Fatalf("exit %d, %q, %q", code, out, errOut)
		}
		return g
	}
	g := run()
	if g.Text+"\n" != text || len(g.Tokens) != g.CompletionTokens || g.CompletionTokens > 40 || g.FinishReason == "" || g.Model != "nano" {
		t.Errorf("%+v; as text %q", g, text)
	}
	hot := []string{"--temperature", "1", "--seed", "7"}
	a, b := run(hot...), run(hot...)
	if a.Text != b.Text || a.Seed != 7 {
		t.Errorf("one seed gave %q and %q", a.Text, b.Text)
	}
	if c := run("--temperature", "1", "--seed", "8"); c.Text == a.Text {
		t.Errorf("two seeds gave %q", c.Text)
	}
	// The text ends before a stop string that it would have had.
	stop := strings.Fields(g.Text)[1]
	if s := run("--stop", stop); s.FinishReason != "stop_string" || s.Text != g.Text[:strings.Index(g.Text, stop)] {
		t.Errorf("stop %q: %+v", stop, s)
	}
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "17": 17, "17B": 17, "1KiB": 1024, "3 MiB": 3 << 20, "2GiB": 2 << 30, "1TiB": 1 << 40, "-1": -1, "1.5GiB": -1, "GiB": -1, "": -1, "1GB": -1, "9999999999TiB": -1} {
		var b byteSize
		err := b.UnmarshalText([]byte(text))
		if want < 0 && err == nil || want >= 0 && (err != nil || int64(b) != want) {
			t.Errorf("%q: %d, %v", text, b, err)
		}
	}
}

// TestServeRefusesBudgetsByFlag: what makes no sense is told with the flag that said it.
func TestServeRefusesBudgetsByFlag(t *testing.T) {
	if testing.Short() {
		t.Skip("five starts of a process to see five lines")
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
		code int
	}{
		{[]string{"--page-bytes", "0"}, "--page-bytes", 2},
		{[]string{"--page-bytes", "1"}, "--page-bytes", 1},
		{[]string{"--snapshot-bytes", "1KiB"}, "--snapshot-bytes", 1},
		{[]string{"--disk-bytes", "1"}, "--disk-bytes", 1},
		{[]string{"--disk-dir", file}, "--disk-dir", 1},
	} {
		args := append([]string{"serve", "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t)}, c.args...)
		if code, _, errOut := rocket(t, args...); code != c.code || !strings.Contains(errOut, c.want) {
			t.Errorf("%v: exit %d, %q; want %d and %s", c.args, code, errOut, c.code, c.want)
		}
	}
}
