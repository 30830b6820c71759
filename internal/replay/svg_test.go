package replay

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// TestSVG: a sweep's picture is well-formed and has a curve a policy with a point a budget.
func TestSVG(t *testing.T) {
	tr := excerpt(t, "kvct", "kvct_0019.json.gz")
	var all []Result
	if err := Sweep(t.Context(), tr, Options{Geometry: geometry(t, "nano", "f32")}, Policies, func(r Result) error {
		all = append(all, r)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if want := 1 + len(SweepSteps)*len(Policies); len(all) != want || all[0].Budget != 0 || all[1].IdealTokens != all[0].KnownTokens {
		t.Fatalf("%d results, want %d; the first is %+v", len(all), want, all[0])
	}
	var b bytes.Buffer
	if err := SVG(&b, all); err != nil {
		t.Fatal(err)
	}
	lines := 0
	for d := xml.NewDecoder(&b); ; {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := tok.(xml.StartElement); ok && e.Name.Local == "polyline" {
			lines++
			for _, a := range e.Attr {
				if a.Name.Local == "points" && len(strings.Fields(a.Value)) != len(SweepSteps) {
					t.Errorf("a curve of %d points", len(strings.Fields(a.Value)))
				}
			}
		}
	}
	if lines != len(Policies) {
		t.Errorf("%d curves, want %d", lines, len(Policies))
	}
	if err := SVG(io.Discard, all[:1]); err == nil {
		t.Error("a walk without a budget was drawn")
	}
}
