package verify

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"rocket/engine/model"
	"rocket/engine/quant"
	"rocket/kernels"
	"rocket/models/nano"
)

// roundTrip is a record as it comes out of its file.
func roundTrip(t *testing.T, r *Record) *Record {
	t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadRecord(data)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// TestRecord: against a record of the baseline everything is as against the baseline, but for what needs its values.
func TestRecord(t *testing.T) {
	base, out := smallModel(t), t.TempDir()
	made, err := quant.Run(t.Context(), quant.Options{Source: base, Out: out, Map: quant.Map{model.RoutedExperts: quant.NVFP4}})
	if err != nil {
		t.Fatal(err)
	}
	docs, err := nano.HeldOut()
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Device: openDevice(t), Class: kernels.ClassBF16, Baseline: base, Candidate: made.Dir, HeldOut: docs[:1], SkipFamilies: true}
	want, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	v := &verification{o: o}
	defer v.close()
	r, err := v.record(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	o.Record, o.Baseline = roundTrip(t, r), "/no/such/model"
	o.Record.Arithmetic = "another/1" // is told, and no reason to refuse
	got, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Baseline.Recorded || got.Baseline.Arithmetic != "another/1" || got.Arithmetic != r.Arithmetic || len(got.Families) != 0 {
		t.Errorf("baseline %+v, arithmetic %s", got.Baseline, got.Arithmetic)
	}
	got.Baseline.Recorded, got.Baseline.Arithmetic, got.Baseline.Dir = false, "", want.Baseline.Dir
	for i := range want.Combined.Channels {
		want.Combined.Channels[i].Error = nil
	}
	for i := range want.Combined.Kinds {
		want.Combined.Kinds[i].MaxError = nil
	}
	a, _ := json.Marshal(want)
	b, _ := json.Marshal(got)
	if string(a) != string(b) {
		t.Errorf("by the record:\n%.3000s\nby the baseline:\n%.3000s", b, a)
	}
	o.Baseline = base
	if _, err := MakeRecord(t.Context(), o); err == nil || !strings.Contains(err.Error(), "the baseline itself fails") {
		t.Error("a baseline that knows no Go was recorded:", err)
	}
	testRecordRefuses(t, o, r)
}

// testRecordRefuses: a record that is not of what is asked is refused by what differs.
func testRecordRefuses(t *testing.T, o Options, good *Record) {
	docs := o.HeldOut
	for want, spoil := range map[string]func(*Record, *Options){
		"it is of numeric class bf16, and f32 is needed": func(_ *Record, o *Options) { o.Class = kernels.ClassF32 },
		"it is of tokenizer x":                           func(r *Record, _ *Options) { r.Tokenizer = "x" },
		"it is of cases x":                               func(r *Record, _ *Options) { r.CasesOf = "x" },
		"it is of held-out text":                         func(_ *Record, o *Options) { o.HeldOut = []string{docs[0] + "x"} },
		"it is of baseline x":                            func(r *Record, _ *Options) { r.Model = "x" },
		"it has no answer to case swap":                  func(r *Record, _ *Options) { r.Cases = slices.Delete(slices.Clone(r.Cases), 2, 3) },
		"there is no token":                              func(r *Record, _ *Options) { r.Cases = []recordedCase{{"max", counts{1 << 40}}} },
		"different models":                               func(r *Record, _ *Options) { r.Texts.Channels = r.Texts.Channels[1:] },
	} {
		r, o := *good, o
		o.Record = &r
		spoil(&r, &o)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		} else if !errors.Is(err, ErrRecord) && want != "different models" {
			t.Errorf("not ErrRecord: %v", err)
		}
	}
}

func smallRecord() *Record {
	hist := make(counts, histBins)
	hist[3] = 4
	return &Record{Format: recordFormat, Texts: recordedTexts{Loss: 1, Choices: counts{1, 2}, Channels: []recordedChannel{
		{Name: "a", Kind: model.TapRouter, N: 4, Squares: 2, Hist: hist, Experts: counts{0, 1, 1 << 40, 3}}}}}
}

func TestReadRecord(t *testing.T) {
	if got := roundTrip(t, smallRecord()); !slices.Equal(got.Texts.Channels[0].Experts, counts{0, 1, 1 << 40, 3}) || !slices.Equal(got.Texts.Choices, counts{1, 2}) {
		t.Errorf("%+v", got)
	}
	for what, spoil := range map[string]func(*Record){
		"another form":          func(r *Record) { r.Format = "rocket verify baseline 0" },
		"no text":               func(r *Record) { r.Texts.Choices = nil },
		"a histogram too short": func(r *Record) { r.Texts.Channels[0].Hist = counts{4} },
		"another sum":           func(r *Record) { r.Texts.Channels[0].N = 5 },
		"a square below zero":   func(r *Record) { r.Texts.Channels[0].Squares = -1 },
		"experts of half a row": func(r *Record) { r.Texts.Channels[0].Experts = counts{1} },
	} {
		r := smallRecord()
		spoil(r)
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ReadRecord(data); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: error %v", what, err)
		}
	}
	for _, text := range []string{"", "{}", "[]", `{"texts":{"choices":"!"}}`, `{"texts":{"choices":"AAAA"}}`, strings.Repeat(" ", MaxRecordBytes+1)} {
		if _, err := ReadRecord([]byte(text)); !errors.Is(err, ErrRecord) {
			t.Errorf("%.40q: error %v", text, err)
		}
	}
	if _, err := json.Marshal(counts{-1}); err == nil {
		t.Error("a count below zero was written")
	}
}

func FuzzReadRecord(f *testing.F) {
	data, err := json.Marshal(smallRecord())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"format":"rocket verify baseline 1"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := ReadRecord(data)
		if err != nil {
			return
		}
		if again := roundTrip(t, r); !slices.Equal(again.Texts.Choices, r.Texts.Choices) {
			t.Error("it reads differently when it is written again")
		}
		r.pass()
	})
}
