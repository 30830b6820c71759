package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"rocket/engine"
	"rocket/engine/tier"
)

// DiskOptions size the measurement of the disk tier.
type DiskOptions struct {
	Dir    string // of the engine's disk tier
	Tokens int    // of each line
	Lines  int
}

// DiskResult says how fast lines leave for the disk and come back, beside the disk's own sequential read rate, measured
// in the same run with the same kind of I/O.
type DiskResult struct {
	Tokens      int     `json:"tokens"`
	Lines       int     `json:"lines"`
	LineBytes   int64   `json:"line_bytes"` // on disk, pages and state, on average
	Direct      bool    `json:"direct_io"`
	RoofBytesPS float64 `json:"read_roof_bytes_per_second"`
	WriteBPS    float64 `json:"detach_bytes_per_second"`
	ReadBPS     float64 `json:"resume_bytes_per_second"`
	Fraction    float64 `json:"resume_over_roof"`
	DetachMS    float64 `json:"detach_ms_p50"`
	ResumeMS    float64 `json:"resume_ms_p50"`
	ColdMS      float64 `json:"cold_ms"` // the same line prefilled
}

// measuredBytes is how much of the disk one roof is read from.
const measuredBytes = 1 << 30

// Disk detaches lines to the disk and brings them back.
func Disk(ctx context.Context, e *engine.Engine, o DiskOptions, progress Progress) (DiskResult, error) {
	out := DiskResult{Tokens: o.Tokens, Lines: o.Lines}
	var err error
	if out.RoofBytesPS, out.Direct, err = tier.MeasureRead(o.Dir, measuredBytes); err != nil {
		return out, fmt.Errorf("measure the disk: %w", err)
	}
	rng := rand.New(rand.NewPCG(lineSeed, 9))
	var lines [][]int32
	var down, up []float64
	var wrote, read time.Duration
	for i := range o.Lines {
		line := randomLine(rng, o.Tokens, e.Info().Vocab)
		s, _, err := e.Open(ctx, line, engine.OpenOptions{Lazy: true})
		if err != nil {
			return out, err
		}
		began := time.Now()
		res, err := decode(ctx, e, s, line, 1, false)
		if err != nil {
			return out, err
		}
		out.ColdMS = ms(time.Since(began))
		before := e.Stats().DiskBytes
		began = time.Now()
		if _, err := e.Detach(ctx, s, engine.TierDisk); err != nil {
			return out, err
		}
		took := time.Since(began)
		wrote += took
		down = append(down, ms(took))
		out.LineBytes += (e.Stats().DiskBytes - before) / int64(o.Lines)
		lines = append(lines, append(line, res.ids...))
		progress.step("detached", i+1, o.Lines)
	}
	for i, line := range lines {
		began := time.Now()
		s, got, err := e.Open(ctx, line, engine.OpenOptions{Lazy: true})
		if err != nil {
			return out, err
		}
		took := time.Since(began)
		e.Release(s)
		if got.Disk != len(line)-1 {
			return out, fmt.Errorf("resume of a line of %d tokens found %+v: the device or the disk is too small for this measurement", len(line), got)
		}
		read += took
		up = append(up, ms(took))
		progress.step("resumed", i+1, o.Lines)
	}
	bytes := float64(out.LineBytes) * float64(o.Lines)
	out.WriteBPS, out.ReadBPS = bytes/wrote.Seconds(), bytes/read.Seconds()
	out.Fraction = out.ReadBPS / out.RoofBytesPS
	out.DetachMS, out.ResumeMS = percentile(down, 0.5), percentile(up, 0.5)
	return out, nil
}
