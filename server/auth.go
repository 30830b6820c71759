package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/go-chi/chi/v5"

	"rocket/sessions"
)

const (
	// keyProtocol begins the entry of Sec-WebSocket-Protocol that carries an API
	// key, for browsers, which cannot set headers of a WebSocket. An address
	// would be kept in histories and logs; this header is not.
	keyProtocol = "rocket.key."

	// credentialsMax is the longest credential that is looked at.
	credentialsMax = 512
)

// openRoutes are answered without a key: they say nothing about anybody. So
// are the dashboard's files, which are no routes.
var openRoutes = map[string]bool{
	"/healthz": true, "/readyz": true, "/version": true, "/openapi.json": true, "/docs": true, "/docs/style.css": true, "/": true,
}

// adminRoutes are about the whole server, so they want an admin key. That a
// call comes from this machine is no key: it may be a proxy that calls.
var adminRoutes = map[string]bool{"/metrics": true, "/v1/stats": true, "/v1/check-cache": true, pathServers: true}

// describeSecurity says in the API's description how a key is sent. Calls
// without one are listed too, since a server need not want any.
func describeSecurity(api *huma.OpenAPI) {
	api.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"bearer": {Type: "http", Scheme: "bearer", Description: "An API key of rocket key create, where the server wants one. " +
			"In a browser's WebSocket it is an entry " + keyProtocol + "KEY of Sec-WebSocket-Protocol, beside " + subprotocol + "."},
		"x-api-key": {Type: "apiKey", In: "header", Name: "x-api-key", Description: "The same key in another header."},
	}
	api.Info.Description += " Where the server wants API keys, each call has one: Authorization: Bearer KEY, or x-api-key: KEY. " +
		"An address that tries too many others gets 429 too_many_failures for those."
	key := []map[string][]string{{"bearer": {}}, {"x-api-key": {}}, {}}
	for path, item := range api.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Patch, item.Delete, item.Put} {
			if op == nil || openRoutes[path] {
				continue
			}
			op.Security = key
			if adminRoutes[path] {
				op.Description = strings.TrimSpace(op.Description + " Where the server wants keys, an admin one.")
			}
		}
	}
}

type callerKey struct{}

// withCaller makes ctx one of who's calls.
func withCaller(ctx context.Context, who sessions.Identity) context.Context {
	return context.WithValue(ctx, callerKey{}, who)
}

// callerOf is who calls. Without authentication it is nobody, whose tenant has
// nothing: a route that was forgotten here shows no one's sessions.
func callerOf(ctx context.Context) sessions.Identity {
	who, _ := ctx.Value(callerKey{}).(sessions.Identity)
	return who
}

// tenantOf is the caller's tenant.
func tenantOf(ctx context.Context) string { return callerOf(ctx).Tenant }

// authenticate finds out who calls before anything else is done for them.
func (s *Server) authenticate(router chi.Routes) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			who := sessions.Identity{Tenant: sessions.DefaultTenant, Admin: true}
			if s.opts.RequireKeys {
				var err error
				if who, err = s.identify(router, r); err != nil {
					s.refuseCaller(w, err)
					return
				}
			}
			next.ServeHTTP(w, r.WithContext(withCaller(r.Context(), who)))
		})
	}
}

// identify is the caller of a request; nobody, for what is open to all.
func (s *Server) identify(router chi.Routes, r *http.Request) (sessions.Identity, error) {
	route, ok := routeOfPath(router, r)
	if openRoutes[route] || !ok && !strings.HasPrefix(r.URL.Path, "/v1") {
		return sessions.Identity{}, nil
	}
	secret, err := credentials(r.Header)
	if err != nil {
		return sessions.Identity{}, err
	}
	who, err := s.manager.Keys().Authenticate(r.Context(), proxies(s.opts.TrustedProxies).clientOf(r), secret)
	if err != nil {
		return who, err
	}
	if adminRoutes[route] && !who.Admin {
		return who, codeProblem(codeAdminKey, "this is about the whole server: it needs an admin key", "")
	}
	return who, nil
}

func (s *Server) refuseCaller(w http.ResponseWriter, err error) {
	p := s.problem(err)
	if p.Status == http.StatusUnauthorized || p.Code == string(sessions.CodeTooManyFailures) {
		s.metrics.refused.Inc()
	}
	writeProblem(w, p)
}

// routeOfPath is the pattern of the route that has the request's path, with
// whatever method. The path is chi's own notion of it.
func routeOfPath(router chi.Routes, r *http.Request) (pattern string, ok bool) {
	path := r.URL.RawPath
	if path == "" {
		path = r.URL.Path
	}
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete, http.MethodPut} {
		ctx := chi.NewRouteContext()
		if router.Match(ctx, method, path) {
			return ctx.RoutePattern(), true
		}
	}
	return "", false
}

var errNoCredentials = errors.New("no API key")

// errKeyGone ends a call that waits when its key is revoked.
var errKeyGone = errors.New("the API key was revoked")

// credentials finds the API key of a request: Authorization: Bearer KEY,
// x-api-key: KEY, or an entry of Sec-WebSocket-Protocol. Two that differ are
// refused, since a proxy and this server could each believe another one.
func credentials(h http.Header) (string, error) {
	secret := ""
	found := 0
	add := func(value string) bool {
		value = strings.TrimSpace(value)
		if value == "" || len(value) > credentialsMax || found > 0 && value != secret {
			return false
		}
		secret = value
		found++
		return true
	}
	for _, value := range h.Values("Authorization") {
		scheme, rest, _ := strings.Cut(strings.TrimSpace(value), " ")
		if !strings.EqualFold(scheme, "Bearer") || !add(rest) {
			return "", badCredentials("Authorization", "want one Bearer KEY")
		}
	}
	for _, value := range h.Values("X-Api-Key") {
		if !add(value) {
			return "", badCredentials("x-api-key", "want one KEY, the same as in other headers")
		}
	}
	for _, list := range h.Values("Sec-Websocket-Protocol") {
		for entry := range strings.SplitSeq(list, ",") {
			if key, ok := strings.CutPrefix(strings.TrimSpace(entry), keyProtocol); ok && !add(key) {
				return "", badCredentials("Sec-WebSocket-Protocol", "want one "+keyProtocol+"KEY, the same as in other headers")
			}
		}
	}
	if found == 0 {
		return "", errNoCredentials
	}
	return secret, nil
}

// badCredentials never repeats what was sent: it may be most of a key.
func badCredentials(header, want string) *Problem {
	return codeProblem(string(sessions.CodeUnauthenticated), fmt.Sprintf("%s: %s", header, want), header)
}
