// Package quant makes quantised checkpoints of the ones that a trainer wrote.
//
// Invariants, each with a test:
//   - The artifact's folder is named after a digest of the map (family to format) and of everything it was made from;
//     it appears whole or not at all, and making it twice makes it once.
//   - Reading it back gives exactly the values that were encoded; what is in no chosen family keeps its bytes, except
//     that an FP32 matrix whose values are all BF16 numbers is stored as BF16.
//   - Whatever cannot be quantised as asked is refused by name before anything is written.
package quant

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"rocket/engine/checkpoint"
	"rocket/engine/model"
)

// Format is how a family's matrices are stored.
type Format string

// The formats that can be written.
const (
	NVFP4 Format = "nvfp4" // ModelOpt's: groups of 16 FP4 values with an E4M3 scale, one FP32 scale a matrix; weights only
	FP8   Format = "fp8"   // E4M3 in blocks of 128 x 128 with an FP32 scale each
)

// ParseFormat knows a format by its name.
func ParseFormat(name string) (Format, error) {
	switch f := Format(name); f {
	case NVFP4, FP8:
		return f, nil
	}
	return "", fmt.Errorf("format %q is not known (known: nvfp4, fp8)", name)
}

func (f Format) kind() checkpoint.Kind {
	if f == NVFP4 {
		return checkpoint.KindNVFP4
	}
	return checkpoint.KindFP8Block
}

// Map says what becomes of each family; those that are missing keep their bytes.
type Map map[model.Family]Format

// ErrQuantised is wrapped where the source is quantised already: its values are no longer the trainer's.
var ErrQuantised = errors.New("is quantised already")

// Options say what to make.
type Options struct {
	Source     string // folder of a BF16 or F32 checkpoint
	Out        string // folder below which the artifact's folder is made
	Map        Map
	ShardBytes int64 // 0: the default
	Progress   func(done, total int64)
}

// Result is what was made.
type Result struct {
	Dir, Digest              string
	Existed                  bool                 // the artifact was there already
	Matrices                 map[model.Family]int // that were encoded
	SourceBytes, OutputBytes int64                // of all tensors
}

// copied are the files beside config and weights that belong to a model.
var copied = []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
	"vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"}

// job is one Run.
type job struct {
	o       Options
	ck      *checkpoint.Checkpoint
	c       model.Config
	prefix  string
	digest  string // of the source model
	groups  []checkpoint.TensorGroup
	modules map[string]Format // of encoded modules, by full name; experts of a layer are one
	plain   map[string]bool   // modules that are matrices and keep their bytes
	result  Result
}

// Run quantises o.Source into a folder below o.Out.
func Run(ctx context.Context, o Options) (Result, error) {
	j := &job{o: o, modules: map[string]Format{}, plain: map[string]bool{}, result: Result{Matrices: map[model.Family]int{}}}
	err := j.run(ctx)
	if j.ck != nil {
		err = errors.Join(err, j.ck.Close())
	}
	if err != nil {
		return Result{}, fmt.Errorf("quantise %s: %w", o.Source, err)
	}
	return j.result, nil
}

func (j *job) run(ctx context.Context) error {
	if len(j.o.Map) == 0 {
		return errors.New("no family is chosen")
	}
	if err := j.open(); err != nil {
		return err
	}
	for _, name := range j.ck.Names() {
		if err := j.add(name); err != nil {
			return err
		}
	}
	for _, f := range model.Families {
		if j.o.Map[f] != "" && j.result.Matrices[f] == 0 {
			return fmt.Errorf("family %s: the model has no such matrices", f)
		}
	}
	for _, g := range j.groups {
		for _, t := range g.Tensors {
			j.result.OutputBytes += t.Bytes()
		}
	}
	files, err := j.files()
	if err != nil {
		return err
	}
	j.result.Digest = j.name(files)
	if err := j.configs(files); err != nil {
		return err
	}
	j.result.Dir = filepath.Join(j.o.Out, j.result.Digest)
	encoders, groups := newAhead(j.groups)
	defer encoders.running.Wait()
	err = checkpoint.Write(ctx, j.result.Dir, checkpoint.Layout{Groups: groups, Files: files, ShardBytes: j.o.ShardBytes, Progress: j.o.Progress})
	if errors.Is(err, fs.ErrExist) {
		j.result.Existed = true
		return nil
	}
	return err
}

// open checks that the source is a whole model of plain numbers.
func (j *job) open() error {
	c, err := model.ReadConfig(j.o.Source)
	if err != nil {
		return err
	}
	if c.QuantAlgo != "" {
		return fmt.Errorf("config.json: the checkpoint %w (%s)", ErrQuantised, c.QuantAlgo)
	}
	j.c = c
	if j.ck, err = checkpoint.Open(j.o.Source); err != nil {
		return err
	}
	for _, name := range j.ck.Names() {
		t, err := j.ck.Tensor(name)
		if err != nil {
			return err
		}
		if t.DType == checkpoint.U8 || t.DType == checkpoint.F8E4M3 || model.IsScale(name) {
			return fmt.Errorf("%s: tensor %q: the checkpoint %w", t.File, name, ErrQuantised)
		}
		j.result.SourceBytes += int64(len(t.Data))
	}
	r, err := model.Inspect(j.o.Source)
	if err != nil {
		return err
	}
	if r.Unread != "" {
		return errors.New(r.Unread)
	}
	j.prefix, j.digest = r.Prefix, r.Digest
	return nil
}

