package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"rocket/client"
	"rocket/sessions"
)

// Codes of errors that are no server's and no ledger's, as --json tells them.
const (
	codeUsage       = "usage"       // the command line is wrong: exit code 2
	codeInterrupted = "interrupted" // by a signal
	codeUnreachable = "unreachable" // there was no answer to a call
	codeTurn        = "turn_"       // before what a turn ended as, if it has no error: turn_cancelled, turn_interrupted
	codeFailed      = "failed"      // anything else
)

// usageError makes the exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errReported is an error that what is on standard output tells already.
type errReported struct{ error }

func (e errReported) Unwrap() error { return e.error }

// outputError is a write to standard output that failed.
type outputError struct{ cause error }

func (e outputError) Error() string { return "write: " + e.cause.Error() }

// Unwrap gives what the write said.
func (e outputError) Unwrap() error { return e.cause }

// codedError has a code for programs.
type codedError struct {
	error
	code string
}

func (e codedError) Unwrap() error { return e.error }

// failure is an error on standard output with --json.
type failure struct {
	Error string `json:"error"`           // as on standard error
	Code  string `json:"code"`            // the server's, or one of the above
	Field string `json:"field,omitempty"` // of the request, or the flag with its dashes, where one is to blame
}

// fail prints an error, if there is one, and gives the exit code: one line on
// standard error, with --json an object on standard output too.
func (c *console) fail(err error) (code int) {
	if err == nil {
		return 0
	}
	left, isLeft := errors.AsType[*leftError](err)
	if !isLeft && errors.Is(err, context.Canceled) && c.ctx.Err() != nil {
		left, isLeft = &leftError{text: codeInterrupted, exit: exitOf(c.ctx)}, true
		if _, said := errors.AsType[errReported](err); said {
			err = errReported{left}
		} else {
			err = left
		}
	}
	code = exitFailed
	if _, ok := errors.AsType[usageError](err); ok {
		code = exitUsage
	} else if isLeft {
		code = left.exit
	}
	_, said := errors.AsType[errReported](err)
	_, closed := errors.AsType[outputError](err)
	if c.json && !said && !closed {
		_ = c.print(describe(err)) // standard output is gone; the exit code remains
	}
	fmt.Fprintf(c.err, "rocket: %v\n", err)
	return code
}

// describe says what --json tells of an error. Of several that are joined it
// is the first that has a code.
func describe(err error) failure {
	f := failure{Error: err.Error(), Code: codeFailed}
	if _, ok := errors.AsType[usageError](err); ok {
		f.Code, f.Field = codeUsage, flagOf(f.Error)
		return f
	}
	if _, ok := errors.AsType[*leftError](err); ok {
		f.Code = codeInterrupted
	} else if e, ok := errors.AsType[codedError](err); ok {
		f.Code = e.code
	} else if e, ok := errors.AsType[*client.Error](err); ok {
		if e.Code != "" {
			f.Code = e.Code
		}
		f.Field = e.Field
	} else if e, ok := errors.AsType[*sessions.Error](err); ok {
		f.Code, f.Field = string(e.Code), e.Field
	} else if _, ok := errors.AsType[*url.Error](err); ok {
		f.Code = codeUnreachable
	}
	return f
}

var flagFirst = regexp.MustCompile(`^(--[a-z][a-z0-9-]*)(:| [^-]|$)`)

// flagOf is the flag that a usage error begins with, "" for none or several.
func flagOf(text string) string {
	m := flagFirst.FindStringSubmatch(text)
	if m == nil || strings.HasPrefix(text[len(m[1]):], " and --") {
		return ""
	}
	return m[1]
}

// asksForJSON looks for --json among arguments that could not be parsed.
func asksForJSON(args []string) bool {
	for _, a := range args {
		if a == "--" {
			break
		}
		name, value, given := strings.Cut(a, "=")
		if name != "--json" {
			continue
		}
		on, err := strconv.ParseBool(value)
		return !given || err != nil || on
	}
	return false
}
