package server

import (
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"rocket/client"
)

// scrape reads /metrics into a map from name with labels to value.
func (w *world) scrape() map[string]float64 {
	w.t.Helper()
	a := w.do("GET", "/metrics", "")
	if a.status != http.StatusOK {
		w.t.Fatalf("/metrics: %d %s", a.status, a.body)
	}
	values := map[string]float64{}
	for _, line := range strings.Split(string(a.body), "\n") {
		name, value, ok := strings.Cut(line, " ")
		if strings.HasPrefix(line, "#") || !ok {
			continue
		}
		if i := strings.LastIndex(line, " "); i > 0 {
			name, value = line[:i], line[i+1:]
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			w.t.Fatalf("line %q: %v", line, err)
		}
		values[name] = n
	}
	return values
}

func TestMetricsAndStats(t *testing.T) {
	w := start(t, worldOptions{})
	s := w.create("func main() {")
	w.turn(s.ID, 10)
	if _, err := w.api.Fork(w.ctx(), s.ID, client.ForkRequest{N: new(3)}, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.api.CloseSession(w.ctx(), s.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	p := w.dial(s.ID, "")
	p.until("subscribed")
	w.do("GET", "/none/such", "")
	wanted := map[string]float64{
		`rocket_sessions{state="idle"}`:       3,
		`rocket_sessions{state="closed"}`:     1,
		`rocket_forks_total`:                  3,
		`rocket_tokens_generated_total`:       10,
		`rocket_tokens_committed_total`:       10,
		`rocket_turns_open`:                   0,
		`rocket_turn_ttft_seconds_count`:      1,
		`rocket_turn_tokens_per_second_count`: 1,
		`rocket_turns_uncounted_total`:        0,
		`rocket_websocket_connections`:        1,
		`rocket_sse_connections`:              0,
		`rocket_ledger_down_seconds`:          0,
		`rocket_http_request_duration_seconds_count{method="POST",route="/v1/sessions/{id}/fork",status="201"}`: 1,
		`rocket_http_request_duration_seconds_count{method="GET",route="other",status="404"}`:                   1,
		`rocket_turns_total{finish_reason="length",state="completed"}`:                                          1,
	}
	// A client may have its answer, and a turn its end, a moment before that is counted.
	ctx, got := w.ctx(), w.scrape()
	differ := func() (names []string) {
		for name, want := range wanted {
			if v, ok := got[name]; !ok || v != want {
				names = append(names, fmt.Sprintf("%s is %v (there: %v), want %v", name, v, ok, want))
			}
		}
		return names
	}
	for len(differ()) > 0 && ctx.Err() == nil {
		got = w.scrape()
	}
	for _, what := range differ() {
		t.Error(what)
	}
	for _, name := range []string{"rocket_pages_total", "rocket_states_total", "rocket_steps_total", "rocket_ledger_commits_total", "rocket_ledger_commit_seconds_total", "go_goroutines"} {
		if got[name] <= 0 {
			t.Errorf("%s is %v", name, got[name])
		}
	}
	for name := range got {
		if !regexp.MustCompile(`^(rocket|go|process|promhttp)_`).MatchString(name) {
			t.Errorf("metric %s belongs to nobody", name)
		}
	}
	var stats Stats
	w.do("GET", "/v1/stats", "").into(t, http.StatusOK, &stats)
	if stats.Tokens.Generated != 10 || stats.Sessions.ByState["idle"] != 3 || stats.Model.Name != "nano" || stats.Pools.PagesTotal <= 0 {
		t.Errorf("stats %+v", stats)
	}
}
