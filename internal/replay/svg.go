package replay

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
)

// Size of a picture and of its margins, in pixels.
const (
	svgWidth, svgHeight            = 720, 360
	svgLeft, svgRight              = 52, 692
	svgTop, svgBottom              = 16, 312
	svgLegendX, svgLegendY, svgRow = 430, 226, 20
)

var svgColours = []string{"#2563eb", "#d97706", "#059669", "#7c3aed"}

// SVG draws hit rates over the budget, one curve a policy, from the results of a Sweep.
func SVG(out io.Writer, results []Result) error {
	var policies []string
	low, ideal := 1.0, 0.0
	for _, r := range results {
		if r.Percent == 0 {
			continue
		}
		low, ideal = min(low, r.HitRate), max(ideal, r.IdealRate)
		if !slices.Contains(policies, r.Policy) {
			policies = append(policies, r.Policy)
		}
	}
	if len(policies) == 0 {
		return fmt.Errorf("draw: no results of a sweep")
	}
	step := 0.1
	if ideal-low < 0.1 {
		step = 0.005
	}
	bottom, top := math.Floor(low/step)*step, math.Ceil(ideal/step+0.2)*step
	x := func(percent float64) float64 { return svgLeft + (svgRight-svgLeft)*percent/100 }
	y := func(rate float64) float64 { return svgBottom - (svgBottom-svgTop)*(rate-bottom)/(top-bottom) }
	w := bufio.NewWriter(out)
	fmt.Fprintf(w, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
		svgWidth, svgHeight, svgWidth, svgHeight)
	for v := bottom; v < top+step/2; v += step {
		fmt.Fprintf(w, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.1f%%</text>\n",
			svgLeft, svgRight, y(v), y(v), svgLeft-6, y(v)+4, v*100)
	}
	for p := 0; p <= 100; p += 10 {
		fmt.Fprintf(w, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d%%</text>\n", x(float64(p)), svgBottom+18, p)
	}
	first := results[slices.IndexFunc(results, func(r Result) bool { return r.Percent > 0 })]
	fmt.Fprintf(w, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">budget, of the %.0f GiB that nothing would be evicted from (%s, %s, %s state)</text>\n",
		(svgLeft+svgRight)/2, svgBottom+36, float64(first.Budget)*100/float64(first.Percent)/(1<<30), first.Format, first.Geometry, first.State)
	fmt.Fprintf(w, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#111\" stroke-dasharray=\"4 3\"/>\n", svgLeft, svgRight, y(ideal), y(ideal))
	svgLegend(w, 0, "#111", "ideal: unlimited, whole pages")
	for i, policy := range policies {
		colour := svgColours[i%len(svgColours)]
		fmt.Fprintf(w, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"", colour)
		for _, r := range results {
			if r.Percent > 0 && r.Policy == policy {
				fmt.Fprintf(w, "%.1f,%.1f ", x(float64(r.Percent)), y(r.HitRate))
			}
		}
		fmt.Fprintf(w, "\"/>\n")
		svgLegend(w, i+1, colour, "prompt tokens hit, "+policy)
	}
	fmt.Fprintf(w, "</svg>\n")
	if err := w.Flush(); err != nil {
		return fmt.Errorf("draw: %w", err)
	}
	return nil
}

func svgLegend(w io.Writer, row int, colour, text string) {
	fmt.Fprintf(w, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
		svgLegendX, svgLegendY+row*svgRow, colour, svgLegendX+18, svgLegendY+10+row*svgRow, text)
}
