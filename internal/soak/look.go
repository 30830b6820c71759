package soak

import (
	"context"
	"fmt"
	"slices"
	"time"

	"rocket/client"
)

const pageMax = 200 // of lists, what the server allows

// look reads all of a session that stands still.
func (a *agent) look(ctx context.Context, s *session) (*seen, error) {
	got := &seen{}
	var err error
	got.session, err = read(ctx, a, "get "+s.id, func(ctx context.Context, api *client.Client) (client.Session, error) { return api.Get(ctx, s.id) })
	if notFound(err) {
		got.gone = true
		return got, nil
	}
	if err != nil || s.deleted {
		return got, err
	}
	line, err := read(ctx, a, "tokens of "+s.id, func(ctx context.Context, api *client.Client) (client.TokenRange, error) {
		return api.Tokens(ctx, s.id, 0, -1)
	})
	if err != nil {
		return got, err
	}
	got.line = line.Tokens
	for after := ""; ; {
		page, err := read(ctx, a, "turns of "+s.id, func(ctx context.Context, api *client.Client) (client.TurnPage, error) {
			return api.Turns(ctx, s.id, pageMax, after)
		})
		if err != nil {
			return got, err
		}
		got.turns = append(got.turns, page.Data...)
		if !page.HasMore || page.Next == nil {
			break
		}
		after = *page.Next
	}
	slices.Reverse(got.turns)
	for next := int64(1); ; {
		page, err := read(ctx, a, "events of "+s.id, func(ctx context.Context, api *client.Client) (client.EventPage, error) {
			return api.Events(ctx, s.id, client.Position{From: next}, 0)
		})
		if err != nil {
			return got, err
		}
		got.events = append(got.events, page.Data...)
		if !page.HasMore || len(page.Data) == 0 {
			break
		}
		next = page.Next
	}
	return got, nil
}

// listAll reads the list of all sessions.
func (r *run) listAll(ctx context.Context) (all []client.Session, err error) {
	a := r.lister
	for after := ""; ; {
		page, err := read(ctx, a, "list", func(ctx context.Context, api *client.Client) (client.SessionPage, error) {
			return api.List(ctx, client.ListOptions{Limit: pageMax, After: after})
		})
		if err != nil {
			return nil, err
		}
		all = append(all, page.Data...)
		if !page.HasMore || page.Next == nil {
			return all, nil
		}
		after = *page.Next
	}
}

// verify settles every session of an agent, makes some calls again and
// compares what is there with what was acknowledged: all of it, or what
// changed and one more.
func (a *agent) verify(ctx context.Context, all bool) error {
	for _, s := range a.sessions {
		if err := a.settle(ctx, s); err != nil {
			return err
		}
	}
	if err := a.repeat(ctx); err != nil {
		return err
	}
	also := a.r.IntN(len(a.sessions) + 1)
	for i, s := range a.sessions {
		if !all && !s.changed && i != also {
			continue
		}
		if err := a.compare(ctx, s, all); err != nil {
			return err
		}
	}
	for _, s := range a.buried {
		if err := a.compare(ctx, s, all); err != nil {
			return err
		}
	}
	a.buried = nil
	a.sessions = slices.DeleteFunc(a.sessions, func(s *session) bool { return s.deleted || a.run.book.known(s.id) })
	return nil
}

// compare compares one session, and takes what was read for acknowledged from
// then on.
func (a *agent) compare(ctx context.Context, s *session, last bool) error {
	got, err := a.look(ctx, s)
	if err != nil {
		return err
	}
	if !got.gone && !s.deleted {
		for _, r := range s.readers {
			if err := r.catchUp(ctx, got.events); err != nil {
				return err
			}
		}
	}
	found := check(s, got)
	s.changed = false
	if len(found) == 0 && !s.deleted && s.onDisk && len(a.run.servers) == 1 {
		if found, err = a.fromDisk(ctx, s); err != nil {
			return err
		}
	}
	a.run.book.add(found...)
	if last || len(found) > 0 || s.deleted {
		s.dropReaders()
	}
	if len(found) == 0 && !s.deleted {
		s.line, s.log, s.logAt, s.readers = got.line, got.events, time.Now(), s.reading()
	}
	return nil
}

// fromDisk resumes a session that was detached to disk: none of it may be
// computed again.
func (a *agent) fromDisk(ctx context.Context, s *session) ([]finding, error) {
	known := s.lastKnown
	got, err := a.resume(ctx, s)
	if err != nil {
		return nil, err
	}
	if got.Restored.Recomputed > 0 {
		return []finding{{kind: lost, session: s.id, known: known,
			what: fmt.Sprintf("its line of %d tokens was acknowledged as detached to disk, it came back as %+v", got.Length, got.Restored)}}, nil
	}
	a.run.book.restored.Add(int64(got.Restored.Disk))
	return nil, nil
}
