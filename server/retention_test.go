package server

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"rocket/client"
)

// TestEventsGoneByRetention: who asks for events that are gone is told where
// the log begins; who names no position starts there.
func TestEventsGoneByRetention(t *testing.T) {
	var url string
	w := start(t, worldOptions{database: func(u string) string { url = u; return u }})
	s := w.create("func main() {")
	w.turn(s.ID, 3)
	if _, err := w.api.Detach(w.ctx(), s.ID, client.DetachRequest{}, client.CallOptions{}); err != nil { // out of memory
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, sql := range []string{"UPDATE sessions SET first_seq = 2, gone_epoch = 1", "DELETE FROM events WHERE seq < 2"} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	path := pathSessions + "/" + s.ID + "/events"
	for _, accept := range []string{"application/json", "text/event-stream"} {
		got := w.do("GET", path+"?from=1", "", "Accept", accept)
		p := wantProblem(t, got.header, got.body, http.StatusGone, "gone", "")
		if p.FirstSeq != 2 {
			t.Errorf("%s: first_seq %d", accept, p.FirstSeq)
		}
	}
	got := w.do("GET", path+"?from=1", "", "Last-Event-ID", "1-0")
	wantProblem(t, got.header, got.body, http.StatusGone, "gone", "")
	for _, query := range []string{"", "?from=2"} {
		if got := w.do("GET", path+query, ""); got.status != http.StatusOK || !strings.Contains(string(got.body), fmt.Sprintf(`"data":[{"seq":%d,`, 2)) {
			t.Errorf("%q: %d %s", query, got.status, got.body)
		}
	}
	for e, err := range w.api.Follow(w.ctx(), s.ID, client.Position{}, client.FollowOptions{}) {
		if err != nil || e.Seq != 2 {
			t.Errorf("a reader that names no position: seq %d, %v", e.Seq, err)
		}
		break
	}
}
