package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
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
	register(s, huma.Operation{OperationID: "check-cache", Method: http.MethodPost, Path: "/v1/check-cache", Tags: []string{tagSystem},
		Summary: "Prove a sample of the cache", Description: "Verifies the checksums of sampled snapshots on lower tiers, and recomputes their states and pages " +
			"from the state before, bit for bit. What is wrong is dropped, counted, and prefilled by whoever needs it next."}, s.checkCache)
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

type checkCacheInput struct {
	Body *sessions.CheckCacheRequest
}

func (s *Server) checkCache(ctx context.Context, in *checkCacheInput) (*body[sessions.CheckCacheResult], error) {
	got, err := s.manager.CheckCache(ctx, valueOf(in.Body))
	if err != nil {
		return nil, s.problem(err)
	}
	return &body[sessions.CheckCacheResult]{Body: got}, nil
}

func (s *Server) version(context.Context, *struct{}) (*body[Version], error) {
	return &body[Version]{Body: s.opts.Version}, nil
}
