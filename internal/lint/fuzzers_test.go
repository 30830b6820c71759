package lint

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestFuzzersAreListed: docs/hostile.md names every fuzzer, and no other.
func TestFuzzersAreListed(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "hostile.md"))
	if err != nil {
		t.Fatal(err)
	}
	function := regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)
	there := map[string]bool{}
	for _, name := range tracked(t, "*_test.go") {
		if path.Dir(name) == "radix" { // decodes nothing: its fuzzer makes operations of bytes
			continue
		}
		text, err := os.ReadFile(filepath.Join(root(t), name))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range function.FindAllStringSubmatch(string(text), -1) {
			there[m[1]] = true
			if !strings.Contains(string(page), m[1]+"`") {
				t.Errorf("%s: %s is not in docs/hostile.md", name, m[1])
			}
		}
	}
	for _, name := range regexp.MustCompile(`Fuzz\w+`).FindAllString(string(page), -1) {
		if !there[name] {
			t.Errorf("docs/hostile.md has %s, which is nowhere", name)
		}
	}
}
