package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"rocket/client"
)

const (
	refusedPause = 50 * time.Millisecond // before a call that was refused for load, or for a takeover, is made again
	brokenPause  = 10 * time.Millisecond // before a call whose connection broke is made again
	repeatable   = 8                     // acknowledged calls that an agent may make again
)

// fault is an answer that makes no sense, or none at all. It ends the run.
type fault struct {
	what string
	err  error
}

func (f *fault) Error() string { return f.what + ": " + f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// outcome says what an error of a call means.
type outcome int

const (
	answered outcome = iota // for good
	refused                 // nothing was done; it may be another time
	broken                  // no answer: nobody knows what was done
)

func outcomeOf(err error) outcome {
	if e, ok := errors.AsType[*client.Error](err); ok {
		switch e.Status {
		case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
			return refused
		}
		switch e.Code {
		case "idempotency_running":
			return refused
		case "timeout": // of a command on a socket; "it may have had its effect"
			return broken
		}
		return answered
	}
	if _, network := errors.AsType[*url.Error](err); network || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return broken
	}
	if err == nil {
		return answered
	}
	return broken // a body that ended early comes in many shapes
}

// settled makes a call until it is answered, on any server that serves. The
// error of an answer is a *client.Error; every other one ends the agent.
func settled[T any](ctx context.Context, a *agent, what string, fn func(ctx context.Context, api *client.Client) (T, error)) (T, error) {
	var zero T
	limited, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	inDoubt := false
	for {
		s, err := a.run.pick(limited, a.r.IntN(len(a.run.servers)))
		if err != nil {
			return zero, a.unanswered(ctx, what, errors.New("no server serves"))
		}
		out, err := fn(limited, s.api)
		wait := refusedPause
		switch outcomeOf(err) {
		case answered:
			if len(a.run.servers) > 1 && client.CodeOf(err) == "turn_in_progress" {
				// A server that stood still answers from memory until it learns that its sessions are others' now.
				// Nothing was done; what is never true any more ends in a fault.
				a.run.book.stale.Add(1)
				break
			}
			if inDoubt {
				a.run.book.repeated.Add(1)
			}
			return out, err
		case broken:
			inDoubt = true
			wait = brokenPause
		}
		if limited.Err() != nil || pause(limited, wait) != nil {
			return zero, a.unanswered(ctx, what, err)
		}
	}
}

func (a *agent) unanswered(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &fault{fmt.Sprintf("agent %d: %s: not answered within %v", a.n, what, answerTime), err}
}

// pick waits for a server that serves, and prefers the one at first.
func (r *run) pick(ctx context.Context, first int) (*server, error) {
	for i := range r.servers {
		s := r.servers[(first+i)%len(r.servers)]
		select {
		case <-s.serving():
			return s, nil
		default:
		}
	}
	s := r.servers[first]
	select {
	case <-s.serving():
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// mutate makes a mutating call until it is answered, always with the same key,
// and remembers it: it may be made again later, and must have no effect then.
// same tells what of an answer must be equal.
func mutate[T any](ctx context.Context, a *agent, what string, s *session, same func(T) string,
	fn func(ctx context.Context, api *client.Client, o client.CallOptions) (T, error)) (T, error) {
	a.calls++
	o := client.CallOptions{IdempotencyKey: fmt.Sprintf("soak-%d-%d-%d", a.run.opts.Seed, a.n, a.calls)}
	call := func(ctx context.Context, api *client.Client) (T, error) { return fn(ctx, api, o) }
	if s != nil {
		what += " " + s.id
	}
	out, err := settled(ctx, a, what, call)
	if err != nil {
		return out, a.refusal(what, err)
	}
	a.run.book.acknowledge(1)
	a.done = append(a.done, doneCall{what, s, same(out), func(ctx context.Context) (string, error) {
		again, err := settled(ctx, a, what+" again", call)
		return same(again), err
	}})
	if len(a.done) > repeatable {
		a.done = a.done[1:]
	}
	return out, nil
}

// doneCall is an acknowledged call.
type doneCall struct {
	what   string
	s      *session // nil: it made a root
	answer string
	again  func(ctx context.Context) (string, error)
}

// repeat makes some acknowledged calls again, with their keys. Their answers
// are the same; that they have no effect is for the comparison that follows.
func (a *agent) repeat(ctx context.Context) error {
	for range min(2, len(a.done)) {
		d := a.done[a.r.IntN(len(a.done))]
		if d.s != nil && d.s.deleted {
			continue // which of two truths a server tells, that it was done or that there is no such session, is its choice
		}
		answer, err := d.again(ctx)
		if _, refused := errors.AsType[*client.Error](err); refused {
			return &fault{fmt.Sprintf("agent %d: %s, with the key of one that was acknowledged", a.n, d.what), err}
		}
		if err != nil {
			return err
		}
		if answer != d.answer {
			id := ""
			if d.s != nil {
				id = d.s.id
			}
			a.run.book.add(finding{kind: duplicated, session: id, what: fmt.Sprintf("%s, repeated with its key, gave %q after %q", d.what, answer, d.answer)})
		}
	}
	return nil
}

// read makes a call that changes nothing until it is answered.
func read[T any](ctx context.Context, a *agent, what string, fn func(ctx context.Context, api *client.Client) (T, error)) (T, error) {
	out, err := settled(ctx, a, what, fn)
	return out, a.refusal(what, err)
}

// refusal makes a fault of a server's refusal: agents ask for nothing that
// must be refused.
func (a *agent) refusal(what string, err error) error {
	if _, refused := errors.AsType[*client.Error](err); refused {
		return &fault{fmt.Sprintf("agent %d: %s", a.n, what), err}
	}
	return err
}

func notFound(err error) bool { return client.CodeOf(err) == "not_found" }
