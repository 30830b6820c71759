package server

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

const (
	pathExport = "/v1/sessions/{id}/export"
	pathImport = "/v1/sessions/import"

	// bundleBytesMax bounds the body of an import; larger ones: 413. What it
	// holds is bounded by sessions; memory is not taken for more than a line.
	bundleBytesMax = 1 << 30

	bundleType = "application/jsonl"
)

// registerBundles adds export and import, which huma cannot serve: it holds a
// whole body in memory.
func (s *Server) registerBundles(router chi.Router) {
	docs := s.api.OpenAPI()
	result := docs.Components.Schemas.Schema(reflect.TypeFor[sessions.ImportResult](), true, "ImportResult")
	text := &huma.Schema{Type: huma.TypeString}
	longest := idempotencyKeyMax
	bundle := map[string]*huma.MediaType{bundleType: {Schema: text}}
	docs.AddOperation(&huma.Operation{
		OperationID: "export-session", Method: http.MethodGet, Path: pathExport, Tags: []string{tagSessions}, Summary: "Export a session and everything forked from it",
		Description: "JSON Lines: a header, the sessions with parents first, turns, runs of tokens, events, a trailer with a checksum. What the session inherits is there as deleted ancestors. " +
			"409 turn_in_progress while a turn is open in the subtree. An answer without its trailer is no bundle: the connection is cut when something goes wrong in the middle. " +
			"One export of a tenant runs at a time, and a few of all; others get 503.",
		Parameters: []*huma.Param{{Name: "id", In: "path", Required: true, Description: "session id", Schema: text}},
		Responses:  map[string]*huma.Response{"200": {Description: "A bundle", Content: bundle}},
	})
	docs.AddOperation(&huma.Operation{
		OperationID: "import-sessions", Method: http.MethodPost, Path: pathImport, Tags: []string{tagSessions}, Summary: "Import an exported subtree",
		Description: fmt.Sprintf("The whole bundle in one transaction, or a refusal that names the line. It must be of this server's model and tokenizer. "+
			"The ids stay where none of the sessions' is taken; else every session and turn gets a new one, and new_ids says so. "+
			"Bounds: %d bytes, %d bytes a line, %d sessions, %d turns, %d runs of tokens. Its tokens count against the tenant's tokens a minute as a new session's prompt does. One import of a tenant runs at a time, and a few of all; others get 503.",
			bundleBytesMax, sessions.BundleLineBytesMax, sessions.BundleSessionsMax, sessions.BundleTurnsMax, sessions.BundleRunsMax),
		Parameters:  []*huma.Param{{Name: "Idempotency-Key", In: "header", Schema: &huma.Schema{Type: huma.TypeString, MaxLength: &longest}}},
		RequestBody: &huma.RequestBody{Required: true, Content: bundle},
		Responses: map[string]*huma.Response{"201": {Description: "What was made", Content: map[string]*huma.MediaType{
			"application/json": {Schema: result}}}},
	})
	router.Get(pathExport, s.exportSession)
	router.Post(pathImport, s.importSessions)
}

// bundleAnswer is the body of an export; its first byte commits to a 200.
type bundleAnswer struct {
	w     http.ResponseWriter
	id    string
	began bool
}

func (a *bundleAnswer) Write(p []byte) (int, error) {
	if !a.began {
		a.began = true
		h := a.w.Header()
		h.Set("Content-Type", bundleType)
		h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": a.id + ".jsonl"}))
		h.Set("Cache-Control", "no-store")
	}
	return a.w.Write(p)
}

func (s *Server) exportSession(w http.ResponseWriter, r *http.Request) {
	err := refuseUnknown(r.URL.Query())
	out := &bundleAnswer{w: w, id: chi.URLParam(r, "id")}
	if err == nil {
		markStream(w)
		err = s.manager.Export(r.Context(), tenantOf(r.Context()), out.id, out)
	}
	switch {
	case err == nil:
	case !out.began:
		writeProblem(w, s.problem(err))
	default:
		s.log.Warn("export ended early", "session", out.id, "err", err)
		panic(http.ErrAbortHandler) // the client must not take it for a whole bundle
	}
}

func (s *Server) importSessions(w http.ResponseWriter, r *http.Request) {
	result, err := s.importBundle(w, r)
	if err != nil {
		writeProblem(w, s.problem(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = marshalJSON(w, result) // the client is gone; nobody is left to tell
}

func (s *Server) importBundle(w http.ResponseWriter, r *http.Request) (sessions.ImportResult, error) {
	var none sessions.ImportResult
	if s.refuse.Load() {
		return none, errDraining
	}
	if err := refuseUnknown(r.URL.Query()); err != nil {
		return none, err
	}
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != bundleType && kind != "application/x-ndjson" {
		return none, codeProblem(codeMediaType, fmt.Sprintf("the body must be %s, not %q", bundleType, kind), "Content-Type")
	}
	c, err := call(r.Context(), r.Header.Get("Idempotency-Key"), http.MethodPost+" "+pathImport, nil, false)
	if err != nil {
		return none, err
	}
	markStream(w)
	passBody(r)
	result, err := s.manager.Import(r.Context(), c, http.MaxBytesReader(w, r.Body, bundleBytesMax))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return none, codeProblem(codeTooLarge, fmt.Sprintf("the bundle is larger than %d bytes", bundleBytesMax), "body")
	}
	if err != nil && lateBody(r) {
		return none, codeProblem(codeBodyTimeout, "the bundle did not come in time", "body")
	}
	return result, err
}
