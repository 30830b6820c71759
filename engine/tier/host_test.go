package tier

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// TestHostModel runs random puts, gets and drops against a map, with a budget small enough to be hit.
func TestHostModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const budget = 200
		h := NewHost(budget)
		model, used := map[int64][]byte{}, 0
		var handles []int64
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				data := rapid.SliceOfN(rapid.Byte(), 0, 80).Draw(t, "data")
				cut := rapid.IntRange(0, len(data)).Draw(t, "cut")
				handle, err := h.Put(bytes.Clone(data[:cut]), bytes.Clone(data[cut:]))
				if fits := used+len(data) <= budget; fits != (err == nil) || !fits && !errors.Is(err, ErrFull) {
					t.Fatalf("put of %d at %d: %v", len(data), used, err)
				}
				if err == nil {
					model[handle], used = data, used+len(data)
					handles = append(handles, handle)
				}
			},
			"get": func(t *rapid.T) {
				if len(handles) == 0 {
					t.Skip()
				}
				handle := rapid.SampledFrom(handles).Draw(t, "handle")
				parts, err := h.Get(handle)
				want, live := model[handle]
				if live != (err == nil) || live && !bytes.Equal(bytes.Join(parts, nil), want) {
					t.Fatalf("get %d: %v %v, want %v", handle, parts, err, want)
				}
			},
			"drop": func(t *rapid.T) {
				if len(handles) == 0 {
					t.Skip()
				}
				handle := rapid.SampledFrom(handles).Draw(t, "handle")
				_, live := model[handle]
				if err := h.Drop(handle); live != (err == nil) {
					t.Fatalf("drop %d: %v", handle, err)
				}
				used -= len(model[handle])
				delete(model, handle)
			},
			"": func(t *rapid.T) {
				if err := h.Check(); err != nil {
					t.Fatal(err)
				}
				if h.Bytes() != int64(used) || h.Len() != len(model) {
					t.Fatalf("%d bytes in %d handles, want %d in %d", h.Bytes(), h.Len(), used, len(model))
				}
			},
		})
	})
}

func TestHostFindsEveryFlippedByte(t *testing.T) {
	data := []byte("pages and states")
	for i := range data {
		h := NewHost(1 << 20)
		part := bytes.Clone(data)
		handle, err := h.Put(part[:5], part[5:])
		if err != nil {
			t.Fatal(err)
		}
		part[i] ^= 1 << (i % 8)
		if _, err := h.Get(handle); !errors.Is(err, ErrCorrupt) {
			t.Errorf("byte %d flipped: %v", i, err)
		}
	}
}
