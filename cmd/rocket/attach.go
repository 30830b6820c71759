package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

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
	turn, err := api.StartTurn(c.ctx, t.ID, req, client.CallOptions{})
	if err != nil {
		return err
	}
	pos := client.Position{From: before.LastSeq + 1, Epoch: before.Epoch}
	return c.follow(api, t.ID, pos, turn.ID)
}

type sessionAttach struct {
	ID     string `arg:"" help:"Session."`
	From   int64  `help:"First seq wanted; default: only what is new." placeholder:"SEQ"`
	All    bool   `help:"From the oldest event there is."`
	Follow bool   `help:"Stay when the turn has ended." default:"true" negatable:""`
	SSE    bool   `help:"Use server-sent events instead of a WebSocket."`
}

func (a sessionAttach) Run(c *console, cmds *commands) error {
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
	case a.From > 0:
		pos = client.Position{From: a.From}
	}
	until := ""
	if !a.Follow {
		until = anyTurn
	}
	return c.followOver(api, a.ID, pos, until, a.SSE)
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
			if c.ctx.Err() != nil && until == "" {
				return nil // the person who attached has seen enough
			}
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
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

func turnError(e client.Event) error {
	if e.Error != nil {
		return fmt.Errorf("turn failed: %s (%s)", e.Error.Message, e.Error.Code)
	}
	return errors.New(strings.Replace(e.Type, ".", " ", 1))
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
