package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"rocket/client"
)

// remote is embedded by commands that talk to a server.
type remote struct {
	Server string `help:"Address of the server." default:"http://127.0.0.1:8080" env:"ROCKET_SERVER" placeholder:"URL"`
	APIKey string `name:"api-key" help:"API key, where the server wants one; rather in the environment, where other users do not see it." env:"ROCKET_API_KEY" placeholder:"KEY"`
}

func (r remote) connect() (*client.Client, error) {
	// One more attempt, not several: a person who waits wants to know soon that
	// there is no server.
	c, err := client.New(r.Server, client.Options{APIKey: r.APIKey, Retries: 1})
	if err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

type sessionCmd struct {
	remote
	Ls        sessionLs        `cmd:"" help:"List sessions, newest first."`
	New       sessionNew       `cmd:"" help:"Create a session."`
	Show      sessionShow      `cmd:"" help:"Show a session, its turns and its text."`
	Tree      sessionTree      `cmd:"" help:"Show a session and its forks."`
	Ancestors sessionAncestors `cmd:"" help:"Show what a session was forked from."`
	Common    sessionCommon    `cmd:"" help:"Show where the lines of two sessions part."`
	Path      sessionPath      `cmd:"" help:"Show the sessions between two."`
	Turn      sessionTurn      `cmd:"" help:"Append a prompt and stream the answer; Ctrl-C cancels the turn."`
	Fork      sessionFork      `cmd:"" help:"Fork a session at a token offset."`
	Cancel    sessionCancel    `cmd:"" help:"Cancel the open turn."`
	Detach    sessionDetach    `cmd:"" help:"Move a session's bytes off the device."`
	Resume    sessionResume    `cmd:"" help:"Bring a session back."`
	Attach    sessionAttach    `cmd:"" help:"Follow a session's tokens live; Ctrl-C leaves the session as it is."`
	Release   sessionRelease   `cmd:"" help:"Have a session's server give it up, so that the one that is called next has it."`
	Close     sessionClose     `cmd:"" help:"Make a session read-only."`
	Rm        sessionRm        `cmd:"" help:"Delete sessions."`
	Export    sessionExport    `cmd:"" help:"Write a session and its forks to a file that another server can load."`
	Import    sessionImport    `cmd:"" help:"Load a file that export wrote, whole or not at all."`
}

type sessionLs struct {
	State string            `help:"Only this state: idle, running, detached or closed." enum:",idle,running,detached,closed" default:""`
	Root  string            `help:"Only this tree." placeholder:"ID"`
	Label map[string]string `help:"Only with this label." placeholder:"KEY=VALUE"`
	Limit int               `help:"At most so many." default:"20"`
	After string            `help:"Go on behind this id." placeholder:"ID"`
}

func (l sessionLs) Run(c *console, cmds *commands) error {
	if l.Limit < 1 {
		return usage("--limit: want 1 or more, not %d", l.Limit)
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	page, err := api.List(c.ctx, client.ListOptions{State: l.State, Root: l.Root, Labels: l.Label, Limit: l.Limit, After: l.After})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(page)
	}
	w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSTATE\tTOKENS\tTURNS\tFORKS\tPARENT\tUPDATED\tTITLE")
	for _, s := range page.Data {
		parent := "-"
		if s.ParentID != nil {
			parent = fmt.Sprintf("%s@%d", *s.ParentID, deref(s.ForkedAt))
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\n", s.ID, s.State, s.Length, s.TurnCount, s.ChildCount, parent, ago(s.UpdatedAt), s.Title)
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if page.HasMore && page.Next != nil {
		fmt.Fprintf(c.err, "more: --after %s\n", *page.Next)
	}
	return nil
}

type sessionNew struct {
	Title  string            `help:"Title."`
	Label  map[string]string `help:"Label." placeholder:"KEY=VALUE"`
	Input  *string           `help:"Raw text that the line begins with." placeholder:"TEXT"`
	System *string           `help:"System message." placeholder:"TEXT"`
	TTL    *time.Duration    `name:"ttl" help:"Close after so long without use, in whole seconds: 90s, 12h; default never." placeholder:"DURATION"`
	Pin    bool              `help:"Protect from eviction."`
}

func (n sessionNew) Run(c *console, cmds *commands) error {
	if t := deref(n.TTL); n.TTL != nil && (t < time.Second || t%time.Second != 0) {
		return usage("--ttl: want whole seconds, 1s or more, not %v", t)
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	req := client.CreateRequest{Title: n.Title, Labels: n.Label, Input: n.Input, Pin: n.Pin}
	if n.System != nil {
		if n.Input != nil {
			return usage("--system and --input exclude each other")
		}
		req.Messages = []client.Message{{Role: "system", Content: *n.System}}
	}
	if n.TTL != nil {
		seconds := int(*n.TTL / time.Second)
		req.TTLSeconds = &seconds
	}
	session, err := api.Create(c.ctx, req, client.CallOptions{})
	if err != nil {
		return err
	}
	return c.session(session)
}

// session prints one session: its id alone for scripts that read lines.
func (c *console) session(s client.Session) error {
	if c.json {
		return c.print(s)
	}
	c.say("%s", s.ID)
	return nil
}

type sessionShow struct {
	ID string `arg:"" help:"Session."`
}

func (s sessionShow) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	session, err := api.Get(c.ctx, s.ID)
	if err != nil {
		return err
	}
	turns, err := allTurns(c.ctx, api, s.ID)
	if err != nil {
		return err
	}
	line, err := api.Tokens(c.ctx, s.ID, 0, -1)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"session": session, "turns": turns, "text": line.Text})
	}
	c.say("%s  %s  %d tokens  %s", session.ID, session.State, session.Length, session.Title)
	if session.ParentID != nil {
		c.say("forked from %s at token %d", *session.ParentID, deref(session.ForkedAt))
	}
	r := session.Residency
	c.say("tokens on device %d, host %d, disk %d; %d snapshots", r.Device, r.Host, r.Disk, r.Snapshots)
	for _, t := range turns {
		inherited := ""
		if t.Inherited {
			inherited = "  inherited"
		}
		c.say("%s  %s  [%d,%d)  %s%s", t.ID, t.State, t.From, t.To, deref(t.FinishReason), inherited)
	}
	c.say("\n%s", line.Text)
	return nil
}

