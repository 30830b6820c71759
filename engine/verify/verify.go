// Package verify tells whether a quantised model is still the model that it was made of.
//
// Invariants, each with a test:
//   - A model verified against itself passes, with every ratio 1, every distance 0 and every token the same.
//   - Every measurement runs both models on the same tokens; what is reported of a family is the baseline with that
//     family's matrices alone taken from the candidate, so a regression is bisectable.
//   - A number that is not finite is a regression, never a pass.
package verify

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/kernels"
)

// Options say what is compared, and how.
type Options struct {
	Device              *kernels.Device
	Baseline, Candidate string // folders of one model in two forms
	Class               kernels.Class
	HeldOut             []string // documents that the model has not been trained on
	SkipFamilies        bool     // measure the candidate as a whole only
	Progress            func(done, total int64)
}

// Report is the outcome. It passes when Regressions is empty.
type Report struct {
	Class       string       `json:"class"`
	Baseline    Side         `json:"baseline"`
	Candidate   Side         `json:"candidate"`
	Passed      int          `json:"cases_passed"`
	Total       int          `json:"cases"`
	Cases       []CaseResult `json:"case_results"`
	Combined    Measured     `json:"combined"`
	Families    []FamilyPart `json:"families"`
	Regressions []string     `json:"regressions"`
}

// Side is one of the two models.
type Side struct {
	Dir       string                          `json:"dir"`
	Digest    string                          `json:"digest"`
	Formats   map[model.Family]map[string]int `json:"formats"`           // matrices by family and how they are stored
	StepBytes int64                           `json:"c16_step_bytes"`    // of weights that a decode step of 16 streams touches, as stored
	Resident  int64                           `json:"c16_step_resident"` // the same as this device keeps them
}

// familyTokens is how much of the text a family alone is measured on: enough for its error, and a share of the time.
const familyTokens = 4096

// stepStreams is the number of streams for which bytes are compared.
const stepStreams = 16

// FamilyPart is the baseline with one family of the candidate.
type FamilyPart struct {
	Family model.Family `json:"family"`
	Measured
}

// CaseResult is one fixed case.
type CaseResult struct {
	Name         string  `json:"name"`
	What         string  `json:"what"`
	PromptTokens int     `json:"prompt_tokens"`
	Baseline     CaseRun `json:"baseline"`
	Candidate    CaseRun `json:"candidate"`
	SameTokens   bool    `json:"same_tokens"`
}

// CaseRun is what one model made of a case.
type CaseRun struct {
	Passed bool   `json:"passed"`
	Why    string `json:"why,omitempty"` // it has not passed
	Text   string `json:"text"`
}

// verification is one Run.
type verification struct {
	o         Options
	tok       *tokenizer.Tokenizer
	template  *chat.Template // nil: the model has none
	reports   [2]model.Report
	runners   [2]*runner
	models    []*model.Model
	texts     [][]int32
	done, all int64
	report    Report
}

// Run compares the candidate with the baseline.
func Run(ctx context.Context, o Options) (Report, error) {
	v := &verification{o: o}
	defer v.close()
	if err := v.run(ctx); err != nil {
		return Report{}, fmt.Errorf("verify %s against %s: %w", o.Candidate, o.Baseline, err)
	}
	return v.report, nil
}

func (v *verification) close() {
	for _, r := range v.runners {
		if r != nil {
			r.close()
		}
	}
	for _, m := range v.models {
		m.Close()
	}
}

func (v *verification) run(ctx context.Context) error {
	if err := v.load(); err != nil {
		return err
	}
	for _, d := range v.o.HeldOut {
		if ids := document(v.tok, d); len(ids) > DraftDepths+1 {
			v.texts = append(v.texts, ids[:min(len(ids), MaxContext)])
		}
	}
	if len(v.texts) == 0 {
		return errors.New("there is no held-out text")
	}
	var families []model.Family
	if !v.o.SkipFamilies {
		families = v.changed()
	}
	v.plan(len(families))
	if err := v.cases(ctx); err != nil {
		return err
	}
	var err error
	if v.report.Combined, err = v.measure(ctx, v.runners[1], v.texts); err != nil {
		return err
	}
	v.report.Regressions = append(v.report.Regressions, regressions("", v.report.Combined)...)
	for _, f := range families {
		m, err := v.family(ctx, f)
		if err != nil {
			return err
		}
		v.report.Regressions = append(v.report.Regressions, regressions(string(f)+" alone: ", m)...)
		m.Channels = nil
		v.report.Families = append(v.report.Families, FamilyPart{f, m})
	}
	return nil
}

