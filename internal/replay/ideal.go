package replay

// Ideal is what an unlimited cache of whole pages would have served: prompt tokens, and how many of them lie in pages
// whose whole prefix an earlier request had computed by then. No radix code takes part: pages are known by a hash of
// all tokens up to their end.
func Ideal(t *Trace) (prompt, cached int64) {
	seen := map[[2]uint64]struct{}{}
	sums := map[int][][2]uint64{} // of requests under way
	var line []int32
	for _, e := range t.events() {
		if e.kind != eventStart && e.kind != eventDone {
			continue
		}
		r := &t.Requests[e.index]
		if e.kind == eventStart {
			line = appendTokens(appendTokens(line[:0], r.Prompt, 0, 1<<31-1), r.Output, 0, 1<<31-1)
			all := pageSums(line)
			known := 0
			for known < (r.prompt-1)/pageTokens {
				if _, ok := seen[all[known]]; !ok {
					break
				}
				known++
			}
			prompt += int64(r.prompt)
			cached += int64(known * pageTokens)
			for _, s := range all[:(r.prompt-1)/pageTokens] {
				seen[s] = struct{}{}
			}
			if r.Done > r.At {
				sums[e.index] = all
				continue
			}
			for _, s := range all {
				seen[s] = struct{}{}
			}
			continue
		}
		for _, s := range sums[e.index] {
			seen[s] = struct{}{}
		}
		delete(sums, e.index)
	}
	return prompt, cached
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
