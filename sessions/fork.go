package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"rocket/engine"
)

// Fork makes children of a session at a token offset, all or none. The parent
// may be in the middle of a turn, which goes on.
//
// First the engine pins the state at that offset, then one transaction writes
// what the parent has not written yet, the children and the events, then the
// children are attached. A failed transaction drops the pin. A device that
// fails to attach leaves cold children, not an error: what they are is
// committed, what they hold is a cache.
func (m *Manager) Fork(ctx context.Context, call Call, id string, req ForkRequest) (ForkResult, error) {
	if err := m.open(); err != nil {
		return ForkResult{}, err
	}
	kids, err := checkFork(req)
	if err != nil {
		return ForkResult{}, err
	}
	return once(ctx, m, call, func(save save) (ForkResult, error) {
		if err := m.admitSessions(ctx, call.Tenant, len(kids)); err != nil {
			return ForkResult{}, err
		}
		var f *fork
		err := m.operate(ctx, call.Tenant, id, func(o *operation) error {
			var err error
			if f, err = o.newFork(ctx, req.At, kids); err != nil {
				return err
			}
			return f.commit(ctx, save)
		})
		if err != nil {
			return ForkResult{}, err
		}
		<-f.attached
		return f.result, nil
	})
}

// checkFork gives what each child has of its own.
func checkFork(req ForkRequest) ([]ForkChild, error) {
	n := 1
	switch {
	case req.N != nil && req.Children != nil:
		return nil, invalid("n", "n and children exclude each other")
	case req.N != nil:
		n = *req.N
	case req.Children != nil:
		n = len(req.Children)
	}
	field := "n"
	if req.Children != nil {
		field = "children"
	}
	if n < 1 || n > ForkChildrenMax {
		return nil, invalid(field, "between 1 and %d children can be made at once", ForkChildrenMax)
	}
	if req.At != nil && *req.At < 0 {
		return nil, invalid("at", "must not be negative")
	}
	kids := make([]ForkChild, n)
	copy(kids, req.Children)
	for i := range kids {
		title, labels := "title", "labels"
		if kids[i].Title == nil {
			kids[i].Title = req.Title
		} else {
			title = fmt.Sprintf("children[%d].title", i)
		}
		if kids[i].Labels == nil {
			kids[i].Labels = req.Labels
		} else {
			labels = fmt.Sprintf("children[%d].labels", i)
		}
		if kids[i].Title != nil {
			if err := checkText(title, *kids[i].Title, TitleBytesMax); err != nil {
				return nil, err
			}
		}
		if err := checkLabels(labels, kids[i].Labels); err != nil {
			return nil, err
		}
	}
	return kids, nil
}

// fork is one fork under way.
type fork struct {
	o        *operation
	at       int
	line     []int32
	mark     *engine.Mark // nil: the children start cold
	resumed  *Restored    // the parent was detached
	kids     []ForkChild
	rows     []*row
	children []*session // reserved for rows
	events   []Event    // of the parent
	created  []Event    // one of each child
	result   ForkResult
	attached chan struct{} // closed when the children have what they get
}

// newFork checks the parent and pins its state.
func (o *operation) newFork(ctx context.Context, at *int, kids []ForkChild) (*fork, error) {
	s := o.session
	s.mu.Lock()
	state, t, fits := s.row.state, s.turn, s.m.canRun(&s.row)
	s.mu.Unlock()
	if state == StateClosed {
		return nil, fail(CodeSessionClosed, "the session is closed")
	}
	if fits != nil {
		return nil, fits
	}
	if err := s.loadLine(ctx); err != nil {
		return nil, err
	}
	f := &fork{o: o, kids: kids, attached: make(chan struct{})}
	if got, err := s.coldStart(ctx, engine.OpenOptions{Lazy: true}); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if ErrorCode(err) != CodeLimit {
			s.m.log.Warn("fork without a timeline", "session", sessionID(s.key.id), "error", err)
		}
	} else if state == StateDetached {
		back := restored(got)
		f.resumed = &back
	}
	if t != nil {
		s.pump(t) // the end of the line is what the engine has verified by now
	}
	s.mu.Lock()
	seq, started, length := s.seq, t != nil && t.started, len(s.line)
	s.mu.Unlock()
	want := length
	if at != nil {
		want = *at
	} else if started && seq != nil {
		want = -1
	}
	if want > length {
		return nil, invalid("at", "the session's line has %d tokens", length)
	}
	f.at = want
	if seq != nil {
		var err error
		f.mark, err = s.m.eng.Mark(ctx, seq, want)
		switch {
		case err == nil:
			f.at = f.mark.At
		case errors.Is(err, engine.ErrRange):
			return nil, invalid("at", "the session's line has %d tokens", length)
		case ctx.Err() != nil:
			return nil, ctx.Err()
		default:
			s.m.log.Warn("fork without a mark", "session", sessionID(s.key.id), "error", err)
			f.at = max(want, 0)
			if want < 0 {
				f.at = length
			}
		}
	}
	if t != nil {
		s.pump(t) // tokens up to the mark
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.at > len(s.line) {
		f.drop()
		return nil, fail(CodeInternal, "the engine is ahead of the session's line")
	}
	f.line = s.line[:f.at:f.at]
	return f, nil
}

