package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"rocket/client"
)

type sessionAncestors struct {
	ID    string `arg:"" help:"Session."`
	Depth int    `help:"Levels above it; -1: all." default:"-1"`
}

func (a sessionAncestors) Run(c *console, cmds *commands) error {
	if err := checkDepth(a.Depth); err != nil {
		return err
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	list, err := api.Ancestors(c.ctx, a.ID, a.Depth)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(list)
	}
	c.lineage(list.Nodes)
	return nil
}

// lineage prints one line for each session of a line of descent.
func (c *console) lineage(nodes []client.Node) {
	for _, n := range nodes {
		text := fmt.Sprintf("%s  %s  %d tokens", n.ID, n.State, n.Length)
		if n.Deleted {
			text = n.ID + "  deleted"
		}
		if n.ForkedAt != nil {
			text += fmt.Sprintf("  @%d", *n.ForkedAt)
		}
		if n.Title != "" {
			text += "  " + n.Title
		}
		c.say("%s", text)
	}
}

type sessionCommon struct {
	ID   string `arg:"" help:"Session."`
	With string `arg:"" help:"Another session."`
}

func (s sessionCommon) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	common, err := api.Common(c.ctx, s.ID, s.With)
	if err != nil {
		return err
	}
	switch {
	case c.json:
		return c.print(common)
	case common.Ancestor == nil:
		c.say("nothing in common")
	default:
		c.say("%s  the lines part at token %d", common.Ancestor.ID, common.At)
	}
	return nil
}

type sessionPath struct {
	From string `arg:"" help:"Session."`
	To   string `arg:"" help:"Another session."`
}

func (s sessionPath) Run(c *console, cmds *commands) error {
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	path, err := api.Path(c.ctx, s.From, s.To)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(path)
	}
	if len(path.Nodes) == 0 {
		c.say("no path: the sessions are of different trees")
	}
	c.lineage(path.Nodes)
	return nil
}

type sessionExport struct {
	ID  string `arg:"" help:"Session."`
	Out string `help:"File to write; default standard output." placeholder:"FILE" type:"path"`
}

func (e sessionExport) Run(c *console, cmds *commands) error {
	if e.Out == "" && c.json {
		return usage("--out: --json needs it, for the bundle itself goes to standard output")
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	if e.Out == "" {
		return api.Export(c.ctx, e.ID, c.out)
	}
	size, err := writeOrNothing(e.Out, func(w io.Writer) error { return api.Export(c.ctx, e.ID, w) })
	if err != nil {
		return err
	}
	if c.json {
		return c.print(map[string]any{"file": e.Out, "bytes": size})
	}
	fmt.Fprintf(c.err, "%d bytes written to %s\n", size, e.Out)
	return nil
}

// writeOrNothing makes a file that is either all that fill writes, or not there.
func writeOrNothing(name string, fill func(io.Writer) error) (size int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*.part")
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := fill(f); err != nil {
		return 0, errors.Join(err, f.Close())
	}
	size, err = f.Seek(0, io.SeekCurrent)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return 0, fmt.Errorf("write %s: %w", name, err)
	}
	return size, os.Rename(f.Name(), name)
}

type sessionImport struct {
	File string `arg:"" help:"Bundle that export wrote; - is standard input."`
}

func (i sessionImport) Run(c *console, cmds *commands) error {
	in := io.Reader(os.Stdin)
	if i.File != "-" {
		f, err := os.Open(i.File)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	api, err := cmds.Session.connect()
	if err != nil {
		return err
	}
	defer api.Close()
	result, err := api.Import(c.ctx, in, client.CallOptions{})
	if err != nil {
		return err
	}
	if c.json {
		return c.print(result)
	}
	c.say("%s", result.Session.ID)
	ids := "the ids of the bundle"
	if result.NewIDs {
		ids = "new ids, the bundle's are taken"
	}
	fmt.Fprintf(c.err, "%d sessions, %d turns, %d tokens, %d events imported with %s\n",
		result.Sessions, result.Turns, result.Tokens, result.Events, ids)
	return nil
}
