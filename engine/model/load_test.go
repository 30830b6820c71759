package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// tensor is one array of a checkpoint that a test rewrites.
type tensor struct {
	dtype checkpoint.DType
	shape []int
	data  []byte
}

// copyModel writes a copy of the fixture with its tensors edited, and gives the folder.
func copyModel(t testing.TB, from string, edit func(map[string]tensor)) string {
	t.Helper()
	ck, err := checkpoint.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	all := map[string]tensor{}
	for _, name := range ck.Names() {
		x, _ := ck.Tensor(name)
		all[name] = tensor{x.DType, x.Shape, bytes.Clone(x.Data)}
	}
	edit(all)
	dir := t.TempDir()
	config, _ := os.ReadFile(filepath.Join(from, "config.json"))
	os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644)
	head, data := map[string]any{}, []byte{}
	for _, name := range sortedKeys(all) {
		x := all[name]
		head[name] = map[string]any{"dtype": x.dtype, "shape": append([]int{}, x.shape...), "data_offsets": []int{len(data), len(data) + len(x.data)}}
		data = append(data, x.data...)
	}
	text, _ := json.Marshal(head)
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), append(append(out, text...), data...), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func sortedKeys(m map[string]tensor) []string { return slices.Sorted(maps.Keys(m)) }

const fixtureDir = "testdata/glm5-next-shared"

func TestLoadRefuses(t *testing.T) {
	layer := "model.language_model.layers."
	for name, tc := range map[string]struct {
		edit func(map[string]tensor)
		want string
	}{
		"missing norm":      {func(m map[string]tensor) { delete(m, layer+"1.input_layernorm.weight") }, "1.input_layernorm.weight"},
		"missing matrix":    {func(m map[string]tensor) { delete(m, layer+"0.self_attn.o_proj.weight") }, "0.self_attn.o_proj.weight"},
		"missing expert":    {func(m map[string]tensor) { delete(m, layer+"3.mlp.experts.7.up_proj.weight") }, "3.mlp.experts.7.up_proj.weight"},
		"missing embedding": {func(m map[string]tensor) { delete(m, "model.language_model.embed_tokens.weight") }, "embed_tokens.weight"},
		"missing head":      {func(m map[string]tensor) { delete(m, "lm_head.weight") }, "lm_head.weight"},
		"bias": {func(m map[string]tensor) {
			m[layer+"2.self_attn.q_a_proj.bias"] = tensor{checkpoint.F32, []int{1}, make([]byte, 4)}
		}, "q_a_proj.bias"},
		"layer too many": {func(m map[string]tensor) { m[layer+"6.input_layernorm.weight"] = m[layer+"5.input_layernorm.weight"] }, "layers.6.input_layernorm.weight"},
		"wrong shape": {func(m map[string]tensor) {
			x := m[layer+"0.mlp.down_proj.weight"]
			x.shape = []int{x.shape[1], x.shape[0]}
			m[layer+"0.mlp.down_proj.weight"] = x
		}, `tensor "` + layer + `0.mlp.down_proj.weight": shape [96 64], want [64 96]`},
		"wrong dtype": {func(m map[string]tensor) {
			x := m[layer+"0.mlp.down_proj.weight"]
			x.dtype, x.shape = checkpoint.U8, []int{x.shape[0], 2 * x.shape[1]}
			m[layer+"0.mlp.down_proj.weight"] = x
		}, "0.mlp.down_proj.weight"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := copyModel(t, fixtureDir, tc.edit)
			m, err := Load(openDevice(t), dir, Options{})
			if err == nil {
				m.Close()
				t.Fatal("loaded")
			}
			if !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), dir) && !strings.Contains(err.Error(), filepath.Base(dir)) {
				t.Fatalf("error %q does not contain %q and the folder", err, tc.want)
			}
		})
	}
	if _, err := Load(openDevice(t), t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "config.json") {
		t.Error("an empty folder:", err)
	}
}

