package localpg

import "testing"

// FuzzPID: whatever a crash left of postmaster.pid, no process is taken for
// ours that signals must not go to: 0 is nobody, 1 is init, below are groups.
func FuzzPID(f *testing.F) {
	for _, seed := range []string{"123\n/data\n", "", "-1", "1", "0", " 12", "99999999999999999999", "12x", "\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if pid := parsePID(text); pid != 0 && (pid < 2 || pid > 1<<31-1) {
			t.Fatalf("%q is process %d", text, pid)
		}
	})
}
