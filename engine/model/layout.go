package model

import (
	"fmt"

	"rocket/kernels"
)

// Strides: a page's slab is padded to pageAlign, a slot to slotAlign, so that tiers and devices move whole blocks in place.
// recordRows is the length of the raw-record ring that verifying drafts will need: none today.
const (
	pageAlign  = 64 << 10
	slotAlign  = 4096
	recordRows = 0
)

// DraftLayer is the name of the draft layer's part of a page.
const DraftLayer = "draft layer"

// Part is a named range of a page's slab or of a slot.
type Part struct {
	Name       string
	Off, Bytes int
}

// Layout says where the caches and states of a sequence lie. A page holds PageTokens positions of every MLA layer and
// the draft layer; a slot the recurrent states of every KDA layer and the final hidden row.
type Layout struct {
	PageTokens            int
	SlabBytes, PageStride int // used and padded bytes of a page
	SlotBytes, SlotStride int // used and padded bytes of a slot
	Page, Slot            []Part
	HiddenOff             int // of the last row's final normed hidden state in a slot, FP32
}

// check refuses sizes that the kernels do not take, by the part that has them.
func (l Layout) check() error {
	for _, p := range append(append([]Part{}, l.Page...), l.Slot...) {
		if p.Bytes <= 0 {
			return fmt.Errorf("%s: the kernels do not support its head sizes", p.Name)
		}
	}
	return nil
}

// Layout is computed from config and class alone.
func (m *Model) Layout() Layout { return LayoutOf(m.Config, m.Class) }

// LayoutOf is the layout that a model of this config has in the class.
func LayoutOf(c Config, class kernels.Class) Layout {
	l := Layout{PageTokens: pageTokens}
	page := func(name string, shared bool) {
		index := c.IndexDim
		if shared {
			index = 0
		}
		n := kernels.MLASlabBytes(c.KVRank, index, c.IndexPool, class)
		l.Page = append(l.Page, Part{name, l.SlabBytes, n})
		l.SlabBytes += n
	}
	slot := func(name string, n int) {
		l.Slot = append(l.Slot, Part{name, l.SlotBytes, n})
		l.SlotBytes += n
	}
	for i, layer := range c.Layers {
		name := fmt.Sprintf("layer %d", i)
		if layer.Kind == LayerMLA {
			page(name, layer.Shared)
			continue
		}
		slot(name, kernels.KDASlotBytes(c.KDAHeads, c.KDADim, c.KDAConv, class)+recordRows*c.KDAHeads*(3*c.KDADim+1)*4)
	}
	if c.MTP {
		page(DraftLayer, false)
	}
	l.HiddenOff = l.SlotBytes
	slot("final hidden", c.Hidden*4)
	l.PageStride = max(pageAlign, (l.SlabBytes+pageAlign-1)/pageAlign*pageAlign)
	l.SlotStride = (l.SlotBytes + slotAlign - 1) / slotAlign * slotAlign
	return l
}
