package sessions

import (
	"context"
	"fmt"
	"time"
)

// Tail is one reader's place in a session's log. It is cheap to have and to
// wait with: a reader that has all there is costs one entry in its session's
// list, and no goroutine. It belongs to one goroutine at a time, and must be
// closed.
type Tail struct {
	log  *Log
	next int64
	wake func()
	s    *session // where it counts as a reader; nil: nowhere

	spot int // guarded by s.mu; its index in s.waiting; -1: it does not wait
}

// Tail reads from seq from on. wake says that Next has something more; it is
// called with locks held, and must neither block nor call back.
func (l *Log) Tail(from int64, wake func()) *Tail {
	return &Tail{log: l, next: max(from, 1), wake: wake, spot: -1}
}

// Next returns up to most events, fewer where they are large, and moves on
// behind them, and the seq of the newest event there is. The events are shared: nobody may change them.
//
// If it returns all there is, wake is called once when there is more or when
// Next has an error to tell: CodeNotFound after the session was deleted,
// CodeMoved and CodeGone as Log says. What has to come from the ledger may take
// as long as limit.
func (t *Tail) Next(ctx context.Context, limit time.Duration, most int) (events []Event, last int64, err error) {
	if most <= 0 || most > ReadMax {
		most = ReadMax
	}
	s, err := t.enter(ctx, limit)
	if err != nil {
		return nil, 0, err
	}
	w := &s.log
	last = w.visible
	if t.next < w.first && t.next <= last {
		to := min(w.first-1, t.next+int64(most)-1)
		s.mu.Unlock()
		limited, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		if events, err = t.log.older(limited, t.next, to, readBytesMax); err != nil {
			return nil, 0, err
		}
		if t.next += int64(len(events)); t.next <= last {
			return events, last, nil
		}
		// all there was then; what has come meanwhile is for the next call
		s, err = t.enter(ctx, limit)
		if err == nil {
			last = max(last, s.log.visible)
			if t.next > last {
				err = t.waitLocked(s)
			}
			s.mu.Unlock()
		}
		return events, last, t.later(events, err)
	}
	defer s.mu.Unlock()
	if n := min(int64(most), last-t.next+1); n > 0 {
		i := t.next - w.first
		n = int64(fitting(w.events[i:i+n], readBytesMax))
		events = w.events[i : i+n : i+n] // appending leaves them alone, trimming copies
		t.next += n
	}
	if t.next > last {
		err = t.waitLocked(s)
	}
	return events, last, t.later(events, err)
}

// later leaves an error that comes with events to the next call, of which
// there must be one.
func (t *Tail) later(events []Event, err error) error {
	if err == nil || len(events) == 0 {
		return err
	}
	t.wake()
	return nil
}

// Close forgets the place. wake is not called any more.
func (t *Tail) Close() {
	if s := t.s; s != nil {
		s.mu.Lock()
		t.leaveLocked(s)
		s.mu.Unlock()
	}
}

// enter finds the session and returns with its mu held.
func (t *Tail) enter(ctx context.Context, limit time.Duration) (*session, error) {
	for {
		s := t.s
		if s == nil {
			limited, cancel := context.WithTimeout(ctx, limit)
			var err error
			s, err = t.log.m.acquire(limited, t.log.key.tenant, t.log.key.id)
			cancel()
			if err != nil {
				return nil, err
			}
		}
		s.mu.Lock()
		var err error
		switch {
		case s.deleted:
			err = deleted(t.log.key)
		case s.gone:
			t.leaveLocked(s)
			s.mu.Unlock()
			continue
		default:
			err = t.log.movedLocked(s)
		}
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		if t.s == nil && !s.foreignLocked() { // of another server's there are no news: look again each time
			t.s = s
			s.readers++
		}
		return s, nil
	}
}

func deleted(k liveKey) error {
	return &Error{Code: CodeNotFound, Field: "session_id", Message: fmt.Sprintf("session %q was deleted", sessionID(k.id))}
}

func (t *Tail) waitLocked(s *session) error {
	switch {
	case t.log.m.ctx.Err() != nil:
		return fail(CodeOverloaded, "the server is shutting down")
	case s.foreignLocked():
		return fail(CodeMoved, "another server has the session: come back with the last epoch you saw")
	}
	if t.spot < 0 {
		t.spot = len(s.waiting)
		s.waiting = append(s.waiting, t)
	}
	return nil
}

func (t *Tail) leaveLocked(s *session) {
	if t.spot >= 0 {
		end := len(s.waiting) - 1
		s.waiting[t.spot] = s.waiting[end]
		s.waiting[t.spot].spot = t.spot
		s.waiting[end] = nil
		s.waiting = s.waiting[:end]
		t.spot = -1
	}
	if t.s == s {
		s.readers--
		t.s = nil
	}
}

// wakeLocked wakes the readers of the log.
func (s *session) wakeLocked() {
	if len(s.waiting) == 0 {
		return
	}
	s.lastUsed = time.Now()
	for i, t := range s.waiting {
		s.waiting[i], t.spot = nil, -1
		t.wake()
	}
	s.waiting = s.waiting[:0]
}

// wakeAll wakes the readers of all logs, who find that the manager ends.
func (m *Manager) wakeAll() {
	for _, s := range m.sessions() {
		s.mu.Lock()
		s.wakeLocked()
		s.mu.Unlock()
	}
}

// Wait returns when an event with seq >= from can be read (true), or when
// there will never be one, the session being deleted (false).
func (l *Log) Wait(ctx context.Context, from int64) (bool, error) {
	woken := make(chan struct{}, 1)
	t := l.Tail(from, func() { signal(woken) })
	defer t.Close()
	for {
		s, err := t.enter(ctx, opTimeout)
		if ErrorCode(err) == CodeNotFound {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		there := s.log.visible >= from
		if !there {
			err = t.waitLocked(s)
		}
		s.mu.Unlock()
		if there || err != nil {
			return there, err
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return false, ctx.Err()
		case <-l.m.ctx.Done():
			return false, fail(CodeOverloaded, "the server is shutting down")
		}
	}
}
