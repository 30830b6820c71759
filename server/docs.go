package server

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"sort"
	"strings"

	"github.com/danielgtaylor/huma/v2"
)

// The documents are made once: the API does not change while the server runs.

//go:embed docs.html
var docsHTML string

//go:embed docs.css
var docsCSS []byte

var docsTemplate = template.Must(template.New("docs").Parse(docsHTML))

// buildDocs makes openapi.json and the page that shows it, which needs no
// script and nothing from elsewhere.
func (s *Server) buildDocs() error {
	api := s.api.OpenAPI()
	spec, err := json.Marshal(api)
	if err != nil {
		return fmt.Errorf("encode openapi.json: %w", err)
	}
	var page bytes.Buffer
	if err := docsTemplate.Execute(&page, describe(api)); err != nil {
		return fmt.Errorf("render docs: %w", err)
	}
	s.spec, s.docs = spec, page.Bytes()
	return nil
}

func (s *Server) serveSpec(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/openapi+json")
	_, _ = w.Write(s.spec) // the client is gone; nobody is left to tell
}

func (s *Server) serveDocs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(s.docs) // as above
}

func (s *Server) serveStyle(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/css; charset=utf-8")
	_, _ = w.Write(docsCSS) // as above
}

type docsPage struct {
	Title, Version string
	Intro          []string
	Example        string
	Groups         []docsGroup
	Schemas        []docsSchema
	Codes          []docsCode
}

type docsGroup struct {
	Name       string
	Operations []docsOperation
}

type docsOperation struct {
	ID, Method, Path, Summary, Description string
	Params                                 []docsParam
	Body                                   *docsType
	Answers                                []docsAnswer
}

type docsParam struct {
	Name, In, Type, Doc string
	Required            bool
}

type docsAnswer struct {
	Status, Doc string
	Body        docsType
}

type docsSchema struct {
	Name, Doc string
	Fields    []docsField
}

type docsField struct {
	Name, Doc string
	Type      docsType
	Required  bool
}

type docsType struct{ Text, Ref string }

type docsCode struct {
	Code   string
	Status int
}

var docsIntro = []string{
	"JSON over HTTP. Times are RFC 3339 in UTC; ids are a prefix (ses_, turn_) and a UUIDv7. Lists are newest first: {data, has_more, next}, and next goes into after.",
	"Every mutating call takes an Idempotency-Key: the same key and body again give the first answer, another body gives 422, a call that still runs 409 (with wait=true it joins the same turn). Keys are kept 24 hours; of a tenant with more than 1,000,000 the oldest go before that, after an hour at the earliest, and when all are younger a call with a new one gets 429 limit.",
	"Events have a seq that is dense per session and the same for every reader, and an epoch that rises when its server is gone and another one, or the same after a restart, takes it over. Read them as a JSON page, as server-sent events (ids are EPOCH-SEQ, so Last-Event-ID works), or over the WebSocket; from is the first seq wanted. Deltas may be seen before their commit: after a crash the next epoch's first event is turn.interrupted, and deltas past its last_seq never happened.",
	"A WebSocket is closed with 1001 (going away), 1008 (policy), 1009 (frame too large), 1011 (fault), 1012 (the server shuts down, or the one that has a session is gone: come back) or 1013 (overload, or too slow: the reason holds the last seq).",
	"Several servers may share a ledger. A call may come to any of them; the one that has the session answers it. 503 with owner_unreachable or session_moved: repeat the call, with its key, after Retry-After; a reader comes back with its epoch. 409 with session_quarantined: its server is gone and something is wrong with its rows in the ledger; it can be read, and an operator is needed.",
	"A server without API keys answers on loopback only.",
}

const docsExample = `# a session, a turn, three forks of its end
curl -s localhost:8080/v1/sessions -H 'Content-Type: application/json' -d '{"input": "func main() {"}'
curl -s "localhost:8080/v1/sessions/$ID/turns?wait=true" -H 'Content-Type: application/json' -d '{"max_tokens": 40}'
curl -s localhost:8080/v1/sessions/$ID/fork -H 'Content-Type: application/json' -d '{"n": 3}'

# its events, live; -H 'Last-Event-ID: 1-42' goes on behind an event
curl -sN localhost:8080/v1/sessions/$ID/events -H 'Accept: text/event-stream'

# over the WebSocket: one frame a line, replies echo ref
{"type": "turn.create", "ref": "a", "input": "\n\treturn", "max_tokens": 40}
{"type": "fork", "ref": "b", "n": 2, "at": 12, "follow": true}
{"type": "turn.cancel", "ref": "c"}
{"type": "subscribe", "ref": "d", "session_id": "ses_…", "from": 1}`

