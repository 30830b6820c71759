package replay

import (
	"fmt"
	"strings"

	"rocket/radix"
)

// Geometry is what a page and a state of a model weigh.
type Geometry struct {
	Name       string
	PageBytes  int64 // slab of 128 tokens, padding included
	TokenBytes int64 // of one token's caches, without padding: what snapshots are spaced by
	SlotBytes  int64 // one state
	State      string
}

// Geometries are the names that GeometryOf knows.
var Geometries = []string{"glm-5.3-flash", "kimi-linear", "nano"}

// States are the element types that a recurrent state may be kept in.
var States = []string{"f32", "bf16"}

const blockOfPage = 64 << 10 // pages are padded to whole blocks of this

// GeometryOf returns a model's sizes with its recurrent state in f32 or bf16 (the raw conv rows are bf16 in both).
//
//	glm-5.3-flash  11 MLA layers of 512 latents, 128 index and 128 gate values in bf16; 34 KDA layers of 64 heads
//	               of 128x128, 3 conv rows of 3x8192. The draft layer and pooled keys are left out, as in the
//	               numbers that the c32 workload is compared with.
//	kimi-linear    7 MLA layers of 512+64 values in bf16; 20 KDA layers of 32 heads of 128x128, 3 conv rows of 3x4096.
//	nano           the model in this repository, numeric class bf16, whose state is f32.
func GeometryOf(name, state string) (Geometry, error) {
	kda := func(layers, heads int64) int64 {
		width := map[string]int64{"f32": 4, "bf16": 2}[state]
		return layers * (heads*128*128*width + 3*3*heads*128*2)
	}
	if state != "f32" && state != "bf16" {
		return Geometry{}, fmt.Errorf("state %q: want one of %s", state, strings.Join(States, ", "))
	}
	g := Geometry{Name: name, State: state}
	switch name {
	case "glm-5.3-flash":
		g.TokenBytes, g.SlotBytes = 11*(512+128+128)*2, kda(34, 64)
	case "kimi-linear":
		g.TokenBytes, g.SlotBytes = 7*(512+64)*2, kda(20, 32)
	case "nano":
		if state != "f32" {
			return Geometry{}, fmt.Errorf("geometry nano: its state is kept in f32 only")
		}
		g.TokenBytes, g.SlotBytes = 1600, 634880
	default:
		return Geometry{}, fmt.Errorf("geometry %q: want one of %s", name, strings.Join(Geometries, ", "))
	}
	slab := g.TokenBytes * radix.PageTokens
	g.PageBytes = (slab + blockOfPage - 1) / blockOfPage * blockOfPage
	return g, nil
}
