// Package web holds the dashboard and serves it.
//
// What always holds:
//   - dist is built from src by `make web` and committed, so Go builds without Node;
//     dist.sha256 names the sources that it was built from and a test compares.
//   - A page loads nothing from anywhere else, and runs no inline script or style: the
//     Content-Security-Policy sent with every answer refuses both.
//   - Files under /assets carry their content's hash in their name and may be kept for ever;
//     everything else is asked for anew and answered with 304 when it is unchanged.
package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"sync"
)

//go:embed dist
var dist embed.FS

// contentSecurityPolicy allows this origin's files and connections, nothing else.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// file is one embedded file with what its answers need, made once.
type file struct {
	body        []byte
	gzipped     []byte // nil where compressing gains nothing
	contentType string
	etag        string
	immutable   bool
}

var files = sync.OnceValue(func() map[string]*file {
	all, err := load(dist)
	if err != nil {
		panic(err) // the files are part of the binary: this cannot depend on where it runs
	}
	return all
})

// Handler serves the dashboard: the page at "/", its assets below "/assets/". Other paths are 404,
// other methods than GET and HEAD are 405.
func Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentSecurityPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
			return
		}
		name := strings.TrimPrefix(r.URL.Path, "/")
		if name == "" {
			name = "index.html"
		}
		f, ok := files()[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		f.serve(w, r)
	})
}

func (f *file) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.contentType)
	if f.immutable {
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	} else {
		h.Set("Cache-Control", "no-cache")
	}
	body, etag := f.body, `"`+f.etag+`"`
	if f.gzipped != nil {
		h.Set("Vary", "Accept-Encoding")
		if acceptsGzip(r.Header.Get("Accept-Encoding")) {
			body, etag = f.gzipped, `"`+f.etag+`-gz"`
			h.Set("Content-Encoding", "gzip")
		}
	}
	h.Set("ETag", etag)
	for _, candidate := range strings.Split(r.Header.Get("If-None-Match"), ",") {
		candidate = strings.TrimPrefix(strings.TrimSpace(candidate), "W/")
		if candidate == etag || candidate == "*" {
			h.Del("Content-Encoding")
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	h.Set("Content-Length", fmt.Sprint(len(body)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(body) // a reader that went away is nobody's error
	}
}

// acceptsGzip reads the simple forms that browsers and curl send; "gzip;q=0" refuses.
func acceptsGzip(header string) bool {
	for _, part := range strings.Split(header, ",") {
		coding, params, _ := strings.Cut(strings.TrimSpace(part), ";")
		if strings.EqualFold(coding, "gzip") {
			q := strings.ReplaceAll(params, " ", "")
			return q != "q=0" && q != "q=0.0" && q != "q=0.00" && q != "q=0.000"
		}
	}
	return false
}

func load(fsys fs.FS) (map[string]*file, error) {
	all := map[string]*file{}
	err := fs.WalkDir(fsys, "dist", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		body, err := fs.ReadFile(fsys, name)
		if err != nil {
			return err
		}
		short := strings.TrimPrefix(name, "dist/")
		sum := sha256.Sum256(body)
		all[short] = &file{
			body:        body,
			gzipped:     compress(body),
			contentType: contentType(short),
			etag:        hex.EncodeToString(sum[:12]),
			immutable:   strings.HasPrefix(short, "assets/"),
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the embedded dashboard: %w", err)
	}
	return all, nil
}

// contentType names the few types that dist holds itself: the system's table may differ or be missing.
func contentType(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	if t := mime.TypeByExtension(path.Ext(name)); t != "" {
		return t
	}
	return "application/octet-stream"
}

func compress(body []byte) []byte {
	var out bytes.Buffer
	zw, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil
	}
	if _, err := zw.Write(body); err != nil || zw.Close() != nil || out.Len() >= len(body) {
		return nil
	}
	return out.Bytes()
}
