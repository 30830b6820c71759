package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"rocket/client"
)

const (
	sessionsMax = 2 * sessionsPerAgent // an agent with so many deletes some
	shortMax    = 8                    // tokens of a turn that is waited for
	longMax     = 60                   // tokens of one during which something else happens
	midMax      = 30 * time.Millisecond
	settlePause = 10 * time.Millisecond // between two looks at an open turn
)

// agent does one thing after another to sessions that are its own. What goes
// on at once is its open turn, its readers, and the other agents.
type agent struct {
	run      *run
	n        int
	r        *rand.Rand
	round    int        // that it has checked
	sessions []*session // living ones, parents before children
	buried   []*session // deleted since the last comparison
	calls    int
	done     []doneCall
}

func newAgent(r *run, n int) *agent {
	return &agent{run: r, n: n, r: rand.New(rand.NewPCG(r.opts.Seed, uint64(n+1)))}
}

// live works until ctx ends or the last round is checked.
func (a *agent) live(ctx context.Context) {
	err := a.work(ctx)
	for _, s := range a.sessions {
		s.dropReaders()
	}
	if err != nil && ctx.Err() == nil {
		a.run.cancel(err)
	}
}

func (a *agent) work(ctx context.Context) error {
	for {
		round, last := a.run.gate.now()
		if round == a.round {
			if err := a.step(ctx); err != nil {
				return err
			}
			continue
		}
		if err := a.verify(ctx, last); err != nil {
			return err
		}
		a.round = round
		if err := a.run.gate.arrive(ctx, a.n, round); err != nil || last {
			return err
		}
	}
}

// deed is something that an agent does to a session that is not closed.
type deed struct {
	weight int
	do     func(a *agent, ctx context.Context, s *session) error
}

var deeds = []deed{
	{20, (*agent).shortTurn},
	{22, (*agent).longTurn},
	{14, (*agent).fork},
	{4, (*agent).detach},
	{12, (*agent).park},
	{6, func(a *agent, ctx context.Context, s *session) error { _, err := a.resume(ctx, s); return err }},
	{4, (*agent).rename},
	{4, (*agent).readPiece},
	{8, (*agent).reader},
	{3, (*agent).textTurn},
	{2, (*agent).close},
	{3, (*agent).remove},
}

// step does one deed.
func (a *agent) step(ctx context.Context) error {
	if len(a.sessions) == 0 || len(a.sessions) < sessionsPerAgent && a.r.IntN(12) == 0 {
		return a.create(ctx)
	}
	s := a.sessions[a.r.IntN(len(a.sessions))]
	switch {
	case len(a.sessions) >= sessionsMax:
		return a.remove(ctx, s)
	case s.closed && a.r.IntN(2) == 0:
		return a.remove(ctx, s)
	case s.closed:
		return a.readPiece(ctx, s)
	case len(s.line)+longMax > len(s.ref.tokens) && a.r.IntN(2) == 0:
		return a.remove(ctx, s)
	case len(s.line)+longMax > len(s.ref.tokens):
		return a.close(ctx, s)
	}
	total := 0
	for _, d := range deeds {
		total += d.weight
	}
	n := a.r.IntN(total)
	for _, d := range deeds {
		if n -= d.weight; n < 0 {
			return d.do(a, ctx, s)
		}
	}
	return nil
}

// labels make the children and roots of an agent known in lists.
func (a *agent) labels() map[string]string { return map[string]string{"agent": fmt.Sprint(a.n)} }

func sessionID(s client.Session) string { return s.ID }
func turnID(t client.Turn) string       { return t.ID }

func (a *agent) create(ctx context.Context) error {
	f := a.run.refs[a.r.IntN(len(a.run.refs))]
	title := fmt.Sprintf("agent %d", a.n)
	got, err := mutate(ctx, a, "create", nil, sessionID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Session, error) {
		return api.Create(ctx, client.CreateRequest{Input: &f.prompt, Title: title, Labels: a.labels()}, o)
	})
	if err != nil {
		return err
	}
	s := &session{id: got.ID, known: time.Now(), lastKnown: time.Now(), prompted: f.prompted, ref: f, refTo: whole, title: title, changed: true}
	s.line = append(s.line, f.tokens[:f.prompted]...)
	a.sessions = append(a.sessions, s)
	return nil
}

