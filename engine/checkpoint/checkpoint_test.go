package checkpoint

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// spec is a tensor to be written by file.
type spec struct {
	name  string
	dtype DType
	shape []int
	data  []byte
}

// file writes a well-formed safetensors file; edit, when not nil, may spoil the header text before it is written.
func file(t testing.TB, path string, specs []spec, edit func(string) string) {
	t.Helper()
	var head, data []byte
	head = append(head, '{')
	for i, s := range specs {
		if i > 0 {
			head = append(head, ',')
		}
		shape, _ := json.Marshal(append([]int{}, s.shape...))
		head = fmt.Appendf(head, "%q:{\"dtype\":%q,\"shape\":%s,\"data_offsets\":[%d,%d]}", s.name, s.dtype, shape, len(data), len(data)+len(s.data))
		data = append(data, s.data...)
	}
	head = append(head, '}')
	if edit != nil {
		head = []byte(edit(string(head)))
	}
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
	out = append(append(out, head...), data...)
	if err := os.WriteFile(path, out, 0o644); err != nil {
		t.Fatal(err)
	}
}

func f32(v ...float32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func bf16(v ...float32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint16(b, ToBF16(x))
	}
	return b
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Fatalf("error %q does not contain %q", err, p)
		}
	}
}

func TestOpenRefusesBadFiles(t *testing.T) {
	two := []spec{{"a", F32, []int{2}, f32(1, 2)}, {"b", BF16, []int{1, 2}, bf16(3, 4)}}
	swap := func(old, new string) func(string) string {
		return func(s string) string {
			if !strings.Contains(s, old) {
				panic("test edits nothing: " + old)
			}
			return strings.Replace(s, old, new, 1)
		}
	}
	for _, tc := range []struct {
		name  string
		edit  func(string) string
		whole func([]byte) []byte
		want  []string
	}{
		{"empty", nil, func(b []byte) []byte { return nil }, []string{"truncated"}},
		{"seven bytes", nil, func(b []byte) []byte { return b[:7] }, []string{"truncated"}},
		{"header cut", nil, func(b []byte) []byte { return b[:40] }, []string{"truncated"}},
		{"data cut", nil, func(b []byte) []byte { return b[:len(b)-1] }, []string{`"b"`, "outside"}},
		{"rest", nil, func(b []byte) []byte { return append(b, 0) }, []string{"1 bytes after"}},
		{"huge header", nil, func(b []byte) []byte { binary.LittleEndian.PutUint64(b, 1<<63); return b }, []string{"limit"}},
		{"header of 100 MB", nil, func(b []byte) []byte { binary.LittleEndian.PutUint64(b, maxHeaderBytes); return b }, []string{"truncated"}},
		{"not JSON", func(string) string { return "hello" }, nil, []string{"not a JSON object"}},
		{"array", func(string) string { return "[]" }, nil, []string{"not a JSON object"}},
		{"unclosed", func(s string) string { return s[:len(s)-1] }, nil, []string{"header"}},
		{"two values", func(s string) string { return s + "{}" }, nil, []string{"after the JSON"}},
		{"not UTF-8", swap(`"a"`, "\"\xff\""), nil, []string{"UTF-8"}},
		{"duplicate", swap(`"b"`, `"a"`), nil, []string{`"a"`, "twice"}},
		{"overlap", swap("[8,12]", "[4,8]"), nil, []string{`"b"`, "overlap"}},
		{"hole", swap("[0,8]", "[1,9]"), nil, []string{`"a"`, "hole"}},
		{"out of range", swap("[8,12]", "[800,804]"), nil, []string{`"b"`, "outside"}},
		{"negative", swap("[0,8]", "[-8,0]"), nil, []string{`"a"`, "range"}},
		{"backwards", swap("[8,12]", "[12,8]"), nil, []string{`"b"`, "range"}},
		{"fraction", swap("[0,8]", "[0.5,8]"), nil, []string{`"a"`}},
		{"wrong size", swap("[2]", "[3]"), nil, []string{`"a"`, "takes 12 bytes"}},
		{"negative shape", swap("[2]", "[-2]"), nil, []string{`"a"`, "out of range"}},
		{"overflowing shape", swap("[2]", "[4294967296,4294967296,4294967296]"), nil, []string{`"a"`, "overflows"}},
		{"unknown dtype", swap("F32", "F64"), nil, []string{`"a"`, "F64"}},
		{"no dtype", swap(`"dtype":"F32",`, ""), nil, []string{`"a"`, "dtype"}},
		{"null entry", func(string) string { return `{"a":null}` }, nil, []string{`"a"`}},
		{"nine dimensions", swap("[2]", "[1,1,1,1,1,1,1,1,2]"), nil, []string{`"a"`, "dimensions"}},
		{"bad metadata", func(s string) string { return `{"__metadata__":{"x":1},` + s[1:] }, nil, []string{"__metadata__"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "model.safetensors")
			file(t, path, two, tc.edit)
			if tc.whole != nil {
				b, _ := os.ReadFile(path)
				os.WriteFile(path, tc.whole(b), 0o644)
			}
			c, err := Open(filepath.Dir(path))
			wantError(t, err, append(tc.want, "model.safetensors")...)
			if c != nil {
				t.Fatal("a checkpoint beside the error")
			}
		})
	}
}

