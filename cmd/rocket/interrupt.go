package main

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// exitSignal is what shells add to the number of the signal that a command
// died of. run's codes from here on mean such a death.
const exitSignal = 128

// deathPatience is how long the death of a signal may take that this process
// ignores, because whoever started it said so.
const deathPatience = time.Second

// interruption is why a context ended.
type interruption struct{ signal syscall.Signal }

func (i interruption) Error() string { return codeInterrupted + " (" + i.signal.String() + ")" }

// Is makes it the end of a context, whoever asks for the cause.
func (i interruption) Is(target error) bool { return target == context.Canceled }

// signalled is a context that the first SIGINT or SIGTERM ends, so that things
// end in order; a second one ends the process at once.
func signalled(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	got := make(chan os.Signal, 1)
	signal.Notify(got, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case s := <-got:
			signal.Stop(got)
			number, _ := s.(syscall.Signal) // all are, where this builds
			cancel(interruption{number})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(nil)
	}
}

// exitOf is the exit code of a command that the end of ctx ended.
func exitOf(ctx context.Context) int {
	if i, ok := context.Cause(ctx).(interruption); ok {
		return exitSignal + int(i.signal)
	}
	return exitFailed
}

// interrupted is that c.ctx ended what is not done.
func (c *console) interrupted() error {
	return cmp.Or(context.Cause(c.ctx), context.Canceled)
}

// exit ends the process: beyond exitSignal of that signal, so that a shell
// which runs a script ends too. It is called when no signal is caught any more.
func exit(code int) {
	switch s := syscall.Signal(code - exitSignal); {
	case s == syscall.SIGPIPE:
		// As any write to a closed pipe ends a process. The runtime takes the
		// signal for its own if it comes from elsewhere.
		_, _ = os.Stdout.WriteString("\n")
	case s > 0:
		if syscall.Kill(syscall.Getpid(), s) == nil {
			time.Sleep(deathPatience)
		}
	}
	os.Exit(code)
}

// catchPipe makes writes to a closed standard output errors, until release: a
// command that has something to end at the server must not die of the signal.
func catchPipe() (release func()) {
	ignored := make(chan os.Signal, 1)
	signal.Notify(ignored, syscall.SIGPIPE)
	return func() { signal.Stop(ignored) }
}

// leftError is that a command was ended before what it follows: by a signal,
// or because nobody takes what it prints.
type leftError struct {
	text  string
	exit  int
	cause error // nil: nobody needs it
}

func (e *leftError) Error() string { return e.text }

// Unwrap gives what ended it.
func (e *leftError) Unwrap() error { return e.cause }

// left says why a command ends before what it follows, if err came from this
// side: with what goes on at the server nothing is wrong. "": it did not.
func (c *console) left(err error) (why string, exit int) {
	out, failed := errors.AsType[outputError](err)
	switch {
	case err == nil:
		return "", 0
	case c.ctx.Err() != nil:
		return codeInterrupted, exitOf(c.ctx)
	case failed && errors.Is(out, syscall.EPIPE):
		return "standard output is closed", exitSignal + int(syscall.SIGPIPE)
	case failed:
		return "standard output failed (" + out.cause.Error() + ")", exitFailed
	}
	return "", 0
}
