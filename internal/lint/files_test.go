package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	linesAimed = 500  // longer files are listed
	linesMax   = 1000 // longer files fail; generated ones and test tables are left alone
)

// emptyNames are package names that say nothing about what is inside.
var emptyNames = []string{"util", "utils", "common", "types", "misc", "helpers", "mocks", "shared", "base"}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// tracked lists the files that git knows or would add, so that build outputs and editors' files do not
// count. Without git (a source archive) the tests of files have nothing to go by and are skipped.
func tracked(t *testing.T, patterns ...string) []string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"ls-files", "--cached", "--others", "--exclude-standard", "--"}, patterns...)...)
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("no git tree here: %v", err)
	}
	var files []string
	for _, name := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if _, err := os.Stat(filepath.Join(root(t), name)); name != "" && err == nil {
			files = append(files, name)
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}

func parse(t *testing.T, name string, mode parser.Mode) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(t), name), nil, mode)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestEveryPackageHasAComment(t *testing.T) {
	commented := map[string]bool{}
	for _, name := range tracked(t, "*.go") {
		if strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata/") {
			continue
		}
		f := parse(t, name, parser.ParseComments|parser.PackageClauseOnly)
		commented[path.Dir(name)] = commented[path.Dir(name)] || f.Doc != nil && len(f.Doc.Text()) > 20
	}
	for dir, ok := range commented {
		if !ok {
			t.Errorf("%s: no file has a package comment; it is where a package's invariants are written", dir)
		}
	}
}

func TestPackageNamesSaySomething(t *testing.T) {
	for _, name := range tracked(t, "*.go") {
		if f := parse(t, name, parser.PackageClauseOnly); slices.Contains(emptyNames, f.Name.Name) {
			t.Errorf("%s: package %s collects what belongs elsewhere: name it after its subject", name, f.Name.Name)
		}
	}
}

// TestOnlyCommandsReadTheEnvironment keeps configuration in Options structs that cmd/rocket fills.
func TestOnlyCommandsReadTheEnvironment(t *testing.T) {
	for _, name := range tracked(t, "*.go") {
		if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "cmd/") || strings.Contains(name, "testdata/") {
			continue
		}
		for _, used := range selectors(parse(t, name, 0), "os") {
			if slices.Contains([]string{"Getenv", "LookupEnv", "ExpandEnv"}, used) {
				t.Errorf("%s uses os.%s: only cmd/rocket reads the environment", name, used)
			}
		}
	}
}

// selectors gives the names that a file takes from an imported package.
func selectors(f *ast.File, imported string) []string {
	local := ""
	for _, spec := range f.Imports {
		if p, err := strconv.Unquote(spec.Path.Value); err == nil && p == imported {
			local = path.Base(imported)
			if spec.Name != nil {
				local = spec.Name.Name
			}
		}
	}
	var names []string
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && local != "" && x.Name == local {
				names = append(names, sel.Sel.Name)
			}
		}
		return true
	})
	return names
}

func TestFilesAreReadable(t *testing.T) {
	for _, name := range tracked(t, "*.go", "*.c", "*.h", "*.ts", "*.tsx") {
		if strings.Contains(name, "testdata/") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root(t), name))
		if err != nil {
			t.Fatal(err)
		}
		switch lines := strings.Count(string(b), "\n"); {
		case lines > linesMax:
			t.Errorf("%s has %d lines: split it by subject (limit %d)", name, lines, linesMax)
		case lines > linesAimed:
			t.Logf("%s has %d lines, aimed at %d", name, lines, linesAimed)
		}
	}
}

// TestLockFilesNameNoHost: whoever builds from a mirror must not be sent elsewhere by a lock file.
func TestLockFilesNameNoHost(t *testing.T) {
	for _, name := range tracked(t, "*package-lock.json") {
		b, err := os.ReadFile(filepath.Join(root(t), name))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), `"resolved"`) {
			t.Errorf("%s records download addresses: npm's omit-lockfile-registry-resolved leaves them out", name)
		}
	}
}
