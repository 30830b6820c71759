// Package verify tells whether a quantised model is still the model that it was made of.
//
// Invariants, each with a test:
//   - A model verified against itself passes, with every ratio 1, every distance 0 and every token the same.
//   - Every measurement runs both models on the same tokens; what is reported of a family is the baseline with that
//     family's matrices alone taken from the candidate, so a regression is bisectable.
//   - A number that is not finite is a regression, never a pass.
//   - Against a record of the baseline everything comes out as against the baseline itself, but for what needs its
//     weights; a record of other cases, texts, classes or models is refused.
package verify

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/kernels"
)

// Options say what is compared, and how.
type Options struct {
	Device              *kernels.Device
	Baseline, Candidate string  // folders of one model in two forms
	Record              *Record // stands for the baseline if it is there; then families cannot be measured alone
	Class               kernels.Class
	HeldOut             []string // documents that the model has not been trained on
	SkipFamilies        bool     // measure the candidate as a whole only
	Progress            func(done, total int64)
}

// Report is the outcome. It passes when Regressions is empty.
type Report struct {
	Class       string       `json:"class"`
	Arithmetic  string       `json:"arithmetic"` // of the device
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
	Dir        string                          `json:"dir,omitempty"`
	Recorded   bool                            `json:"recorded,omitempty"`   // measured before, by the arithmetic that follows
	Arithmetic string                          `json:"arithmetic,omitempty"` // of the device that it was recorded on
	Digest     string                          `json:"digest"`
	Formats    map[model.Family]map[string]int `json:"formats"`           // matrices by family and how they are stored
	StepBytes  int64                           `json:"c16_step_bytes"`    // of weights that a decode step of 16 streams touches, as stored
	Resident   int64                           `json:"c16_step_resident"` // the same as this device keeps them
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
	against := o.Baseline
	if o.Record != nil {
		against = "a record"
	}
	if err := v.run(ctx); err != nil {
		return Report{}, fmt.Errorf("verify %s against %s: %w", o.Candidate, against, err)
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
	dirs := []string{v.o.Baseline, v.o.Candidate}
	if v.o.Record != nil {
		dirs[0] = ""
	}
	if err := v.load(dirs...); err != nil {
		return err
	}
	if err := v.readTexts(); err != nil {
		return err
	}
	if r := v.o.Record; r != nil {
		if err := r.fits(v.report.Class, v.o.Candidate, v.tok, v.template, v.texts); err != nil {
			return err
		}
		v.report.Baseline = r.side()
	}
	var families []model.Family
	if !v.o.SkipFamilies && v.o.Record == nil {
		families = v.changed()
	}
	v.plan(len(families))
	if err := v.cases(ctx); err != nil {
		return err
	}
	var err error
	if v.o.Record != nil {
		v.report.Combined, err = v.measureRecorded(ctx)
	} else {
		v.report.Combined, err = measure(ctx, v.runners[0], v.runners[1], v.texts, v.progress)
	}
	if err != nil {
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

// readTexts makes tokens of the held-out text.
func (v *verification) readTexts() error {
	for _, d := range v.o.HeldOut {
		if ids := document(v.tok, d); len(ids) > DraftDepths+1 {
			v.texts = append(v.texts, ids[:min(len(ids), MaxContext)])
		}
	}
	if len(v.texts) == 0 {
		return errors.New("there is no held-out text")
	}
	return nil
}

// load loads the models of up to two folders, the baseline's and the candidate's, and what turns text into their tokens.
// An empty name is passed over.
func (v *verification) load(dirs ...string) error {
	v.report.Class, v.report.Arithmetic = v.o.Class.String(), v.o.Device.Arithmetic()
	v.report.Regressions, v.report.Families = []string{}, []FamilyPart{}
	for i, dir := range dirs {
		if dir == "" {
			continue
		}
		if err := v.loadText(dir); err != nil {
			return err
		}
		side, err := v.loadSide(i, dir)
		if err != nil {
			return err
		}
		*[]*Side{&v.report.Baseline, &v.report.Candidate}[i] = side
	}
	if v.runners[0] == nil || v.runners[1] == nil {
		return nil
	}
	return v.reports[0].Config.SameModel(v.reports[1].Config)
}

// loadText reads a folder's tokenizer and template. The baseline's are used; the candidate's tokenizer must be equal.
func (v *verification) loadText(dir string) error {
	tok, err := tokenizer.Load(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		return err
	}
	if v.tok != nil {
		if v.tok.Digest() != tok.Digest() {
			return errors.New("their tokenizers differ")
		}
		return nil
	}
	v.tok = tok
	if v.template, err = chat.Load(dir, tok); err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		return err
	}
	return nil
}

func (v *verification) loadSide(i int, dir string) (side Side, err error) {
	if v.reports[i], err = model.Inspect(dir); err != nil {
		return Side{}, err
	}
	m, err := model.Load(v.o.Device, dir, model.Options{Class: v.o.Class, ContextLimit: MaxContext})
	if err != nil {
		return Side{}, err
	}
	v.models = append(v.models, m)
	if v.runners[i], err = newRunner(v.o.Device, m); err != nil {
		return Side{}, err
	}
	side = Side{Dir: dir, Digest: m.Digest, Formats: map[model.Family]map[string]int{}, StepBytes: v.reports[i].StepWeightBytes(stepStreams),
		Resident: m.StepCost(stepStreams, 0).WeightBytes}
	for f, fr := range v.reports[i].Families {
		if f != "" {
			side.Formats[f] = fr.Kinds
		}
	}
	return side, nil
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

func (v *verification) progress(tokens int) {
	if v.done += int64(tokens); v.o.Progress != nil {
		v.o.Progress(min(v.done, v.all), v.all)
	}
}

// measureRecorded walks the candidate alone and compares it with the record.
func (v *verification) measureRecorded(ctx context.Context) (Measured, error) {
	p, err := newPass(v.runners[1])
	if err != nil {
		return Measured{}, err
	}
	if err := walk(ctx, []*pass{p}, v.texts, nil, v.progress); err != nil {
		return Measured{}, err
	}
	return compare(v.o.Record.pass(), p, nil)
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
	return measure(ctx, v.runners[0], r, v.some(), v.progress)
}

// cases runs the fixed cases on both; a recorded baseline has answered them before.
func (v *verification) cases(ctx context.Context) error {
	for i, c := range cases(v.tok) {
		result := CaseResult{Name: c.name, What: c.what}
		prompt, err := c.prompt(v.tok, v.template)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		result.PromptTokens = len(prompt)
		var before, after []int32
		if v.o.Record != nil {
			before, result.Baseline, err = v.o.Record.answer(i, c, v.tok)
		} else {
			before, result.Baseline, err = v.try(ctx, v.runners[0], c, prompt)
		}
		if err != nil {
			return err
		}
		if after, result.Candidate, err = v.try(ctx, v.runners[1], c, prompt); err != nil {
			return err
		}
		result.SameTokens = slices.Equal(before, after)
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

// try runs a case on one model. That the model fails it is no error.
func (v *verification) try(ctx context.Context, r *runner, c testCase, prompt []int32) (ids []int32, run CaseRun, err error) {
	ids, text, err := r.generate(ctx, v.tok, prompt, c.limit, c.stop)
	if ctx.Err() != nil {
		return nil, CaseRun{}, ctx.Err()
	}
	return ids, c.judge(text, err), nil
}

// judge tells whether a text that was generated, unless err says why not, passes.
func (c testCase) judge(text string, err error) CaseRun {
	if err == nil {
		err = c.check(text)
	}
	run := CaseRun{Passed: err == nil, Text: text}
	if err != nil {
		run.Why = err.Error()
	}
	return run
}
