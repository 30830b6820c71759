package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"rocket/engine/model"
)

type modelCmd struct {
	Inspect  modelInspect  `cmd:"" help:"Show what a model's folder holds, and check that it can be loaded."`
	Quantize modelQuantize `cmd:"" help:"Make a quantised checkpoint of a BF16 one, family by family."`
	Verify   modelVerify   `cmd:"" help:"Check that a quantised model is as good as the one it was made of; exit 1 if not."`
}

type modelInspect struct {
	Model string `arg:"" optional:"" help:"Folder of a model, or nano, which is built in." default:"nano"`
}

// inspected is what --json prints.
type inspected struct {
	Dir          string                     `json:"dir"`
	Name         string                     `json:"name"`
	Family       string                     `json:"family"`
	Digest       string                     `json:"digest"`
	Vocab        int                        `json:"vocab"`
	Hidden       int                        `json:"hidden"`
	Layers       int                        `json:"layers"`
	LayerKinds   map[string]int             `json:"layer_kinds"`
	MTP          bool                       `json:"mtp"`
	ContextLimit int                        `json:"context_limit"`
	EOS          []int32                    `json:"eos"`
	Experts      int                        `json:"experts"`
	TopK         int                        `json:"experts_per_token"`
	Tensors      int                        `json:"tensors"`
	Parameters   int64                      `json:"parameters"`
	Bytes        map[string]int64           `json:"bytes"`
	Weights      map[string]int             `json:"weights"`
	Families     map[string]inspectedFamily `json:"families"`
	StepBytes    map[int]int64              `json:"step_weight_bytes"` // by rows: what a decode step touches, as stored
	Classes      map[string]inspectedClass  `json:"classes"`
	Refused      string                     `json:"refused,omitempty"` // tensors that loading would refuse
}

type inspectedFamily struct {
	Matrices int            `json:"matrices"`
	Kinds    map[string]int `json:"kinds"`
	Bytes    int64          `json:"bytes"`
}

// otherTensors is what a report calls the tensors that are in no family.
const otherTensors = "other"

// stepRows are the numbers of streams for which inspect says what a decode step touches.
var stepRows = []int{1, 16}

type inspectedClass struct {
	PageBytes     int `json:"page_bytes"` // stride of a page of 128 tokens: its slab and its padding
	SlabBytes     int `json:"slab_bytes"`
	PaddingBytes  int `json:"padding_bytes"`
	StateBytes    int `json:"state_bytes"` // of one recurrent state with its snapshot's rows
	BytesPerToken int `json:"bytes_per_token"`
}

func (m modelInspect) Run(c *console) error {
	dir, name, err := modelDir(m.Model)
	if err != nil {
		return err
	}
	r, err := model.Inspect(dir)
	if err != nil {
		return err
	}
	out := inspected{
		Dir: r.Dir, Name: name, Family: r.Config.Family, Digest: r.Digest, Vocab: r.Config.Vocab, Hidden: r.Config.Hidden,
		Layers: len(r.Config.Layers), LayerKinds: map[string]int{}, MTP: r.Config.MTP, ContextLimit: r.Config.ContextLimit, EOS: r.Config.EOS,
		Experts: r.Config.Experts, TopK: r.Config.TopK, Tensors: r.Tensors, Parameters: r.Parameters, Bytes: r.Bytes, Weights: r.Weights,
		Classes: map[string]inspectedClass{}, Refused: r.Unread, Families: map[string]inspectedFamily{}, StepBytes: map[int]int64{},
	}
	for f, fr := range r.Families {
		out.Families[familyName(f)] = inspectedFamily{fr.Matrices, fr.Kinds, fr.Bytes}
	}
	for _, rows := range stepRows {
		out.StepBytes[rows] = r.StepWeightBytes(rows)
	}
	for _, layer := range r.Config.Layers {
		out.LayerKinds[string(layer.Kind)+"+"+string(layer.MLP)]++
	}
	for class, l := range r.Layouts {
		out.Classes[class] = inspectedClass{l.PageStride, l.SlabBytes, r.PaddingPerPage[class], l.SlotStride, r.BytesPerToken[class]}
	}
	if c.json {
		err = c.print(out)
	} else {
		out.print(c)
	}
	if err == nil && out.Refused != "" {
		err = errReported{fmt.Errorf("model %s: %s", m.Model, out.Refused)}
	}
	return err
}

func (m inspected) print(c *console) {
	c.say("%s  %s  %s", m.Name, m.Family, m.Dir)
	c.say("digest          %s", m.Digest)
	c.say("layers          %d: %s%s", m.Layers, counts(m.LayerKinds), map[bool]string{true: ", and a draft layer"}[m.MTP])
	c.say("hidden, vocab   %d, %d", m.Hidden, m.Vocab)
	c.say("context         %d tokens", m.ContextLimit)
	if m.Experts > 0 {
		c.say("experts         %d, %d for a token", m.Experts, m.TopK)
	}
	c.say("parameters      %d in %d tensors; matrices: %s", m.Parameters, m.Tensors, counts(m.Weights))
	c.say("file bytes      %s", counts(m.Bytes))
	for _, f := range append(slices.Clone(model.Families), "") {
		if fr, ok := m.Families[familyName(f)]; ok {
			c.say("  %-17s %12d B  %s", familyName(f), fr.Bytes, counts(fr.Kinds))
		}
	}
	c.say("a step touches  %d B of weights as stored for 1 stream, %d B for 16", m.StepBytes[1], m.StepBytes[16])
	for _, class := range slices.Sorted(maps.Keys(m.Classes)) {
		k := m.Classes[class]
		c.say("class %-9s page of 128 tokens %d B (slab %d, padding %d; %d a token), state %d B", class, k.PageBytes, k.SlabBytes, k.PaddingBytes, k.BytesPerToken, k.StateBytes)
	}
}

func familyName(f model.Family) string {
	if f == "" {
		return otherTensors
	}
	return string(f)
}

// counts prints a map of numbers in the order of its keys.
func counts[N int | int64](m map[string]N) string {
	parts := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(parts, ", ")
}
