package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"rocket/engine"
	"rocket/engine/chat"
)

// StartTurn commits a turn and starts it; use WaitTurn for its end. On a
// detached session it resumes it.
func (m *Manager) StartTurn(ctx context.Context, call Call, id string, req TurnRequest) (Turn, error) {
	if err := m.open(); err != nil {
		return Turn{}, err
	}
	if err := checkTurn(&req); err != nil {
		return Turn{}, err
	}
	return once(ctx, m, call, func(save save) (Turn, error) {
		if err := m.admitTokens(ctx, call.Tenant); err != nil {
			return Turn{}, err
		}
		var out Turn
		err := m.operate(ctx, call.Tenant, id, func(o *operation) error {
			t, err := o.newTurn(ctx, req)
			if err != nil {
				return err
			}
			if out, err = o.begin(ctx, t, save); err == nil {
				m.spend(call.Tenant, len(t.prompt))
			}
			return err
		})
		return out, err
	})
}

// newTurn checks that the session may have a turn and makes its prompt.
func (o *operation) newTurn(ctx context.Context, req TurnRequest) (*turn, error) {
	s := o.session
	s.mu.Lock()
	x, open := s.row, s.turn != nil
	s.mu.Unlock()
	switch {
	case x.state == StateClosed:
		return nil, fail(CodeSessionClosed, "the session is closed")
	case open || x.state == StateRunning:
		return nil, fail(CodeTurnInProgress, "a turn is in progress")
	}
	if err := s.m.canRun(&x); err != nil {
		return nil, err
	}
	if err := s.loadLine(ctx); err != nil {
		return nil, err
	}
	prompt, mark, field, err := s.m.prompt(ctx, x.tenant, s.line, req.Messages, req.Input, true)
	if err != nil {
		return nil, err
	}
	switch n := len(s.line) + len(prompt); {
	case n == 0:
		return nil, invalid("input", "the session's line is empty: there is nothing to go on from")
	case n >= s.m.info.Context:
		return nil, &Error{Code: CodeContextLimit, Field: field, Message: fmt.Sprintf(
			"the line would be %d tokens, the model's context is %d", n, s.m.info.Context)}
	}
	t := s.newTurn(newID(), req, prompt, len(s.line), time.Time{})
	t.mark = mark
	return t, nil
}

func (s *session) newTurn(id uuid.UUID, req TurnRequest, prompt []int32, from int, created time.Time) *turn {
	t := &turn{s: s, id: id, req: req, prompt: prompt, from: from, created: created,
		done: make(chan struct{}), failed: make(chan struct{}), cut: newCutter(s.m.tok, req.Stop)}
	t.ctx, t.cancel = context.WithCancel(s.m.ctx)
	return t
}

// prompt turns messages or text into the tokens that follow line, and names
// the field that they came from. mark is the end of a system prompt that begins
// the line, where others with the same one part; 0 if there is none.
func (m *Manager) prompt(ctx context.Context, tenant string, line []int32, msgs []Message, input *string, generate bool) (ids []int32, mark int, field string, err error) {
	if promptBytes(msgs, input) > promptLarge {
		leave, err := m.prompts.enter(ctx, tenant)
		if err != nil {
			return nil, 0, "", err
		}
		defer leave()
	}
	if len(msgs) == 0 {
		if input == nil || *input == "" {
			return []int32{}, 0, "input", nil
		}
		return m.tok.Encode(*input), 0, "input", nil
	}
	if m.opts.Template == nil {
		return nil, 0, "messages", invalid("messages", "this model has no chat template: use input")
	}
	converted := make([]chat.Message, len(msgs))
	for i, msg := range msgs {
		data, err := json.Marshal(msg)
		if err == nil {
			err = json.Unmarshal(data, &converted[i])
		}
		if err != nil {
			return nil, 0, "messages", invalid(fmt.Sprintf("messages[%d]", i), "%v", err)
		}
	}
	ids, err = m.opts.Template.AppendTo(line, converted, chat.Options{AddGenerationPrompt: generate})
	if err == nil {
		if len(line) == 0 {
			mark = m.systemEnd(ids, converted)
		}
		return ids, mark, "messages", nil
	}
	if f, ok := errors.AsType[*chat.FieldError](err); ok {
		return nil, 0, "messages", invalid(f.Field, "%s", f.Problem)
	}
	return nil, 0, "messages", invalid("messages", "%v", err)
}

// systemEnd is how many of ids belong to the system messages that msgs begin
// with, if a template renders them as a beginning of the whole; else 0.
func (m *Manager) systemEnd(ids []int32, msgs []chat.Message) int {
	n := 0
	for n < len(msgs) && msgs[n].Role == "system" {
		n++
	}
	if n == 0 || n == len(msgs) {
		return 0
	}
	head, err := m.opts.Template.PromptWith(msgs[:n], chat.Options{})
	if err != nil || len(head) > len(ids) || !slices.Equal(head, ids[:len(head)]) {
		return 0
	}
	return len(head)
}

