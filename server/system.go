package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
)

// Health is the answer of /healthz and /readyz.
type Health struct {
	Status string `json:"status" example:"ok"`
}

func (s *Server) registerSystem() {
	register(s, huma.Operation{OperationID: "get-stats", Method: http.MethodGet, Path: "/v1/stats", Tags: []string{tagSystem},
		Summary: "Numbers of sessions, ledger and engine"}, s.getStats)
	register(s, huma.Operation{OperationID: "healthz", Method: http.MethodGet, Path: "/healthz", Tags: []string{tagSystem},
		Summary: "Is the process alive"}, s.healthz)
	register(s, huma.Operation{OperationID: "readyz", Method: http.MethodGet, Path: "/readyz", Tags: []string{tagSystem},
		Summary: "Should the server get traffic", Description: "503 while the ledger is away and while the server shuts down."}, s.readyz)
	register(s, huma.Operation{OperationID: "version", Method: http.MethodGet, Path: "/version", Tags: []string{tagSystem},
		Summary: "What was built"}, s.version)
	docs := s.api.OpenAPI()
	docs.AddOperation(&huma.Operation{OperationID: "metrics", Method: http.MethodGet, Path: "/metrics", Tags: []string{tagSystem},
		Summary: "Prometheus metrics", Responses: map[string]*huma.Response{"200": {Description: "Text exposition",
			Content: map[string]*huma.MediaType{"text/plain": {Schema: &huma.Schema{Type: huma.TypeString}}}}}})
}

func (s *Server) healthz(context.Context, *struct{}) (*body[Health], error) {
	return &body[Health]{Body: Health{Status: "ok"}}, nil
}

func (s *Server) readyz(ctx context.Context, _ *struct{}) (*body[Health], error) {
	if s.refuse.Load() {
		return nil, s.problem(errDraining)
	}
	if err := s.manager.Ready(ctx); err != nil {
		return nil, s.problem(err)
	}
	return &body[Health]{Body: Health{Status: "ok"}}, nil
}

func (s *Server) version(context.Context, *struct{}) (*body[Version], error) {
	return &body[Version]{Body: s.opts.Version}, nil
}
