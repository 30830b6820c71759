package radix

import "slices"

// CapturePoints plans where a prefill stops to take a snapshot: ascending
// positions in consumed tokens, each above start and at most prompt-1. The exact
// end of a turn is not among them; the engine takes that when the turn ends.
//
//   - the largest page edge strictly below the prompt's end, so that the same
//     prompt again finds a state although one token must be computed;
//   - branch (Match.Branch), where known pages end: the next line that parts
//     there finds a state;
//   - the client's marks, where they are;
//   - inside a long prompt, one spacing back from its end, two, four, ... where
//     a spacing is as many tokens as weigh the same as a snapshot, in whole
//     pages. They lie on multiples of the spacing counted from the line's start,
//     so that prompts with a common beginning choose common points.
//
// start is where the prefill begins (Match.Start).
func CapturePoints(start, prompt, branch int, marks []int, bytesPerSnapshot, bytesPerToken int64) []int {
	var out []int
	add := func(p int) {
		if p > start && p < prompt {
			out = append(out, p)
		}
	}
	end := floorPage(prompt - 1)
	add(end)
	add(branch)
	for _, m := range marks {
		add(m)
	}
	spacing := Spacing(bytesPerSnapshot, bytesPerToken)
	for back := spacing; ; back *= 2 {
		p := (end - back) / spacing * spacing
		if p < start+spacing { // a replay from start costs no more than the snapshot
			break
		}
		add(p)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Spacing is the distance of snapshots inside long lines: as many tokens as weigh
// the same as a snapshot, in whole pages, one at least.
func Spacing(bytesPerSnapshot, bytesPerToken int64) int {
	return max(PageTokens, floorPage(int(bytesPerSnapshot/max(bytesPerToken, 1))))
}

func floorPage(n int) int { return n / PageTokens * PageTokens }