// begin starts a turn and does not wait for its end. It returns the key, so
// that the turn can be joined.
func (a *agent) begin(ctx context.Context, s *session, req client.TurnRequest, wait bool) (*turn, error) {
	s.touch()
	s.detached = false
	if req.Input != nil {
		s.refTo = min(s.refTo, len(s.line))
	}
	s.warm = 0
	kills, what := a.run.book.kills(), "start a turn of"
	if wait {
		what = "run a turn of"
	}
	var got client.Turn
	var err error
	t := &turn{from: len(s.line)}
	if wait {
		got, err = mutate(ctx, a, what, s, turnID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Turn, error) {
			return api.RunTurn(ctx, s.id, req, o)
		})
	} else {
		got, err = command(ctx, a, what, s, "turn.create", req, turnID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Turn, error) {
			t.join = func(ctx context.Context, api *client.Client) (client.Turn, error) {
				return api.RunTurn(ctx, s.id, req, o)
			}
			return api.StartTurn(ctx, s.id, req, o)
		})
	}
	if err != nil {
		return nil, err
	}
	t.id, t.known = got.ID, time.Now()
	s.turns = append(s.turns, t)
	s.touch()
	if got.From != t.from {
		a.run.book.add(finding{kind: lost, session: s.id, turn: t.id, known: t.known, what: fmt.Sprintf("it begins at %d of a line with %d tokens", got.From, t.from)})
	}
	if wait {
		a.run.book.add(s.ended(t, got)...)
		if !final(got.State) {
			return t, &fault{"run a turn of " + s.id, fmt.Errorf("answered with a turn that is %s", got.State)}
		}
		if got.State == "completed" && a.run.book.kills() == kills {
			s.warm = kills + 1
		}
	}
	return t, nil
}

func (a *agent) shortTurn(ctx context.Context, s *session) error {
	_, err := a.begin(ctx, s, s.ref.mode.turn(1+a.r.IntN(shortMax)), true)
	return err
}

// textTurn adds words, after which no reference knows the line.
func (a *agent) textTurn(ctx context.Context, s *session) error {
	req := s.ref.mode.turn(1 + a.r.IntN(shortMax))
	words := strings.Repeat(fmt.Sprintf("// word %d\n", a.r.IntN(100)), 1+a.r.IntN(4))
	req.Input = &words
	_, err := a.begin(ctx, s, req, true)
	return err
}

// longTurn does something else while a turn runs.
func (a *agent) longTurn(ctx context.Context, s *session) error {
	t, err := a.begin(ctx, s, s.ref.mode.turn(shortMax+a.r.IntN(longMax-shortMax)), false)
	for range a.r.IntN(3) {
		if err == nil {
			err = pause(ctx, time.Duration(a.r.Int64N(int64(midMax)))) // a moment of the turn
		}
		if err != nil {
			return err
		}
		switch a.r.IntN(4) {
		case 0:
			err = a.cancel(ctx, s, t)
		case 1:
			err = a.reader(ctx, s)
		default:
			if len(a.sessions) < sessionsMax {
				err = a.fork(ctx, s)
			}
		}
	}
	if err != nil {
		return err
	}
	if t.join != nil && a.r.IntN(3) == 0 {
		return a.join(ctx, s, t)
	}
	return a.settle(ctx, s)
}

