package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"rocket/client"
	"rocket/internal/testaddr"
	"rocket/sessions"
)

// here runs a command in this process, which suits what fails early.
func here(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	code = run(&console{ctx: t.Context(), out: &out, err: &errOut}, args)
	return code, out.String(), errOut.String()
}

// TestErrorsAsJSON: with --json, wherever it stands, every error is one object
// with a code, and the flag that is to blame; people read the same line as
// without it.
func TestErrorsAsJSON(t *testing.T) {
	nowhere := "http://" + testaddr.Refusing(t)
	for _, c := range []struct {
		args  []string
		exit  int
		code  string
		field string
	}{
		{[]string{"launch"}, exitUsage, codeUsage, ""},
		{[]string{"session", "show"}, exitUsage, codeUsage, ""},
		{[]string{"session", "fork", "id", "--at", "x"}, exitUsage, codeUsage, "--at"},
		{[]string{"serve", "--page-bytes", "much"}, exitUsage, codeUsage, "--page-bytes"},
		{[]string{"serve", "--class", "int3"}, exitUsage, codeUsage, "--class"},
		{[]string{"session", "export", "id"}, exitUsage, codeUsage, "--out"},
		{[]string{"session", "turn", "id", "--chat"}, exitUsage, codeUsage, "--chat"},
		{[]string{"generate", "--prompt", "x", "--top-p", "2"}, exitUsage, codeUsage, "--top-p"},
		{[]string{"session", "ls", "--server", "nowhere"}, exitUsage, codeUsage, ""},
		{[]string{"session", "ls", "--server", nowhere}, exitFailed, codeUnreachable, ""},
		{[]string{"session", "import", filepath.Join(t.TempDir(), "none")}, exitFailed, codeFailed, ""},
	} {
		for _, args := range [][]string{append([]string{"--json"}, c.args...), append(c.args[:len(c.args):len(c.args)], "--json")} {
			code, out, errOut := here(t, args...)
			var f failure
			err := json.Unmarshal([]byte(out), &f)
			if code != c.exit || err != nil || strings.Count(out, "\n") != 1 || f.Code != c.code || f.Field != c.field || errOut != "rocket: "+f.Error+"\n" {
				t.Errorf("rocket %v: exit %d, %q, %q; want %q of field %q", args, code, out, errOut, c.code, c.field)
			}
		}
	}
	for _, args := range [][]string{{"launch", "--", "--json"}, {"launch", "--json=false"}, {"launch"}} {
		if code, out, _ := here(t, args...); code != exitUsage || out != "" {
			t.Errorf("rocket %v: exit %d, %q", args, code, out)
		}
	}
}

func TestDescribe(t *testing.T) {
	for _, c := range []struct {
		err         error
		code, field string
	}{
		{&client.Error{Status: 422, Code: "invalid", Detail: "too long", Field: "title"}, "invalid", "title"},
		{&client.Error{Status: 502}, codeFailed, ""},
		{errors.Join(fmt.Errorf("ses_1: %w", &client.Error{Status: 404, Code: "not_found"})), "not_found", ""},
		{plain(&sessions.Error{Code: sessions.CodeInvalid, Field: "tenant", Message: "is empty"}), "invalid", "tenant"},
		{turnError(client.Event{Type: "turn.cancelled"}), "turn_cancelled", ""},
		{turnError(client.Event{Type: "turn.failed", Error: &client.TurnError{Code: "device_full"}}), "device_full", ""},
		{&url.Error{Op: "Get", Err: errors.New("refused")}, codeUnreachable, ""},
		{usage("--page-bytes, --snapshot-bytes: want more than 0"), codeUsage, ""},
		{usage("--tls-cert and --tls-key: want both or none"), codeUsage, ""},
		{usage("--auth off: without API keys"), codeUsage, "--auth"},
		{&leftError{text: "x", cause: &client.Error{Code: "y"}}, codeInterrupted, ""},
	} {
		if f := describe(c.err); f.Code != c.code || f.Field != c.field || f.Error != c.err.Error() {
			t.Errorf("%v: %+v, want %q of field %q", c.err, f, c.code, c.field)
		}
	}
}

// TestValuesThatWouldBeDropped: a number that the command would cut, or take
// for none, is refused with its flag.
func TestValuesThatWouldBeDropped(t *testing.T) {
	for _, args := range [][]string{
		{"session", "new", "--ttl", "0"}, {"session", "new", "--ttl=-5s"}, {"session", "new", "--ttl", "500ms"}, {"session", "new", "--ttl", "1.5s"},
		{"session", "ls", "--limit", "0"}, {"session", "tree", "id", "--depth=-2"}, {"session", "ancestors", "id", "--depth=-2"},
		{"session", "attach", "id", "--from", "0"}, {"session", "attach", "id", "--from=-3"}, {"session", "attach", "id", "--from", "3", "--all"},
		{"serve", "--events-retention", "1ns", "--listen", "none"}, {"serve", "--events-retention=-1h", "--listen", "none"}, {"serve", "--drain-timeout=-1s", "--listen", "none"},
		{"generate", "--temperature", "NaN", "--prompt", "x"}, {"generate", "--top-p", "NaN", "--prompt", "x"},
		{"replay", "--check=-1", "--format", "c32"}, {"soak", "--within=0s", "--servers", "0"},
	} {
		flag := ""
		for _, a := range args {
			if strings.HasPrefix(a, "--") {
				flag, _, _ = strings.Cut(a, "=")
				break
			}
		}
		if code, out, errOut := here(t, args...); code != exitUsage || out != "" || !oneLine(errOut) || !strings.Contains(errOut, flag) {
			t.Errorf("rocket %v: exit %d, %q, %q", args, code, out, errOut)
		}
	}
	// What is a whole number of seconds comes as far as the server.
	if code, _, errOut := here(t, "session", "new", "--ttl", "1m30s", "--server", "http://"+testaddr.Refusing(t)); code != exitFailed {
		t.Errorf("exit %d, %q", code, errOut)
	}
}
