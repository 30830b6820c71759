// Package checkpoint reads model weights: safetensors files by mmap, alone or sharded by an index, and the quantised
// groups that a tensor and its scales form. It also encodes such groups and writes whole model folders.
//
// Invariants, each with a test:
//   - A file that is truncated, corrupt, overlapping or inconsistent gives an error that names the file and, where one
//     is concerned, the tensor; never a panic. (A file cut short while it is mapped cannot be caught: replace a
//     checkpoint by writing a new folder, never in place.)
//   - Bytes handed out are the mapping itself: read-only, and valid until Close.
//   - How a weight is quantised is decided by the scale tensors that stand beside it, never by a config's exclude list.
//   - Dequantisation in this package is the reference: values by table, products in float64, rounded once.
//   - Encoding rounds the exact quotient to nearest, ties to even; what is not finite is refused, never clipped.
//   - A folder that is written appears under its name whole and synced, or not at all, wherever writing fails.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// DType is a tensor's element type, spelled as safetensors does.
type DType string

// The element types that can be read; everything else is refused when the header is parsed.
const (
	F32    DType = "F32"
	F16    DType = "F16"
	BF16   DType = "BF16"
	F8E4M3 DType = "F8_E4M3"
	U8     DType = "U8"
	I32    DType = "I32"
	I64    DType = "I64"
)

// Size is the bytes of one element; 0 for a type that is not supported.
func (d DType) Size() int {
	switch d {
	case I64:
		return 8
	case F32, I32:
		return 4
	case F16, BF16:
		return 2
	case F8E4M3, U8:
		return 1
	}
	return 0
}

// Tensor is one named array of a checkpoint. Data is little-endian and read-only.
type Tensor struct {
	Name  string
	DType DType
	Shape []int
	Data  []byte
	File  string // base name of the file that holds it, for messages
}

// errorf names the tensor and its file.
func (t *Tensor) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: tensor %q: %w", t.File, t.Name, fmt.Errorf(format, args...))
}

// Checkpoint is an open set of safetensors files.
type Checkpoint struct {
	dir     string
	tensors map[string]*Tensor
	names   []string // sorted
	maps    [][]byte
}

// Open opens a model folder: model.safetensors.index.json and its shards where there is one, else model.safetensors.
func Open(dir string) (*Checkpoint, error) {
	index := filepath.Join(dir, "model.safetensors.index.json")
	c := &Checkpoint{dir: dir, tensors: map[string]*Tensor{}}
	text, err := os.ReadFile(index)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = c.add(filepath.Join(dir, "model.safetensors"), nil)
	case err == nil:
		err = c.addShards(index, text)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("open checkpoint %s: %w", dir, err)
	}
	c.seal()
	return c, nil
}

// OpenFile opens one safetensors file by itself.
func OpenFile(path string) (*Checkpoint, error) {
	c := &Checkpoint{dir: filepath.Dir(path), tensors: map[string]*Tensor{}}
	if err := c.add(path, nil); err != nil {
		c.Close()
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	c.seal()
	return c, nil
}

// Close unmaps the files; every slice that was handed out is dead afterwards.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, m := range c.maps {
		errs = append(errs, syscall.Munmap(m))
	}
	c.maps, c.tensors, c.names = nil, nil, nil
	return errors.Join(errs...)
}

// Names lists every tensor, sorted.
func (c *Checkpoint) Names() []string { return c.names }

// Has tells whether the tensor exists.
func (c *Checkpoint) Has(name string) bool { return c.tensors[name] != nil }

// Tensor returns the named tensor, or an error that names the folder and the tensor.
func (c *Checkpoint) Tensor(name string) (*Tensor, error) {
	t := c.tensors[name]
	if t == nil {
		return nil, fmt.Errorf("%s: tensor %q is missing", filepath.Base(c.dir), name)
	}
	return t, nil
}

func (c *Checkpoint) seal() {
	for n := range c.tensors {
		c.names = append(c.names, n)
	}
	slices.Sort(c.names)
}

