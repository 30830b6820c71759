package server

import (
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"rocket/client"
)

// TestEventsThatCannotBeWritten: an event that has no JSON is an error, not an
// answer without a body.
func TestEventsThatCannotBeWritten(t *testing.T) {
	var url string
	w := start(t, worldOptions{database: func(u string) string { url = u; return u }})
	s := w.create("func main() {")
	if _, err := w.api.Detach(w.ctx(), s.ID, client.DetachRequest{}, client.CallOptions{}); err != nil { // out of memory
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "UPDATE events SET time = '10001-01-01'"); err != nil { // RFC 3339 ends before
		t.Fatal(err)
	}
	got := w.do("GET", pathSessions+"/"+s.ID+"/events", "")
	wantProblem(t, got.header, got.body, http.StatusInternalServerError, "internal", "")
}
