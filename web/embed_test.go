package web

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"testing"
)

func get(t *testing.T, method, target string, header http.Header) *http.Response {
	t.Helper()
	r := httptest.NewRequest(method, target, nil)
	for k, v := range header {
		r.Header[k] = v
	}
	w := httptest.NewRecorder()
	Handler().ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, res *http.Response) string {
	t.Helper()
	var r io.Reader = res.Body
	if res.Header.Get("Content-Encoding") == "gzip" {
		zr, err := gzip.NewReader(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		r = zr
	}
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEveryReferencedAssetIsServed(t *testing.T) {
	res := get(t, "GET", "/", nil)
	page := body(t, res)
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/html; charset=utf-8" {
		t.Fatalf("page: %d %s", res.StatusCode, res.Header.Get("Content-Type"))
	}
	refs := regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(page, -1)
	if len(refs) < 3 {
		t.Fatalf("the page names %d files, want script, style and icon", len(refs))
	}
	for _, ref := range refs {
		if !strings.HasPrefix(ref[1], "/") {
			t.Errorf("%s is not a path of this origin", ref[1])
		}
		asset := get(t, "GET", ref[1], nil)
		if asset.StatusCode != 200 || len(body(t, asset)) == 0 {
			t.Errorf("%s: status %d", ref[1], asset.StatusCode)
		}
		want := "no-cache"
		if strings.HasPrefix(ref[1], "/assets/") {
			want = "public, max-age=31536000, immutable"
		}
		if got := asset.Header.Get("Cache-Control"); got != want {
			t.Errorf("%s: Cache-Control %q, want %q", ref[1], got, want)
		}
	}
	if regexp.MustCompile(`<script(?:>|[^>]*[^/"]>[^<])`).MatchString(page) || strings.Contains(page, "<style") || strings.Contains(page, "style=") {
		t.Error("the page has an inline script or style, which its own policy refuses")
	}
}

func TestHeadersOfEveryAnswer(t *testing.T) {
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/", 200}, {"HEAD", "/", 200}, {"GET", "/assets/none.js", 404}, {"GET", "/embed.go", 404},
		{"GET", "/../embed.go", 404}, {"GET", "/assets/", 404}, {"POST", "/", 405},
	} {
		res := get(t, c.method, c.path, nil)
		if res.StatusCode != c.status {
			t.Errorf("%s %s: %d, want %d", c.method, c.path, res.StatusCode, c.status)
		}
		if csp := res.Header.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Errorf("%s %s: policy %q", c.method, c.path, csp)
		}
		if c.method == "HEAD" && len(body(t, res)) != 0 {
			t.Errorf("HEAD %s has a body", c.path)
		}
	}
}

func TestConditionalAndCompressed(t *testing.T) {
	plain := get(t, "GET", "/", nil)
	zipped := get(t, "GET", "/", http.Header{"Accept-Encoding": {"br, gzip"}})
	if zipped.Header.Get("Content-Encoding") != "gzip" || plain.Header.Get("Content-Encoding") != "" {
		t.Fatalf("encodings %q and %q", zipped.Header.Get("Content-Encoding"), plain.Header.Get("Content-Encoding"))
	}
	if body(t, plain) != body(t, zipped) {
		t.Error("the compressed page differs from the plain one")
	}
	if plain.Header.Get("ETag") == zipped.Header.Get("ETag") {
		t.Error("two encodings share one ETag")
	}
	if res := get(t, "GET", "/", http.Header{"Accept-Encoding": {"gzip;q=0"}}); res.Header.Get("Content-Encoding") != "" {
		t.Error("gzip was refused and sent")
	}
	again := get(t, "GET", "/", http.Header{"If-None-Match": {plain.Header.Get("ETag")}})
	if again.StatusCode != http.StatusNotModified || len(body(t, again)) != 0 {
		t.Errorf("unchanged page: %d", again.StatusCode)
	}
	if res := get(t, "GET", "/", http.Header{"If-None-Match": {`"other"`}}); res.StatusCode != 200 {
		t.Errorf("changed page: %d", res.StatusCode)
	}
}

// TestDistIsBuiltFromTheseSources fails when somebody changed src without `make web`, or dist by hand.
func TestDistIsBuiltFromTheseSources(t *testing.T) {
	recorded, err := os.ReadFile("dist.sha256")
	if err != nil {
		t.Fatal(err)
	}
	sources := append(list(t, "src"), "build.mjs", "package-lock.json", "package.json", "tsconfig.json")
	want := fmt.Sprintf("sources %s\ndist %s\n", hashOf(t, sources), hashOf(t, list(t, "dist")))
	if string(recorded) != want {
		t.Errorf("dist is not what src builds to: run `make web` and commit both\nrecorded\n%scomputed\n%s", recorded, want)
	}
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if !strings.HasSuffix(name, ".test.ts") && !strings.HasSuffix(name, ".test.tsx") {
			all = append(all, filepath.ToSlash(name))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func hashOf(t *testing.T, paths []string) string {
	t.Helper()
	sort.Strings(paths)
	h := sha256.New()
	for _, name := range paths {
		b, err := os.ReadFile(filepath.FromSlash(name))
		if err != nil {
			t.Fatal(err)
		}
		h.Write([]byte(name + "\n"))
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))
}
