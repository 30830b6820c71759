package server

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"rocket/client"
	"rocket/engine"
	"rocket/sessions"
)

// floodWorld is a server whose device holds a few lines of nano, without a host tier, and two tenants of it.
func floodWorld(t *testing.T, pages, states int) (w *world, page, state int64) {
	l, err := loadNano()
	if err != nil {
		t.Fatal(err)
	}
	layout := l.model.Layout()
	page, state = int64(layout.PageStride), int64(layout.SlotStride)
	return start(t, worldOptions{server: Options{RequireKeys: true},
		engine: engine.Options{PageBytes: int64(pages) * page, SnapshotBytes: int64(states) * state, HostBytes: -1}}), page, state
}

// prompt is a text of a few pages that shares nothing with those of other numbers.
func prompt(n int) string {
	return fmt.Sprint(n, strings.Repeat(fmt.Sprintf(" the %dth prompt fills pages,", n), 30))
}

// ask runs a short turn on a new session and returns how many tokens of the text were not computed.
func (w *world) ask(c *client.Client, text string) client.Usage {
	w.t.Helper()
	s, err := c.Create(w.ctx(), client.CreateRequest{}, client.CallOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	n := 1
	turn, err := c.RunTurn(w.ctx(), s.ID, client.TurnRequest{Input: &text, MaxTokens: &n}, client.CallOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := c.CloseSession(w.ctx(), s.ID, client.CallOptions{}); err != nil {
		w.t.Fatal(err)
	}
	return *turn.Usage
}

// TestFloodOfATenantAtItsLimit: a tenant floods a small device. With a limit of resident bytes the other's prompt is
// found again, and so is the flood's own latest one; without, the other has lost its.
func TestFloodOfATenantAtItsLimit(t *testing.T) {
	for _, limited := range []bool{true, false} {
		t.Run(fmt.Sprintf("limited %t", limited), func(t *testing.T) {
			w, page, state := floodWorld(t, 14, 12)
			_, flood := w.key("flood", false)
			_, quiet := w.key("quiet", false)
			admin, _ := w.key("ops", true)
			limit := 6*page + 4*state
			if limited {
				if err := w.manager.Keys().SetQuotas(w.ctx(), "flood", sessions.Quotas{ResidentBytes: &limit}); err != nil {
					t.Fatal(err)
				}
			}
			w.ask(quiet, prompt(0))
			warm := w.ask(quiet, prompt(0))
			if warm.CachedTokens < 256 {
				t.Fatalf("the prompt's second use: %+v", warm)
			}
			for i := range 5 {
				w.ask(flood, prompt(1+i))
			}
			own, other := w.ask(flood, prompt(5)), w.ask(quiet, prompt(0))
			if own.CachedTokens < 256 {
				t.Errorf("the flood's own latest prompt: %+v", own)
			}
			if hit := other.CachedTokens == warm.CachedTokens; hit != limited {
				t.Errorf("the other's prompt after the flood: %+v, before %+v", other, warm)
			}
			var stats Stats
			w.do("GET", "/v1/stats", "", "X-Api-Key", admin.Secret).into(t, http.StatusOK, &stats)
			i := slices.IndexFunc(stats.Resident.Tenants, func(s StatsTenant) bool { return s.Tenant == "flood" })
			if i < 0 {
				t.Fatalf("stats %+v", stats.Resident)
			}
			got := stats.Resident.Tenants[i]
			if limited != (got.LimitBytes != nil) || limited != (stats.Resident.Evicted > 0) || limited && got.DeviceBytes > limit || got.DeviceBytes == 0 {
				t.Errorf("stats %+v: the limit is %d", stats.Resident, limit)
			}
			if strings.Contains(string(w.do("GET", "/metrics", "", "X-Api-Key", admin.Secret).body), "rocket_quota_evicted_total 0\n") == limited {
				t.Error("the metric says something else")
			}
		})
	}
}

// TestResidentLimitAnswers: a turn beside one that fills the limit is refused like those of other quotas, and is
// taken when that one has ended.
func TestResidentLimitAnswers(t *testing.T) {
	w, _, _ := floodWorld(t, 14, 12)
	k, c := w.key("a", false)
	one := int64(1)
	if err := w.manager.Keys().SetQuotas(w.ctx(), "a", sessions.Quotas{ResidentBytes: &one}); err != nil {
		t.Fatal(err)
	}
	first := w.createBy(c, "func main() {")
	many := 100_000
	turn, err := c.StartTurn(w.ctx(), first.ID, client.TurnRequest{MaxTokens: &many, IgnoreEOS: true}, client.CallOptions{})
	if err != nil {
		t.Fatal(err)
	}
	second := w.createBy(c, "func other() {") // stays cold
	for _, path := range []string{"/turns", "/resume"} {
		body := ""
		if path == "/turns" {
			body = `{"max_tokens":1}`
		}
		var p Problem
		got := w.do("POST", "/v1/sessions/"+second.ID+path, body, "X-Api-Key", k.Secret)
		got.into(t, http.StatusTooManyRequests, &p)
		if p.Code != "limit" || p.Field != "resident_bytes" || got.header.Get("Retry-After") == "" {
			t.Errorf("%s: %+v, Retry-After %q", path, p, got.header.Get("Retry-After"))
		}
	}
	if _, err := c.Cancel(w.ctx(), first.ID, client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if out, err := w.manager.WaitTurn(w.ctx(), "a", first.ID, turn.ID); err != nil || out.State != sessions.TurnCancelled {
		t.Fatalf("the open turn: %+v, %v", out, err)
	}
	if _, err := c.RunTurn(w.ctx(), second.ID, greedy(1), client.CallOptions{}); err != nil {
		t.Errorf("after its end: %v", err)
	}
}
