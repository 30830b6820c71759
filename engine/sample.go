package engine

import (
	"math"
	"slices"
)

// sampler picks tokens. Its result is a function of (logits, request, position) alone: filters sort by logit
// descending, then id ascending; sums are FP32 in that order; the noise of a token is a hash of (seed, position, id).
// So K drafts verified at once, a fork and a replay all pick the same token.
type sampler struct {
	temperature, topP float32
	topK              int
	seed              uint64
	cand              []candidate // scratch
}

type candidate struct {
	id    int32
	logit float32
}

func newSampler(t TurnRequest) sampler {
	topP := t.TopP
	if topP == 0 {
		topP = 1
	}
	return sampler{temperature: t.Temperature, topP: topP, topK: t.TopK, seed: t.Seed}
}

// pick returns the token for absolute position pos.
func (s *sampler) pick(logits []float32, pos int) int32 {
	if s.temperature <= 0 {
		return argmax(logits)
	}
	if s.topK <= 0 && s.topP >= 1 {
		best, bestScore := int32(0), math.Inf(-1)
		for id, l := range logits {
			if score := s.perturb(l, pos, int32(id)); score > bestScore {
				best, bestScore = int32(id), score
			}
		}
		return best
	}
	kept := s.filter(logits)
	best, bestScore := kept[0].id, math.Inf(-1)
	for _, c := range kept {
		score := s.perturb(c.logit, pos, c.id)
		if score > bestScore || score == bestScore && c.id < best {
			best, bestScore = c.id, score
		}
	}
	return best
}

// filter keeps the top-k logits, then the smallest prefix of them whose probability at this temperature reaches top-p.
func (s *sampler) filter(logits []float32) []candidate {
	s.cand = s.cand[:0]
	for id, l := range logits {
		s.cand = append(s.cand, candidate{int32(id), l})
	}
	slices.SortFunc(s.cand, byLogit)
	kept := s.cand
	if s.topK > 0 && s.topK < len(kept) {
		kept = kept[:s.topK]
	}
	if s.topP >= 1 {
		return kept
	}
	var total float32
	weight := func(c candidate) float32 {
		return float32(math.Exp(float64(c.logit-kept[0].logit) / float64(s.temperature)))
	}
	for _, c := range kept {
		total += weight(c)
	}
	limit := s.topP * total
	var sum float32
	for i, c := range kept {
		sum += weight(c)
		if sum >= limit {
			return kept[:i+1]
		}
	}
	return kept
}

func byLogit(a, b candidate) int {
	switch {
	case a.logit > b.logit:
		return -1
	case a.logit < b.logit:
		return 1
	}
	return int(a.id - b.id)
}

// perturb is logit/T plus Gumbel noise: the argmax over tokens is a sample of the softmax at T.
func (s *sampler) perturb(logit float32, pos int, id int32) float64 {
	h := mix64(mix64(s.seed^0x9e3779b97f4a7c15) + uint64(pos)*0xbf58476d1ce4e5b9 + uint64(uint32(id))*0x94d049bb133111eb)
	u := (float64(h>>12) + 0.5) / (1 << 52) // exact, so in (0,1) at both ends
	return float64(logit)/float64(s.temperature) - math.Log(-math.Log(u))
}

// mix64 is the finaliser of splitmix64.
func mix64(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// argmax is the greedy choice: the largest logit, the lower id on ties.
func argmax(logits []float32) int32 {
	best := 0
	for i, l := range logits {
		if l > logits[best] {
			best = i
		}
	}
	return int32(best)
}

// logprobs returns the log-probability of id at temperature 1 and the n best alternatives, sums in float64.
func logprobs(logits []float32, id int32, n int) (float32, []TokenLogprob) {
	top := float64(logits[argmax(logits)])
	var sum float64
	for _, l := range logits {
		sum += math.Exp(float64(l) - top)
	}
	norm := top + math.Log(sum)
	if n == 0 {
		return float32(float64(logits[id]) - norm), nil
	}
	best := make([]candidate, 0, n+1)
	for i, l := range logits {
		c := candidate{int32(i), l}
		if len(best) == n && byLogit(c, best[n-1]) > 0 {
			continue
		}
		at, _ := slices.BinarySearchFunc(best, c, byLogit)
		best = slices.Insert(best, at, c)
		if len(best) > n {
			best = best[:n]
		}
	}
	out := make([]TokenLogprob, len(best))
	for i, c := range best {
		out[i] = TokenLogprob{c.id, float32(float64(c.logit) - norm)}
	}
	return float32(float64(logits[id]) - norm), out
}
