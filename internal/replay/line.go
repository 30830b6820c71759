package replay

import "rocket/radix"

// Seg is a run of a line's tokens: tokens [Off, Off+N) of the endless stream that ID names. Streams with different
// ids have different tokens.
type Seg struct {
	ID  uint64
	Off int32
	N   int32
}

// stream names a stream by where its id comes from, so that ids of different files or kinds do not collide.
func stream(scope, id uint64) uint64 {
	return mix(mix(scope+0x9e3779b97f4a7c15) ^ (id + 0x632be59bd9b4e019))
}

// mix is a bijection of 64 bits that spreads them (the finaliser of splitmix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// length is the number of tokens of the segments.
func length(segs []Seg) int {
	n := 0
	for _, s := range segs {
		n += int(s.N)
	}
	return n
}

// appendTokens appends the segments' tokens to dst: ids in [low, low+vocab).
func appendTokens(dst []int32, segs []Seg, low, vocab int32) []int32 {
	for _, s := range segs {
		for i := range s.N {
			x := mix(s.ID + uint64(s.Off+i)*0x9e3779b97f4a7c15)
			dst = append(dst, low+int32((x>>32)*uint64(vocab)>>32))
		}
	}
	return dst
}

// cut returns the segments of tokens [from, to) of a line; to may be past its end.
func cut(segs []Seg, from, to int) []Seg {
	var out []Seg
	for _, s := range segs {
		n := int(s.N)
		a, b := max(from, 0), min(to, n)
		if a < b {
			out = append(out, Seg{s.ID, s.Off + int32(a), int32(b - a)})
		}
		from, to = from-n, to-n
		if to <= 0 {
			break
		}
	}
	return out
}

// floorPage is the page edge at or below n.
func floorPage(n int) int { return n / radix.PageTokens * radix.PageTokens }