func (c *Checkpoint) addShards(path string, text []byte) error {
	base := filepath.Base(path)
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return fmt.Errorf("%s: %w", base, err)
	}
	if len(index.WeightMap) == 0 {
		return fmt.Errorf("%s: weight_map is missing or empty", base)
	}
	shards := map[string]map[string]bool{}
	for name, file := range index.WeightMap {
		if file == "" || file != filepath.Base(file) || file == "." || file == ".." {
			return fmt.Errorf("%s: tensor %q: file name %q leads out of the folder", base, name, file)
		}
		if shards[file] == nil {
			shards[file] = map[string]bool{}
		}
		shards[file][name] = true
	}
	files := make([]string, 0, len(shards))
	for f := range shards {
		files = append(files, f)
	}
	slices.Sort(files)
	for _, f := range files {
		if err := c.add(filepath.Join(c.dir, f), shards[f]); err != nil {
			return err
		}
	}
	return nil
}

// add maps one file. want, when not nil, is exactly the set of tensors that the index promises in it.
func (c *Checkpoint) add(path string, want map[string]bool) error {
	base := filepath.Base(path)
	m, err := mapFile(path)
	if err != nil {
		return err
	}
	c.maps = append(c.maps, m)
	entries, data, err := parseHeader(m, int64(len(m)))
	if err != nil {
		return fmt.Errorf("%s: %w", base, err)
	}
	found := 0
	for _, e := range entries {
		if c.tensors[e.name] != nil {
			return fmt.Errorf("%s: tensor %q is also in %s", base, e.name, c.tensors[e.name].File)
		}
		if want != nil {
			if !want[e.name] {
				return fmt.Errorf("%s: tensor %q is not placed here by the index", base, e.name)
			}
			found++
		}
		c.tensors[e.name] = &Tensor{Name: e.name, DType: e.dtype, Shape: e.shape, File: base, Data: m[data+e.begin : data+e.end : data+e.end]}
	}
	if found < len(want) {
		for n := range want {
			if c.tensors[n] == nil {
				return fmt.Errorf("%s: tensor %q is missing, the index places it here", base, n)
			}
		}
	}
	return nil
}

func mapFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	base := filepath.Base(path)
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", base)
	}
	if st.Size() < 8 {
		return nil, fmt.Errorf("%s: truncated: %d bytes, the header length alone takes 8", base, st.Size())
	}
	if int64(int(st.Size())) != st.Size() {
		return nil, fmt.Errorf("%s: %d bytes do not fit this machine's address space", base, st.Size())
	}
	m, err := syscall.Mmap(int(f.Fd()), 0, int(st.Size()), syscall.PROT_READ, syscall.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", base, err)
	}
	return m, nil
}

// Roots says under which names a checkpoint keeps the text model: Body precedes "embed_tokens.weight", "layers." and
// "norm.weight"; Head precedes "lm_head.weight".
type Roots struct{ Body, Head string }

// roots lists the layouts that are met in the wild. The longer prefixes come first only for reading: a checkpoint that
// matches two of them is refused.
var roots = []Roots{
	{"model.language_model.", ""},
	{"model.language_model.", "model.language_model."},
	{"language_model.model.", "language_model."},
	{"model.", ""},
}

// Roots finds the prefix by the embedding table, and the head beside it. A checkpoint without a head (tied
// embeddings) gets the first layout whose body fits.
func (c *Checkpoint) Roots() (Roots, error) {
	var found []Roots
	for _, r := range roots {
		if !c.Has(r.Body + "embed_tokens.weight") {
			continue
		}
		if len(found) > 0 && found[len(found)-1].Body == r.Body {
			if last := &found[len(found)-1]; !c.Has(last.Head + "lm_head.weight") {
				*last = r
			}
			continue
		}
		found = append(found, r)
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Roots{}, fmt.Errorf("%s: tensor \"embed_tokens.weight\" is missing under every known prefix (model., model.language_model., language_model.model.)", filepath.Base(c.dir))
	}
	var bodies []string
	for _, f := range found {
		bodies = append(bodies, f.Body)
	}
	return Roots{}, fmt.Errorf("%s: tensor \"embed_tokens.weight\" exists under several prefixes: %s", filepath.Base(c.dir), strings.Join(bodies, " "))
}
