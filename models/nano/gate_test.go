package nano_test

import (
	"testing"

	"rocket/engine/verify"
	"rocket/kernels"
	"rocket/models/nano"
)

// TestGate: the embedded weights pass the quality gate against the record of the BF16 weights that they were made of.
func TestGate(t *testing.T) {
	if testing.Short() {
		t.Skip("twelve cases and the held-out text take ten seconds")
	}
	record, err := verify.ReadRecord(nano.Baseline)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := nano.Extract(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	docs, err := nano.HeldOut()
	if err != nil {
		t.Fatal(err)
	}
	dev, err := kernels.Open("auto", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	r, err := verify.Run(t.Context(), verify.Options{Device: dev, Class: kernels.ClassBF16, Record: record, Candidate: dir, HeldOut: docs})
	if err != nil {
		t.Fatal(err)
	}
	if r.Passed != 12 || r.Total != 12 || len(r.Regressions) != 0 {
		t.Errorf("%d of %d cases; regressions: %q", r.Passed, r.Total, r.Regressions)
	}
	t.Logf("perplexity %.4f of %.4f, parity %.4f, accepted length %.3f of %.3f", r.Combined.Perplexity.Candidate, r.Combined.Perplexity.Baseline,
		r.Combined.Parity, r.Combined.Drafts.Candidate.AcceptedLength, r.Combined.Drafts.Baseline.AcceptedLength)
}
