// Package soak kills servers under load and checks that nothing which they
// acknowledged is lost or has happened twice.
//
// Invariants:
//   - Servers are real processes on a real ledger; a kill is SIGKILL to the
//     server and to nothing else.
//   - Acknowledged is what a client was told: every 2xx answer of a mutating
//     call, and every event other than a delta that a reader saw. Each such
//     fact is in the book before the next call of its agent.
//   - A call without an answer is in doubt; it is repeated with its
//     idempotency key until there is one. So between two calls of an agent
//     the book is exact: what the ledger lacks of it is lost, what the ledger
//     has beyond it is duplicated.
//   - Everything is read through the API that everybody uses. What is read is
//     compared by functions without I/O (check.go), which tests feed with
//     wrong histories.
//   - Lines are compared with references that were generated undisturbed.
package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"sync"
	"time"

	"rocket/client"
)

const (
	sessionsPerAgent = 4  // on the average; agents delete and fork around it
	findingsMax      = 20 // after that many the run stops: what is left to learn is in the data

	complaintsMax = 10 // lines of a server's log that are shown

	restMax    = time.Second            // how long a killed server may stay away while others serve
	drained    = 6                      // one kill of so many comes while the server stops in order,
	drainMax   = 300 * time.Millisecond // within this long after it was asked to
	together   = 8                      // of several servers two die in one kill of so many
	frozen     = 15                     // one server of several stands still before one kill of so many,
	frozenMin  = 14 * time.Second       // for a time around what a lease lasts
	frozenMax  = 22 * time.Second
	againMax   = 700 * time.Millisecond // of the moment of a kill during the recovery from the one before
	answerTime = time.Minute            // for a call, with all its repetitions
)

// Options configure a run.
type Options struct {
	Command     func(args ...string) *exec.Cmd // the rocket binary with arguments
	Dir         string                         // for data and logs; the caller removes it
	DatabaseURL string                         // the ledger; "": the one server has a private one
	Servers     int                            // 1, or more with DatabaseURL
	Sessions    int                            // about so many live at once
	Kills       int
	Every       time.Duration // a kill comes at a random moment within this much load
	Seed        uint64        // of what agents do and of the moments, as far as timing lets them repeat
	Log         io.Writer     // progress and findings, for people
}

// Report is what a run comes to.
type Report struct {
	Acknowledged int `json:"acknowledged"` // facts that were told to a client
	Lost         int `json:"lost"`         // of them
	Duplicated   int `json:"duplicated"`   // effects that nobody was told of, or that came twice
	Kills        int `json:"kills"`
}

// run is one run.
type run struct {
	opts    Options
	servers []*server
	refs    []*reference
	agents  []*agent
	lister  *agent // has no sessions: makes the calls of Run itself
	gate    *gate
	book    *book
	cancel  context.CancelCauseFunc
	r       *rand.Rand // only the goroutine of Run
}

// Run does a run. An error means that it could not be finished, or that a
// server gave an answer that makes no sense; the report has what was known by
// then.
func Run(ctx context.Context, opts Options) (Report, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	n := max(1, opts.Sessions/sessionsPerAgent)
	r := &run{opts: opts, gate: newGate(n), cancel: cancel, r: rand.New(rand.NewPCG(opts.Seed, 0))}
	r.book = newBook(opts.Log, cancel)
	err := r.do(ctx, n)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	for _, s := range r.servers {
		err = errors.Join(err, s.end(), r.complain(s))
	}
	report := r.book.report()
	if err == nil && (report.Lost > 0 || report.Duplicated > 0) {
		err = fmt.Errorf("%d acknowledged facts lost, %d duplicated", report.Lost, report.Duplicated)
	}
	if n := r.book.wrongs.Load(); err == nil && n > 0 {
		err = fmt.Errorf("%d answers made no sense", n)
	}
	return report, err
}

// complain shows what a server logged as an error: kills cause none, a server
// that stood still has reason to.
func (r *run) complain(s *server) error {
	lines, err := s.complaints()
	for _, line := range lines[:min(len(lines), complaintsMax)] {
		fmt.Fprintf(r.opts.Log, "server %d logged: %s\n", s.n, line)
	}
	if len(lines) > complaintsMax {
		fmt.Fprintf(r.opts.Log, "server %d logged %d more errors\n", s.n, len(lines)-complaintsMax)
	}
	return err
}

func (r *run) do(ctx context.Context, agents int) error {
	for i := range r.opts.Servers {
		s, err := newServer(r.opts, i, func(err error) { r.cancel(err) })
		if err != nil {
			return err
		}
		r.servers = append(r.servers, s)
		if err := s.start(); err != nil {
			return err
		}
	}
	if err := r.makeReferences(ctx); err != nil {
		return err
	}
	r.lister = newAgent(r, agents)
	working, stop := context.WithCancel(ctx)
	defer stop()
	var all sync.WaitGroup
	for i := range agents {
		a := newAgent(r, i)
		r.agents = append(r.agents, a)
		all.Go(func() { a.live(working) })
	}
	err := r.killAll(ctx)
	if err == nil {
		err = r.whole(ctx, r.gate.raise(true), 0)
	}
	stop()
	all.Wait()
	if err == nil {
		err = r.checkCaches(ctx)
	}
	return err
}