func TestOpenSingle(t *testing.T) {
	dir := t.TempDir()
	file(t, filepath.Join(dir, "model.safetensors"), []spec{
		{"a", F32, []int{2}, f32(1, 2)}, {"empty", F32, []int{0}, nil}, {"b", BF16, []int{1, 2}, bf16(3, 4)}, {"n", I32, []int{1}, []byte{7, 0, 0, 0}},
	}, func(s string) string { return `{"__metadata__":{"format":"pt"},` + s[1:] + "   " })
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if d := cmp.Diff([]string{"a", "b", "empty", "n"}, c.Names()); d != "" {
		t.Fatal(d)
	}
	if v, err := c.Vector("b", 2); err != nil || v[0] != 3 || v[1] != 4 {
		t.Fatal(v, err)
	}
	n, err := c.Tensor("n")
	if err != nil {
		t.Fatal(err)
	}
	if v, err := n.Ints(); err != nil || v[0] != 7 {
		t.Fatal(v, err)
	}
	_, err = c.Tensor("zz")
	wantError(t, err, `"zz"`, "missing")
	_, err = c.Vector("a", 3)
	wantError(t, err, `"a"`, "model.safetensors", "want 3")
	_, err = Open(t.TempDir())
	wantError(t, err, "model.safetensors", "no such file")
	_, err = OpenFile(dir)
	wantError(t, err, "not a regular file")
}

