package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"rocket/client"
)

type sessionTurn struct {
	ID          string   `arg:"" help:"Session."`
	Prompt      *string  `help:"Text to append; default none: decoding goes on." placeholder:"TEXT"`
	Chat        bool     `help:"Send the prompt as a user message through the chat template."`
	MaxTokens   int      `help:"Tokens to generate at most." default:"256"`
	Temperature *float64 `help:"0 takes the likeliest token." placeholder:"T"`
	TopP        *float64 `help:"Smallest set of tokens with this probability." placeholder:"P"`
	TopK        *int     `help:"Likeliest tokens only." placeholder:"K"`
	Seed        *int64   `help:"Seed; drawn when absent." placeholder:"N"`
	Stop        []string `help:"String that ends the turn." placeholder:"TEXT"`
}

func (t sessionTurn) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	req := client.TurnRequest{MaxTokens: &t.MaxTokens, Temperature: t.Temperature, TopP: t.TopP, TopK: t.TopK, Seed: t.Seed, Stop: t.Stop}
	switch {
	case t.Chat && t.Prompt == nil:
		return usage("--chat needs --prompt")
	case t.Chat:
		req.Messages = []client.Message{{Role: "user", Content: *t.Prompt}}
	default:
		req.Input = t.Prompt
	}
	before, err := api.Get(c.ctx, t.ID)
	if err != nil {
		return err
	}
	defer catchPipe()()
	turn, err := c.startTurn(api, t.ID, req)
	if err != nil {
		return err
	}
	pos := client.Position{From: before.LastSeq + 1, Epoch: before.Epoch}
	err = c.follow(api, t.ID, pos, turn.ID)
	if why, exit := c.left(err); why != "" {
		return &leftError{text: why + ": " + c.cancelTurn(api, t.ID, turn.ID), exit: exit, cause: err}
	}
	return err
}

// cancelPatience is how long a command that was interrupted waits for the
// server, to start a turn or to cancel it. Then it ends, and says what it does
// not know.
const cancelPatience = 5 * time.Second

// startTurn starts a turn whatever signal comes meanwhile: a turn whose name is
// not known could not be cancelled.
func (c *console) startTurn(api *client.Client, id string, req client.TurnRequest) (client.Turn, error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.ctx))
	defer cancel()
	stop := context.AfterFunc(c.ctx, func() {
		select {
		case <-ctx.Done():
		case <-time.After(cancelPatience):
			cancel()
		}
	})
	defer stop()
	turn, err := api.StartTurn(ctx, id, req, client.CallOptions{})
	if err != nil && ctx.Err() != nil {
		return turn, &leftError{exit: exitOf(c.ctx), text: codeInterrupted + ": the server did not answer in time, and may have started the turn; rocket session cancel " + id + " ends it"}
	}
	return turn, err
}

// cancelTurn ends a turn that this command started and leaves, and says what
// came of it.
func (c *console) cancelTurn(api *client.Client, id, turn string) string {
	fmt.Fprintf(c.err, "\ncancelling %s at the server; Ctrl-C ends this wait, not the turn\n", turn)
	ctx, stop := context.WithTimeout(context.WithoutCancel(c.ctx), cancelPatience)
	defer stop()
	t, err := api.Turn(ctx, id, turn)
	if err == nil && (t.State == "queued" || t.State == "running") {
		// Whatever is open is what this cancels; nobody else has a turn open
		// while this one is.
		if _, err = api.Cancel(ctx, id, client.CallOptions{}); err == nil {
			t, err = api.Turn(ctx, id, turn)
		}
	}
	switch {
	case err != nil:
		return fmt.Sprintf("%s could not be cancelled and may go on at the server (%v); rocket session cancel %s ends it", turn, err, id)
	case t.State == "cancelled":
		return turn + " was cancelled at the server"
	}
	return fmt.Sprintf("%s had ended at the server: %s", turn, t.State)
}

