// Package model turns a checkpoint into plans of the kernels: the graph of the glm5_next family (KDA, sparse NoPE MLA
// with a pooled indexer, mHC, experts, a draft layer), all of it by config, nothing by constants.
//
// Invariants, each with a test:
//   - A config key, config value or tensor that the graph does not understand is refused by name; a model that loads is
//     computed as its config says.
//   - One prefill, ragged chunks, token by token, beside other sequences or alone: the same bits.
//   - A state slot and the pages of a sequence are everything that going on needs: copied, they continue bit for bit.
//   - The layout is a function of config and class alone, and its digest of config and tensor bytes alone.
package model

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// Options are the choices at load time. The zero value loads in class F32 with the config's own context limit.
type Options struct {
	Class        kernels.Class
	ContextLimit int                     // lower than the config's, 0: the config's
	Progress     func(done, total int64) // weights packed so far, one call at a time
}

// Model is a loaded model. It is immutable; plans of it may be built from any goroutine.
type Model struct {
	Config Config
	Class  kernels.Class
	Digest string // over config and tensors: equal digests are the same model

	dev     *kernels.Device
	limit   int
	embed   *kernels.Weight
	head    *kernels.Weight // the embedding itself where the head is tied
	norm    []float32
	layers  []layerWeights
	mtp     *mtpWeights // nil: the model drafts nothing
	weights *builder
}

// Load reads the model folder dir (config.json and safetensors) and packs its weights for the device. Errors name the
// file and the key or tensor.
func Load(dev *kernels.Device, dir string, opts Options) (*Model, error) {
	c, err := ReadConfig(dir)
	if err != nil {
		return nil, err
	}
	ck, err := checkpoint.Open(dir)
	if err != nil {
		return nil, err
	}
	defer ck.Close() // packing copies
	src, err := newStored(ck)
	if err != nil {
		return nil, fmt.Errorf("load model: %w", err)
	}
	m, err := build(dev, c, src, opts)
	if err != nil {
		return nil, fmt.Errorf("load model %s: %w", dir, err)
	}
	if err := src.unread(c); err != nil {
		m.Close()
		return nil, fmt.Errorf("load model %s: %w", dir, err)
	}
	m.Digest = digest(c, ck)
	return m, nil
}

// Random makes a model of random weights, a function of config and seed: for benchmarks and property tests.
func Random(dev *kernels.Device, c Config, opts Options, seed uint64) (*Model, error) {
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("random model: %w", err)
	}
	m, err := build(dev, c, random{seed}, opts)
	if err != nil {
		return nil, fmt.Errorf("random model: %w", err)
	}
	h := configHash(c)
	fmt.Fprintf(h, "random %d", seed)
	m.Digest = hex.EncodeToString(h.Sum(nil))
	return m, nil
}

func build(dev *kernels.Device, c Config, src source, opts Options) (*Model, error) {
	m := &Model{Config: c, Class: opts.Class, dev: dev, limit: c.ContextLimit, layers: make([]layerWeights, len(c.Layers))}
	if opts.ContextLimit > 0 {
		m.limit = min(m.limit, opts.ContextLimit)
	}
	if err := m.Layout().check(); err != nil {
		return nil, err
	}
	b := &builder{c: c, dev: dev, src: src}
	m.weights = b
	b.all(m)
	if err := b.run(opts.Progress); err != nil {
		b.free()
		return nil, err
	}
	if c.TiedHead {
		m.head = m.embed
	}
	b.jobs, b.src = nil, nil // they hold the checkpoint
	return m, nil
}

// Close frees the weights. Plans that were built keep theirs until they are freed.
func (m *Model) Close() { m.weights.free() }

// Vocab is the number of logits of a row.
func (m *Model) Vocab() int { return m.Config.Vocab }

// ContextLimit is the most tokens a line may consume.
func (m *Model) ContextLimit() int { return m.limit }

// EOS are the tokens that end a turn.
func (m *Model) EOS() []int32 { return m.Config.EOS }

// WeightBytes is the resident size of all matrices, padding included.
func (m *Model) WeightBytes() int64 {
	n := int64(0)
	for _, w := range m.weights.packed {
		n += int64(w.Bytes())
	}
	return n
}

func configHash(c Config) hash.Hash {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // a struct of plain fields
	}
	h := sha256.New()
	fmt.Fprintf(h, "rocket model 1 %d\n%s\n", len(text), text)
	return h
}

// digest is over what the model computes with: the config as understood and every tensor's name, type, shape, bytes.
func digest(c Config, ck *checkpoint.Checkpoint) string {
	h := configHash(c)
	for _, name := range ck.Names() {
		t, _ := ck.Tensor(name)
		fmt.Fprintf(h, "%q %s %v %d\n", name, t.DType, t.Shape, len(t.Data))
		h.Write(t.Data)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Plan builds the trunk for batches of at most maxRows rows of maxSegs sequences over the two arenas: logits of the
// wanted rows, and the last row's final normed hidden state kept in the slot. Free it before the model.
func (m *Model) Plan(pages, slots *kernels.Buffer, maxRows, maxSegs int) (*kernels.Plan, error) {
	if m.weights.packed == nil {
		return nil, errors.New("plan: the model is closed")
	}
	p, err := m.dev.NewPlan(m.Class, maxRows, maxSegs, m.limit)
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	g := newGraph(m, p, pages, slots)
	g.trunk()
	if err := p.Err(); err != nil {
		p.Free()
		return nil, fmt.Errorf("plan: %w", err)
	}
	return p, nil
}
