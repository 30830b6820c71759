package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"rocket/engine"
	"rocket/engine/model"
	"rocket/kernels"
)

// measureTime is how long each roof is measured.
const measureTime = 2 * time.Second

// RooflineResult compares a decode step with what the machine can do at all.
type RooflineResult struct {
	ISA        string         `json:"isa"`
	Threads    int            `json:"threads"`
	WorkingSet int64          `json:"working_set_bytes"` // what the read roof was measured over: the step's own bytes
	ReadRoof   float64        `json:"read_bytes_per_second"`
	MemoryRoof float64        `json:"memory_bytes_per_second"` // over a working set far larger than the caches
	FMARoof    float64        `json:"fma_per_second"`
	Context    int            `json:"context"`
	Steps      []RooflineStep `json:"steps"`
}

// RooflineStep is one batch size. Fraction is the larger of the two roofs' times over the measured time.
type RooflineStep struct {
	Streams     int     `json:"streams"`
	WeightBytes int64   `json:"weight_bytes"`
	StateBytes  int64   `json:"state_bytes"`
	CacheBytes  int64   `json:"cache_bytes"`
	FMAs        int64   `json:"fmas"`
	RoofMS      float64 `json:"roof_ms"`
	StepMS      float64 `json:"step_ms"`
	Fraction    float64 `json:"fraction"`
	BytesPerSec float64 `json:"bytes_per_second"`
	Bound       string  `json:"bound"` // "memory" or "compute"
}

// Roofline measures the machine's roofs and the engine's decode steps at the given numbers of streams, on lines of
// about ctxLen tokens.
func Roofline(ctx context.Context, dev *kernels.Device, m *model.Model, e *engine.Engine, streams []int, ctxLen, tokens int, progress Progress) (RooflineResult, error) {
	res := RooflineResult{ISA: dev.ISA(), Threads: dev.Threads(), Context: ctxLen, WorkingSet: m.StepCost(1, ctxLen).Bytes()}
	res.MemoryRoof = dev.MeasureRead(1<<30, measureTime)
	res.ReadRoof = dev.MeasureRead(int(res.WorkingSet), measureTime)
	res.FMARoof = dev.MeasureFMA(measureTime)
	rng := rand.New(rand.NewPCG(lineSeed, 3))
	for i, n := range streams {
		rung, err := ladderBest(ctx, e, rng, n, LadderOptions{Prompt: ctxLen, Tokens: tokens, Rounds: 3})
		if err != nil {
			return res, fmt.Errorf("decode at c%d: %w", n, err)
		}
		c := m.StepCost(n, ctxLen+tokens/2)
		s := RooflineStep{Streams: n, WeightBytes: c.WeightBytes, StateBytes: c.StateBytes, CacheBytes: c.CacheBytes, FMAs: c.FMAs, StepMS: rung.StepMS}
		mem, fma := float64(c.Bytes())/res.ReadRoof*1e3, float64(c.FMAs)/res.FMARoof*1e3
		s.RoofMS, s.Bound = mem, "memory"
		if fma > mem {
			s.RoofMS, s.Bound = fma, "compute"
		}
		s.Fraction = s.RoofMS / s.StepMS
		s.BytesPerSec = float64(c.Bytes()) / s.StepMS * 1e3
		res.Steps = append(res.Steps, s)
		progress.step("batch sizes", i+1, len(streams))
	}
	return res, nil
}
