package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"rocket/client"
)

// withFiles makes a command begin with a soft and a hard limit of open files.
func withFiles(soft, hard int) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		cmd.Args = append([]string{"sh", "-c", fmt.Sprintf(`ulimit -Sn %d && ulimit -Hn %d && exec "$0" "$@"`, soft, hard), cmd.Path}, cmd.Args[1:]...)
		cmd.Path = "/bin/sh"
	}
}

// limitFiles changes a running process's limit.
func limitFiles(t *testing.T, pid int, soft, hard uint64) {
	t.Helper()
	limit := syscall.Rlimit{Cur: soft, Max: hard}
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&limit)), 0, 0, 0); errno != 0 {
		t.Fatal(errno)
	}
}

// firstFree is the number that a process's next file gets.
func firstFree(t *testing.T, pid int) uint64 {
	t.Helper()
	for n := uint64(0); ; n++ {
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", pid, n)); errors.Is(err, os.ErrNotExist) {
			return n
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestOutOfDescriptors: the server takes what the hard limit gives, leaves
// some for its ledger, and outlives that there is none.
func TestOutOfDescriptors(t *testing.T) {
	const hard = 200
	server := serveWith(t, withFiles(64, hard), "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t))
	pid := server.cmd.Process.Pid
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(limits), "Max open files")
	if now, err := strconv.Atoi(strings.Fields(after)[0]); err != nil || now < hard-1 { // the runtime may leave one
		t.Errorf("the soft limit was not raised: %.60s", after)
	}
	api := connect(t, server.url)
	ctx := testContext(t)
	prompt := "package main"
	s, err := api.Create(ctx, client.CreateRequest{Input: &prompt}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	works := func(when string) {
		t.Helper()
		if turn, err := api.RunTurn(ctx, s.ID, sampled(5), client.CallOptions{}); err != nil || len(turn.Tokens) != 5 {
			t.Errorf("a turn %s: %v", when, err)
		}
	}
	works("at first")
	connection := func() net.Conn {
		conn, err := net.Dial("tcp", strings.TrimPrefix(server.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(patience))
		return conn
	}
	get := func(conn net.Conn) error {
		_, _ = io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") // reading says it
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s", resp.Status)
		}
		return err
	}

	// No descriptor at all: the server is told so from outside. A silent
	// connection gives way to each new one.
	for range 10 {
		connection()
	}
	if err := get(connection()); err != nil { // those before are accepted by now
		t.Fatal(err)
	}
	limitFiles(t, pid, firstFree(t, pid), hard)
	for i := range 3 {
		if err := get(connection()); err != nil {
			t.Fatalf("call %d without descriptors: %v", i, err)
		}
	}
	limitFiles(t, pid, hard, hard)
	works("with descriptors again")

	for range 2 * hard { // more than there may be
		connection()
	}
	works("beside silent connections")
	if code := server.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d", code)
	}
	if n := strings.Count(server.stderr.String(), "no descriptor is left"); n != 1 {
		t.Errorf("the log says %d times that descriptors ran out", n)
	}
}
