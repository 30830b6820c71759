package soak

import (
	"context"
	"fmt"
	"slices"
	"time"

	"rocket/client"
)

const readersMax = 2 // of one session

func (a *agent) detach(ctx context.Context, s *session) error {
	return a.detachTo(ctx, s, []string{"host", "disk"}[a.r.IntN(2)])
}

// park is what an agent does with a session for the night: one more turn, then to disk.
func (a *agent) park(ctx context.Context, s *session) error {
	if err := a.shortTurn(ctx, s); err != nil {
		return err
	}
	return a.detachTo(ctx, s, "disk")
}

func (a *agent) detachTo(ctx context.Context, s *session, tier string) error {
	s.touch()
	req := client.DetachRequest{Tier: tier}
	got, err := command(ctx, a, "detach", s, "detach", req, sessionID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Session, error) {
		return api.Detach(ctx, s.id, req, o)
	})
	if err != nil {
		return err
	}
	s.touch()
	s.detached = true
	// A state that no tier has cannot be put on disk: a session that went cold in a crash says how much of it is there.
	s.onDisk = tier == "disk" && (got.Residency.Disk >= got.Length-1 || s.warm == a.run.book.kills()+1)
	return nil
}

func (a *agent) resume(ctx context.Context, s *session) (client.ResumeResult, error) {
	s.touch()
	kills := a.run.book.kills()
	got, err := command(ctx, a, "resume", s, "resume", struct{}{}, func(r client.ResumeResult) string { return r.ID },
		func(ctx context.Context, api *client.Client, o client.CallOptions) (client.ResumeResult, error) {
			return api.Resume(ctx, s.id, o)
		})
	if err != nil {
		return got, err
	}
	s.touch()
	s.detached, s.warm = false, 0
	if a.run.book.kills() == kills {
		s.warm = kills + 1
	}
	return got, nil
}

func (a *agent) rename(ctx context.Context, s *session) error {
	title := fmt.Sprintf("renamed %d", a.calls)
	_, err := mutate(ctx, a, "rename", s, sessionID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Session, error) {
		return api.Patch(ctx, s.id, client.PatchRequest{Title: &title}, o)
	})
	if err == nil {
		onDisk := s.onDisk
		s.touch()
		s.title, s.onDisk = title, onDisk
	}
	return err
}

// readPiece reads a piece of the line; a closed session must refuse a turn.
func (a *agent) readPiece(ctx context.Context, s *session) error {
	from := a.r.IntN(len(s.line) + 1)
	to := from + a.r.IntN(len(s.line)+1-from)
	got, err := read(ctx, a, fmt.Sprintf("tokens [%d, %d) of %s", from, to, s.id), func(ctx context.Context, api *client.Client) (client.TokenRange, error) {
		return api.Tokens(ctx, s.id, from, to)
	})
	if err != nil {
		return err
	}
	for i, id := range got.Tokens {
		if want := s.line[from+i]; want != unknown && want != id || i >= to-from {
			a.run.book.add(finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf("token %d is read as %d, acknowledged as %d", from+i, id, want)})
			break
		}
	}
	if len(got.Tokens) < to-from {
		a.run.book.add(finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf("of [%d, %d) it gives %d tokens", from, to, len(got.Tokens))})
	}
	if !s.closed {
		return nil
	}
	_, err = settled(ctx, a, "turn of a closed session", func(ctx context.Context, api *client.Client) (client.Turn, error) {
		return api.StartTurn(ctx, s.id, s.ref.mode.turn(1), client.CallOptions{})
	})
	switch code := client.CodeOf(err); {
	case err == nil:
		a.run.book.add(finding{kind: lost, session: s.id, known: s.lastKnown, what: "it was closed and has taken a turn"})
	case code == "":
		return err
	case code != "session_closed":
		return &fault{"turn of the closed session " + s.id, err}
	}
	return nil
}

// reader starts a reader of a session, or ends one. Half of them begin where
// another one has been, the others at the start.
func (a *agent) reader(ctx context.Context, s *session) error {
	if len(s.readers) >= readersMax {
		s.readers[a.r.IntN(len(s.readers))].cancel() // what it saw stays until it is compared
		return nil
	}
	from := client.Position{}
	var known []client.Event
	if len(s.readers) > 0 {
		r := s.readers[a.r.IntN(len(s.readers))]
		r.mu.Lock()
		known = slices.Clone(r.events)
		r.mu.Unlock()
	}
	if len(known) == 0 {
		known = s.log
	}
	if len(known) > 0 && a.r.IntN(3) > 0 {
		e := known[a.r.IntN(len(known))]
		from = client.Position{From: e.Seq + 1, Epoch: e.Epoch}
	}
	a.follow(ctx, s, from)
	return nil
}

func (a *agent) close(ctx context.Context, s *session) error {
	s.touch()
	_, err := mutate(ctx, a, "close", s, sessionID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Session, error) {
		return api.CloseSession(ctx, s.id, o)
	})
	if err == nil {
		s.touch()
		s.closed, s.detached = true, false
	}
	return err
}

// remove deletes a session, or it and all that was forked from it.
func (a *agent) remove(ctx context.Context, s *session) error {
	subtree := a.r.IntN(4) == 0
	s.touch()
	what := "delete"
	if subtree {
		what = "prune"
	}
	_, err := mutate(ctx, a, what, s, func(struct{}) string { return "" }, func(ctx context.Context, api *client.Client, o client.CallOptions) (struct{}, error) {
		if subtree {
			return struct{}{}, api.Prune(ctx, s.id, o)
		}
		return struct{}{}, api.Delete(ctx, s.id, o)
	})
	if err != nil {
		return err
	}
	s.gone(subtree)
	a.sessions = slices.DeleteFunc(a.sessions, func(s *session) bool {
		if s.deleted {
			a.buried = append(a.buried, s)
		}
		return s.deleted
	})
	return nil
}

// gone marks a session, and all below it, as deleted.
func (s *session) gone(subtree bool) {
	s.deleted, s.lastKnown = true, time.Now()
	s.dropReaders()
	if s.parent != nil {
		s.parent.changed = true
	}
	if subtree {
		for _, c := range s.children {
			c.gone(true)
		}
	}
}
