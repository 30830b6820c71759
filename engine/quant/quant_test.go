package quant

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"rocket/engine/checkpoint"
	"rocket/engine/model"
	"rocket/kernels"
)

const (
	fixture = "../model/testdata/glm5-next-shared" // BF16, without a draft layer
	body    = "model.language_model."
)

// stored is one tensor of a source that a test makes.
type stored struct {
	info checkpoint.TensorInfo
	data []byte
}

// source writes a copy of the fixture with its tensors and config edited.
func source(t *testing.T, edit func(tensors map[string]stored, config map[string]any)) string {
	t.Helper()
	ck, err := checkpoint.Open(fixture)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	tensors, config := map[string]stored{}, map[string]any{}
	for _, name := range ck.Names() {
		x, _ := ck.Tensor(name)
		tensors[name] = stored{checkpoint.TensorInfo{Name: name, DType: x.DType, Shape: x.Shape}, bytes.Clone(x.Data)}
	}
	text, err := os.ReadFile(filepath.Join(fixture, "config.json"))
	if err == nil {
		err = json.Unmarshal(text, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	edit(tensors, config)
	l := checkpoint.Layout{Files: map[string][]byte{"tokenizer.json": []byte("{}"), "notes.txt": []byte("private")}}
	for name, x := range tensors {
		x.info.Name = name
		l.Groups = append(l.Groups, checkpoint.TensorGroup{Tensors: []checkpoint.TensorInfo{x.info}, Make: func() ([][]byte, error) { return [][]byte{x.data}, nil }})
	}
	if l.Files["config.json"], err = json.Marshal(config); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "source")
	if err := checkpoint.Write(t.Context(), dir, l); err != nil {
		t.Fatal(err)
	}
	return dir
}

func unchanged(map[string]stored, map[string]any) {}

func open(t *testing.T, dir string) *checkpoint.Checkpoint {
	t.Helper()
	c, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// every maps all families that the fixture has to one format.
func every(f Format) Map {
	return Map{model.LinearAttention: f, model.FullAttention: f, model.RoutedExperts: f, model.SharedExperts: f, model.BaseRouters: f}
}

// checkArtifact compares an artifact with its source tensor by tensor: what is in a chosen family is exactly what the
// encoder makes of it, the rest is the same.
func checkArtifact(t *testing.T, from, dir string, m Map) {
	t.Helper()
	c, err := model.ReadConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	src, got := open(t, from), open(t, dir)
	tensors := 0
	for _, name := range src.Names() {
		x, _ := src.Tensor(name)
		base, isMatrix := strings.CutSuffix(name, ".weight")
		format := m[c.FamilyOf(strings.TrimPrefix(base, body))]
		if !isMatrix || format == "" {
			y, err := got.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			a, _ := x.Floats()
			b, _ := y.Floats()
			if !slices.Equal(a, b) || !slices.Equal(x.Shape, y.Shape) {
				t.Errorf("%s has changed", name)
			}
			if y.DType != x.DType && !(x.DType == checkpoint.F32 && y.DType == checkpoint.BF16 && len(x.Shape) == 2) {
				t.Errorf("%s was %s and is %s", name, x.DType, y.DType)
			}
			tensors++
			continue
		}
		values, _ := x.Floats()
		encode := map[Format]func(string, int, int, []float32) (checkpoint.Weight, error){NVFP4: checkpoint.EncodeNVFP4, FP8: checkpoint.EncodeFP8Block}[format]
		want, err := encode(base, x.Shape[0], x.Shape[1], values)
		if err != nil {
			t.Fatal(err)
		}
		w, err := got.Weight(base, x.Shape[0], x.Shape[1])
		if err != nil {
			t.Fatal(err)
		}
		if w.Kind != want.Kind || !bytes.Equal(w.Data, want.Data) || !bytes.Equal(w.Scale8, want.Scale8) || !slices.Equal(w.Scale, want.Scale) {
			t.Errorf("%s is not what was encoded", name)
		}
		tensors += len(checkpoint.StoredAs(base, w.Kind, w.N, w.K))
	}
	if n := len(got.Names()); n != tensors {
		t.Errorf("%d tensors, want %d", n, tensors)
	}
}

// loads tells that the artifact is a model: every weight can be packed and the report names its formats.
func loads(t *testing.T, dir string) model.Report {
	t.Helper()
	r, err := model.Inspect(dir)
	if err != nil || r.Unread != "" {
		t.Fatal(err, r.Unread)
	}
	dev, err := kernels.Open("auto", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	m, err := model.Load(dev, dir, model.Options{ContextLimit: 256})
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	return r
}

func TestRun(t *testing.T) {
	src := source(t, unchanged)
	mixed := Map{model.RoutedExperts: NVFP4, model.FullAttention: FP8, model.BaseRouters: FP8}
	for name, tc := range map[string]struct {
		m           Map
		method, alg string
	}{
		"nvfp4":         {every(NVFP4), "modelopt", "W4A16_NVFP4"},
		"fp8":           {every(FP8), "fp8", "FP8_PB_WO"},
		"mixed":         {mixed, "modelopt", "MIXED_PRECISION"},
		"one family":    {Map{model.LinearAttention: NVFP4}, "modelopt", "W4A16_NVFP4"},
		"routers alone": {Map{model.BaseRouters: FP8}, "fp8", "FP8_PB_WO"},
	} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			r, err := Run(t.Context(), Options{Source: src, Out: out, Map: tc.m, ShardBytes: 100_000})
			if err != nil {
				t.Fatal(err)
			}
			if r.Existed || filepath.Base(r.Dir) != r.Digest || len(r.Digest) != 64 || r.OutputBytes >= r.SourceBytes {
				t.Errorf("result %+v", r)
			}
			if got := slices.Sorted(maps.Keys(r.Matrices)); len(got) != len(tc.m) {
				t.Errorf("encoded families %v, want those of %v", got, tc.m)
			}
			checkArtifact(t, src, r.Dir, tc.m)
			loads(t, r.Dir)
			if _, err := os.Stat(filepath.Join(r.Dir, "notes.txt")); err == nil {
				t.Error("a file that is no part of a model was copied")
			}
			if b, err := os.ReadFile(filepath.Join(r.Dir, "tokenizer.json")); err != nil || string(b) != "{}" {
				t.Errorf("tokenizer.json: %q, %v", b, err)
			}
			checkConfigs(t, r.Dir, tc.m, tc.method, tc.alg)
			again, err := Run(t.Context(), Options{Source: src, Out: out, Map: tc.m})
			if err != nil || !again.Existed || again.Dir != r.Dir {
				t.Errorf("again: %+v, %v", again, err)
			}
			if left, _ := os.ReadDir(out); len(left) != 1 {
				t.Errorf("left %v", left)
			}
		})
	}
}

