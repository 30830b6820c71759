package checkpoint

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// DefaultShardBytes is how much data a file of a written checkpoint holds at most; a larger tensor has a file alone.
const DefaultShardBytes = 4 << 30

// writeChunk is the most that one write call takes, so that progress is seen and a cancelled job ends soon.
const writeChunk = 8 << 20

// TensorInfo is a tensor to be written: everything but its bytes.
type TensorInfo struct {
	Name  string
	DType DType
	Shape []int
}

// Bytes is the size of the tensor's data.
func (t TensorInfo) Bytes() int64 {
	n := int64(t.DType.Size())
	for _, d := range t.Shape {
		n *= int64(d)
	}
	return n
}

// TensorGroup is some tensors whose bytes are made together (a matrix and its scales). They stay in one file. Make is
// called once, when their turn comes, and gives the bytes in the order of Tensors.
type TensorGroup struct {
	Tensors []TensorInfo
	Make    func() ([][]byte, error)
}

func (g TensorGroup) bytes() (n int64) {
	for _, t := range g.Tensors {
		n += t.Bytes()
	}
	return n
}

// Layout is a checkpoint to be written.
type Layout struct {
	Groups     []TensorGroup
	Files      map[string][]byte // beside the weights: config.json, tokenizer.json, ...
	ShardBytes int64             // 0: DefaultShardBytes
	Progress   func(done, total int64)
}

// Write makes the model folder dir. It appears whole or not at all: everything is written into a folder beside it,
// synced, and renamed. A dir that exists already is refused. One file of weights is called model.safetensors; several
// get an index.
func Write(ctx context.Context, dir string, l Layout) error {
	w := writer{ctx: ctx, l: l}
	if err := w.write(dir); err != nil {
		return fmt.Errorf("write checkpoint %s: %w", dir, err)
	}
	return nil
}

// writer is one Write.
type writer struct {
	ctx         context.Context
	l           Layout
	done, total int64
	// fault, in tests, is asked before every step that touches the disk and may fail it.
	fault func(step string) error
}

func (w *writer) step(name string) error {
	if w.fault != nil {
		return w.fault(name)
	}
	return nil
}

