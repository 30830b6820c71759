package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// The vocabulary and the merges are nearly all of a file. They are read by hand, which takes a fraction of the time that
// reflection takes. The JSON package has checked the syntax before it calls UnmarshalJSON, so the scanner only tells the
// values apart.

// vocabJSON is an object of ids by spelling.
type vocabJSON map[string]int32

func (v *vocabJSON) UnmarshalJSON(data []byte) error {
	s := scanner{data: data}
	if s.next() != '{' {
		return errors.New("vocab: is no object")
	}
	*v = make(vocabJSON, len(data)/16)
	s.i++
	for s.next() == '"' {
		key, err := s.text()
		if err != nil {
			return fmt.Errorf("vocab: %w", err)
		}
		if s.next() == ':' {
			s.i++
		}
		id, ok := s.number()
		if !ok {
			return fmt.Errorf("vocab[%q]: is no id", key)
		}
		if _, twice := (*v)[key]; twice {
			return fmt.Errorf("vocab[%q]: is there twice", key)
		}
		(*v)[key] = id
		if s.next() == ',' {
			s.i++
		}
	}
	return nil
}

// mergeList holds the merges in order of rank. The file writes each as "a b" or as ["a", "b"].
type mergeList [][2]string

func (m *mergeList) UnmarshalJSON(data []byte) error {
	s := scanner{data: data}
	if s.next() != '[' {
		return errors.New("merges: is no array")
	}
	*m = make(mergeList, 0, len(data)/16)
	s.i++
	for i := 0; ; i++ {
		var pair [2]string
		switch s.next() {
		case ']':
			return nil
		case '"':
			line, err := s.text()
			if err != nil {
				return fmt.Errorf("merges[%d]: %w", i, err)
			}
			a, b, ok := strings.Cut(line, " ")
			if !ok || a == "" || b == "" || strings.Contains(b, " ") {
				return fmt.Errorf("merges[%d]: %q is not two words", i, line)
			}
			pair = [2]string{a, b}
		case '[':
			s.i++
			n := 0
			for ; s.next() == '"'; n++ {
				word, err := s.text()
				if err != nil {
					return fmt.Errorf("merges[%d]: %w", i, err)
				}
				if n < 2 {
					pair[n] = word
				}
				if s.next() == ',' {
					s.i++
				}
			}
			if s.next() != ']' || n != 2 {
				return fmt.Errorf("merges[%d]: is not two strings", i)
			}
			s.i++
		default:
			return fmt.Errorf("merges[%d]: is neither a string nor a pair", i)
		}
		*m = append(*m, pair)
		if s.next() == ',' {
			s.i++
		}
	}
}

// scanner walks over valid JSON.
type scanner struct {
	data []byte
	i    int
}

// next skips white space and returns the byte that follows, 0 at the end.
func (s *scanner) next() byte {
	for s.i < len(s.data) {
		switch c := s.data[s.i]; c {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return c
		}
	}
	return 0
}

// text reads the string at the current quote.
func (s *scanner) text() (string, error) {
	start, plain := s.i, true
	for s.i++; s.i < len(s.data) && s.data[s.i] != '"'; s.i++ {
		if s.data[s.i] == '\\' {
			plain = false
			s.i++
		}
	}
	s.i = min(s.i+1, len(s.data))
	if plain && utf8.Valid(s.data[start+1:s.i-1]) {
		return string(s.data[start+1 : s.i-1]), nil
	}
	var text string
	err := json.Unmarshal(s.data[start:s.i], &text)
	return text, err
}

// number reads an integer that fits an id.
func (s *scanner) number() (int32, bool) {
	s.next()
	n, digits, neg := int64(0), 0, false
	if s.i < len(s.data) && s.data[s.i] == '-' {
		neg = true
		s.i++
	}
	for ; s.i < len(s.data) && s.data[s.i] >= '0' && s.data[s.i] <= '9'; s.i++ {
		if n = n*10 + int64(s.data[s.i]-'0'); n > 1<<31-1 {
			return 0, false
		}
		digits++
	}
	if s.i < len(s.data) && (s.data[s.i] == '.' || s.data[s.i]|0x20 == 'e') {
		return 0, false
	}
	if neg {
		n = -n
	}
	return int32(n), digits > 0
}
