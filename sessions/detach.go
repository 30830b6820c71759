package sessions

import (
	"context"

	"github.com/google/uuid"

	"rocket/engine"
)

// Detach moves the session's bytes off the device. The device goes first, the
// row follows: a crash between the two costs a cache. Not while a turn is open.
func (m *Manager) Detach(ctx context.Context, call Call, id string, req DetachRequest) (Session, error) {
	if err := m.open(); err != nil {
		return Session{}, err
	}
	to := engine.Tier(req.Tier)
	switch {
	case to == "":
		to = engine.TierHost
	case to == engine.TierDisk && !m.eng.HasDisk():
		return Session{}, invalid("tier", "this server has no disk tier")
	case to != engine.TierHost && to != engine.TierDisk:
		return Session{}, invalid("tier", "must be host or disk")
	}
	return once(ctx, m, call, func(save save) (Session, error) {
		var out Session
		err := m.operate(ctx, call.Tenant, id, func(o *operation) error {
			var err error
			out, err = o.detach(ctx, to, save)
			return err
		})
		return out, err
	})
}

// settled refuses a session that is closed or has an open turn.
func (o *operation) settled() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.row.state == StateClosed:
		return fail(CodeSessionClosed, "the session is closed")
	case o.turn != nil || o.row.state == StateRunning:
		return fail(CodeTurnInProgress, "a turn is in progress")
	}
	return nil
}

func (o *operation) detach(ctx context.Context, to engine.Tier, save save) (Session, error) {
	s := o.session
	if err := o.settled(); err != nil {
		return Session{}, err
	}
	s.mu.Lock()
	state := s.row.state
	s.mu.Unlock()
	res, err := s.stow(ctx, to)
	if err != nil {
		return Session{}, err
	}
	var out Session
	var events []Event
	err = o.commit(ctx, effect{
		write: func(ctx context.Context, w *work, x *row) error {
			if state != StateDetached {
				events = []Event{{Type: EventSessionDetached, Time: w.now, EventData: EventData{Tier: string(to)}}}
				number(events, x)
				x.state = StateDetached
				x.touch(w.now)
				if err := insertEvents(w.b, x.tenant, x.id, events); err != nil {
					return err
				}
			}
			writeResidency(w, s.m.me, x, res)
			out = x.session()
			return save(w, out)
		},
		apply: func() { s.appendLocked(events) },
		after: func() { s.m.forgetIdle(s) },
	})
	return out, err
}

// stow moves what only this session has to the tier, with a timeline or, where it has none, what the cache still has.
func (s *session) stow(ctx context.Context, to engine.Tier) (engine.Residency, error) {
	s.mu.Lock()
	seq := s.seq
	s.seq = nil
	s.mu.Unlock()
	if seq != nil {
		res, err := s.m.eng.Detach(ctx, seq, to)
		if err != nil {
			s.m.eng.Release(seq) // the next use opens it anew
		}
		return res, engineError("detach", err, "")
	}
	if err := s.loadLine(ctx); err != nil {
		return engine.Residency{}, err
	}
	salt, err := s.m.namespace(ctx, s.key.tenant)
	if err != nil {
		return engine.Residency{}, err
	}
	res, err := s.m.eng.Stow(ctx, s.line, salt, to)
	return res, engineError("detach", err, "")
}

// forgetIdle takes a session out of memory unless somebody waits on it.
func (m *Manager) forgetIdle(s *session) {
	s.mu.Lock()
	keep := s.readers > 0 || s.turn != nil || s.seq != nil
	s.mu.Unlock()
	if !keep {
		m.forget(s)
	}
}

// Resume brings a detached session back; on an idle one it only opens the
// timeline if there is none.
func (m *Manager) Resume(ctx context.Context, call Call, id string) (ResumeResult, error) {
	if err := m.open(); err != nil {
		return ResumeResult{}, err
	}
	return once(ctx, m, call, func(save save) (ResumeResult, error) {
		var out ResumeResult
		err := m.operate(ctx, call.Tenant, id, func(o *operation) error {
			var err error
			out, err = o.resume(ctx, save)
			return err
		})
		return out, err
	})
}

func (o *operation) resume(ctx context.Context, save save) (ResumeResult, error) {
	s := o.session
	if err := o.settled(); err != nil && ErrorCode(err) != CodeTurnInProgress {
		return ResumeResult{}, err
	}
	s.mu.Lock()
	fits := s.m.canRun(&s.row)
	s.mu.Unlock()
	if fits != nil {
		return ResumeResult{}, fits
	}
	if err := s.loadLine(ctx); err != nil {
		return ResumeResult{}, err
	}
	got, err := s.coldStart(ctx, engine.OpenOptions{})
	if err != nil {
		return ResumeResult{}, err
	}
	back := restored(got)
	var out ResumeResult
	var events []Event
	err = o.commit(ctx, effect{
		write: func(ctx context.Context, w *work, x *row) error {
			if x.state == StateDetached {
				events = []Event{{Type: EventSessionResumed, Time: w.now, EventData: EventData{Restored: &back}}}
				number(events, x)
				x.state = StateIdle
				x.touch(w.now)
				clearResidency(w, x)
				if err := insertEvents(w.b, x.tenant, x.id, events); err != nil {
					return err
				}
			}
			s.mu.Lock()
			out = ResumeResult{s.viewLocked(x), back}
			s.mu.Unlock()
			return save(w, out)
		},
		apply: func() { s.appendLocked(events) },
	})
	return out, err
}

func writeResidency(w *work, me uuid.UUID, x *row, res engine.Residency) {
	clearResidency(w, x)
	for tier, tokens := range map[string]int{"device": res.Device, "host": res.Host, "disk": res.Disk} {
		if tokens > 0 {
			w.queue(`INSERT INTO residency (tenant_id, session_id, server_id, tier, tokens, snapshots, updated_at)
				VALUES ($1, $2, $3, $4, $5, $6, $7)`, x.tenant, x.id, me, tier, tokens, res.Snapshots, w.now)
		}
	}
	x.residency = Residency(res)
}

func clearResidency(w *work, x *row) {
	x.residency = Residency{}
	w.queue(`DELETE FROM residency WHERE tenant_id = $1 AND session_id = $2`, x.tenant, x.id)
}
