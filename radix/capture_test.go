package radix

import (
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestCapturePoints(t *testing.T) {
	const perToken = 16_400
	tests := []struct {
		name                  string
		start, prompt, branch int
		marks                 []int
		snapshot              int64
		want                  []int
	}{
		{"short", 0, 100, 0, nil, 8700 * perToken, nil},
		{"strictly below the end", 0, 257, 0, nil, 8700 * perToken, []int{256}},
		{"strictly below an end on an edge", 0, 256, 0, nil, 8700 * perToken, []int{128}},
		{"nothing new", 256, 300, 256, nil, 8700 * perToken, nil},
		{"branch", 0, 1000, 512, nil, 8700 * perToken, []int{512, 896}},
		{"marks where they are", 300, 1000, 0, []int{250, 333, 999, 1000, 2000}, 8700 * perToken, []int{333, 896, 999}},
		{"spacing of a large state", 0, 100_000, 0, nil, 8700 * perToken, []int{25_728, 60_032, 77_184, 85_760, 99_968}},
		{"no spacing close to the start", 2000, 3000, 0, nil, 440 * perToken, []int{2944}},
		{"spacing of a small state", 0, 3000, 0, nil, 440 * perToken, []int{1152, 1920, 2304, 2944}},
	}
	for _, tt := range tests {
		if got := CapturePoints(tt.start, tt.prompt, tt.branch, tt.marks, tt.snapshot, perToken); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestCapturePointsAreFewAndInRange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompt := rapid.IntRange(1, 1<<20).Draw(t, "prompt")
		start := rapid.IntRange(0, prompt-1).Draw(t, "start")
		branch := rapid.IntRange(0, 1<<13).Draw(t, "branch") * PageTokens
		marks := rapid.SliceOfN(rapid.IntRange(0, 1<<20), 0, 4).Draw(t, "marks")
		spacing := rapid.Int64Range(0, 20_000).Draw(t, "spacing")
		got := CapturePoints(start, prompt, branch, marks, spacing*1000, 1000)
		for i, p := range got {
			if p <= start || p >= prompt || i > 0 && p <= got[i-1] {
				t.Fatalf("points %v for [%d,%d)", got, start, prompt)
			}
			if p%PageTokens != 0 && !slices.Contains(marks, p) {
				t.Fatalf("point %d is neither a page edge nor a mark", p)
			}
		}
		if end := (prompt - 1) / PageTokens * PageTokens; end > start && !slices.Contains(got, end) {
			t.Fatalf("points %v lack the last page edge %d", got, end)
		}
		if most := len(marks) + 2 + bits.Len(uint(prompt/PageTokens)); len(got) > most {
			t.Fatalf("%d points for %d tokens", len(got), prompt)
		}
	})
}
