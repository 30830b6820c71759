package server

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

// Paths of mutating calls, shared with the WebSocket, whose frames are the
// same calls.
const (
	pathSessions = "/v1/sessions"
	pathSession  = "/v1/sessions/{id}"
	pathClose    = "/v1/sessions/{id}/close"
	pathTurns    = "/v1/sessions/{id}/turns"
	pathCancel   = "/v1/sessions/{id}/cancel"
	pathFork     = "/v1/sessions/{id}/fork"
	pathDetach   = "/v1/sessions/{id}/detach"
	pathResume   = "/v1/sessions/{id}/resume"
)

type createInput struct {
	Mutation
	Body *sessions.CreateRequest
}

type listInput struct {
	State  string   `query:"state" enum:"idle,running,detached,closed"`
	Root   string   `query:"root" doc:"sessions of this tree"`
	Parent string   `query:"parent" doc:"children of this session"`
	Label  []string `query:"label,explode" doc:"key=value; every one must be there" example:"[\"team=search\"]"`
	Limit  int      `query:"limit" minimum:"1" maximum:"200" default:"20"`
	After  string   `query:"after" doc:"next of the page before"`
}

type patchInput struct {
	Mutation
	SessionInput
	Body sessions.PatchRequest
}

type mutateInput struct {
	Mutation
	SessionInput
}

type deleteInput struct {
	Mutation
	SessionInput
	Subtree bool `query:"subtree" doc:"delete everything forked from it too, all or nothing"`
}

type treeInput struct {
	SessionInput
	Depth optional[int] `query:"depth" minimum:"0" doc:"levels below the session; default all"`
}

type forkInput struct {
	Mutation
	SessionInput
	Body *sessions.ForkRequest
}

type detachInput struct {
	Mutation
	SessionInput
	Body *sessions.DetachRequest
}

type tokensInput struct {
	SessionInput
	From optional[int] `query:"from" minimum:"0" doc:"first token; default 0"`
	To   optional[int] `query:"to" minimum:"0" doc:"one past the last token; default the end"`

	Pieces bool `query:"pieces" doc:"also the text that each token adds"`
}

func (s *Server) registerSessions() {
	register(s, huma.Operation{OperationID: "create-session", Method: http.MethodPost, Path: pathSessions, DefaultStatus: http.StatusCreated,
		Tags: []string{tagSessions}, Summary: "Create a session", Description: "Answered after the commit; the prompt is prefilled behind, residency shows it."}, s.createSession)
	register(s, huma.Operation{OperationID: "list-sessions", Method: http.MethodGet, Path: pathSessions,
		Tags: []string{tagSessions}, Summary: "List sessions, newest first", Description: pageBytesNote}, s.listSessions)
	register(s, huma.Operation{OperationID: "get-session", Method: http.MethodGet, Path: pathSession,
		Tags: []string{tagSessions}, Summary: "Get a session"}, s.getSession)
	register(s, huma.Operation{OperationID: "patch-session", Method: http.MethodPatch, Path: pathSession,
		Tags: []string{tagSessions}, Summary: "Change title, labels, TTL or pin"}, s.patchSession)
	register(s, huma.Operation{OperationID: "delete-session", Method: http.MethodDelete, Path: pathSession, DefaultStatus: http.StatusNoContent,
		Tags: []string{tagSessions}, Summary: "Delete a session", Description: "404 from then on; an open turn is cancelled. Tokens that children share stay until the last child goes; trees show the place. " +
			fmt.Sprintf("With subtree=true all descendants go with it, in one transaction; subtrees of more than %d sessions are refused. A refusal cancels no turn; a failure while the deletion is under way may.", sessions.PruneMax)}, s.deleteSession)
	register(s, huma.Operation{OperationID: "close-session", Method: http.MethodPost, Path: pathClose,
		Tags: []string{tagSessions}, Summary: "Close a session", Description: "It can be read but not advanced or forked any more."}, s.closeSession)
	register(s, huma.Operation{OperationID: "get-tree", Method: http.MethodGet, Path: "/v1/sessions/{id}/tree",
		Tags: []string{tagSessions}, Summary: "Get the subtree of forks",
		Description: fmt.Sprintf("Parents first. %d nodes and %d bytes at most: more is refused with field depth, for which fewer levels can be asked for, or pages of list-sessions with root.", sessions.TreeNodesMax, sessions.TreeBytesMax)}, s.getTree)
	register(s, huma.Operation{OperationID: "fork-session", Method: http.MethodPost, Path: pathFork, DefaultStatus: http.StatusCreated,
		Tags: []string{tagSessions}, Summary: "Fork a session at a token offset", Description: "All children or none."}, s.forkSession)
	register(s, huma.Operation{OperationID: "detach-session", Method: http.MethodPost, Path: pathDetach,
		Tags: []string{tagSessions}, Summary: "Move a session's bytes off the device"}, s.detachSession)
	register(s, huma.Operation{OperationID: "resume-session", Method: http.MethodPost, Path: pathResume,
		Tags: []string{tagSessions}, Summary: "Bring a session back", Description: "A turn or a fork does it too; restored says where the tokens' state came from."}, s.resumeSession)
	register(s, huma.Operation{OperationID: "get-tokens", Method: http.MethodGet, Path: "/v1/sessions/{id}/tokens",
		Tags: []string{tagSessions}, Summary: "Get a range of the line"}, s.getTokens)
}

