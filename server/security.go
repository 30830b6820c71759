package server

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// loopbackHosts are the names under which a browser or a client on this machine
// reaches the server. Any web page can make a browser connect to loopback, and
// a name of the attacker's can be made to resolve to 127.0.0.1 (DNS rebinding);
// then the Host header holds the attacker's name, and that is what is checked.
var loopbackHosts = []string{"localhost", "127.0.0.1", "::1"}

// Loopback tells whether addr, as host:port, can be reached from this machine
// only. Anything else needs API keys.
func Loopback(addr string) (bool, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false, fmt.Errorf("listen address %q: want host:port: %w", addr, err)
	}
	if strings.EqualFold(host, "localhost") {
		return true, nil
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback(), nil
}

// allowHosts refuses requests whose Host header names none of the allowed
// hosts. With keys and no list of hosts any name will do: a page under a name
// of the attacker's has no key to send.
func (s *Server) allowHosts() func(http.Handler) http.Handler {
	if s.opts.RequireKeys && len(s.opts.AllowedHosts) == 0 {
		return func(next http.Handler) http.Handler { return next }
	}
	own := s.opts.AllowedHosts
	if u, err := url.Parse(s.opts.Address); err == nil && u.Host != "" { // other servers call it by that
		own = append(slices.Clone(own), u.Hostname())
	}
	return allowHosts(own)
}

// allowHosts compares no ports: a forwarded one is no attack.
func allowHosts(extra []string) func(http.Handler) http.Handler {
	allowed := make(map[string]bool, len(loopbackHosts)+len(extra))
	for _, h := range append(append([]string{}, loopbackHosts...), extra...) {
		allowed[strings.ToLower(h)] = true
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !allowed[hostOnly(r.Host)] {
				writeProblem(w, codeProblem(codeHostNotAllowed,
					fmt.Sprintf("the Host header %q is not on the list of allowed hosts", r.Host), "Host"))
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

func hostOnly(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
}

// checkQuery refuses queries that cannot be read, and parameters that are there
// twice: net/url drops the former in silence, and of the latter a proxy and
// this server could each believe another one.
func checkQuery(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "" {
			query, err := url.ParseQuery(r.URL.RawQuery)
			if err != nil {
				writeProblem(w, codeProblem(codeMalformed, "query: "+err.Error(), "query"))
				return
			}
			for name, values := range query {
				if len(values) > 1 && name != "label" {
					writeProblem(w, codeProblem(codeInvalid, name+": is there more than once", name))
					return
				}
			}
		}
		next.ServeHTTP(w, r)
	})
}

// refuseCrossOrigin refuses state-changing requests that a browser sends from a
// page of another origin. WebSocket upgrades are GETs, which this lets through;
// accept checks their Origin.
func refuseCrossOrigin() func(http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writeProblem(w, codeProblem(codeCrossOrigin,
			"a page of another origin may not call this server", "Origin"))
	}))
	return protection.Handler
}

// pageHeaders sets what a browser needs to know about every answer: types are
// not guessed, nothing is framed, and pages load nothing from elsewhere. The
// dashboard has a policy of its own.
func pageHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		next.ServeHTTP(w, r)
	})
}

// checkOrigin refuses WebSockets from pages that are not our own. A client that
// is no browser sends no Origin.
func checkOrigin(r *http.Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return nil
	}
	if u, err := url.Parse(origin); err == nil && u.Host != "" && strings.EqualFold(u.Host, r.Host) {
		return nil
	}
	return codeProblem(codeCrossOrigin, fmt.Sprintf("a page of %s may not open a WebSocket here", origin), "Origin")
}