func describe(api *huma.OpenAPI) docsPage {
	page := docsPage{Title: api.Info.Title + " API", Version: api.Info.Version, Intro: docsIntro, Example: docsExample}
	groups := map[string]*docsGroup{}
	for _, tag := range api.Tags {
		page.Groups = append(page.Groups, docsGroup{Name: tag.Name})
	}
	for i := range page.Groups {
		groups[page.Groups[i].Name] = &page.Groups[i]
	}
	paths := make([]string, 0, len(api.Paths))
	for path := range api.Paths {
		paths = append(paths, path)
	}
	sort.Strings(paths)
	for _, path := range paths {
		item := api.Paths[path]
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Patch, item.Delete} {
			if op == nil || len(op.Tags) == 0 {
				continue
			}
			if g := groups[op.Tags[0]]; g != nil {
				g.Operations = append(g.Operations, describeOperation(op))
			}
		}
	}
	names := make([]string, 0)
	for name := range api.Components.Schemas.Map() {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		page.Schemas = append(page.Schemas, describeSchema(name, api.Components.Schemas.Map()[name]))
	}
	for code, status := range statuses {
		page.Codes = append(page.Codes, docsCode{code, status})
	}
	sort.Slice(page.Codes, func(i, j int) bool {
		a, b := page.Codes[i], page.Codes[j]
		return a.Status < b.Status || a.Status == b.Status && a.Code < b.Code
	})
	return page
}

func describeOperation(op *huma.Operation) docsOperation {
	d := docsOperation{ID: op.OperationID, Method: op.Method, Path: op.Path, Summary: op.Summary, Description: op.Description}
	for _, p := range op.Parameters {
		d.Params = append(d.Params, docsParam{p.Name, p.In, typeOf(p.Schema).Text, sentence(p.Description, p.Schema), p.Required})
	}
	if op.RequestBody != nil {
		for _, media := range op.RequestBody.Content {
			t := typeOf(media.Schema)
			d.Body = &t
		}
	}
	statuses := make([]string, 0, len(op.Responses))
	for status := range op.Responses {
		statuses = append(statuses, status)
	}
	sort.Strings(statuses)
	for _, status := range statuses {
		answer := docsAnswer{Status: status, Doc: op.Responses[status].Description}
		for _, media := range op.Responses[status].Content {
			answer.Body = typeOf(media.Schema)
		}
		d.Answers = append(d.Answers, answer)
	}
	return d
}

func describeSchema(name string, schema *huma.Schema) docsSchema {
	d := docsSchema{Name: name, Doc: schema.Description}
	required := map[string]bool{}
	for _, field := range schema.Required {
		required[field] = true
	}
	names := make([]string, 0, len(schema.Properties))
	for field := range schema.Properties {
		names = append(names, field)
	}
	sort.Strings(names)
	for _, field := range names {
		p := schema.Properties[field]
		d.Fields = append(d.Fields, docsField{field, sentence(p.Description, p), typeOf(p), required[field]})
	}
	return d
}

// typeOf names a schema for a reader: "list of Session", "integer".
func typeOf(s *huma.Schema) docsType {
	switch {
	case s == nil:
		return docsType{Text: "any"}
	case s.Ref != "":
		name := s.Ref[strings.LastIndex(s.Ref, "/")+1:]
		return docsType{Text: name, Ref: name}
	case s.Type == huma.TypeArray:
		item := typeOf(s.Items)
		return docsType{Text: "list of " + item.Text, Ref: item.Ref}
	case s.Type == "":
		return docsType{Text: "any"}
	}
	text := s.Type
	if s.Format != "" {
		text = s.Format
	}
	if s.Nullable {
		text += " or null"
	}
	return docsType{Text: text}
}

// sentence adds a schema's bounds to what its description says.
func sentence(doc string, s *huma.Schema) string {
	if s == nil {
		return doc
	}
	var parts []string
	if doc != "" {
		parts = append(parts, doc)
	}
	if len(s.Enum) > 0 {
		values := make([]string, len(s.Enum))
		for i, v := range s.Enum {
			values[i] = fmt.Sprint(v)
		}
		parts = append(parts, "one of "+strings.Join(values, ", "))
	}
	switch {
	case s.Minimum != nil && s.Maximum != nil:
		parts = append(parts, fmt.Sprintf("%g to %g", *s.Minimum, *s.Maximum))
	case s.Minimum != nil:
		parts = append(parts, fmt.Sprintf("at least %g", *s.Minimum))
	}
	if s.Default != nil {
		parts = append(parts, fmt.Sprintf("default %v", s.Default))
	}
	return strings.Join(parts, "; ")
}