// allTurns reads a session's turns, page by page, newest first.
func allTurns(ctx context.Context, api *client.Client, id string) ([]client.Turn, error) {
	const page = 100
	turns := []client.Turn{}
	for after := ""; ; {
		p, err := api.Turns(ctx, id, page, after)
		if err != nil {
			return nil, err
		}
		turns = append(turns, p.Data...)
		if !p.HasMore || p.Next == nil {
			return turns, nil
		}
		after = *p.Next
	}
}

type sessionTree struct {
	ID    string `arg:"" help:"Session."`
	Depth int    `help:"Levels below it; -1: all." default:"-1"`
}

func (t sessionTree) Run(c *console, cmds *commands) error {
	if err := checkDepth(t.Depth); err != nil {
		return err
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	tree, err := api.Tree(c.ctx, t.ID, t.Depth)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(tree)
	}
	c.say("%s", strings.Join(drawTree(tree), "\n"))
	return nil
}

// checkDepth refuses what the client takes for all levels.
func checkDepth(depth int) error {
	if depth < -1 {
		return usage("--depth: want 0 or more, or -1 for all, not %d", depth)
	}
	return nil
}

// drawTree gives one line per node, children under their parent.
func drawTree(tree client.Tree) []string {
	children := map[string][]client.Node{}
	var top client.Node
	for _, n := range tree.Nodes {
		if n.ID == tree.Root {
			top = n
		} else if n.ParentID != nil {
			children[*n.ParentID] = append(children[*n.ParentID], n)
		}
	}
	var lines []string
	var draw func(n client.Node, first, rest string)
	draw = func(n client.Node, first, rest string) {
		text := fmt.Sprintf("%s%s  %s  %d tokens", first, n.ID, n.State, n.Length)
		if n.Deleted {
			text = first + n.ID + "  deleted"
		}
		if n.ForkedAt != nil && n.ID != tree.Root {
			text += fmt.Sprintf("  @%d", *n.ForkedAt)
		}
		if n.Title != "" {
			text += "  " + n.Title
		}
		lines = append(lines, text)
		below := children[n.ID]
		for i, child := range below {
			if i == len(below)-1 {
				draw(child, rest+"└─ ", rest+"   ")
			} else {
				draw(child, rest+"├─ ", rest+"│  ")
			}
		}
	}
	draw(top, "", "")
	return lines
}

