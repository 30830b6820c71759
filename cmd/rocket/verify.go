package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"rocket/engine/verify"
	"rocket/kernels"
	"rocket/models/nano"
)

type modelVerify struct {
	Baseline  string `help:"Folder of the model as it was trained, a record of it that --save made, or nano: the record that comes with the nano model." default:"nano" placeholder:"DIR|FILE"`
	Candidate string `help:"Folder of the quantised model, or nano." placeholder:"DIR"`
	Save      string `help:"Measure the baseline alone and write a record of it, to verify candidates where its weights are not." placeholder:"FILE"`
	Text      string `help:"Folder of *.txt files that the model has not been trained on; absent: those that come with nano." placeholder:"DIR"`
	Class     string `help:"Numeric class: bf16 or f32." enum:"bf16,f32" default:"bf16"`
	Threads   int    `help:"Threads of the kernels; 0: one per core." default:"0"`
	Families  bool   `help:"Measure every family that differs by itself, too; needs the baseline's folder." default:"true" negatable:""`
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
	o := verify.Options{Class: numericClass(v.Class), HeldOut: docs, SkipFamilies: !v.Families}
	if o.Record, err = v.record(); err != nil {
		return err
	}
	if v.Save != "" && (o.Record != nil || v.Candidate != "") {
		return usage("--save takes the folder of a --baseline, and no --candidate")
	}
	o.Baseline = v.Baseline
	if v.Save == "" {
		if v.Candidate == "" {
			v.Candidate = nanoName
		}
		if o.Candidate, _, err = modelDir(v.Candidate); err != nil {
			return err
		}
	}
	if o.Device, err = kernels.Open("auto", v.Threads); err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	defer o.Device.Close()
	if v.Save != "" {
		return v.save(c, o)
	}
	update, done := c.progress("verifying " + v.Candidate)
	o.Progress = update
	r, err := verify.Run(c.ctx, o)
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

// record reads the baseline's record; nil: the baseline is a folder.
func (v modelVerify) record() (*verify.Record, error) {
	data := nano.Baseline
	if v.Baseline != nanoName {
		st, err := os.Stat(v.Baseline)
		if err != nil {
			return nil, fmt.Errorf("--baseline: %w", err)
		}
		if st.IsDir() {
			return nil, nil
		}
		if data, err = readRecord(v.Baseline); err != nil {
			return nil, err
		}
	}
	r, err := verify.ReadRecord(data)
	if err != nil {
		return nil, fmt.Errorf("--baseline %s: %w", v.Baseline, err)
	}
	return r, nil
}

// readRecord reads a file of at most one byte more than a record may have.
func readRecord(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, verify.MaxRecordBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return data, nil
}

// save writes the baseline's record: whole under its name, or not at all.
func (v modelVerify) save(c *console, o verify.Options) error {
	update, done := c.progress("measuring " + v.Baseline)
	o.Progress = update
	r, err := verify.MakeRecord(c.ctx, o)
	done()
	if err != nil {
		return err
	}
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := writeWhole(v.Save, append(data, '\n')); err != nil {
		return fmt.Errorf("--save: %w", err)
	}
	if c.json {
		return c.print(map[string]any{"file": v.Save, "bytes": len(data) + 1, "model": r.Model, "arithmetic": r.Arithmetic})
	}
	c.say("%s: %d B, of model %s", v.Save, len(data)+1, r.Model)
	return nil
}

// writeWhole writes a file beside the name and moves it there.
func writeWhole(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already when it was moved
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
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
	if b := r.Baseline; b.Recorded {
		note := ""
		if b.Arithmetic != r.Arithmetic {
			note = ", which is not this device's: what is exact there may differ here, the bounds hold"
		}
		c.say("the baseline is a record of model %s by arithmetic %s%s", b.Digest, b.Arithmetic, note)
	}
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
		more := ""
		if k.MaxError != nil {
			more = fmt.Sprintf(", error up to %.4f", *k.MaxError)
		}
		if k.MinAgreement != nil {
			more += fmt.Sprintf(", experts agree %.3f or more", *k.MinAgreement)
		}
		c.say("  %-28s %3d channels  RMS ratio %.3f to %.3f, histogram TV up to %.4f%s", k.Kind, k.Channels, k.MinRMSRatio, k.MaxRMSRatio, k.MaxTV, more)
	}
}

func shares(v []float64) string {
	var parts []string
	for _, x := range v {
		parts = append(parts, fmt.Sprintf("%.3f", x))
	}
	return strings.Join(parts, " ")
}
