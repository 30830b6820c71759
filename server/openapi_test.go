package server

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-chi/chi/v5"
)

// routes are those of the native API's page; none may be missing.
var routes = []string{
	"POST /v1/sessions", "GET /v1/sessions",
	"GET /v1/sessions/{id}", "PATCH /v1/sessions/{id}", "DELETE /v1/sessions/{id}",
	"POST /v1/sessions/{id}/close", "GET /v1/sessions/{id}/tree",
	"GET /v1/sessions/{id}/ancestors", "GET /v1/sessions/{id}/common", "GET /v1/sessions/{id}/path",
	"GET /v1/sessions/{id}/export", "POST /v1/sessions/import",
	"POST /v1/sessions/{id}/turns", "GET /v1/sessions/{id}/turns", "GET /v1/sessions/{id}/turns/{turn}",
	"POST /v1/sessions/{id}/cancel", "POST /v1/sessions/{id}/fork", "POST /v1/sessions/{id}/detach", "POST /v1/sessions/{id}/resume", "POST /v1/sessions/{id}/release",
	"GET /v1/sessions/{id}/events", "GET /v1/sessions/{id}/tokens", "GET /v1/sessions/{id}/stream",
	"GET /v1/watch", "GET /v1/servers", "GET /v1/stats", "GET /metrics", "GET /healthz", "GET /readyz", "GET /version",
}

func TestEveryRouteIsServedAndDocumented(t *testing.T) {
	s := bare(t, Options{})
	var served []string
	err := chi.Walk(s.Handler().(chi.Routes), func(method, route string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		served = append(served, method+" "+route)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	doc := openapi(t, s)
	for _, route := range routes {
		if !slices.Contains(served, route) {
			t.Errorf("%s is not served", route)
		}
		method, path, _ := strings.Cut(route, " ")
		if doc.Paths[path][strings.ToLower(method)].OperationID == "" {
			t.Errorf("%s is not in /openapi.json", route)
		}
	}
	for _, route := range served {
		if method, path, _ := strings.Cut(route, " "); strings.HasPrefix(path, "/v1/") {
			if doc.Paths[path][strings.ToLower(method)].OperationID == "" {
				t.Errorf("%s is served but not in /openapi.json", route)
			}
		}
	}
}

type openapiDoc struct {
	OpenAPI    string                                 `json:"openapi"`
	Info       struct{ Title, Version string }        `json:"info"`
	Paths      map[string]map[string]openapiOperation `json:"paths"`
	Components struct {
		Schemas map[string]json.RawMessage `json:"schemas"`
	} `json:"components"`
}

type openapiOperation struct {
	OperationID string `json:"operationId"`
	Security    []any  `json:"security"`
	Summary     string `json:"summary"`
	Parameters  []struct {
		Name     string          `json:"name"`
		In       string          `json:"in"`
		Required bool            `json:"required"`
		Schema   json.RawMessage `json:"schema"`
	} `json:"parameters"`
	Responses map[string]struct {
		Description string `json:"description"`
	} `json:"responses"`
}

func openapi(t *testing.T, s *Server) openapiDoc {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/openapi.json", nil)
	r.Host = "localhost"
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	var doc openapiDoc
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

var pathParameter = regexp.MustCompile(`\{(\w+)\}`)

// TestOpenAPIIsValid checks what generators of clients stumble over.
func TestOpenAPIIsValid(t *testing.T) {
	s := bare(t, Options{Version: Version{Version: "v0.0.0-test"}})
	doc := openapi(t, s)
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || doc.Info.Title == "" || doc.Info.Version == "" {
		t.Errorf("openapi %q, title %q, version %q", doc.OpenAPI, doc.Info.Title, doc.Info.Version)
	}
	seen := map[string]bool{}
	for path, item := range doc.Paths {
		for method, op := range item {
			name := method + " " + path
			if op.OperationID == "" || seen[op.OperationID] {
				t.Errorf("%s: operationId %q is missing or not unique", name, op.OperationID)
			}
			seen[op.OperationID] = true
			if len(op.Responses) == 0 || op.Summary == "" {
				t.Errorf("%s: no responses or no summary", name)
			}
			for status, r := range op.Responses {
				if r.Description == "" {
					t.Errorf("%s: response %s has no description", name, status)
				}
			}
			var declared []string
			for _, p := range op.Parameters {
				if len(p.Schema) == 0 {
					t.Errorf("%s: parameter %s has no schema", name, p.Name)
				}
				if p.In == "path" {
					declared = append(declared, p.Name)
					if !p.Required {
						t.Errorf("%s: path parameter %s must be required", name, p.Name)
					}
				}
			}
			var wanted []string
			for _, m := range pathParameter.FindAllStringSubmatch(path, -1) {
				wanted = append(wanted, m[1])
			}
			slices.Sort(declared)
			slices.Sort(wanted)
			if !slices.Equal(declared, wanted) {
				t.Errorf("%s: declares path parameters %v", name, declared)
			}
		}
	}
	var tree any
	if err := json.Unmarshal(s.spec, &tree); err != nil {
		t.Fatal(err)
	}
	checkSchemas(t, "#", tree, doc)
	for path, methods := range doc.Paths {
		for method, op := range methods {
			if needed := len(op.Security) > 0; needed == openRoutes[path] {
				t.Errorf("%s %s: security %v", method, path, op.Security)
			}
		}
	}
}

// checkSchemas walks the document: references resolve, types are JSON Schema's,
// required properties exist.
func checkSchemas(t *testing.T, at string, v any, doc openapiDoc) {
	switch v := v.(type) {
	case []any:
		for _, x := range v {
			checkSchemas(t, at+"/-", x, doc)
		}
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			name, local := strings.CutPrefix(ref, "#/components/schemas/")
			if _, known := doc.Components.Schemas[name]; !local || !known {
				t.Errorf("%s: reference %s leads nowhere", at, ref)
			}
		}
		types := []any{}
		switch kind := v["type"].(type) {
		case string:
			types = append(types, kind)
		case []any:
			types = kind
		}
		for _, kind := range types {
			if !strings.HasSuffix(at, "/properties") && !slices.Contains([]any{"object", "array", "string", "integer", "number", "boolean", "null"}, kind) {
				t.Errorf("%s: type %v", at, kind)
			}
		}
		if required, ok := v["required"].([]any); ok {
			properties, _ := v["properties"].(map[string]any)
			for _, name := range required {
				if _, ok := properties[name.(string)]; !ok {
					t.Errorf("%s: requires %v, which it does not have", at, name)
				}
			}
		}
		for k, x := range v {
			if k == "securitySchemes" {
				continue // types of another kind
			}
			checkSchemas(t, at+"/"+k, x, doc)
		}
	}
}

// TestDocsPageNeedsNothing: the page must work without a network and name every
// operation.
func TestDocsPageNeedsNothing(t *testing.T) {
	s := bare(t, Options{})
	page := string(s.docs)
	for _, route := range routes {
		_, path, _ := strings.Cut(route, " ")
		if !strings.Contains(page, "<code>"+path+"</code>") {
			t.Errorf("the page does not show %s", path)
		}
	}
	for _, bad := range []string{"<script", "http://", "https://", "style="} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for _, ref := range regexp.MustCompile(`(?:href|src)="(/[^"]*)"`).FindAllStringSubmatch(page, -1) {
		r := httptest.NewRequest(http.MethodGet, ref[1], nil)
		r.Host = "localhost"
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d", ref[1], w.Code)
		}
	}
}