// join waits for a turn with the key that began it.
func (a *agent) join(ctx context.Context, s *session, t *turn) error {
	got, err := settled(ctx, a, "join turn "+t.id, t.join)
	if err != nil {
		return a.refusal("join turn "+t.id, err)
	}
	switch {
	case got.ID != t.id:
		a.run.book.add(finding{kind: duplicated, session: s.id, turn: got.ID, what: "a turn that was joined with the key of " + t.id})
	case !final(got.State):
		return &fault{"join turn " + t.id, fmt.Errorf("answered with a turn that is %s", got.State)}
	default:
		a.run.book.add(s.ended(t, got)...)
	}
	return nil
}

// settle waits for the end of a session's open turn.
func (a *agent) settle(ctx context.Context, s *session) error {
	if len(s.turns) == 0 || s.deleted {
		return nil
	}
	t := s.turns[len(s.turns)-1]
	for began := time.Now(); !final(t.state); {
		got, err := read(ctx, a, "turn "+t.id, func(ctx context.Context, api *client.Client) (client.Turn, error) {
			return api.Turn(ctx, s.id, t.id)
		})
		switch {
		case notFound(err):
			a.run.book.add(finding{kind: lost, session: s.id, turn: t.id, known: t.known, what: "there is no such turn"})
			t.state = "lost"
			return nil
		case err != nil:
			return err
		case final(got.State):
			a.run.book.add(s.ended(t, got)...)
		case time.Since(began) > answerTime:
			return &fault{"wait for turn " + t.id, fmt.Errorf("it is %s after %v", got.State, answerTime)}
		default:
			if err := pause(ctx, settlePause); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *agent) cancel(ctx context.Context, s *session, t *turn) error {
	got, err := command(ctx, a, "cancel a turn of", s, "turn.cancel", struct{}{}, turnID, func(ctx context.Context, api *client.Client, o client.CallOptions) (client.Turn, error) {
		return api.Cancel(ctx, s.id, o)
	})
	switch {
	case err != nil:
		return err
	case got.ID != t.id:
		return &fault{"cancel a turn of " + s.id, fmt.Errorf("it named %s, the open one was %s", got.ID, t.id)}
	case !final(got.State):
		return &fault{"cancel a turn of " + s.id, fmt.Errorf("it answered with turn %s, which is %s", got.ID, got.State)}
	}
	a.run.book.add(s.ended(t, got)...)
	return nil
}

// fork makes children at a random offset, or where the line ends.
func (a *agent) fork(ctx context.Context, s *session) error {
	n, title := 1+a.r.IntN(min(3, max(1, sessionsMax-len(a.sessions)))), fmt.Sprintf("fork %d", a.calls)
	req := client.ForkRequest{N: &n, Title: &title, Labels: a.labels()}
	if a.r.IntN(2) == 0 {
		req.At = new(1 + a.r.IntN(len(s.line)))
	}
	least := len(s.line)
	s.touch()
	got, err := command(ctx, a, "fork", s, "fork", req, func(f client.ForkResult) string { return fmt.Sprint(f.At, idsOf(f.Sessions)) },
		func(ctx context.Context, api *client.Client, o client.CallOptions) (client.ForkResult, error) {
			return api.Fork(ctx, s.id, req, o)
		})
	if err != nil {
		return err
	}
	s.detached = false
	s.touch()
	s.forked = append(s.forked, idsOf(got.Sessions))
	bad := func(format string, args ...any) {
		a.run.book.add(finding{kind: lost, session: s.id, known: s.lastKnown, what: fmt.Sprintf(format, args...)})
	}
	switch {
	case len(got.Sessions) != n:
		bad("a fork into %d made %d", n, len(got.Sessions))
	case req.At != nil && got.At != *req.At:
		bad("a fork at %d was made at %d", *req.At, got.At)
	case req.At == nil && got.At < least:
		bad("a fork at the end was made at %d, %d tokens were acknowledged", got.At, least)
	}
	for _, c := range got.Sessions {
		a.sessions = append(a.sessions, s.child(c.ID, got.At, title))
	}
	return nil
}

func idsOf(list []client.Session) []string {
	ids := make([]string, len(list))
	for i, s := range list {
		ids[i] = s.ID
	}
	return ids
}
