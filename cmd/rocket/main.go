// Command rocket serves and drives sessions that fork.
//
// This package is the only reader of the environment and of the command line;
// it turns them into the Options of the packages below, and errors into one
// line and an exit code: 0 fine, 1 failed, 2 used wrongly. A command that a
// signal ended says so and dies of that signal, which shells show as 130 after
// Ctrl-C (interrupt.go). With --json an error is an object on standard output
// too (fail.go).
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/alecthomas/kong"
	"golang.org/x/term"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

// commands is the command line. What does not work yet is not here.
type commands struct {
	JSON bool `help:"Print JSON for machines, errors as {error, code, field}."`

	Serve      serveCmd      `cmd:"" help:"Serve sessions over HTTP; without flags on the nano model and a private Postgres."`
	Session    sessionCmd    `cmd:"" help:"Work with the sessions of a server."`
	Servers    serversCmd    `cmd:"" help:"List the servers that share a ledger."`
	Key        keyCmd        `cmd:"" help:"Make, list and revoke API keys."`
	Generate   generateCmd   `cmd:"" help:"Generate text once, without a server."`
	Bench      benchCmd      `cmd:"" help:"Measure forks, decoding and the distance to the machine's roofs."`
	Replay     replayCmd     `cmd:"" help:"Walk a trace of real use through the cache's bookkeeping, without a model."`
	Model      modelCmd      `cmd:"" help:"Look at a model's files."`
	CheckCache checkCacheCmd `cmd:"" help:"Have a server prove a sample of its cache against recomputation."`
	Doctor     doctorCmd     `cmd:"" help:"Check what this machine has and lacks."`
	Soak       soakCmd       `cmd:"" hidden:"" help:"Kill servers under load and check that nothing acknowledged is lost."`
	Version    versionCmd    `cmd:"" help:"Print what was built."`
}

// console is what a command writes to. Results go to out; progress, hints and
// errors go to err.
type console struct {
	ctx         context.Context
	out, err    io.Writer
	json        bool
	errTerminal bool // progress bars make sense
	outTerminal bool
}

func main() {
	ctx, stop := signalled(context.Background())
	code := run(&console{
		ctx: ctx, out: os.Stdout, err: os.Stderr,
		errTerminal: term.IsTerminal(int(os.Stderr.Fd())),
		outTerminal: term.IsTerminal(int(os.Stdout.Fd())),
	}, os.Args[1:])
	stop()
	exit(code)
}

// exited is what kong's own exit (after --help) is turned into.
type exited int

// run is main without the process.
func run(c *console, args []string) (code int) {
	defer func() {
		if v := recover(); v != nil {
			e, ok := v.(exited)
			if !ok {
				panic(v)
			}
			code = int(e)
		}
	}()
	var cmds commands
	parser, err := kong.New(&cmds, kong.Name("rocket"),
		kong.Description("Sessions that fork, on hybrid models. Start with: rocket serve"),
		kong.Writers(c.out, c.err), kong.Exit(func(code int) { panic(exited(code)) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}), kong.Bind(c))
	if err != nil {
		panic(err) // a mistake in the tags above
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	parsed, err := parser.Parse(args)
	c.json = cmds.JSON
	if err != nil {
		c.json = c.json || asksForJSON(args) // what was parsed before the mistake may not say it
		return c.fail(usageError{fmt.Errorf("%w (rocket --help shows the usage)", err)})
	}
	return c.fail(parsed.Run(c))
}

// print writes v as one line of JSON.
func (c *console) print(v any) error {
	enc := json.NewEncoder(c.out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return outputError{err}
	}
	return nil
}

// say writes a line for people.
func (c *console) say(format string, args ...any) {
	fmt.Fprintf(c.out, format+"\n", args...)
}