func (f *fork) drop() {
	if f.mark != nil {
		f.mark.Drop()
		f.mark = nil
	}
}

// abort is for a fork that did not happen.
func (f *fork) abort() {
	f.drop()
	for _, c := range f.children {
		c.unmade(fail(CodeOverloaded, "the fork did not happen"))
	}
}

func (f *fork) commit(ctx context.Context, save save) error {
	s := f.o.session
	return f.o.commit(ctx, effect{
		children: len(f.kids),
		write: func(ctx context.Context, w *work, x *row) error {
			if x.state == StateDetached {
				f.events = append(f.events, Event{Type: EventSessionResumed, Time: w.now, EventData: EventData{Restored: f.resumed}})
				x.state = StateIdle
				clearResidency(w, x)
			}
			f.family(x, w.now)
			number(f.events, x)
			if err := insertSessions(w.b, f.rows, f.created[0]); err != nil {
				return err
			}
			if err := insertEvents(w.b, x.tenant, x.id, f.events); err != nil {
				return err
			}
			x.touch(w.now)
			return save(w, f.result)
		},
		apply: func() {
			s.appendLocked(f.events)
			for i, c := range f.children {
				c.fill(*f.rows[i], f.line, f.created[i:i+1])
			}
			s.m.counts.forks.Add(int64(len(f.children)))
			s.m.wg.Go(f.attach)
		},
		abort: f.abort,
	})
}

// family makes the children's rows, their events, the parent's event, and the
// answer.
func (f *fork) family(x *row, now time.Time) {
	shared, replay := 0, max(0, f.at-1)
	if f.mark != nil {
		shared, replay = f.mark.Shared, f.mark.Replay
	}
	f.result = ForkResult{At: f.at, SharedTokens: shared, ReplayTokens: replay}
	parent := sessionID(x.id)
	forked := Event{Type: EventSessionForked, Time: now, EventData: EventData{At: &f.at}}
	for _, kid := range f.kids {
		c := &row{
			tenant: x.tenant, id: newID(), root: x.root, parent: &x.id, forkedAt: &f.at,
			model: x.model, modelDigest: x.modelDigest, tokDigest: x.tokDigest, parity: x.parity,
			state: StateIdle, owner: &f.o.m.me, epoch: 1, rev: 1, length: f.at,
			title: x.title, labels: x.labels, ttl: x.ttl, created: now,
		}
		if kid.Title != nil {
			c.title = *kid.Title
		}
		if kid.Labels != nil {
			c.labels = kid.Labels
		}
		c.touch(now)
		events := []Event{{Type: EventSessionCreated, Time: now,
			EventData: EventData{ParentID: &parent, ForkedAt: &f.at, RootID: sessionID(x.root)}}}
		number(events, c)
		f.rows = append(f.rows, c)
		f.children = append(f.children, f.o.m.reserve(c.tenant, c.id))
		f.created = append(f.created, events[0])
		forked.Children = append(forked.Children, sessionID(c.id))
		v := c.session()
		v.Residency.Device = shared
		f.result.Sessions = append(f.result.Sessions, v)
	}
	f.events = append(f.events, forked)
}

// attach gives the children their timelines.
func (f *fork) attach() {
	defer close(f.attached)
	mark := f.mark
	for i, c := range f.children {
		if mark != nil {
			seq, err := f.o.m.eng.Fork(context.Background(), mark)
			if err != nil {
				f.o.m.log.Warn("child stays cold", "session", sessionID(c.key.id), "error", err)
				f.result.SharedTokens, f.result.ReplayTokens = 0, max(0, f.at-1)
				f.result.Sessions[i].Residency = Residency{}
			} else {
				c.mu.Lock()
				c.seq = seq
				c.mu.Unlock()
				f.result.Sessions[i].Residency = Residency(seq.Residency())
			}
		}
		c.ops.unlock()
	}
	f.drop()
}
