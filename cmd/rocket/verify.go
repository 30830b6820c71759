package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"rocket/engine/verify"
	"rocket/kernels"
	"rocket/models/nano"
)

type modelVerify struct {
	Baseline  string `help:"Folder of the model as it was trained." required:"" placeholder:"DIR"`
	Candidate string `help:"Folder of the quantised model, or nano." default:"nano" placeholder:"DIR"`
	Text      string `help:"Folder of *.txt files that the model has not been trained on; absent: those that come with nano." placeholder:"DIR"`
	Class     string `help:"Numeric class: bf16 or f32." enum:"bf16,f32" default:"bf16"`
	Threads   int    `help:"Threads of the kernels; 0: one per core." default:"0"`
	Families  bool   `help:"Measure every family that differs by itself, too." default:"true" negatable:""`
}

// maxTextBytes bounds one held-out file.
const maxTextBytes = 1 << 20

func (v modelVerify) heldOut() ([]string, error) {
	if v.Text == "" {
		return nano.HeldOut()
	}
	names, err := filepath.Glob(filepath.Join(v.Text, "*.txt"))
	if err != nil || len(names) == 0 {
		return nil, fmt.Errorf("--text %s: there are no *.txt files", v.Text)
	}
	slices.Sort(names)
	var docs []string
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read held-out text: %w", err)
		}
		if len(b) > maxTextBytes {
			return nil, fmt.Errorf("held-out text %s has %d bytes, at most %d are read", name, len(b), maxTextBytes)
		}
		docs = append(docs, string(b))
	}
	return docs, nil
}

func (v modelVerify) Run(c *console) error {
	if v.Threads < 0 {
		return usage("--threads: want 0 or more, not %d", v.Threads)
	}
	docs, err := v.heldOut()
	if err != nil {
		return err
	}
	base, _, err := modelDir(v.Baseline)
	if err != nil {
		return err
	}
	cand, name, err := modelDir(v.Candidate)
	if err != nil {
		return err
	}
	dev, err := kernels.Open("auto", v.Threads)
	if err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	defer dev.Close()
	update, done := c.progress("verifying " + name)
	r, err := verify.Run(c.ctx, verify.Options{Device: dev, Baseline: base, Candidate: cand, Class: numericClass(v.Class), HeldOut: docs, SkipFamilies: !v.Families, Progress: update})
	done()
	if err != nil {
		return err
	}
	if c.json {
		err = c.print(r)
	} else {
		printReport(c, r)
	}
	if err == nil && len(r.Regressions) > 0 {
		err = errReported{fmt.Errorf("%d regressions", len(r.Regressions))}
	}
	return err
}

func printReport(c *console, r verify.Report) {
	c.say("cases           %d of %d", r.Passed, r.Total)
	for _, x := range r.Cases {
		state := map[bool]string{true: "pass", false: "FAIL"}
		same := ""
		if x.SameTokens {
			same = ", same tokens"
		}
		c.say("  %-16s baseline %s, candidate %s%s: %s", x.Name, state[x.Baseline.Passed], state[x.Candidate.Passed], same, x.What)
	}
	c.say("a step of 16 streams touches %d B of weights as stored, the baseline %d B: %d B removed", r.Candidate.StepBytes, r.Baseline.StepBytes, r.Baseline.StepBytes-r.Candidate.StepBytes)
	printMeasured(c, "combined", r.Combined)
	for _, f := range r.Families {
		printMeasured(c, string(f.Family)+" alone", f.Measured)
	}
	for _, s := range r.Regressions {
		c.say("regression: %s", s)
	}
}

func printMeasured(c *console, what string, m verify.Measured) {
	c.say("%s", what)
	c.say("  perplexity %.4f, baseline %.4f (ratio %.4f); token parity %.4f of %d", m.Perplexity.Candidate, m.Perplexity.Baseline, m.Perplexity.Ratio, m.Parity, m.Tokens)
	if d := m.Drafts; d != nil {
		c.say("  accepted length %.3f, baseline %.3f; agreement by depth %s, baseline %s", d.Candidate.AcceptedLength, d.Baseline.AcceptedLength, shares(d.Candidate.Agreement), shares(d.Baseline.Agreement))
	}
	for _, k := range m.Kinds {
		agreement := ""
		if k.MinAgreement != nil {
			agreement = fmt.Sprintf(", experts agree %.3f or more", *k.MinAgreement)
		}
		c.say("  %-28s %3d channels  RMS ratio %.3f to %.3f, histogram TV up to %.4f, error up to %.4f%s", k.Kind, k.Channels, k.MinRMSRatio, k.MaxRMSRatio, k.MaxTV, k.MaxError, agreement)
	}
}

func shares(v []float64) string {
	var parts []string
	for _, x := range v {
		parts = append(parts, fmt.Sprintf("%.3f", x))
	}
	return strings.Join(parts, " ")
}
