package verify

import (
	"bytes"
	"compress/flate"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/quant"
	"rocket/engine/tokenizer"
)

// recordFormat names the form of a record and the way of measuring. It is raised when either changes, and records of
// other forms are refused: their numbers would not mean the same.
const recordFormat = "rocket verify baseline 1"

// MaxRecordBytes bounds a record's file and maxCounts each of its lists; what is larger is refused.
const (
	MaxRecordBytes = 16 << 20
	maxCounts      = 4 << 20
)

// ErrRecord is wrapped where a record cannot stand for the baseline that is asked for.
var ErrRecord = errors.New("the record does not fit")

// Record is what a baseline was measured to do, so that a candidate can be verified where the baseline's weights are
// not. Cases, texts, tokenizer, model and numeric class must be those of the record exactly. Its numbers are compared
// within the gate's bounds, which are far wider than the differences between the arithmetics of devices; on a device of
// the record's own arithmetic the baseline would give the same numbers bit for bit.
type Record struct {
	Format     string                          `json:"format"`
	Class      string                          `json:"class"`
	Arithmetic string                          `json:"arithmetic"` // of the device that it was made on
	Model      string                          `json:"model"`      // digest
	Tokenizer  string                          `json:"tokenizer"`  // digest
	CasesOf    string                          `json:"cases_digest"`
	TextsOf    string                          `json:"texts_digest"`
	Formats    map[model.Family]map[string]int `json:"formats"`
	StepBytes  int64                           `json:"c16_step_bytes"`
	Resident   int64                           `json:"c16_step_resident"`
	Cases      []recordedCase                  `json:"cases"`
	Texts      recordedTexts                   `json:"texts"`
}

// recordedCase is what the baseline answered.
type recordedCase struct {
	Name   string `json:"name"`
	Tokens counts `json:"tokens"`
}

// recordedTexts is a pass.
type recordedTexts struct {
	Loss     float64            `json:"loss"` // sum
	Choices  counts             `json:"choices"`
	Agree    [DraftDepths]int64 `json:"agree"`
	Accepted int64              `json:"accepted"`
	Drafted  int64              `json:"drafted"`
	Channels []recordedChannel  `json:"channels"`
}

type recordedChannel struct {
	Name    string        `json:"name"`
	Kind    model.TapKind `json:"kind"`
	N       int64         `json:"n"`
	Squares float64       `json:"squares"`
	Hist    counts        `json:"histogram"`
	Experts counts        `json:"experts,omitempty"`
}

// counts is a list of numbers from 0 up, in JSON a compressed string.
type counts []int64

// MarshalText packs the list.
func (c counts) MarshalText() ([]byte, error) {
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.BestCompression)
	if err != nil {
		return nil, err
	}
	var raw []byte
	for _, x := range c {
		if x < 0 {
			return nil, fmt.Errorf("%d is no count", x)
		}
		raw = binary.AppendUvarint(raw, uint64(x))
	}
	if _, err = w.Write(raw); err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, err
	}
	return base64.StdEncoding.AppendEncode(nil, packed.Bytes()), nil
}

// UnmarshalText unpacks what MarshalText made.
func (c *counts) UnmarshalText(text []byte) error {
	packed, err := base64.StdEncoding.AppendDecode(nil, text)
	if err != nil {
		return err
	}
	const most = maxCounts * binary.MaxVarintLen32
	raw, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), most+1))
	if err != nil {
		return err
	}
	*c = counts{}
	for len(raw) > 0 {
		x, n := binary.Uvarint(raw)
		if n <= 0 || x > math.MaxInt64 || len(*c) == maxCounts {
			return errors.New("a list of counts is damaged or too long")
		}
		*c, raw = append(*c, int64(x)), raw[n:]
	}
	return nil
}

// ReadRecord reads what json.Marshal made of a Record, and refuses what no baseline can have given.
func ReadRecord(data []byte) (*Record, error) {
	if len(data) > MaxRecordBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d are read", ErrRecord, len(data), MaxRecordBytes)
	}
	r := &Record{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if r.Format != recordFormat {
		return nil, fmt.Errorf("%w: it is %q, and %q is read", ErrRecord, r.Format, recordFormat)
	}
	t, rows := r.Texts, len(r.Texts.Choices)
	ok := rows > 0 && t.Loss >= 0 && t.Loss-t.Loss == 0 && t.Drafted >= 0 && t.Accepted >= 0
	for _, c := range t.Channels {
		total := int64(0)
		for _, n := range c.Hist {
			total += n
		}
		ok = ok && c.N > 0 && total == c.N && len(c.Hist) == histBins && c.Squares >= 0 && c.Squares-c.Squares == 0 && len(c.Experts)%rows == 0
	}
	if !ok {
		return nil, fmt.Errorf("%w: its measurements are damaged", ErrRecord)
	}
	return r, nil
}

// MakeRecord measures o.Baseline alone. A baseline that fails a case, or whose logits are no numbers, is refused.
func MakeRecord(ctx context.Context, o Options) (*Record, error) {
	v := &verification{o: o}
	defer v.close()
	r, err := v.record(ctx)
	if err != nil {
		return nil, fmt.Errorf("record %s: %w", o.Baseline, err)
	}
	for i, c := range cases(v.tok) {
		if _, run, err := r.answer(i, c, v.tok); err != nil || !run.Passed {
			return nil, fmt.Errorf("record %s: case %s: the baseline itself fails, so it proves nothing: %s", o.Baseline, c.name, run.Why)
		}
	}
	return r, nil
}