// load loads both models and what turns text into their tokens.
func (v *verification) load() (err error) {
	if v.tok, err = tokenizer.Load(filepath.Join(v.o.Baseline, "tokenizer.json")); err != nil {
		return err
	}
	other, err := tokenizer.Load(filepath.Join(v.o.Candidate, "tokenizer.json"))
	if err != nil {
		return err
	}
	if v.tok.Digest() != other.Digest() {
		return errors.New("their tokenizers differ")
	}
	if v.template, err = chat.Load(v.o.Baseline, v.tok); err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		return err
	}
	v.report.Class, v.report.Regressions, v.report.Families = v.o.Class.String(), []string{}, []FamilyPart{}
	for i, dir := range []string{v.o.Baseline, v.o.Candidate} {
		if v.reports[i], err = model.Inspect(dir); err != nil {
			return err
		}
		m, err := model.Load(v.o.Device, dir, model.Options{Class: v.o.Class, ContextLimit: MaxContext})
		if err != nil {
			return err
		}
		v.models = append(v.models, m)
		if v.runners[i], err = newRunner(v.o.Device, m); err != nil {
			return err
		}
		side := Side{Dir: dir, Digest: m.Digest, Formats: map[model.Family]map[string]int{}, StepBytes: v.reports[i].StepWeightBytes(stepStreams),
			Resident: m.StepCost(stepStreams, 0).WeightBytes}
		for f, fr := range v.reports[i].Families {
			if f != "" {
				side.Formats[f] = fr.Kinds
			}
		}
		if i == 0 {
			v.report.Baseline = side
		} else {
			v.report.Candidate = side
		}
	}
	return v.reports[0].Config.SameModel(v.reports[1].Config)
}

// changed lists the families whose bytes differ in number or kind between the two.
func (v *verification) changed() (families []model.Family) {
	for _, f := range model.Families {
		a, b := v.reports[0].Families[f], v.reports[1].Families[f]
		same := a.Bytes == b.Bytes && len(a.Kinds) == len(b.Kinds)
		for k, n := range a.Kinds {
			same = same && b.Kinds[k] == n
		}
		if !same {
			families = append(families, f)
		}
	}
	return families
}

// plan counts the work for the progress bar in tokens of text.
func (v *verification) plan(families int) {
	for _, t := range v.texts {
		v.all += int64(len(t))
	}
	for _, t := range v.some() {
		v.all += int64(families * len(t))
	}
}

// some is the beginning of the text, familyTokens of it.
func (v *verification) some() (texts [][]int32) {
	left := familyTokens
	for _, t := range v.texts {
		if left <= DraftDepths+1 {
			break
		}
		n := min(left, len(t))
		texts, left = append(texts, t[:n]), left-n
	}
	return texts
}

func (v *verification) measure(ctx context.Context, cand *runner, texts [][]int32) (Measured, error) {
	return measure(ctx, v.runners[0], cand, texts, func(tokens int) {
		if v.done += int64(tokens); v.o.Progress != nil {
			v.o.Progress(min(v.done, v.all), v.all)
		}
	})
}

// family measures the baseline with one family of the candidate.
func (v *verification) family(ctx context.Context, f model.Family) (Measured, error) {
	m, err := model.LoadMixed(v.o.Device, v.o.Baseline, v.o.Candidate, []model.Family{f}, model.Options{Class: v.o.Class, ContextLimit: MaxContext})
	if err != nil {
		return Measured{}, err
	}
	defer m.Close()
	r, err := newRunner(v.o.Device, m)
	if err != nil {
		return Measured{}, err
	}
	defer r.close()
	return v.measure(ctx, r, v.some())
}

// cases runs the fixed cases on both.
func (v *verification) cases(ctx context.Context) error {
	for _, c := range cases(v.tok) {
		result := CaseResult{Name: c.name, What: c.what}
		prompt, err := c.prompt(v.tok, v.template)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		result.PromptTokens = len(prompt)
		var ids [2][]int32
		for i, to := range []*CaseRun{&result.Baseline, &result.Candidate} {
			if ids[i], to.Text, err = v.runners[i].generate(ctx, v.tok, prompt, c.limit, c.stop); err == nil {
				err = c.check(to.Text)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if to.Passed = err == nil; err != nil {
				to.Why = err.Error()
			}
		}
		result.SameTokens = fmt.Sprint(ids[0]) == fmt.Sprint(ids[1])
		switch {
		case !result.Baseline.Passed:
			v.report.Regressions = append(v.report.Regressions, fmt.Sprintf("case %s: the baseline itself fails, so it proves nothing: %s", c.name, result.Baseline.Why))
		case !result.Candidate.Passed:
			v.report.Regressions = append(v.report.Regressions, fmt.Sprintf("case %s: the candidate fails: %s", c.name, result.Candidate.Why))
		default:
			v.report.Passed++
		}
		v.report.Total++
		v.report.Cases = append(v.report.Cases, result)
	}
	return nil
}