type sessionAttach struct {
	ID     string `arg:"" help:"Session."`
	From   *int64 `help:"First seq wanted, 1 or more; default: only what is new." placeholder:"SEQ"`
	All    bool   `help:"From the oldest event there is."`
	Follow bool   `help:"Stay when the turn has ended." default:"true" negatable:""`
	SSE    bool   `help:"Use server-sent events instead of a WebSocket."`
}

func (a sessionAttach) Run(c *console, cmds *commands) error {
	switch {
	case a.From != nil && *a.From < 1:
		return usage("--from: want 1 or more, not %d", *a.From)
	case a.From != nil && a.All:
		return usage("--from and --all exclude each other")
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	session, err := api.Get(c.ctx, a.ID)
	if err != nil {
		return err
	}
	pos := client.Position{From: session.LastSeq + 1, Epoch: session.Epoch}
	switch {
	case a.All:
		pos = client.Position{}
	case a.From != nil:
		pos = client.Position{From: *a.From}
	}
	until := ""
	if !a.Follow {
		until = anyTurn
	}
	defer catchPipe()()
	err = c.followOver(api, a.ID, pos, until, a.SSE)
	why, exit := c.left(err)
	if why == "" {
		return err
	}
	text := fmt.Sprintf("%s: detached; the session goes on at the server, and rocket session cancel %s ends its turn", why, a.ID)
	if a.Follow && c.ctx.Err() != nil { // the person who attached has seen enough: that is how it ends
		fmt.Fprintf(c.err, "\nrocket: %s\n", text)
		return nil
	}
	return &leftError{text: text, exit: exit, cause: err}
}

// anyTurn ends a follow with the first turn that ends.
const anyTurn = "*"

func (c *console) follow(api *client.Client, id string, pos client.Position, until string) error {
	return c.followOver(api, id, pos, until, false)
}

// followOver prints a session's text as it comes, with --json its events, until
// the turn named by until ends ("": until interrupted).
func (c *console) followOver(api *client.Client, id string, pos client.Position, until string, sse bool) error {
	opts := client.FollowOptions{SSE: sse, Reconnected: func(cause error) {
		fmt.Fprintf(c.err, "\nconnection lost (%v), coming back\n", root(cause))
	}}
	for e, err := range api.Follow(c.ctx, id, pos, opts) {
		if err != nil {
			return err
		}
		if err := c.event(e); err != nil {
			return err
		}
		if e.Final() {
			last := until == anyTurn || until == e.TurnID
			switch {
			case e.Type == "turn.completed" && last:
				return nil
			case e.Type != "turn.completed" && last:
				return turnError(e)
			case e.Type != "turn.completed":
				fmt.Fprintf(c.err, "%v\n", turnError(e))
			}
		}
	}
	return nil
}

// event prints one event: with --json all of it, otherwise the text.
func (c *console) event(e client.Event) error {
	if c.json {
		return c.print(e)
	}
	var err error
	switch {
	case e.Type == "turn.delta":
		_, err = io.WriteString(c.out, deref(e.Text))
	case e.Type == "turn.completed":
		_, err = io.WriteString(c.out, "\n")
		if u := e.Usage; u != nil {
			fmt.Fprintf(c.err, "%s: %d tokens, %.1f a second, first after %.0f ms\n", e.FinishReason, u.CompletionTokens, u.TokensPerSecond, u.TTFTMillis)
		}
	case e.Final():
		_, err = io.WriteString(c.out, "\n") // the caller says what happened
	case e.Type == "session.forked":
		fmt.Fprintf(c.err, "\nforked at token %d: %v\n", deref(e.At), e.Children)
	}
	if err != nil {
		return outputError{err}
	}
	return nil
}

func turnError(e client.Event) error {
	if e.Error != nil {
		return codedError{fmt.Errorf("turn failed: %s (%s)", e.Error.Message, e.Error.Code), e.Error.Code}
	}
	end := strings.TrimPrefix(e.Type, "turn.")
	return codedError{errors.New("turn " + end), codeTurn + end}
}

// root is the cause that says most in a line for a person.
func root(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}
