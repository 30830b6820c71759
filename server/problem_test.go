package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"rocket/sessions"
)

// wantProblem checks an error answer: type, status, code and field.
func wantProblem(t *testing.T, header http.Header, body []byte, status int, code, field string) Problem {
	t.Helper()
	if got := header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type %q: %s", got, body)
	}
	var p Problem
	if err := json.Unmarshal(body, &p); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if p.Status != status || p.Code != code || p.Field != field {
		t.Errorf("status %d, code %q, field %q, want %d, %q, %q: %s", p.Status, p.Code, p.Field, status, code, field, body)
	}
	if p.Type != "urn:rocket:problem:"+code || p.Title == "" || p.Detail == "" {
		t.Errorf("type %q, title %q, detail %q", p.Type, p.Title, p.Detail)
	}
	retry := header.Get("Retry-After") != ""
	if want := status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable; retry != want {
		t.Errorf("Retry-After there: %v, want %v", retry, want)
	}
	return p
}

func TestProblemOfErrors(t *testing.T) {
	s := bare(t, Options{})
	for _, c := range []struct {
		err    error
		status int
		code   string
	}{
		{&sessions.Error{Code: sessions.CodeNotFound, Message: "m"}, 404, "not_found"},
		{&sessions.Error{Code: sessions.CodeInvalid, Message: "m", Field: "f"}, 422, "invalid"},
		{&sessions.Error{Code: sessions.CodeSessionClosed, Message: "m"}, 409, "session_closed"},
		{&sessions.Error{Code: sessions.CodeTurnInProgress, Message: "m"}, 409, "turn_in_progress"},
		{&sessions.Error{Code: sessions.CodeQueueFull, Message: "m"}, 429, "queue_full"},
		{&sessions.Error{Code: sessions.CodeContextLimit, Message: "m"}, 422, "context_limit"},
		{&sessions.Error{Code: sessions.CodeIdempotencyMismatch, Message: "m"}, 422, "idempotency_mismatch"},
		{&sessions.Error{Code: sessions.CodeIdempotencyRunning, Message: "m"}, 409, "idempotency_running"},
		{&sessions.Error{Code: sessions.CodeLedgerUnavailable, Message: "m"}, 503, "ledger_unavailable"},
		{&sessions.Error{Code: sessions.CodeGone, Message: "m", FirstSeq: 7}, 410, "gone"},
		{&sessions.Error{Code: sessions.CodeOverloaded, Message: "m"}, 503, "overloaded"},
		{&sessions.Error{Code: sessions.CodeLimit, Message: "m"}, 429, "limit"},
		{fmt.Errorf("deep: %w", &sessions.Error{Code: sessions.CodeNotFound, Message: "m"}), 404, "not_found"},
		{&sessions.Error{Code: "nobody knows it", Message: "m"}, 500, "nobody knows it"},
		{errors.New("password=secret"), 500, "internal"},
		{errDraining, 503, "draining"},
	} {
		p := s.problem(c.err)
		if p.Status != c.status || p.Code != c.code {
			t.Errorf("%v: status %d, code %q", c.err, p.Status, p.Code)
		}
		if (p.retryAfter > 0) != (c.status == 429 || c.status == 503) {
			t.Errorf("%v: Retry-After %v", c.err, p.retryAfter)
		}
		if e, ok := errors.AsType[*sessions.Error](c.err); ok && (p.Field != e.Field || p.FirstSeq != e.FirstSeq || p.Detail != e.Message) {
			t.Errorf("%v: %+v", c.err, p)
		}
		if c.code == "internal" && p.Detail == c.err.Error() {
			t.Error("an internal error is told to the client")
		}
	}
}
