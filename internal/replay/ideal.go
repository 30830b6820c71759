package replay

// Unlimited is what an unlimited cache of whole pages would have served.
type Unlimited struct {
	Prompt    int64 // prompt tokens
	Cached    int64 // of them, in pages whose whole prefix an earlier request had computed by then
	Pages     int64 // distinct pages, known by their prefix
	LinePages int64 // whole pages of all lines, answers included
}

// Ideal works out the best that could be done. No radix code takes part: pages are known by a hash of all tokens up
// to their end.
func Ideal(t *Trace) Unlimited {
	var u Unlimited
	seen := map[[2]uint64]struct{}{}
	sums := map[int][][2]uint64{} // of requests under way
	learn := func(pages [][2]uint64) {
		for _, s := range pages {
			seen[s] = struct{}{}
		}
	}
	var line []int32
	for _, e := range t.events() {
		switch e.kind {
		case eventStart:
			r := &t.Requests[e.index]
			line = appendTokens(appendTokens(line[:0], r.Prompt, 0, 1<<31-1), r.Output, 0, 1<<31-1)
			all := pageSums(line)
			own := all[:(r.prompt-1)/pageTokens]
			known := 0
			for known < len(own) {
				if _, ok := seen[own[known]]; !ok {
					break
				}
				known++
			}
			u.Prompt += int64(r.prompt)
			u.Cached += int64(known * pageTokens)
			u.LinePages += int64(len(all))
			learn(own)
			if r.Done > r.At {
				sums[e.index] = all
			} else {
				learn(all)
			}
		case eventDone:
			learn(sums[e.index])
			delete(sums, e.index)
		}
	}
	u.Pages = int64(len(seen))
	return u
}

const pageTokens = 128

// pageSums hashes the line up to every page edge below its last token, which stays pending.
func pageSums(line []int32) [][2]uint64 {
	sums := make([][2]uint64, 0, len(line)/pageTokens)
	a, b := uint64(1), uint64(2)
	for i := 0; i+pageTokens < len(line); i += pageTokens {
		for _, t := range line[i : i+pageTokens] {
			a = mix(a ^ uint64(uint32(t)))
			b = (b ^ uint64(uint32(t))) * 0x100000001b3
		}
		sums = append(sums, [2]uint64{a, b})
	}
	return sums
}