func TestOpenSharded(t *testing.T) {
	write := func(t *testing.T, index string) string {
		dir := t.TempDir()
		file(t, filepath.Join(dir, "m1.safetensors"), []spec{{"a", F32, []int{1}, f32(1)}}, nil)
		file(t, filepath.Join(dir, "m2.safetensors"), []spec{{"b", F32, []int{1}, f32(2)}, {"c", F32, []int{1}, f32(3)}}, nil)
		file(t, filepath.Join(dir, "m3.safetensors"), []spec{{"a", F32, []int{1}, f32(9)}}, nil)
		os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), []byte(index), 0o644)
		return dir
	}
	c, err := Open(write(t, `{"metadata":{},"weight_map":{"a":"m1.safetensors","b":"m2.safetensors","c":"m2.safetensors"}}`))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i, n := range []string{"a", "b", "c"} {
		if v, err := c.Vector(n, 1); err != nil || v[0] != float32(i+1) {
			t.Fatal(n, v, err)
		}
	}
	for name, tc := range map[string]struct {
		index string
		want  []string
	}{
		"not JSON":      {`{`, []string{"index.json"}},
		"empty map":     {`{}`, []string{"index.json", "weight_map"}},
		"path":          {`{"weight_map":{"a":"../m1.safetensors"}}`, []string{`"a"`, "leads out"}},
		"dots":          {`{"weight_map":{"a":".."}}`, []string{`"a"`, "leads out"}},
		"no shard":      {`{"weight_map":{"a":"m9.safetensors"}}`, []string{"m9.safetensors"}},
		"missing":       {`{"weight_map":{"a":"m1.safetensors","z":"m1.safetensors"}}`, []string{"m1.safetensors", `"z"`, "missing"}},
		"not listed":    {`{"weight_map":{"b":"m2.safetensors"}}`, []string{"m2.safetensors", `"c"`}},
		"wrong shard":   {`{"weight_map":{"a":"m1.safetensors","b":"m1.safetensors"}}`, []string{`"b"`}},
		"in two shards": {`{"weight_map":{"a":"m1.safetensors","b":"m3.safetensors"}}`, []string{`"a"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(write(t, tc.index))
			wantError(t, err, tc.want...)
		})
	}
}

func TestRoots(t *testing.T) {
	for _, tc := range []struct {
		names []string
		want  Roots
		err   string
	}{
		{[]string{"model.embed_tokens.weight", "lm_head.weight"}, Roots{"model.", ""}, ""},
		{[]string{"model.language_model.embed_tokens.weight", "lm_head.weight"}, Roots{"model.language_model.", ""}, ""},
		{[]string{"model.language_model.embed_tokens.weight", "model.language_model.lm_head.weight"}, Roots{"model.language_model.", "model.language_model."}, ""},
		{[]string{"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}, Roots{"language_model.model.", "language_model."}, ""},
		{[]string{"model.embed_tokens.weight"}, Roots{"model.", ""}, ""},
		{[]string{"embed.weight"}, Roots{}, "missing under every known prefix"},
		{[]string{"model.embed_tokens.weight", "model.language_model.embed_tokens.weight"}, Roots{}, "several prefixes"},
	} {
		c := &Checkpoint{tensors: map[string]*Tensor{}}
		for _, n := range tc.names {
			c.tensors[n] = &Tensor{}
		}
		got, err := c.Roots()
		if tc.err != "" {
			wantError(t, err, tc.err)
			continue
		}
		if err != nil || got != tc.want {
			t.Errorf("%v: %v, %v; want %v", tc.names, got, err, tc.want)
		}
	}
}

// FuzzParseHeader: no input may panic or be accepted with tensors outside the data section.
func FuzzParseHeader(f *testing.F) {
	dir := f.TempDir()
	file(f, filepath.Join(dir, "x"), []spec{{"a", F32, []int{2}, f32(1, 2)}, {"b", BF16, []int{1, 2}, bf16(3, 4)}}, nil)
	good, _ := os.ReadFile(filepath.Join(dir, "x"))
	f.Add(good)
	f.Add(good[:20])
	f.Add([]byte("\x02\x00\x00\x00\x00\x00\x00\x00{}"))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff{}"))
	f.Add([]byte("\x3d\x00\x00\x00\x00\x00\x00\x00{\"a\":{\"dtype\":\"U8\",\"shape\":[1,0],\"data_offsets\":[0,0]},\"a\":1}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, data, err := parseHeader(b, int64(len(b)))
		if err != nil {
			return
		}
		at := int64(0)
		for _, e := range entries {
			size := int64(e.dtype.Size())
			for _, d := range e.shape {
				size *= int64(d)
			}
			if e.begin != at || e.end-e.begin != size {
				t.Fatalf("accepted %+v at %d", e, at)
			}
			at = e.end
		}
		if data+at != int64(len(b)) {
			t.Fatalf("data section not covered: %d + %d of %d", data, at, len(b))
		}
	})
}
