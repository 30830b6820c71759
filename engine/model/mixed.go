package model

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"rocket/engine/checkpoint"
	"rocket/kernels"
)

// LoadMixed loads the model in dir with the matrices of the given families taken from the folder other, which must hold
// the same model quantised in another way. So what one family's form costs can be measured alone.
func LoadMixed(dev *kernels.Device, dir, other string, families []Family, opts Options) (m *Model, err error) {
	c, err := ReadConfig(dir)
	if err != nil {
		return nil, err
	}
	d, err := ReadConfig(other)
	if err != nil {
		return nil, err
	}
	if err := c.SameModel(d); err != nil {
		return nil, fmt.Errorf("load %s with families of %s: %w", dir, other, err)
	}
	var srcs [2]*stored
	for i, dir := range []string{dir, other} {
		ck, err := checkpoint.Open(dir)
		if err != nil {
			return nil, err
		}
		defer ck.Close() // packing copies
		if srcs[i], err = newStored(ck); err != nil {
			return nil, fmt.Errorf("load model: %w", err)
		}
	}
	m, err = build(dev, c, mixed{srcs[0], srcs[1], c, families}, opts)
	if err != nil {
		return nil, fmt.Errorf("load %s with families of %s: %w", dir, other, err)
	}
	h := configHash(c)
	fmt.Fprintf(h, "mixed %s %s %v", digest(c, srcs[0].c), digest(d, srcs[1].c), families)
	m.Digest = hex.EncodeToString(h.Sum(nil))
	return m, nil
}

// SameModel tells why two configs are not of one model in two forms; nil if they are.
func (c Config) SameModel(d Config) error {
	c.QuantAlgo, d.QuantAlgo = "", ""
	if a, b := configHash(c).Sum(nil), configHash(d).Sum(nil); !slices.Equal(a, b) {
		return errors.New("their configs describe different models")
	}
	return nil
}

// mixed is a source that takes some families from another checkpoint.
type mixed struct {
	*stored
	other    *stored
	c        Config
	families []Family
}

func (s mixed) from(name string) *stored {
	if f := s.c.FamilyOf(name); f != "" && slices.Contains(s.families, f) {
		return s.other
	}
	return s.stored
}

func (s mixed) weight(name string, n, k int) (checkpoint.Weight, error) {
	return s.from(name).weight(name, n, k)
}

func (s mixed) expert(mlp string, e, experts int, which string, n, k int) (checkpoint.Weight, error) {
	return s.from(fmt.Sprintf("%sexperts.%d.%s", mlp, e, which)).expert(mlp, e, experts, which, n, k)
}
