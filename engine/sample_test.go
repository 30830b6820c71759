package engine

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestPickGreedyTiesToLowerID(t *testing.T) {
	s := newSampler(TurnRequest{})
	if got := s.pick([]float32{1, 3, 3, 2}, 7); got != 1 {
		t.Fatalf("got %d, want 1", got)
	}
}

func TestPickDependsOnSeedAndPositionOnly(t *testing.T) {
	logits := randomLogits(300, 1)
	a, b := newSampler(TurnRequest{Temperature: 1, Seed: 5}), newSampler(TurnRequest{Temperature: 1, Seed: 5})
	for pos := range 50 {
		b.pick(logits, pos+1000) // history must not matter
		if x, y := a.pick(logits, pos), b.pick(logits, pos); x != y {
			t.Fatalf("position %d: %d and %d", pos, x, y)
		}
	}
	c := newSampler(TurnRequest{Temperature: 1, Seed: 6})
	same := 0
	for pos := range 50 {
		if a.pick(logits, pos) == c.pick(logits, pos) {
			same++
		}
	}
	if same > 25 {
		t.Fatalf("another seed picked the same token at %d of 50 positions", same)
	}
}

// The Gumbel argmax must sample the softmax: compare frequencies with the distribution computed in float64.
func TestPickFollowsSoftmax(t *testing.T) {
	logits := []float32{2, 1, 0, -1, 0.5}
	const n = 200000
	for _, req := range []TurnRequest{
		{Temperature: 1, Seed: 9}, {Temperature: 0.7, Seed: 9}, {Temperature: 1, TopK: 3, Seed: 9}, {Temperature: 1, TopP: 0.8, Seed: 9},
	} {
		want := softmax(logits, float64(req.Temperature))
		switch {
		case req.TopK == 3: // ids 0, 1, 4
			want[2], want[3] = 0, 0
		case req.TopP == 0.8: // 0.573 + 0.211 < 0.8, so id 4 joins
			want[2], want[3] = 0, 0
		}
		var sum float64
		for _, p := range want {
			sum += p
		}
		s := newSampler(req)
		count := make([]int, len(logits))
		for pos := range n {
			count[s.pick(logits, pos)]++
		}
		for id, p := range want {
			p /= sum
			if got := float64(count[id]) / n; math.Abs(got-p) > 5*math.Sqrt(p*(1-p)/n)+1e-9 {
				t.Errorf("%+v: token %d has frequency %.4f, want %.4f", req, id, got, p)
			}
		}
	}
}

func TestLogprobsAgainstFloat64(t *testing.T) {
	logits := randomLogits(100, 3)
	p := softmax(logits, 1)
	lp, top := logprobs(logits, 17, 4)
	if math.Abs(float64(lp)-math.Log(p[17])) > 1e-5 {
		t.Errorf("logprob %v, want %v", lp, math.Log(p[17]))
	}
	if len(top) != 4 || top[0].ID != argmax(logits) {
		t.Fatalf("top = %v", top)
	}
	for i := 1; i < 4; i++ {
		if top[i].Logprob > top[i-1].Logprob {
			t.Errorf("alternatives out of order: %v", top)
		}
	}
	better := 0
	for id := range logits {
		if p[id] > p[top[3].ID] {
			better++
		}
	}
	if better != 3 {
		t.Errorf("%d tokens are better than the fourth alternative, want 3", better)
	}
}

func TestStopMatcher(t *testing.T) {
	for _, c := range []struct {
		stops  []string
		tokens []string
		at     int // token index of the match, -1 none
		from   int // byte where the stop string begins
	}{
		{[]string{"end"}, []string{"the e", "n", "d of"}, 2, 4},
		{[]string{"xyz", "yz"}, []string{"xy", "z"}, 1, 0},
		{[]string{"\n\n"}, []string{"a\n", "b\n", "\nc"}, 2, 3},
		{[]string{"aab"}, []string{"a", "a", "a", "b"}, 3, 1},
		{[]string{"no"}, []string{"n", "n"}, -1, -1},
		{[]string{""}, []string{"n"}, -1, -1},
		{[]string{"é"}, []string{"caf\xc3", "\xa9"}, 1, 3},
	} {
		m := newStopMatcher(c.stops)
		at, from := -1, -1
		for i, tok := range c.tokens {
			if f := m.push([]byte(tok)); f >= 0 {
				at, from = i, f
				break
			}
		}
		if at != c.at || from != c.from {
			t.Errorf("%q over %q: token %d byte %d, want %d %d", c.stops, c.tokens, at, from, c.at, c.from)
		}
	}
}

func randomLogits(n int, seed uint64) []float32 {
	r := rand.New(rand.NewPCG(seed, 0))
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(r.NormFloat64() * 2)
	}
	return out
}

func softmax(logits []float32, temperature float64) []float64 {
	out := make([]float64, len(logits))
	var sum float64
	for i, l := range logits {
		out[i] = math.Exp(float64(l) / temperature)
		sum += out[i]
	}
	for i := range out {
		out[i] /= sum
	}
	return out
}
