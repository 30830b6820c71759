package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// maxHeaderBytes bounds the JSON header of one file. The format's own library uses the same bound; a longer header is
// taken for corruption before anything is allocated for it.
const maxHeaderBytes = 100_000_000

// maxDims bounds the rank of a tensor; nothing that we load has more than 4.
const maxDims = 8

// entry is one tensor of a header: its place is relative to the data section.
type entry struct {
	name       string
	dtype      DType
	shape      []int
	begin, end int64
}

// parseHeader reads a whole safetensors file's head. size is the file's size and head its first bytes, at least
// 8 + header long (a shorter head is an error, not a panic). It returns the tensors in order of their place in the
// file and the offset of the data section. The data section must be covered exactly: no overlap, no hole, no rest.
func parseHeader(head []byte, size int64) ([]entry, int64, error) {
	if size < 8 || len(head) < 8 {
		return nil, 0, fmt.Errorf("truncated: %d bytes, the header length alone takes 8", size)
	}
	n := binary.LittleEndian.Uint64(head)
	if n > maxHeaderBytes {
		return nil, 0, fmt.Errorf("header of %d bytes is over the limit of %d", n, maxHeaderBytes)
	}
	if int64(n) > size-8 || int64(n) > int64(len(head)-8) {
		return nil, 0, fmt.Errorf("truncated: header of %d bytes in a file of %d", n, size)
	}
	text := head[8 : 8+n]
	if !utf8.Valid(text) {
		return nil, 0, errors.New("header is not valid UTF-8")
	}
	entries, err := parseEntries(text)
	if err != nil {
		return nil, 0, err
	}
	data := size - 8 - int64(n)
	slices.SortFunc(entries, func(a, b entry) int {
		if a.begin != b.begin {
			return int(min(max(a.begin-b.begin, -1), 1))
		}
		if a.end != b.end {
			return int(min(max(a.end-b.end, -1), 1))
		}
		return bytes.Compare([]byte(a.name), []byte(b.name))
	})
	at := int64(0)
	for _, e := range entries {
		switch {
		case e.end > data:
			return nil, 0, fmt.Errorf("tensor %q: bytes [%d, %d) are outside the data section of %d bytes (file truncated?)", e.name, e.begin, e.end, data)
		case e.begin < at:
			return nil, 0, fmt.Errorf("tensor %q: bytes [%d, %d) overlap the tensor before it, which ends at %d", e.name, e.begin, e.end, at)
		case e.begin > at:
			return nil, 0, fmt.Errorf("tensor %q: starts at %d, the tensor before it ends at %d: a hole", e.name, e.begin, at)
		}
		at = e.end
	}
	if at != data {
		return nil, 0, fmt.Errorf("%d bytes after the last tensor belong to none", data-at)
	}
	return entries, 8 + int64(n), nil
}

// parseEntries walks the header token by token, since encoding/json would let a repeated key pass.
func parseEntries(text []byte) ([]entry, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("header is not a JSON object")
	}
	var entries []entry
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("header: %w", err)
		}
		name, ok := t.(string)
		if !ok {
			return nil, errors.New("header: key is not a string")
		}
		if seen[name] {
			return nil, fmt.Errorf("tensor %q: named twice in the header", name)
		}
		seen[name] = true
		if name == "__metadata__" {
			var meta map[string]string
			if err := dec.Decode(&meta); err != nil {
				return nil, fmt.Errorf("header: __metadata__: %w", err)
			}
			continue
		}
		e, err := parseEntry(dec, name)
		if err != nil {
			return nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		entries = append(entries, e)
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF { // padding with spaces is allowed, a second value is not
		return nil, errors.New("header: text after the JSON object")
	}
	return entries, nil
}

func parseEntry(dec *json.Decoder, name string) (entry, error) {
	var raw struct {
		DType   *DType  `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	if err := dec.Decode(&raw); err != nil {
		return entry{}, fmt.Errorf("header: %w", err)
	}
	if raw.DType == nil || raw.Shape == nil || len(raw.Offsets) != 2 {
		return entry{}, errors.New("header: wants dtype, shape and two data_offsets")
	}
	if raw.DType.Size() == 0 {
		return entry{}, fmt.Errorf("dtype %q is not supported", *raw.DType)
	}
	if len(raw.Shape) > maxDims {
		return entry{}, fmt.Errorf("%d dimensions, at most %d are supported", len(raw.Shape), maxDims)
	}
	e := entry{name: name, dtype: *raw.DType, begin: raw.Offsets[0], end: raw.Offsets[1], shape: make([]int, len(raw.Shape))}
	want := uint64(e.dtype.Size())
	for i, d := range raw.Shape {
		if d < 0 || int64(int(d)) != d {
			return entry{}, fmt.Errorf("shape %v has a dimension out of range", raw.Shape)
		}
		e.shape[i] = int(d)
		hi, lo := bits.Mul64(want, uint64(d))
		if hi != 0 || lo > 1<<62 {
			return entry{}, fmt.Errorf("shape %v overflows", raw.Shape)
		}
		want = lo
	}
	if e.begin < 0 || e.end < e.begin {
		return entry{}, fmt.Errorf("data_offsets [%d, %d] are not a range", e.begin, e.end)
	}
	if uint64(e.end-e.begin) != want {
		return entry{}, fmt.Errorf("%s of shape %v takes %d bytes, data_offsets give %d", e.dtype, e.shape, want, e.end-e.begin)
	}
	return e, nil
}
