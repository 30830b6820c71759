package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"rocket/engine/checkpoint"
)

// TestInspectClasses: a page is its slab and its padding, for every class.
func TestInspectClasses(t *testing.T) {
	var m inspected
	code, out, stderr := rocket(t, "model", "inspect", "--json")
	if err := json.Unmarshal([]byte(out), &m); code != 0 || err != nil {
		t.Fatalf("exit %d, %v: %s", code, err, stderr)
	}
	for class, k := range m.Classes {
		if k.SlabBytes <= 0 || k.PaddingBytes < 0 || k.SlabBytes+k.PaddingBytes != k.PageBytes {
			t.Errorf("class %s: %+v", class, k)
		}
	}
	if len(m.Classes) != 2 || m.Families["mtp"].Kinds["NVFP4"] != 57 || m.Bytes["U8"] == 0 {
		t.Errorf("%+v", m)
	}
	if code, out, _ := rocket(t, "model", "inspect"); code != 0 || !strings.Contains(out, "slab 204800, padding 57344") || !strings.Contains(out, m.Digest) {
		t.Errorf("exit %d, %s", code, out)
	}
}

// TestInspectRefusedTensors: what loading would refuse is told, in one JSON object, and the exit code says so.
func TestInspectRefusedTensors(t *testing.T) {
	ck, err := checkpoint.Open(plainModel)
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	l := checkpoint.Layout{Files: map[string][]byte{}}
	if l.Files["config.json"], err = os.ReadFile(filepath.Join(plainModel, "config.json")); err != nil {
		t.Fatal(err)
	}
	add := func(name string, x *checkpoint.Tensor) {
		l.Groups = append(l.Groups, checkpoint.TensorGroup{Tensors: []checkpoint.TensorInfo{{Name: name, DType: x.DType, Shape: x.Shape}},
			Make: func() ([][]byte, error) { return [][]byte{x.Data}, nil }})
	}
	for _, name := range ck.Names() {
		x, err := ck.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		add(name, x)
		if name == "lm_head.weight" {
			add("model.language_model.layers.0.extra.weight", x)
		}
	}
	dir := filepath.Join(t.TempDir(), "model")
	if err := checkpoint.Write(t.Context(), dir, l); err != nil {
		t.Fatal(err)
	}
	var m inspected
	code, out, stderr := rocket(t, "model", "inspect", dir, "--json")
	if err := json.Unmarshal([]byte(out), &m); code != exitFailed || err != nil || !strings.Contains(m.Refused, "layers.0.extra") || !strings.Contains(stderr, "layers.0.extra") {
		t.Errorf("exit %d, %v, %q, %q", code, err, m.Refused, stderr)
	}
	if code, _, stderr := rocket(t, "model", "inspect", dir); code != exitFailed || !oneLine(stderr) || !strings.Contains(stderr, "layers.0.extra") {
		t.Errorf("exit %d, %q", code, stderr)
	}
}