// checkConfigs: both descriptions agree with each other and with the tensors.
func checkConfigs(t *testing.T, dir string, m Map, method, alg string) {
	t.Helper()
	var config struct {
		Q quantizationConfig `json:"quantization_config"`
	}
	var hf hfQuantConfig
	for name, v := range map[string]any{"config.json": &config, "hf_quant_config.json": &hf} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = json.Unmarshal(b, v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if config.Q.Method != method || hf.Quantization.Algo != alg || method == "modelopt" && config.Q.Algo != alg {
		t.Errorf("quantization_config %+v, hf_quant_config %+v", config.Q, hf)
	}
	if !maps.Equal(hf.Families, m) || len(hf.Source) != 64 {
		t.Errorf("families %v of source %q", hf.Families, hf.Source)
	}
	skipped := map[string]bool{}
	for _, s := range append(config.Q.Ignore, config.Q.NotConvert...) {
		skipped[s] = true
	}
	c := open(t, dir)
	for _, name := range c.Names() {
		x, _ := c.Tensor(name)
		module := strings.TrimSuffix(name, ".weight")
		if i := strings.Index(module, ".mlp.experts."); i >= 0 {
			module = module[:i] + ".mlp.experts"
		}
		quantised := x.DType == checkpoint.U8 || x.DType == checkpoint.F8E4M3
		if strings.HasSuffix(name, ".weight") && len(x.Shape) == 2 && skipped[module] == quantised {
			t.Errorf("%s is %s, and among those left alone: %v", name, x.DType, skipped[module])
		}
		if l, ok := config.Q.Layers[module]; method == "modelopt" && alg == "MIXED_PRECISION" && strings.HasSuffix(name, ".weight") && len(x.Shape) == 2 {
			want := map[checkpoint.DType]string{checkpoint.U8: "W4A16_NVFP4", checkpoint.F8E4M3: "FP8_PB_WO"}[x.DType]
			if l.Algo != want || ok != quantised {
				t.Errorf("%s is %s and described as %+v", name, x.DType, l)
			}
		}
	}
}

// TestName: the folder's name moves with the map, the tensors, the config and the tokenizer, and with nothing else.
func TestName(t *testing.T) {
	src := source(t, unchanged)
	name := func(src string, m Map) string {
		r, err := Run(t.Context(), Options{Source: src, Out: t.TempDir(), Map: m})
		if err != nil {
			t.Fatal(err)
		}
		return r.Digest
	}
	base := name(src, every(NVFP4))
	if other := name(source(t, unchanged), every(NVFP4)); other != base {
		t.Error("the same source elsewhere has another name")
	}
	seen := map[string]string{base: "base"}
	for what, digest := range map[string]string{
		"format": name(src, every(FP8)),
		"map":    name(src, Map{model.LinearAttention: NVFP4}),
		"tensor": name(source(t, func(m map[string]stored, _ map[string]any) { m[body+"norm.weight"].data[0] ^= 1 }), every(NVFP4)),
		"config": name(source(t, func(_ map[string]stored, c map[string]any) { c["transformers_version"] = "5.18.0" }), every(NVFP4)),
	} {
		if seen[digest] != "" {
			t.Errorf("another %s has the name of %s", what, seen[digest])
		}
		seen[digest] = what
	}
}

// TestSources: F32 sources and fused experts give the artifact of the BF16 source, tensor for tensor.
func TestSources(t *testing.T) {
	want := open(t, run(t, source(t, unchanged), every(NVFP4)).Dir)
	same := func(what string, dir string) {
		got := open(t, dir)
		if !slices.Equal(got.Names(), want.Names()) {
			t.Fatalf("%s: other tensors", what)
		}
		for _, name := range want.Names() {
			a, _ := want.Tensor(name)
			b, _ := got.Tensor(name)
			x, errA := a.Floats()
			y, errB := b.Floats()
			if errA == nil && errB == nil && slices.Equal(x, y) {
				continue
			}
			if a.DType != b.DType || !bytes.Equal(a.Data, b.Data) {
				t.Errorf("%s: %s differs", what, name)
			}
		}
	}
	same("F32", run(t, source(t, func(m map[string]stored, _ map[string]any) {
		for name, x := range m {
			if x.info.DType == checkpoint.BF16 {
				wide := []byte{}
				for i := 0; i < len(x.data); i += 2 {
					wide = append(wide, 0, 0, x.data[i], x.data[i+1])
				}
				x.info.DType, x.data = checkpoint.F32, wide
				m[name] = x
			}
		}
	}), every(NVFP4)).Dir)
	same("fused experts", run(t, source(t, func(m map[string]stored, _ map[string]any) {
		for layer := 1; layer < 6; layer++ {
			at := fmt.Sprintf("%slayers.%d.mlp.experts.", body, layer)
			var up, down []byte
			for e := range 8 {
				one := fmt.Sprintf("%s%d.", at, e)
				up = append(append(up, m[one+"gate_proj.weight"].data...), m[one+"up_proj.weight"].data...)
				down = append(down, m[one+"down_proj.weight"].data...)
				for _, p := range []string{"gate", "up", "down"} {
					delete(m, one+p+"_proj.weight")
				}
			}
			m[at+"gate_up_proj"] = stored{checkpoint.TensorInfo{DType: checkpoint.BF16, Shape: []int{8, 96, 64}}, up}
			m[at+"down_proj"] = stored{checkpoint.TensorInfo{DType: checkpoint.BF16, Shape: []int{8, 64, 48}}, down}
		}
	}), every(NVFP4)).Dir)
}

func run(t *testing.T, src string, m Map) Result {
	t.Helper()
	r, err := Run(t.Context(), Options{Source: src, Out: t.TempDir(), Map: m})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRunRefuses(t *testing.T) {
	plain := source(t, unchanged)
	done := run(t, plain, Map{model.BaseRouters: FP8}).Dir
	bare := source(t, func(_ map[string]stored, c map[string]any) {})
	odd := source(t, func(m map[string]stored, c map[string]any) {
		c["text_config"].(map[string]any)["moe_intermediate_size"] = 40
		for name, x := range m {
			rows, cols := 40, 64
			if strings.Contains(name, "shared_experts") {
				rows = 80
			} else if !strings.Contains(name, "mlp.experts.") {
				continue
			}
			if strings.Contains(name, "down_proj") {
				rows, cols = 64, rows
			}
			m[name] = stored{checkpoint.TensorInfo{DType: x.info.DType, Shape: []int{rows, cols}}, make([]byte, 2*rows*cols)}
		}
	})
	nan := source(t, func(m map[string]stored, _ map[string]any) {
		x := m[body+"layers.0.self_attn.o_proj.weight"]
		x.data[6], x.data[7] = 0xc0, 0x7f
	})
	for name, tc := range map[string]struct {
		src  string
		m    Map
		want string
	}{
		"quantised":          {done, every(NVFP4), "config.json: the checkpoint is quantised already (FP8)"},
		"no such family":     {plain, Map{model.MTP: NVFP4, model.BaseRouters: FP8}, "family mtp: the model has no such matrices"},
		"columns":            {odd, Map{model.RoutedExperts: NVFP4}, `layers.1.mlp.experts.0.down_proj.weight": 40 columns: NVFP4 groups want a multiple of 16`},
		"NaN":                {nan, Map{model.LinearAttention: FP8}, `layers.0.self_attn.o_proj.weight": row 0 column 3 is NaN`},
		"nothing chosen":     {bare, nil, "no family is chosen"},
		"no model":           {t.TempDir(), every(NVFP4), "config.json"},
		"tensor not of ours": {source(t, func(m map[string]stored, _ map[string]any) { m[body+"layers.0.extra.weight"] = m[body+"norm.weight"] }), every(NVFP4), "layers.0.extra.weight"},
	} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			_, err := Run(t.Context(), Options{Source: tc.src, Out: out, Map: tc.m})
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
			if name == "quantised" && !errors.Is(err, ErrQuantised) {
				t.Error("not ErrQuantised")
			}
			if left, _ := os.ReadDir(out); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		})
	}
	// Without the config's word the tensors tell.
	text, _ := os.ReadFile(filepath.Join(plain, "config.json"))
	if err := os.WriteFile(filepath.Join(done, "config.json"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), Options{Source: done, Out: t.TempDir(), Map: every(FP8)}); !errors.Is(err, ErrQuantised) || !strings.Contains(err.Error(), "mlp.gate.weight") {
		t.Error("tensors of a quantised checkpoint:", err)
	}
	if r := run(t, odd, Map{model.RoutedExperts: FP8}); r.Matrices[model.RoutedExperts] != 5*8*3 {
		t.Error("FP8 takes part blocks:", r.Matrices)
	}
	for _, f := range []Format{NVFP4, FP8} {
		if got, err := ParseFormat(string(f)); got != f || err != nil {
			t.Error(got, err)
		}
	}
	if _, err := ParseFormat("int8"); err == nil || !strings.Contains(err.Error(), `"int8" is not known`) {
		t.Error(err)
	}
}

func TestNarrow(t *testing.T) {
	bytesOf := func(v ...float32) (b []byte) {
		for _, x := range v {
			u := math.Float32bits(x)
			b = append(b, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
		}
		return b
	}
	if got, ok := narrow(bytesOf(1, -2.5, 0, float32(math.Copysign(0, -1)))); !ok || !bytes.Equal(got, []byte{0x80, 0x3f, 0x20, 0xc0, 0, 0, 0, 0x80}) {
		t.Error(got, ok)
	}
	for _, v := range []float32{0.1, float32(math.NaN())} {
		if _, ok := narrow(bytesOf(1, v)); ok {
			t.Errorf("%v was narrowed", v)
		}
	}
}
