package kernels

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The pool alone, built with the thread sanitizer. Skipped where the source or a compiler with the sanitizer is missing
// (a test binary that was carried to another machine).
func TestPoolUnderThreadSanitizer(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	if _, err := os.Stat("testdata/pool_race.c"); err != nil {
		t.Skip("no source here")
	}
	bin := filepath.Join(t.TempDir(), "pool_race")
	if out, err := exec.Command(cc, "-std=c11", "-O1", "-g", "-fsanitize=thread", "-pthread", "-I.", "-o", bin, "testdata/pool_race.c").CombinedOutput(); err != nil {
		t.Skipf("no thread sanitizer: %v\n%s", err, out)
	}
	cmd := exec.Command(bin)
	cmd.Env = append(os.Environ(), "TSAN_OPTIONS=halt_on_error=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