type sessionFork struct {
	ID    string            `arg:"" help:"Session."`
	At    *int              `help:"Token offset; default the end of the line." placeholder:"OFFSET"`
	N     int               `help:"How many children." default:"1" short:"n"`
	Title *string           `help:"Title of the children."`
	Label map[string]string `help:"Label of the children." placeholder:"KEY=VALUE"`
}

func (f sessionFork) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	result, err := api.Fork(c.ctx, f.ID, client.ForkRequest{At: f.At, N: &f.N, Title: f.Title, Labels: f.Label}, client.CallOptions{})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(result)
	}
	for _, s := range result.Sessions {
		c.say("%s", s.ID)
	}
	fmt.Fprintf(c.err, "forked at token %d: %d shared, %d to replay\n", result.At, result.SharedTokens, result.ReplayTokens)
	return nil
}

type sessionCancel struct {
	ID string `arg:"" help:"Session."`
}

func (s sessionCancel) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	turn, err := api.Cancel(c.ctx, s.ID, client.CallOptions{})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(turn)
	}
	c.say("%s %s", turn.ID, turn.State)
	return nil
}

type sessionDetach struct {
	ID   string `arg:"" help:"Session."`
	Tier string `help:"Where to: host memory, or disk, which outlives a restart." enum:"host,disk" default:"host"`
}

func (d sessionDetach) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	session, err := api.Detach(c.ctx, d.ID, client.DetachRequest{Tier: d.Tier}, client.CallOptions{})
	if err != nil {
		return err
	}
	return c.session(session)
}

type sessionResume struct {
	ID string `arg:"" help:"Session."`
}

func (r sessionResume) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	result, err := api.Resume(c.ctx, r.ID, client.CallOptions{})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(result)
	}
	x := result.Restored
	c.say("%s restored: device %d, host %d, disk %d, recomputed %d tokens", result.ID, x.Device, x.Host, x.Disk, x.Recomputed)
	return nil
}

type sessionClose struct {
	ID string `arg:"" help:"Session."`
}

func (s sessionClose) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	session, err := api.CloseSession(c.ctx, s.ID, client.CallOptions{})
	if err != nil {
		return err
	}
	return c.session(session)
}

type sessionRm struct {
	IDs     []string `arg:"" name:"id" help:"Sessions."`
	Subtree bool     `help:"Everything forked from them too, each subtree as a whole."`
}

func (r sessionRm) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	var failed error
	var removed []string
	remove := api.Delete
	if r.Subtree {
		remove = api.Prune
	}
	for _, id := range r.IDs {
		if err := remove(c.ctx, id, client.CallOptions{}); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", id, err))
			continue
		}
		removed = append(removed, id)
	}
	if c.json && failed == nil {
		return c.print(map[string]any{"deleted": removed})
	}
	return failed
}

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// ago is a time for a person who looks now.
func ago(t time.Time) string {
	d := time.Since(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d.Hours()))
	}
	return t.Format(time.DateOnly)
}