func (s *Server) createSession(ctx context.Context, in *createInput) (*body[sessions.Session], error) {
	if s.refuse.Load() {
		return nil, s.problem(errDraining)
	}
	req := valueOf(in.Body)
	c, err := call(ctx, in.IdempotencyKey, http.MethodPost+" "+pathSessions, req, false)
	if err != nil {
		return nil, s.problem(err)
	}
	session, err := s.manager.Create(ctx, c, req)
	return answer(s, session, err)
}

func (s *Server) listSessions(ctx context.Context, in *listInput) (*body[sessions.SessionPage], error) {
	filter := sessions.ListFilter{State: sessions.State(in.State), Root: in.Root, Parent: in.Parent, Limit: in.Limit, After: in.After}
	for _, pair := range in.Label {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, codeProblem(codeInvalid, fmt.Sprintf("label: want key=value, not %q", pair), "label")
		}
		if filter.Labels == nil {
			filter.Labels = map[string]string{}
		}
		filter.Labels[key] = value
	}
	page, err := s.manager.List(ctx, tenantOf(ctx), filter)
	return answer(s, page, err)
}

func (s *Server) getSession(ctx context.Context, in *SessionInput) (*body[sessions.Session], error) {
	session, err := s.manager.Get(ctx, tenantOf(ctx), in.ID)
	return answer(s, session, err)
}

func (s *Server) patchSession(ctx context.Context, in *patchInput) (*body[sessions.Session], error) {
	c, err := call(ctx, in.IdempotencyKey, routeOf(http.MethodPatch, pathSession, in.ID), in.Body, false)
	if err != nil {
		return nil, s.problem(err)
	}
	session, err := s.manager.Patch(ctx, c, in.ID, in.Body)
	return answer(s, session, err)
}

func (s *Server) deleteSession(ctx context.Context, in *deleteInput) (*struct{}, error) {
	var request any // as before there were subtrees: keys of then must still match
	remove := s.manager.Delete
	if in.Subtree {
		request, remove = map[string]bool{"subtree": true}, s.prune
	}
	c, err := call(ctx, in.IdempotencyKey, routeOf(http.MethodDelete, pathSession, in.ID), request, false)
	if err == nil {
		err = remove(ctx, c, in.ID)
	}
	if err != nil {
		return nil, s.problem(err)
	}
	return nil, nil
}

func (s *Server) closeSession(ctx context.Context, in *mutateInput) (*body[sessions.Session], error) {
	c, err := call(ctx, in.IdempotencyKey, routeOf(http.MethodPost, pathClose, in.ID), nil, false)
	if err != nil {
		return nil, s.problem(err)
	}
	session, err := s.manager.Close(ctx, c, in.ID)
	return answer(s, session, err)
}

func (s *Server) getTree(ctx context.Context, in *treeInput) (*body[sessions.Tree], error) {
	tree, err := s.manager.Tree(ctx, tenantOf(ctx), in.ID, in.Depth.pointer())
	return answer(s, tree, err)
}

func (s *Server) forkSession(ctx context.Context, in *forkInput) (*body[sessions.ForkResult], error) {
	result, err := s.fork(ctx, in.IdempotencyKey, in.ID, valueOf(in.Body))
	return answer(s, result, err)
}

// fork is what REST and the WebSocket have in common, as are the others below.
func (s *Server) fork(ctx context.Context, key, id string, req sessions.ForkRequest) (sessions.ForkResult, error) {
	c, err := call(ctx, key, routeOf(http.MethodPost, pathFork, id), req, false)
	if err != nil {
		return sessions.ForkResult{}, err
	}
	return s.manager.Fork(ctx, c, id, req)
}

func (s *Server) detachSession(ctx context.Context, in *detachInput) (*body[sessions.Session], error) {
	session, err := s.detach(ctx, in.IdempotencyKey, in.ID, valueOf(in.Body))
	return answer(s, session, err)
}

func (s *Server) detach(ctx context.Context, key, id string, req sessions.DetachRequest) (sessions.Session, error) {
	c, err := call(ctx, key, routeOf(http.MethodPost, pathDetach, id), req, false)
	if err != nil {
		return sessions.Session{}, err
	}
	return s.manager.Detach(ctx, c, id, req)
}

func (s *Server) resumeSession(ctx context.Context, in *mutateInput) (*body[sessions.ResumeResult], error) {
	result, err := s.resume(ctx, in.IdempotencyKey, in.ID)
	return answer(s, result, err)
}

func (s *Server) resume(ctx context.Context, key, id string) (sessions.ResumeResult, error) {
	c, err := call(ctx, key, routeOf(http.MethodPost, pathResume, id), nil, false)
	if err != nil {
		return sessions.ResumeResult{}, err
	}
	return s.manager.Resume(ctx, c, id)
}

func (s *Server) getTokens(ctx context.Context, in *tokensInput) (*body[sessions.TokenRange], error) {
	tokens, err := s.manager.Tokens(ctx, tenantOf(ctx), in.ID, in.From.pointer(), in.To.pointer())
	if err == nil && in.Pieces {
		tokens.Pieces = s.manager.Pieces(tokens.Tokens)
	}
	return answer(s, tokens, err)
}

// valueOf gives the zero value for a body that was not sent.
func valueOf[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