func (v *verification) record(ctx context.Context) (*Record, error) {
	if err := v.load(v.o.Baseline); err != nil {
		return nil, err
	}
	if err := v.readTexts(); err != nil {
		return nil, err
	}
	v.plan(0)
	side := v.report.Baseline
	r := &Record{Format: recordFormat, Class: v.report.Class, Arithmetic: v.report.Arithmetic, Model: side.Digest, Tokenizer: v.tok.Digest(),
		TextsOf: textsDigest(v.texts), Formats: side.Formats, StepBytes: side.StepBytes, Resident: side.Resident}
	var err error
	if r.CasesOf, err = casesDigest(v.tok, v.template); err != nil {
		return nil, err
	}
	for _, c := range cases(v.tok) {
		prompt, err := c.prompt(v.tok, v.template)
		if err != nil {
			return nil, fmt.Errorf("case %s: %w", c.name, err)
		}
		ids, _, err := v.try(ctx, v.runners[0], c, prompt)
		if err != nil {
			return nil, err
		}
		r.Cases = append(r.Cases, recordedCase{c.name, widen(ids)})
	}
	p, err := newPass(v.runners[0])
	if err != nil {
		return nil, err
	}
	if err := walk(ctx, []*pass{p}, v.texts, nil, v.progress); err != nil {
		return nil, err
	}
	if slices.Min(p.choices) < 0 || p.loss-p.loss != 0 {
		return nil, errors.New("the logits are not numbers")
	}
	r.Texts = p.recorded()
	return r, nil
}

func widen(ids []int32) counts {
	out := make(counts, len(ids))
	for i, id := range ids {
		out[i] = int64(id)
	}
	return out
}

func (p *pass) recorded() recordedTexts {
	t := recordedTexts{Loss: p.loss, Choices: p.choices, Agree: p.agree, Accepted: p.accepted, Drafted: p.drafted}
	for _, o := range p.channels {
		t.Channels = append(t.Channels, recordedChannel{o.name, o.kind, o.n, o.squares, o.hist[:], o.experts})
	}
	return t
}

// pass is the baseline's, as it was when the record was made.
func (r *Record) pass() *pass {
	t := r.Texts
	p := &pass{loss: t.Loss, choices: t.Choices, agree: t.Agree, accepted: t.Accepted, drafted: t.Drafted}
	for _, c := range t.Channels {
		o := &observed{name: c.Name, kind: c.Kind, n: c.N, squares: c.Squares, experts: c.Experts}
		copy(o.hist[:], c.Hist)
		p.channels = append(p.channels, o)
	}
	return p
}

// answer is what the baseline made of case i.
func (r *Record) answer(i int, c testCase, tok *tokenizer.Tokenizer) ([]int32, CaseRun, error) {
	if i >= len(r.Cases) || r.Cases[i].Name != c.name {
		return nil, CaseRun{}, fmt.Errorf("%w: it has no answer to case %s", ErrRecord, c.name)
	}
	var ids []int32
	for _, x := range r.Cases[i].Tokens {
		if x > math.MaxInt32 {
			return nil, CaseRun{}, fmt.Errorf("%w: case %s: there is no token %d", ErrRecord, c.name, x)
		}
		ids = append(ids, int32(x))
	}
	return ids, c.judge(tok.Decode(ids), nil), nil
}

// side is the baseline's part of a report.
func (r *Record) side() Side {
	return Side{Digest: r.Model, Recorded: true, Arithmetic: r.Arithmetic, Formats: r.Formats, StepBytes: r.StepBytes, Resident: r.Resident}
}

// fits tells whether the record was made of what is asked now: a candidate in folder dir, read with tok and template.
func (r *Record) fits(class, dir string, tok *tokenizer.Tokenizer, template *chat.Template, texts [][]int32) error {
	casesOf, err := casesDigest(tok, template)
	if err != nil {
		return err
	}
	source, err := quant.SourceDigest(dir)
	if err != nil {
		return err
	}
	if source == "" {
		source = r.Model // made by somebody who does not say of what; other models are found by what is measured
	}
	for _, x := range []struct{ what, is, want string }{
		{"numeric class", r.Class, class}, {"tokenizer", r.Tokenizer, tok.Digest()}, {"cases", r.CasesOf, casesOf},
		{"held-out text", r.TextsOf, textsDigest(texts)}, {"baseline", r.Model, source},
	} {
		if x.is != x.want {
			return fmt.Errorf("%w: it is of %s %s, and %s is needed", ErrRecord, x.what, short(x.is), short(x.want))
		}
	}
	return nil
}

func short(digest string) string { return digest[:min(len(digest), 12)] }

// casesDigest is of everything that decides what a case's answer is.
func casesDigest(tok *tokenizer.Tokenizer, template *chat.Template) (string, error) {
	h := sha256.New()
	for _, c := range cases(tok) {
		prompt, err := c.prompt(tok, template)
		if err != nil {
			return "", fmt.Errorf("case %s: %w", c.name, err)
		}
		fmt.Fprintln(h, c.name, c.limit, prompt)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func textsDigest(texts [][]int32) string {
	h := sha256.New()
	for _, t := range texts {
		fmt.Fprintln(h, t)
	}
	return hex.EncodeToString(h.Sum(nil))
}
