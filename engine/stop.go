package engine

import "bytes"

// stopMatcher finds the first stop string in the bytes of the generated tokens, token by token.
type stopMatcher struct {
	stops   [][]byte
	longest int
	text    []byte // bytes generated so far
}

func newStopMatcher(stops []string) *stopMatcher {
	m := &stopMatcher{}
	for _, s := range stops {
		if s != "" {
			m.stops = append(m.stops, []byte(s))
			m.longest = max(m.longest, len(s))
		}
	}
	return m
}

// push adds one token's bytes and returns where the earliest stop string begins, or -1.
func (m *stopMatcher) push(b []byte) int {
	if len(m.stops) == 0 {
		return -1
	}
	from := max(0, len(m.text)-m.longest+1)
	m.text = append(m.text, b...)
	found := -1
	for _, s := range m.stops {
		if i := bytes.Index(m.text[from:], s); i >= 0 && (found < 0 || from+i < found) {
			found = from + i
		}
	}
	return found
}
