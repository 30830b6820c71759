package kernels

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"testing"
)

// golden are hashes of outputs, pages and slots. They are part of the arithmetic id: every instruction set and
// architecture must give them. A change of bits on purpose needs a new revision of the id and new hashes.
var golden = map[string]string{
	"cpu-fma32/1 hc/4x48 bf16":                                                                    "d4ba6d14e0b3cea4",
	"cpu-fma32/1 hc/4x48 f32":                                                                     "bc63df8c0dfa5b1c",
	"cpu-fma32/1 kda/2x32/conv4/-5/[37 5] bf16":                                                   "05fc1edf7ed39a08",
	"cpu-fma32/1 kda/2x32/conv4/-5/[37 5] f32":                                                    "9fc0e635e4aefe5b",
	"cpu-fma32/1 kda/2x48/conv4/0/[20 3] bf16":                                                    "6066e7d6499c4223",
	"cpu-fma32/1 kda/2x48/conv4/0/[20 3] f32":                                                     "971208b2eba5033f",
	"cpu-fma32/1 linear/0/33x130/[2 1] bf16":                                                      "c3ff1cc6b894cb20",
	"cpu-fma32/1 linear/0/33x130/[2 1] f32":                                                       "c3ff1cc6b894cb20",
	"cpu-fma32/1 linear/1/100x257/[11 8 1] bf16":                                                  "848bf41f1f014296",
	"cpu-fma32/1 linear/1/100x257/[11 8 1] f32":                                                   "848bf41f1f014296",
	"cpu-fma32/1 linear/2/300x384/[11 8 1] bf16":                                                  "351a0b4c57ba6815",
	"cpu-fma32/1 linear/2/300x384/[11 8 1] f32":                                                   "351a0b4c57ba6815",
	"cpu-fma32/1 linear/4/33x144/[5 1] bf16":                                                      "bc40e3693012c415",
	"cpu-fma32/1 linear/4/33x144/[5 1] f32":                                                       "bc40e3693012c415",
	"cpu-fma32/1 mla/{latent:48 indexDim:32 pool:4 indexHeads:3 topk:16 heads:5}/[140 9] bf16":    "b1cd0ae527c5e34d",
	"cpu-fma32/1 mla/{latent:48 indexDim:32 pool:4 indexHeads:3 topk:16 heads:5}/[140 9] f32":     "38f1e2807de22fc6",
	"cpu-fma32/1 moe/{experts:12 topk:3 nGroup:4 topkGroup:2 norm:true}/64x24/1/true/[30 1] bf16": "ce51b7f9b8aa0700",
	"cpu-fma32/1 moe/{experts:12 topk:3 nGroup:4 topkGroup:2 norm:true}/64x24/1/true/[30 1] f32":  "903711292f2a18a8",
}

func TestGolden(t *testing.T) {
	cases := []opCase{
		linearCase(F32, 33, 130, []int{2, 1}),
		linearCase(BF16, 100, 257, []int{11, 8, 1}),
		linearCase(FP8Block, 300, 384, []int{11, 8, 1}),
		linearCase(NVFP4, 33, 144, []int{5, 1}),
		hcCase(4, 48),
		kdaCase(2, 32, 4, -5, []int{37, 5}),
		kdaCase(2, 48, 4, 0, []int{20, 3}),
		mlaCase(mlaShape{latent: 48, indexDim: 32, pool: 4, indexHeads: 3, topk: 16, heads: 5}, []int{140, 9}),
		moeCase(routerShape{experts: 12, topk: 3, nGroup: 4, topkGroup: 2, norm: true}, 64, 24, BF16, true, []int{30, 1}),
	}
	for _, s := range setups() {
		d, err := Open(s.isa, s.threads)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			for _, class := range []Class{ClassF32, ClassBF16} {
				g := c.open(t, d, class)
				res := g.run(schedules(c.seqs)["ragged"])
				h := fnv.New64a()
				for _, out := range res.outs {
					for _, rows := range out {
						for _, v := range rows {
							h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)))
						}
					}
				}
				h.Write(res.pages)
				h.Write(res.slots)
				name := d.Arithmetic() + " " + c.name + " " + class.String()
				if got := fmt.Sprintf("%016x", h.Sum64()); got != golden[name] {
					t.Errorf("%s with %s:\n\t%q: %q,", "bits changed", d.ISA(), name, got)
				}
				g.close()
			}
		}
		d.Close()
	}
}