// killAll is the loop of kills.
func (r *run) killAll(ctx context.Context) error {
	for r.book.kills() < r.opts.Kills {
		if err := pause(ctx, r.within(r.opts.Every)); err != nil {
			return err
		}
		if len(r.servers) > 1 && r.r.IntN(frozen) == 0 {
			if err := r.freeze(ctx); err != nil {
				return err
			}
		}
		s := r.servers[r.r.IntN(len(r.servers))]
		began := time.Now()
		round, err := r.kill(ctx, s)
		if err != nil {
			return err
		}
		for r.book.kills() < r.opts.Kills && r.r.IntN(4) == 0 { // the next one hits the recovery
			if round, err = r.killRecovering(ctx, s); err != nil {
				return err
			}
		}
		up := time.Since(began)
		if err := r.whole(ctx, round, up); err != nil {
			return err
		}
	}
	return nil
}

// freeze makes a server stand still until its lease has run out: when it wakes
// up, others have its sessions, and it must not do anything to them.
func (r *run) freeze(ctx context.Context) error {
	s, d := r.servers[r.r.IntN(len(r.servers))], frozenMin+r.within(frozenMax-frozenMin)
	if err := s.freeze(ctx, d); err != nil {
		return err
	}
	fmt.Fprintf(r.opts.Log, "%s server %d stood still for %.1f s\n", time.Now().UTC().Format(timeFormat), s.n, d.Seconds())
	return pause(ctx, r.within(r.opts.Every))
}

// kill kills one server and starts it again, some time later if there are
// others. It returns the round that began.
func (r *run) kill(ctx context.Context, s *server) (round int, err error) {
	var drain time.Duration
	if r.r.IntN(drained) == 0 {
		drain = 1 + r.within(drainMax)
	}
	s.kill(drain)
	r.book.killed()
	other := r.servers[(s.n+1)%len(r.servers)]
	both := other != s && r.r.IntN(together) == 0
	if both {
		other.kill(0)
		r.book.killed()
	}
	round = r.gate.raise(false)
	if other != s {
		if err := pause(ctx, r.within(restMax)); err != nil {
			return round, err
		}
	}
	err = s.start()
	if both {
		err = errors.Join(err, other.start())
	}
	return round, err
}

// killRecovering kills a server that was killed just now once more, before it
// serves or while clients come back.
func (r *run) killRecovering(ctx context.Context, s *server) (round int, err error) {
	if r.r.IntN(2) == 0 {
		s.kill(0)
		r.book.killed()
		if err := s.launch(); err != nil {
			return 0, err
		}
	}
	if err := pause(ctx, r.within(againMax)); err != nil {
		return 0, err
	}
	if r.book.kills() == r.opts.Kills { // the first of the two was the last one
		return r.gate.raise(false), s.ready()
	}
	return r.kill(ctx, s)
}

// whole waits until every agent has settled and has checked what is its own,
// then compares the list of all sessions with all that was acknowledged, and
// lets the agents go on.
func (r *run) whole(ctx context.Context, round int, up time.Duration) error {
	began := time.Now()
	if err := r.gate.wait(ctx, round); err != nil {
		return err
	}
	all, err := r.listAll(ctx)
	if err != nil {
		return err
	}
	want := map[string]*session{}
	for _, a := range r.agents {
		for _, s := range a.sessions {
			want[s.id] = s
		}
	}
	all = slices.DeleteFunc(all, func(x client.Session) bool { return r.book.known(x.ID) })
	r.book.add(checkList(want, all)...)
	rep := r.book.report()
	what := fmt.Sprintf("kill %d of %d: serving again after %.1f s", rep.Kills, r.opts.Kills, up.Seconds())
	if _, last := r.gate.now(); last {
		what = fmt.Sprintf("at the end (readers saw %d committed events, %d tokens of detached sessions came from the disk, %d calls were refused for a turn that had ended)",
			r.book.read.Load(), r.book.restored.Load(), r.book.stale.Load())
	}
	fmt.Fprintf(r.opts.Log, "%s %s, %d sessions checked in %.1f s; %d acknowledged, %d calls repeated, lost %d, duplicated %d\n",
		time.Now().UTC().Format(timeFormat), what, len(all), time.Since(began).Seconds(), rep.Acknowledged, r.book.repeated.Load(), rep.Lost, rep.Duplicated)
	r.gate.release(round)
	return ctx.Err()
}

// checkCaches has every server prove all of its cache.
func (r *run) checkCaches(ctx context.Context) error {
	for _, s := range r.servers {
		got, err := s.api.CheckCache(ctx, 1)
		if err != nil {
			return fmt.Errorf("check the cache of server %d: %w", s.n, err)
		}
		if len(got.Mismatches) > 0 {
			return fmt.Errorf("the cache of server %d has mismatches: %v", s.n, got.Mismatches)
		}
		fmt.Fprintf(r.opts.Log, "server %d: %d of %d cached snapshots proven, %d pages\n", s.n, got.Sampled, got.Snapshots, got.Pages)
	}
	return nil
}

func (r *run) within(d time.Duration) time.Duration { return time.Duration(r.r.Int64N(int64(d) + 1)) }

// pause is how random moments come about.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
