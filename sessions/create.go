package sessions

import (
	"context"
	"fmt"
	"time"

	"rocket/engine"
)

// Create makes a root session; it is visible when Create returns, its prompt
// is prefilled behind.
func (m *Manager) Create(ctx context.Context, call Call, req CreateRequest) (Session, error) {
	if err := m.open(); err != nil {
		return Session{}, err
	}
	ttl, err := m.checkCreate(req)
	if err != nil {
		return Session{}, err
	}
	line, mark, field, err := m.prompt(ctx, call.Tenant, nil, req.Messages, req.Input, false)
	if err != nil {
		return Session{}, err
	}
	if len(line) > m.info.Context {
		return Session{}, &Error{Code: CodeContextLimit, Field: field, Message: fmt.Sprintf(
			"the prompt is %d tokens, the model's context is %d", len(line), m.info.Context)}
	}
	return once(ctx, m, call, func(save save) (Session, error) {
		if err := m.admitTokens(ctx, call.Tenant); err != nil {
			return Session{}, err
		}
		if err := m.admitSessions(ctx, call.Tenant, 1); err != nil {
			return Session{}, err
		}
		x := m.newRow(call.Tenant, len(line))
		x.title, x.labels, x.ttl, x.pin = req.Title, req.Labels, ttl, req.Pin
		s, err := m.createRoot(ctx, x, line, save)
		if err != nil {
			return Session{}, err
		}
		defer s.ops.unlock()
		m.spend(call.Tenant, len(line))
		out := s.view()
		if len(line) > 0 {
			m.prefill(ctx, s, mark)
		}
		return out, nil
	})
}

func (m *Manager) checkCreate(req CreateRequest) (ttl *int, err error) {
	if req.Model != "" && req.Model != m.info.Name {
		return nil, invalid("model", "this server runs %q", m.info.Name)
	}
	if err := checkText("title", req.Title, TitleBytesMax); err != nil {
		return nil, err
	}
	if err := checkLabels("labels", req.Labels); err != nil {
		return nil, err
	}
	if err := checkPrompt(req.Messages, req.Input); err != nil {
		return nil, err
	}
	return checkTTL(req.TTLSeconds)
}

// newRow is a root's row, without times.
func (m *Manager) newRow(tenant string, length int) row {
	id := newID()
	return row{tenant: tenant, id: id, root: id, model: m.info.Name, modelDigest: m.info.Digest, tokDigest: m.info.TokenizerDigest,
		parity: m.info.ParityClass, state: StateIdle, owner: &m.me, epoch: 1, rev: 1, length: length, labels: map[string]string{}}
}

// createRoot makes a root session and returns it with its ops held.
func (m *Manager) createRoot(ctx context.Context, x row, line []int32, save save) (*session, error) {
	if x.labels == nil {
		x.labels = map[string]string{}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opTimeout)
	defer cancel()
	var created Event
	began := time.Now()
	s := m.reserve(x.tenant, x.id)
	err, unknown := m.transact(ctx, (*work).readNow, func(w *work) error {
		x.created = w.now
		x.touch(w.now)
		events := []Event{{Type: EventSessionCreated, Time: w.now, EventData: EventData{RootID: sessionID(x.root)}}}
		number(events, &x)
		created = events[0]
		if err := insertSessions(w.b, []*row{&x}, created); err != nil {
			return err
		}
		if len(line) > 0 {
			insertRun(w.b, x.tenant, x.id, run{ids: line, firstSeq: created.Seq, base: w.now, epoch: x.epoch})
		}
		return save(w, x.session())
	})
	if err == nil {
		m.counts.committed(time.Since(began))
		s.fill(x, line, []Event{created})
		return s, nil
	}
	err = ledgerError("create session", err)
	if !unknown {
		s.unmade(err)
		return nil, err
	}
	m.wg.Go(func() { // it may be there all the same, and be told of
		if !s.settle(x.epoch, x.rev) {
			s.unmade(err)
			return
		}
		s.fill(x, line, []Event{created})
		m.spend(x.tenant, len(line))
		s.ops.unlock()
	})
	return nil, err
}

// prefill opens a new session's timeline, which fills it behind. Without room
// it stays cold until its first turn. The caller holds ops.
func (m *Manager) prefill(ctx context.Context, s *session, mark int) {
	if _, err := s.coldStart(ctx, engine.OpenOptions{Mark: mark}); err != nil && ErrorCode(err) != CodeLimit {
		m.log.Warn("session stays cold", "session", sessionID(s.key.id), "error", err)
	}
}

// Patch changes title, labels, TTL, pin.
func (m *Manager) Patch(ctx context.Context, call Call, id string, req PatchRequest) (Session, error) {
	if err := m.open(); err != nil {
		return Session{}, err
	}
	if req.Title != nil {
		if err := checkText("title", *req.Title, TitleBytesMax); err != nil {
			return Session{}, err
		}
	}
	if req.Labels != nil {
		if err := checkLabels("labels", *req.Labels); err != nil {
			return Session{}, err
		}
	}
	ttl, err := checkTTL(req.TTLSeconds)
	if err != nil {
		return Session{}, err
	}
	return once(ctx, m, call, func(save save) (Session, error) {
		var out Session
		err := m.operate(ctx, call.Tenant, id, func(o *operation) error {
			return o.commit(ctx, effect{write: func(ctx context.Context, w *work, x *row) error {
				if req.Title != nil {
					x.title = *req.Title
				}
				if req.Labels != nil {
					x.labels = *req.Labels
					if x.labels == nil {
						x.labels = map[string]string{}
					}
				}
				if req.TTLSeconds != nil {
					x.ttl = ttl
				}
				if req.Pin != nil {
					x.pin = *req.Pin
				}
				x.touch(w.now)
				o.mu.Lock()
				out = o.viewLocked(x)
				o.mu.Unlock()
				return save(w, out)
			}, after: func() {
				if req.Pin != nil {
					o.pin(*req.Pin)
				}
			}})
		})
		return out, err
	})
}

// pin tells the engine what the row says. Without a timeline the next one is pinned when it is opened.
func (o *operation) pin(on bool) {
	o.mu.Lock()
	seq := o.seq
	o.mu.Unlock()
	if seq != nil {
		o.m.eng.Pin(seq, on)
	}
}