// begin starts the run, commits the turn's row, and hands the turn to its
// goroutine. The run starts first, so that the device works during the commit;
// nobody sees its tokens before. If it is past the queue by the time of the
// commit, its start is committed with it.
func (o *operation) begin(ctx context.Context, t *turn, save save) (Turn, error) {
	s := o.session
	request, err := json.Marshal(t.req)
	if err != nil {
		return Turn{}, fmt.Errorf("encode request: %w", err)
	}
	if err := s.m.turnBegan(s.key.tenant); err != nil {
		return Turn{}, err
	}
	resumed, err := s.startRun(ctx, t)
	if err != nil {
		s.m.turnEnded(s.key.tenant)
		return Turn{}, err
	}
	var events []Event
	started := false
	var out Turn
	err = o.commit(ctx, effect{
		write: func(ctx context.Context, w *work, x *row) error {
			_, st := t.run.Read(0)
			started = joined(st, 0)
			r := turnRow{tenant: s.key.tenant, id: t.id, session: s.key.id, state: TurnQueued, request: request, seed: *t.req.Seed,
				prompt: t.prompt, from: t.from, promptTo: t.promptTo(), to: t.from, created: w.now}
			t.created = w.now
			if x.state == StateDetached {
				back := restored(resumed)
				events = append(events, Event{Type: EventSessionResumed, Time: w.now, EventData: EventData{Restored: &back}})
				clearResidency(w, x)
			}
			if started {
				at := s.m.clock.now()
				r.state, r.started, r.to = TurnRunning, &at, t.promptTo()
				events = append(events, t.startedEvent(x.epoch, at))
			}
			insertTurn(w.b, &r)
			number(events, x)
			if started {
				insertPrompt(w.b, s.key.tenant, s.key.id, t, t.from, x.lastSeq, x.epoch, *r.started)
				x.length += len(t.prompt)
			}
			if err := insertEvents(w.b, s.key.tenant, s.key.id, events); err != nil {
				return err
			}
			x.state = StateRunning
			x.turnCount++
			x.touch(w.now)
			if out, err = r.turn(); err != nil {
				return err
			}
			out.Tokens = []int32{}
			return save(w, out)
		},
		apply: func() {
			s.appendLocked(events)
			s.turn = t
			if started {
				t.started = true
				s.line = append(s.line, t.prompt...)
			}
			s.m.wg.Go(t.loop)
		},
		abort: func() {
			t.abandon()
			s.dropSeq() // its line has the prompt
		},
	})
	return out, err
}

// number gives new events their session, epoch and seqs behind the row's last.
func number(events []Event, x *row) {
	for i := range events {
		x.lastSeq++
		events[i].Seq, events[i].Epoch, events[i].SessionID = x.lastSeq, x.epoch, sessionID(x.id)
	}
}

// appendLocked adds committed events to the log in memory.
func (s *session) appendLocked(events []Event) {
	for _, e := range events {
		s.log.append(e)
	}
}

// startRun opens the timeline if there is none and queues the run on it. A
// timeline that is not what the line says is given up for a new one, once.
func (s *session) startRun(ctx context.Context, t *turn) (engine.Restored, error) {
	line := append(s.line[:t.from:t.from], t.prompt...)
	req := engine.TurnRequest{
		Line: line, MaxTokens: *t.req.MaxTokens, Temperature: float32(*t.req.Temperature), TopP: float32(*t.req.TopP),
		TopK: *t.req.TopK, Seed: uint64(*t.req.Seed), Stop: t.req.Stop, IgnoreEOS: t.req.IgnoreEOS, Logprobs: -1, Mark: t.mark,
	}
	if t.req.Logprobs != nil {
		req.Logprobs = *t.req.Logprobs
	}
	field := "input"
	if len(t.req.Messages) > 0 {
		field = "messages"
	}
	for try := 0; ; try++ {
		got, err := s.coldStart(ctx, engine.OpenOptions{Lazy: true})
		if err != nil {
			return got, err
		}
		s.mu.Lock()
		seq := s.seq
		s.mu.Unlock()
		t.run, err = s.m.eng.Start(ctx, seq, req)
		if err == nil {
			return got, nil
		}
		if try > 0 || !errors.Is(err, engine.ErrLine) && !errors.Is(err, engine.ErrBusy) && !errors.Is(err, engine.ErrClosed) {
			return got, engineError("start turn", err, field)
		}
		s.dropSeq()
	}
}
