package model

// BenchConfig is a glm5_next of about 1.5 GiB in BF16 with the proportions of the big one at a small scale: every 4th
// layer sparse MLA, 4 streams, the first layer dense, experts with a shared one, one draft layer. Too big for a
// processor's cache, so a decode step of it measures memory.
func BenchConfig() Config {
	c := Config{
		Family: "glm5_next", Vocab: 32768, Hidden: 1024, MTP: true, ContextLimit: 65536, NormEps: 1e-5,
		KDAHeads: 8, KDADim: 128, KDAConv: 4, KDALowerBound: -5,
		Heads: 8, QRank: 512, KVRank: 256, NopeDim: 128, VDim: 128,
		IndexHeads: 8, IndexDim: 64, IndexTopK: 2048, IndexPool: 4,
		Inter: 3072, SwigluLimit: 10,
		Experts: 32, TopK: 4, MoEInter: 256, SharedExperts: 1, Groups: 1, TopKGroups: 1, NormTopK: true, RoutedScaling: 2.5,
		Streams: 4, SinkhornIters: 20, HCEps: 1e-6,
	}
	for i := range 24 {
		l := Layer{Kind: LayerKDA, MLP: MLPSparse}
		if i%4 == 3 {
			l.Kind = LayerMLA
		}
		if i == 0 {
			l.MLP = MLPDense
		}
		c.Layers = append(c.Layers, l)
	}
	return c
}
