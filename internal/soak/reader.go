package soak

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"rocket/client"
)

// reader follows one session over one connection after another.
type reader struct {
	s      *session
	from   client.Position // where it began
	sse    bool            // or else over a WebSocket
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	events []client.Event // guarded by mu; in the order in which they came
	times  []time.Time    // guarded by mu; when
	err    error          // guarded by mu; why it ended by itself
	change chan struct{}  // guarded by mu; closed at the next event
}

// follow starts a reader of s at from.
func (a *agent) follow(ctx context.Context, s *session, from client.Position) {
	r := &reader{s: s, from: from, sse: a.r.IntN(2) == 0, done: make(chan struct{}), change: make(chan struct{})}
	ctx, r.cancel = context.WithCancel(ctx)
	s.readers = append(s.readers, r)
	first, run := a.r.IntN(len(a.run.servers)), a.run
	go func() {
		defer close(r.done)
		r.live(ctx, run, first)
	}()
}

func (r *reader) String() string {
	if r.sse {
		return fmt.Sprintf("over server-sent events, from %+v", r.from)
	}
	return fmt.Sprintf("over WebSockets, from %+v", r.from)
}

// live reads until ctx ends or the session is unknown.
func (r *reader) live(ctx context.Context, run *run, server int) {
	at := r.from
	for ; ; server++ {
		s, err := run.pick(ctx, server%len(run.servers))
		if err != nil {
			return
		}
		for e, err := range s.api.Follow(ctx, r.s.id, at, client.FollowOptions{SSE: r.sse, Retries: 1}) {
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				at = client.Position{From: e.Seq + 1, Epoch: e.Epoch}
				r.add(e, run.book)
				continue
			}
			if e, ok := errors.AsType[*client.Error](err); ok && e.Status >= http.StatusInternalServerError && e.Status != http.StatusServiceUnavailable {
				run.book.wrong("a reader of %s %s, by server %d, was told %d: %v", r.s.id, r, s.n, e.Status, err)
			} else if outcomeOf(err) == answered {
				r.end(err)
				return
			}
		}
		if pause(ctx, brokenPause) != nil {
			return
		}
	}
}

func (r *reader) add(e client.Event, b *book) {
	if e.Type != "turn.delta" {
		b.acknowledge(1)
		b.read.Add(1)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events, r.times = append(r.events, e), append(r.times, time.Now())
	close(r.change)
	r.change = make(chan struct{})
}

func (r *reader) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
	close(r.change)
	r.change = make(chan struct{})
}

// catchUp waits until the reader has the end of the log.
func (r *reader) catchUp(ctx context.Context, log []client.Event) error {
	if len(log) == 0 || r.from.From > int64(len(log)) {
		return nil // it waits for what has not happened
	}
	last := log[len(log)-1]
	limited, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	for {
		r.mu.Lock()
		n, change, err := len(r.events), r.change, r.err
		there := n > 0 && r.events[n-1].Seq >= last.Seq && r.events[n-1].Epoch >= last.Epoch
		r.mu.Unlock()
		if there || err != nil { // an end by itself is for check
			return nil
		}
		select {
		case <-change:
		case <-r.done:
			return nil
		case <-limited.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return &fault{fmt.Sprintf("a reader of %s (%s) has %d events after %v, the log ends at %d", r.s.id, r, n, answerTime, last.Seq), limited.Err()}
		}
	}
}

// check compares what the reader saw with the log: what it saw of committed
// events is there, what is there it saw, each once and in order. It tells of
// the first event that is not so.
func (r *reader) check(got *seen) (found []finding) {
	r.mu.Lock()
	events, times, err := slices.Clone(r.events), slices.Clone(r.times), r.err
	r.mu.Unlock()
	add := func(k kind, e client.Event, known time.Time, format string, args ...any) {
		found = append(found, finding{kind: k, session: r.s.id, turn: e.TurnID, seq: e.Seq, known: known, what: "a reader " + r.String() + ": " + fmt.Sprintf(format, args...)})
	}
	if err != nil {
		add(lost, client.Event{}, time.Time{}, "was told %q", err)
	}
	next := r.start(got)
	for i, e := range events {
		if len(found) > 0 {
			return found
		}
		if e.Seq < 1 || e.Seq > int64(len(got.events)) {
			if e.Type != "turn.delta" {
				add(lost, e, times[i], "saw %s, the log ends at %d", show(e), len(got.events))
			}
			continue
		}
		there := got.events[e.Seq-1]
		switch {
		case there.Epoch > e.Epoch && e.Type == "turn.delta":
			continue // it never happened, as deltas may
		case there.Epoch != e.Epoch || !sameEvent(e, there):
			add(lost, e, times[i], "saw %s, the log has %s", show(e), show(there))
		case e.Seq < next:
			add(duplicated, e, times[i], "got %s again", e.Type)
		case e.Seq > next:
			add(lost, e, times[i], "did not get %d to %d", next, e.Seq-1)
		default:
			next++
		}
	}
	return found
}

// start is the seq of the first event that the reader is to get.
func (r *reader) start(got *seen) int64 {
	next := max(r.from.From, 1)
	if r.from.Epoch > 0 {
		i := slices.IndexFunc(got.events, func(e client.Event) bool { return e.Epoch > r.from.Epoch })
		if i >= 0 {
			next = min(next, int64(i+1))
		}
	}
	return next
}

// dropReaders ends all readers of a session.
func (s *session) dropReaders() {
	for _, r := range s.readers {
		r.cancel()
		<-r.done
	}
	s.readers = nil
}

// reading lets go of readers that have ended.
func (s *session) reading() []*reader {
	return slices.DeleteFunc(s.readers, func(r *reader) bool {
		select {
		case <-r.done:
			return true
		default:
			return false
		}
	})
}