// add notes what becomes of one tensor.
func (j *job) add(name string) error {
	t, err := j.ck.Tensor(name)
	if err != nil {
		return err
	}
	module := strings.TrimSuffix(strings.TrimPrefix(name, j.prefix), ".weight")
	format := Format("")
	family := j.c.FamilyOf(module)
	if family != "" {
		format = j.o.Map[family]
	}
	full := strings.TrimSuffix(name, ".weight")
	if i := strings.Index(full, ".mlp.experts."); i >= 0 {
		full = full[:i] + ".mlp.experts"
	} else if full == name { // stored under a bare name: no module of its own
		full = ""
	}
	switch {
	case format == "":
		if len(t.Shape) >= 2 && full != "" && !strings.HasSuffix(full, "conv1d") {
			j.plain[full] = true
		}
		j.keep(t)
		return nil
	case len(t.Shape) == 3:
		return j.fused(t, family, format, full)
	case len(t.Shape) != 2 || !strings.HasSuffix(name, ".weight"):
		return fmt.Errorf("%s: tensor %q: shape %v is not a matrix's", t.File, name, t.Shape)
	}
	j.modules[full] = format
	return j.encode(t, strings.TrimSuffix(name, ".weight"), family, format, t.Shape[0], t.Shape[1], t.Data)
}

// encode notes a matrix that is quantised.
func (j *job) encode(t *checkpoint.Tensor, base string, family model.Family, format Format, n, k int, data []byte) error {
	if format == NVFP4 && k%16 != 0 {
		return fmt.Errorf("%s: tensor %q: %d columns: NVFP4 groups want a multiple of 16 (fp8 takes any)", t.File, t.Name, k)
	}
	j.result.Matrices[family]++
	part := checkpoint.Tensor{Name: t.Name, DType: t.DType, Shape: []int{n, k}, File: t.File, Data: data}
	j.groups = append(j.groups, checkpoint.TensorGroup{Tensors: checkpoint.StoredAs(base, format.kind(), n, k), Make: func() ([][]byte, error) {
		values, err := part.Floats()
		if err != nil {
			return nil, err
		}
		encode := checkpoint.EncodeFP8Block
		if format == NVFP4 {
			encode = checkpoint.EncodeNVFP4
		}
		w, err := encode(t.Name, n, k, values)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", t.File, err)
		}
		return w.Stored(), nil
	}})
	return nil
}

// fused takes experts that are stored as [expert][rows][columns] apart: quantised, each matrix has its own name.
func (j *job) fused(t *checkpoint.Tensor, family model.Family, format Format, full string) error {
	experts, n, k := t.Shape[0], t.Shape[1], t.Shape[2]
	at, which := t.Name[:strings.LastIndexByte(t.Name, '.')+1], []string{"down_proj"}
	if strings.HasSuffix(t.Name, "gate_up_proj") {
		which, n = []string{"gate_proj", "up_proj"}, n/2
	}
	j.modules[full] = format
	size := n * k * t.DType.Size()
	for e := range experts {
		for i, w := range which {
			from := (e*len(which) + i) * size
			if err := j.encode(t, fmt.Sprintf("%s%d.%s", at, e, w), family, format, n, k, t.Data[from:from+size]); err != nil {
				return err
			}
		}
	}
	return nil
}

// keep notes a tensor that keeps its values.
func (j *job) keep(t *checkpoint.Tensor) {
	info, data := checkpoint.TensorInfo{Name: t.Name, DType: t.DType, Shape: t.Shape}, t.Data
	if t.DType == checkpoint.F32 && len(t.Shape) == 2 {
		if half, ok := narrow(data); ok {
			info.DType, data = checkpoint.BF16, half
		}
	}
	j.groups = append(j.groups, checkpoint.TensorGroup{Tensors: []checkpoint.TensorInfo{info}, Make: func() ([][]byte, error) { return [][]byte{data}, nil }})
}

// narrow gives FP32 values as BF16 if that loses nothing.
func narrow(data []byte) ([]byte, bool) {
	half := make([]byte, 0, len(data)/2)
	for ; len(data) > 0; data = data[4:] {
		u := binary.LittleEndian.Uint32(data)
		if f := math.Float32frombits(u); u&0xffff != 0 || f != f {
			return nil, false
		}
		half = append(half, data[2], data[3])
	}
	return half, true
}

// files reads what is copied beside the weights.
func (j *job) files() (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, name := range copied {
		b, err := os.ReadFile(filepath.Join(j.o.Source, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		files[name] = b
	}
	return files, nil
}

// name is the artifact's: a digest of the map and the sources, and of the version of what is done with them.
func (j *job) name(files map[string][]byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "rocket quantised 1\nmodel %s\n", j.digest)
	for _, f := range model.Families {
		if format := j.o.Map[f]; format != "" {
			fmt.Fprintf(h, "family %s %s\n", f, format)
		}
	}
	config, err := os.ReadFile(filepath.Join(j.o.Source, "config.json"))
	if err == nil { // it was read before; the model's digest covers what it means, this what is copied
		files = maps.Clone(files)
		files["config.json"] = bytes.TrimSpace(config)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "file %s %x\n", name, sha256.Sum256(files[name]))
	}
	return hex.EncodeToString(h.Sum(nil))
}
