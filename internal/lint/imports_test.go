package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "rocket"

// pkg is what the rules read of `go list -json`.
type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Deps       []string
	CgoFiles   []string
}

// rule refuses imports of the packages at or below from. Direct rules look at a package's own
// imports; the others at everything that it pulls in.
type rule struct {
	from    string
	except  string // a package below from that the rule leaves alone
	forbid  string
	direct  bool
	because string
}

var rules = []rule{
	{from: "radix", forbid: "rocket/...", because: "the tree is pure bookkeeping: whoever reads it need know nothing else"},
	{from: "radix", forbid: "third-party", because: "radix uses the standard library only"},
	{from: "radix", forbid: "sync", direct: true, because: "the engine loop is radix's only caller; a lock would hide a second one"},
	{from: "radix", forbid: "time", direct: true, because: "time is an argument, so that a test or a peer can replay it"},
	{from: "radix", forbid: "os", direct: true, because: "radix does no I/O; the tiers do"},
	{from: "kernels", forbid: "rocket/...", because: "kernels are the bottom: they know no models and no pages"},
	{from: "engine", forbid: "github.com/jackc/...", because: "the engine knows no database: the ledger is sessions' business"},
	{from: "engine", forbid: "net/http", because: "the engine knows no protocol: readers come through sessions"},
	{from: "engine", forbid: "rocket/sessions", because: "imports go cmd -> server -> sessions -> engine"},
	{from: "engine", forbid: "rocket/server", because: "imports go cmd -> server -> sessions -> engine"},
	{from: "sessions", forbid: "rocket/kernels", direct: true, because: "sessions name lines and offsets, never device memory"},
	{from: "sessions", forbid: "rocket/radix", direct: true, because: "only the engine loop touches the tree"},
	{from: "sessions", forbid: "net/http", direct: true, because: "sessions know no protocol: server maps its errors"},
	{from: "sessions", forbid: "rocket/server", because: "imports go cmd -> server -> sessions -> engine"},
	{from: "server", forbid: "rocket/engine/...", direct: true, because: "numbers and verbs come through sessions"},
	{from: "server", forbid: "rocket/kernels", direct: true, because: "numbers and verbs come through sessions"},
	{from: "server", forbid: "rocket/radix", direct: true, because: "numbers and verbs come through sessions"},
	{from: "server", forbid: "github.com/jackc/...", direct: true, because: "rows are sessions' business"},
	{from: "client", forbid: "rocket/server", because: "a client knows the protocol, not the server's code"},
	{from: "client", forbid: "rocket/engine/...", because: "a client must build without the engine and cgo"},
	{from: "web", forbid: "rocket/...", because: "the dashboard speaks the same HTTP as everybody else"},
	{from: "migrations", forbid: "rocket/...", because: "migrations are SQL and what applies it"},
	{from: "...", except: "rocket/kernels", forbid: "github.com/NVIDIA/go-nvml/...", direct: true, because: "devices are kernels' business"},
}

func TestImportDirection(t *testing.T) {
	all := list(t)
	standard := map[string]bool{}
	for _, p := range all {
		standard[p.ImportPath] = p.Standard
	}
	for _, p := range all {
		if !ours(p.ImportPath) {
			continue
		}
		for _, r := range rules {
			if !below(p.ImportPath, r.from) || r.except != "" && p.ImportPath == r.except {
				continue
			}
			imports := p.Deps
			if r.direct {
				imports = p.Imports
			}
			for _, imported := range imports {
				if imported == p.ImportPath || below(p.ImportPath, r.from) && below(imported, r.from) && r.from != "..." {
					continue
				}
				if matches(r.forbid, imported, standard) {
					t.Errorf("%s imports %s: refused, because %s", p.ImportPath, imported, r.because)
				}
			}
		}
	}
}

func TestOnlyKernelsUsesCgo(t *testing.T) {
	for _, p := range list(t) {
		if ours(p.ImportPath) && len(p.CgoFiles) > 0 && !below(p.ImportPath, "kernels") {
			t.Errorf("%s uses cgo in %v: refused, because one C boundary is enough to get right", p.ImportPath, p.CgoFiles)
		}
	}
}

// TestRulesCanFail proves the matcher on edges that must be refused and edges that must not.
func TestRulesCanFail(t *testing.T) {
	standard := map[string]bool{"net/http": true, "sort": true}
	for _, c := range []struct {
		forbid, imported string
		want             bool
	}{
		{"rocket/...", "rocket/engine", true},
		{"rocket/...", "rockets/engine", false},
		{"rocket/engine/...", "rocket/engine", true},
		{"rocket/engine/...", "rocket/engine/model", true},
		{"rocket/engine/...", "rocket/engines", false},
		{"rocket/sessions", "rocket/sessions", true},
		{"rocket/sessions", "rocket/sessions/x", false},
		{"net/http", "net/http", true},
		{"third-party", "github.com/a/b", true},
		{"third-party", "sort", false},
		{"third-party", "rocket/engine", false},
	} {
		if got := matches(c.forbid, c.imported, standard); got != c.want {
			t.Errorf("matches(%q, %q) = %v, want %v", c.forbid, c.imported, got, c.want)
		}
	}
	for _, c := range []struct {
		path, dir string
		want      bool
	}{{"rocket/engine/model", "engine", true}, {"rocket/engine", "engine", true}, {"rocket/enginex", "engine", false}, {"rocket", "...", true}} {
		if got := below(c.path, c.dir); got != c.want {
			t.Errorf("below(%q, %q) = %v, want %v", c.path, c.dir, got, c.want)
		}
	}
}

func ours(path string) bool { return path == module || strings.HasPrefix(path, module+"/") }

func below(path, dir string) bool {
	if dir == "..." {
		return ours(path)
	}
	return path == module+"/"+dir || strings.HasPrefix(path, module+"/"+dir+"/")
}

func matches(forbid, imported string, standard map[string]bool) bool {
	if forbid == "third-party" {
		return !standard[imported] && !ours(imported)
	}
	if prefix, ok := strings.CutSuffix(forbid, "/..."); ok {
		return imported == prefix || strings.HasPrefix(imported, prefix+"/")
	}
	return imported == forbid
}

// list is the whole build list of the module's packages, without their tests.
func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-deps", "-json=ImportPath,Standard,Imports,Deps,CgoFiles", "./...")
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var all []pkg
	decoder := json.NewDecoder(bytes.NewReader(out))
	for {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if !slices.ContainsFunc(all, func(p pkg) bool { return ours(p.ImportPath) }) {
		t.Fatal("go list found no package of this module")
	}
	return all
}
