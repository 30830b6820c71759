package server

import (
	"context"
	"errors"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

type turnInput struct {
	Mutation
	SessionInput
	Wait bool `query:"wait" doc:"answer when the turn has ended; it goes on if the client leaves"`
	Body *sessions.TurnRequest
}

type turnOutput struct {
	Status int
	Body   sessions.Turn
}

type turnsInput struct {
	SessionInput
	Limit int    `query:"limit" minimum:"1" maximum:"200" default:"20"`
	After string `query:"after" doc:"next of the page before"`
}

type oneTurnInput struct {
	SessionInput
	Turn string `path:"turn" doc:"turn id"`
}

func (s *Server) registerTurns() {
	register(s, huma.Operation{OperationID: "create-turn", Method: http.MethodPost, Path: pathTurns, DefaultStatus: http.StatusAccepted,
		Tags: []string{tagTurns}, Summary: "Append a prompt and decode",
		Description: "202 after the commit of the turn's row; with wait=true 200 at its end. One turn at a time: 409 turn_in_progress. The turn goes on when nobody reads it.",
		Responses: map[string]*huma.Response{"200": {Description: "The turn at its end, with wait=true", Content: map[string]*huma.MediaType{
			"application/json": {Schema: &huma.Schema{Ref: "#/components/schemas/Turn"}}}}}}, s.createTurn)
	register(s, huma.Operation{OperationID: "list-turns", Method: http.MethodGet, Path: pathTurns,
		Tags: []string{tagTurns}, Summary: "List turns, newest first", Description: "Own and inherited ones, the latter clipped at forked_at; without token lists. " + pageBytesNote}, s.listTurns)
	register(s, huma.Operation{OperationID: "get-turn", Method: http.MethodGet, Path: "/v1/sessions/{id}/turns/{turn}",
		Tags: []string{tagTurns}, Summary: "Get a turn"}, s.getTurn)
	register(s, huma.Operation{OperationID: "cancel-turn", Method: http.MethodPost, Path: pathCancel,
		Tags: []string{tagTurns}, Summary: "Cancel the open turn", Description: "What was generated stays on the line."}, s.cancelTurn)
}

func (s *Server) createTurn(ctx context.Context, in *turnInput) (*turnOutput, error) {
	turn, err := s.startTurn(ctx, in.IdempotencyKey, in.ID, valueOf(in.Body), in.Wait)
	if err != nil {
		return nil, s.problem(err)
	}
	if !in.Wait {
		return &turnOutput{Status: http.StatusAccepted, Body: turn}, nil
	}
	if !turn.State.Final() || turn.Tokens == nil {
		if turn, err = s.waitTurn(ctx, in.ID, turn.ID); err != nil {
			return nil, s.problem(err)
		}
	}
	return &turnOutput{Status: http.StatusOK, Body: turn}, nil
}

func (s *Server) startTurn(ctx context.Context, key, id string, req sessions.TurnRequest, wait bool) (sessions.Turn, error) {
	if s.refuse.Load() {
		return sessions.Turn{}, errDraining
	}
	c, err := call(ctx, key, routeOf(http.MethodPost, pathTurns, id), req, wait)
	if err != nil {
		return sessions.Turn{}, err
	}
	return s.manager.StartTurn(ctx, c, id, req)
}

// waitTurn gives up when the server closes, as a drain has waited long enough,
// and when the caller's key is revoked: what comes of the turn is not for it.
func (s *Server) waitTurn(ctx context.Context, id, turnID string) (sessions.Turn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.closing, func() { cancel(errDraining) })()
	held, release := s.manager.Keys().Hold(ctx, callerOf(ctx))
	defer release()
	defer context.AfterFunc(held, func() { cancel(errKeyGone) })() // nothing where ctx has ended before
	turn, err := s.manager.WaitTurn(ctx, tenantOf(ctx), id, turnID)
	if ctx.Err() != nil && (err != nil || errors.Is(context.Cause(ctx), errKeyGone)) {
		return sessions.Turn{}, context.Cause(ctx)
	}
	return turn, err
}

func (s *Server) listTurns(ctx context.Context, in *turnsInput) (*body[sessions.TurnPage], error) {
	page, err := s.manager.Turns(ctx, tenantOf(ctx), in.ID, sessions.TurnFilter{Limit: in.Limit, After: in.After})
	return answer(s, page, err)
}

func (s *Server) getTurn(ctx context.Context, in *oneTurnInput) (*body[sessions.Turn], error) {
	turn, err := s.manager.Turn(ctx, tenantOf(ctx), in.ID, in.Turn)
	return answer(s, turn, err)
}

func (s *Server) cancelTurn(ctx context.Context, in *mutateInput) (*body[sessions.Turn], error) {
	turn, err := s.cancel(ctx, in.IdempotencyKey, in.ID)
	return answer(s, turn, err)
}

func (s *Server) cancel(ctx context.Context, key, id string) (sessions.Turn, error) {
	c, err := call(ctx, key, routeOf(http.MethodPost, pathCancel, id), nil, false)
	if err != nil {
		return sessions.Turn{}, err
	}
	return s.manager.Cancel(ctx, c, id)
}