func (w *writer) write(dir string) (err error) {
	shards, err := w.shards()
	if err != nil {
		return err
	}
	if _, err := os.Lstat(dir); err == nil {
		return fs.ErrExist
	}
	parent := filepath.Dir(dir)
	if err := w.step("mkdir"); err != nil {
		return err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(parent, ".writing-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	if err := w.fill(tmp, shards); err != nil {
		return err
	}
	if err := w.sync(tmp); err != nil {
		return err
	}
	if err := w.step("rename"); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	// The name is given: an error from here on is not about what the folder holds, and must not take it away.
	return w.sync(parent)
}

// fill writes every file of the folder.
func (w *writer) fill(dir string, shards [][]TensorGroup) error {
	index := struct {
		Metadata  map[string]int64  `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}{map[string]int64{"total_size": w.total}, map[string]string{}}
	for i, shard := range shards {
		name := "model.safetensors"
		if len(shards) > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		}
		if err := w.shard(filepath.Join(dir, name), shard); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for _, g := range shard {
			for _, t := range g.Tensors {
				index.WeightMap[t.Name] = name
			}
		}
	}
	files := map[string][]byte{}
	for name, data := range w.l.Files {
		files[name] = data
	}
	if len(shards) > 1 {
		text, err := json.MarshalIndent(index, "", "  ")
		if err != nil {
			return err
		}
		files["model.safetensors.index.json"] = append(text, '\n')
	}
	for _, name := range sortedNames(files) {
		if err := w.file(filepath.Join(dir, name), func(f *os.File) error { return w.put(f, 0, files[name]) }); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func sortedNames(m map[string][]byte) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// shards cuts the groups, in the order of their first names, into files.
func (w *writer) shards() (shards [][]TensorGroup, err error) {
	limit := w.l.ShardBytes
	if limit <= 0 {
		limit = DefaultShardBytes
	}
	for name := range w.l.Files {
		if name != filepath.Base(name) || name == "." || name == ".." || strings.HasSuffix(name, ".safetensors") {
			return nil, fmt.Errorf("file name %q is not one of a file beside the weights", name)
		}
	}
	seen := map[string]bool{}
	groups := slices.Clone(w.l.Groups)
	for _, g := range groups {
		if len(g.Tensors) == 0 {
			return nil, errors.New("a group without tensors")
		}
		for _, t := range g.Tensors {
			if seen[t.Name] || t.Name == "" || t.Name == "__metadata__" || t.DType.Size() == 0 {
				return nil, fmt.Errorf("tensor %q (%s): written twice, or not to be written", t.Name, t.DType)
			}
			seen[t.Name] = true
		}
	}
	if len(groups) == 0 {
		return nil, errors.New("no tensors")
	}
	slices.SortFunc(groups, func(a, b TensorGroup) int { return strings.Compare(a.Tensors[0].Name, b.Tensors[0].Name) })
	size := int64(0)
	for _, g := range groups {
		n := g.bytes()
		w.total += n
		if len(shards) == 0 || size+n > limit {
			shards, size = append(shards, nil), 0
		}
		shards[len(shards)-1] = append(shards[len(shards)-1], g)
		size += n
	}
	return shards, nil
}

// place is where a tensor's data begins in its file.
type place struct {
	info TensorInfo
	at   int64
}

// places lays the tensors of a file out widest element first, so that each starts at a multiple of its element's size.
func places(groups []TensorGroup) (list []place, head []byte, err error) {
	for _, g := range groups {
		for _, t := range g.Tensors {
			list = append(list, place{info: t})
		}
	}
	slices.SortStableFunc(list, func(a, b place) int { return b.info.DType.Size() - a.info.DType.Size() })
	at, keys := int64(0), map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	for i := range list {
		t := list[i].info
		list[i].at = at
		keys[t.Name] = map[string]any{"dtype": t.DType, "shape": append([]int{}, t.Shape...), "data_offsets": []int64{at, at + t.Bytes()}}
		at += t.Bytes()
	}
	text, err := json.Marshal(keys)
	if err != nil {
		return nil, nil, err
	}
	for len(text)%8 != 0 { // the data section starts aligned
		text = append(text, ' ')
	}
	return list, append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), nil
}

// shard writes one safetensors file.
func (w *writer) shard(path string, groups []TensorGroup) error {
	list, head, err := places(groups)
	if err != nil {
		return err
	}
	at := map[string]int64{}
	for _, p := range list {
		at[p.info.Name] = int64(len(head)) + p.at
	}
	return w.file(path, func(f *os.File) error {
		if err := w.put(f, 0, head); err != nil {
			return err
		}
		for _, g := range groups {
			made, err := g.Make()
			if err != nil {
				return err
			}
			if len(made) != len(g.Tensors) {
				return fmt.Errorf("tensor %q: made %d tensors, want %d", g.Tensors[0].Name, len(made), len(g.Tensors))
			}
			for i, t := range g.Tensors {
				if int64(len(made[i])) != t.Bytes() {
					return fmt.Errorf("tensor %q: made %d bytes, want %d", t.Name, len(made[i]), t.Bytes())
				}
				if err := w.put(f, at[t.Name], made[i]); err != nil {
					return err
				}
				w.done += t.Bytes()
				if w.l.Progress != nil {
					w.l.Progress(w.done, w.total)
				}
			}
		}
		return nil
	})
}

// file creates a file, lets body fill it, and syncs it.
func (w *writer) file(path string, body func(*os.File) error) (err error) {
	if err := w.step("create"); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := body(f); err != nil {
		return err
	}
	if err := w.step("sync"); err != nil {
		return err
	}
	return f.Sync()
}

func (w *writer) put(f *os.File, at int64, b []byte) error {
	for len(b) > 0 {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		n := min(len(b), writeChunk)
		if err := w.step("write"); err != nil {
			_, _ = f.WriteAt(b[:n/2], at) // as a full disk does: some of it arrives
			return err
		}
		if _, err := f.WriteAt(b[:n], at); err != nil {
			return err
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}

// sync makes a folder's entries durable.
func (w *writer) sync(dir string) error {
	if err := w.step("sync folder"); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Stored is the bytes of w in the order of StoredAs: with it the inverse of Checkpoint.Weight.
func (w Weight) Stored() [][]byte {
	var scale []byte
	for _, s := range w.Scale {
		scale = binary.LittleEndian.AppendUint32(scale, math.Float32bits(s))
	}
	switch w.Kind {
	case KindNVFP4:
		return [][]byte{w.Data, w.Scale8, scale}
	case KindFP8Block:
		return [][]byte{w.Data, scale}
	}
	return [][]byte{w.Data}
}

// StoredAs lists the tensors that a matrix [n][k] of the given kind takes. KindFP8 is read only, never written.
func StoredAs(base string, kind Kind, n, k int) []TensorInfo {
	name := base + ".weight"
	switch kind {
	case KindNVFP4:
		return []TensorInfo{{name, U8, []int{n, k / 2}}, {name + "_scale", F8E4M3, []int{n, k / nvfp4Group}}, {name + "_scale_2", F32, []int{}}}
	case KindFP8Block:
		return []TensorInfo{{name, F8E4M3, []int{n, k}}, {name + "_scale_inv", F32, []int{(n + blockEdge - 1) / blockEdge, (k + blockEdge - 1) / blockEdge}}}
	case KindBF16:
		return []TensorInfo{{name, BF16, []int{n, k}}}
	}
	return []TensorInfo{{name, F32, []int{n, k}}}
}