// TestLoadVariants: the other layouts of the same tensors give the same bits.
func TestLoadVariants(t *testing.T) {
	ids := []int32{5, 9, 300, 7, 7, 42}
	run := func(dir string) (string, [][]float32) {
		m := load(t, dir, kernels.ClassF32)
		h := newHarness(t, m, len(ids), 1, 2, 2)
		return m.Digest, h.prefill(h.seq(), ids, len(ids))
	}
	digest, want := run(fixtureDir)
	same, rows := run(copyModel(t, fixtureDir, func(map[string]tensor) {}))
	if same != digest {
		t.Error("a copy has another digest")
	}
	sameBits(t, "copy", rows, want)

	body := "model.language_model."
	rename := func(m map[string]tensor, from, to string) {
		for name, x := range m {
			if strings.HasPrefix(name, from) {
				delete(m, name)
				m[to+strings.TrimPrefix(name, from)] = x
			}
		}
	}
	for name, edit := range map[string]func(map[string]tensor){
		"prefix model.": func(m map[string]tensor) { rename(m, body, "model.") },
		"prefix language_model.model.": func(m map[string]tensor) {
			rename(m, body, "language_model.model.")
			rename(m, "lm_head", "language_model.lm_head")
		},
		"vision tower": func(m map[string]tensor) {
			m["model.visual.blocks.0.w"] = tensor{checkpoint.F32, []int{1}, make([]byte, 4)}
		},
		"A_log 4-D": func(m map[string]tensor) {
			x := m[body+"layers.0.self_attn.A_log"]
			x.shape = []int{1, 1, x.shape[0], 1}
			m[body+"layers.0.self_attn.A_log"] = x
		},
		"conv 2-D": func(m map[string]tensor) {
			x := m[body+"layers.0.self_attn.k_conv1d.weight"]
			x.shape = []int{x.shape[0], x.shape[2]}
			m[body+"layers.0.self_attn.k_conv1d.weight"] = x
		},
		"conv packed": func(m map[string]tensor) {
			var all []byte
			n := 0
			for _, c := range "qkv" {
				name := body + "layers.1.self_attn." + string(c) + "_conv1d.weight"
				all = append(all, m[name].data...)
				n += m[name].shape[0]
				delete(m, name)
			}
			m[body+"layers.1.self_attn.conv1d.weight"] = tensor{checkpoint.F32, []int{n, 1, 4}, all}
		},
		"fused experts": func(m map[string]tensor) {
			var up, down []byte
			for _, e := range "01234567" {
				at := body + "layers.4.mlp.experts." + string(e)
				up = append(append(up, m[at+".gate_proj.weight"].data...), m[at+".up_proj.weight"].data...)
				down = append(down, m[at+".down_proj.weight"].data...)
				for _, w := range []string{"gate", "up", "down"} {
					delete(m, at+"."+w+"_proj.weight")
				}
			}
			m[body+"layers.4.mlp.experts.gate_up_proj"] = tensor{checkpoint.BF16, []int{8, 96, 64}, up}
			m[body+"layers.4.mlp.experts.down_proj"] = tensor{checkpoint.BF16, []int{8, 64, 48}, down}
		},
		"one part F32": func(m map[string]tensor) { // mixed with BF16 in one matrix
			x := m[body+"layers.0.self_attn.k_proj.weight"]
			var wide []byte
			for i := 0; i < len(x.data); i += 2 {
				wide = append(wide, 0, 0, x.data[i], x.data[i+1])
			}
			m[body+"layers.0.self_attn.k_proj.weight"] = tensor{checkpoint.F32, x.shape, wide}
		},
	} {
		t.Run(name, func(t *testing.T) {
			other, rows := run(copyModel(t, fixtureDir, edit))
			if other == digest {
				t.Error("other tensors, same digest")
			}
			sameBits(t, name, rows, want)
		})
	}
}

func TestDigest(t *testing.T) {
	flip := copyModel(t, fixtureDir, func(m map[string]tensor) { m["model.language_model.norm.weight"].data[0] ^= 1 })
	a, err := Inspect(fixtureDir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Inspect(flip)
	if err != nil {
		t.Fatal(err)
	}
	if a.Digest == b.Digest || len(a.Digest) != 64 {
		t.Errorf("digests %s and %s", a.Digest, b.Digest)
	}
	m := load(t, fixtureDir, kernels.ClassBF16)
	if m.Digest != a.Digest {
		t.Error("Load and Inspect disagree")
	}
}

func TestInspect(t *testing.T) {
	r, err := Inspect(nanoDir)
	if err != nil {
		t.Fatal(err)
	}
	if r.Unread != "" {
		t.Error(r.Unread)
	}
	if r.Prefix != "model.language_model." || r.Tensors != 2373 || r.Parameters != 27_366_316 {
		t.Errorf("%+v", r)
	}
	if r.Weights["NVFP4"] != 719 || r.Weights["BF16"] != 52 || len(r.Weights) != 2 { // mHC's 24 among them, which were trained to be BF16
		t.Errorf("weights %v", r.Weights)
	}
	total := int64(0)
	for _, n := range r.Bytes {
		total += n
	}
	st, _ := os.Stat(filepath.Join(nanoDir, "model.safetensors"))
	if total > st.Size() || total < st.Size()*9/10 {
		t.Errorf("%d bytes of tensors in a file of %d", total, st.Size())
	}
	if _, err := Inspect(copyModel(t, fixtureDir, func(m map[string]tensor) { delete(m, "lm_head.weight") })); err == nil || !strings.Contains(err.Error(), "lm_head.weight") {
		t.Error("a missing tensor:", err)
	}
	l := r.Layouts["bf16"]
	checkLayout(t, l)
	// 4 MLA layers (the draft layer's too) of 128 latents and 32 + 32 indexer values a token and 32 a pool of 4.
	if want := 4 * (128*(128+32+32) + 32*32) * 2; l.SlabBytes != want {
		t.Errorf("slab of %d bytes, want %d", l.SlabBytes, want)
	}
	// 9 KDA layers: 4 heads of a 64x64 FP32 state and 3 raw rows of q, k, v; the final hidden row.
	if want := 9*4*(64*64*4+3*3*64*2) + 256*4; l.SlotBytes != want {
		t.Errorf("slot of %d bytes, want %d", l.SlotBytes, want)
	}
	if r.PaddingPerPage["bf16"] != l.PageStride-l.SlabBytes || r.BytesPerToken["bf16"] != l.PageStride/128 {
		t.Errorf("padding %v, bytes a token %v", r.PaddingPerPage, r.BytesPerToken)
	}
}

// checkLayout: parts follow each other without gap or overlap, and strides are aligned.
func checkLayout(t *testing.T, l Layout) {
	t.Helper()
	for _, x := range []struct {
		parts []Part
		total int
	}{{l.Page, l.SlabBytes}, {l.Slot, l.SlotBytes}} {
		at := 0
		for _, p := range x.parts {
			if p.Off != at || p.Bytes <= 0 || p.Off%64 != 0 {
				t.Errorf("part %+v at %d", p, at)
			}
			at += p.Bytes
		}
		if at != x.total {
			t.Errorf("parts end at %d of %d", at, x.total)
		}
	}
	if l.PageStride%(64<<10) != 0 || l.PageStride < l.SlabBytes || l.SlotStride%64 != 0 || l.SlotStride < l.SlotBytes {
		t.Errorf("strides %+v", l)
	}
}
