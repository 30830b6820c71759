package server

import (
	"context"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

type ancestorsInput struct {
	SessionInput
	Depth optional[int] `query:"depth" minimum:"0" doc:"levels above the session; default all"`
}

type commonInput struct {
	SessionInput
	With string `query:"with" required:"true" doc:"the other session"`
}

type pathInput struct {
	SessionInput
	To string `query:"to" required:"true" doc:"the other session"`
}

func (s *Server) registerLineage() {
	register(s, huma.Operation{OperationID: "get-ancestors", Method: http.MethodGet, Path: "/v1/sessions/{id}/ancestors",
		Tags: []string{tagSessions}, Summary: "Get what a session was forked from",
		Description: fmt.Sprintf("The root first, the parent last; deleted ones are there as their places. %d of them and %d bytes at most.", sessions.LineageNodesMax, sessions.TreeBytesMax)}, s.getAncestors)
	register(s, huma.Operation{OperationID: "get-common", Method: http.MethodGet, Path: "/v1/sessions/{id}/common",
		Tags: []string{tagSessions}, Summary: "Get the common ancestor of two sessions and where their lines part",
		Description: "The lines are the same in [0, at). Either session may be the ancestor; ancestor is null, and at 0, where the two are of different trees."}, s.getCommon)
	register(s, huma.Operation{OperationID: "get-path", Method: http.MethodGet, Path: "/v1/sessions/{id}/path",
		Tags: []string{tagSessions}, Summary: "Get the sessions between two",
		Description: fmt.Sprintf("Up to the nearest common ancestor, which ancestor names, and down, both ends included. None where the two are of different trees. %d of them and %d bytes at most.", sessions.LineageNodesMax, sessions.TreeBytesMax)}, s.getPath)
}

func (s *Server) getAncestors(ctx context.Context, in *ancestorsInput) (*body[sessions.Ancestry], error) {
	list, err := s.manager.Ancestors(ctx, tenantOf(ctx), in.ID, in.Depth.pointer())
	return answer(s, list, err)
}

func (s *Server) getCommon(ctx context.Context, in *commonInput) (*body[sessions.Common], error) {
	common, err := s.manager.Common(ctx, tenantOf(ctx), in.ID, in.With)
	return answer(s, common, err)
}

func (s *Server) getPath(ctx context.Context, in *pathInput) (*body[sessions.Path], error) {
	path, err := s.manager.Path(ctx, tenantOf(ctx), in.ID, in.To)
	return answer(s, path, err)
}
