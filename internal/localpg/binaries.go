package localpg

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
)

// versionMin is the oldest usable major version.
const versionMin = 15

// places are where distributions put the server's binaries, which often are
// not under PATH.
var places = []string{
	"/usr/lib/postgresql/*/bin",         // Debian, Ubuntu
	"/usr/pgsql-*/bin",                  // PGDG on Fedora, RHEL
	"/usr/libexec/postgresql*",          // Alpine
	"/opt/homebrew/opt/postgresql*/bin", // macOS, Homebrew on Apple silicon
	"/usr/local/opt/postgresql*/bin",    // macOS, Homebrew on Intel
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/usr/local/pgsql/bin",
	"/usr/bin",
}

type binaries struct {
	initdb, postgres string
	major            int
}

// findBinaries looks for the newest server, or, if pgdata holds a cluster, for
// one of its very version.
func findBinaries(pgdata string) (binaries, error) {
	dirs := []string{}
	if p, err := exec.LookPath("postgres"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	for _, pattern := range places {
		found, _ := filepath.Glob(pattern) // the patterns are well formed
		dirs = append(dirs, found...)
	}
	return choose(dirs, pgdata)
}

func choose(dirs []string, pgdata string) (binaries, error) {
	var all []binaries
	for _, dir := range dirs {
		b := binaries{initdb: filepath.Join(dir, "initdb"), postgres: filepath.Join(dir, "postgres")}
		if !executable(b.initdb) || !executable(b.postgres) {
			continue
		}
		if b.major = majorOf(b.postgres); b.major > 0 {
			all = append(all, b)
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].major > all[j].major })
	want := 0
	if text, err := os.ReadFile(filepath.Join(pgdata, "PG_VERSION")); err == nil {
		want, _ = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	for _, b := range all {
		if want == 0 && b.major >= versionMin || b.major == want {
			return b, nil
		}
	}
	const hint = "install the postgresql package (Debian, Ubuntu: apt-get install postgresql; macOS: brew install postgresql@17) or give a database with --database-url"
	switch {
	case want != 0:
		return binaries{}, fmt.Errorf("the cluster in %s is of PostgreSQL %d, whose server binaries are not installed: install postgresql-%d or give a database with --database-url", pgdata, want, want)
	case len(all) > 0:
		return binaries{}, fmt.Errorf("the newest PostgreSQL here is version %d, %d or newer is needed: %s", all[0].major, versionMin, hint)
	}
	return binaries{}, fmt.Errorf("no PostgreSQL server binaries (initdb, postgres) found: %s", hint)
}

func executable(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0
}

// majorOf asks a server binary for its version: "postgres (PostgreSQL) 15.9".
func majorOf(postgres string) int {
	out, err := exec.Command(postgres, "--version").Output()
	if err != nil {
		return 0
	}
	_, v, _ := strings.Cut(string(out), ") ")
	end := strings.IndexFunc(v, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(v)
	}
	n, _ := strconv.Atoi(v[:end]) // "" for a text of another form: 0
	return n
}
