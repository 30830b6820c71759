package client

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"
)

// FuzzReadError: whatever a server or a proxy answers, it becomes an Error with
// its status, and a time to wait that is none of the past.
func FuzzReadError(f *testing.F) {
	f.Add(422, "application/problem+json", "1", []byte(`{"code":"invalid","field":"at"}`))
	f.Add(502, "text/html", "", []byte("<html>"))
	f.Add(429, "application/problem+json; charset", "9223372036854775807", []byte(`{"status":200,"first_seq":-1}`))
	f.Add(503, "application/problem+json", "-5", []byte(`null`))
	f.Fuzz(func(t *testing.T, status int, kind, wait string, body []byte) {
		resp := &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {kind}, "Retry-After": {wait}}, Body: io.NopCloser(bytes.NewReader(body))}
		e, ok := errors.AsType[*Error](readError(resp))
		if !ok || e.Status != status || e.RetryAfter < 0 || len(e.Detail) > problemBytesMax {
			t.Fatalf("%+v", e)
		}
		_ = e.Error()
	})
}

// FuzzSocketFrame: a frame is an event of the session, an error, or nothing.
func FuzzSocketFrame(f *testing.F) {
	for _, seed := range []string{
		`{"seq":1,"epoch":1,"type":"turn.delta","session_id":"ses_x","text":"a","tokens":[1]}`, `{"type":"subscribed","session_id":"ses_x"}`,
		`{"type":"error","code":"gone","first_seq":9}`, `{"type":"reply","result":{}}`, `[]`, `null`, `{"seq":1e99}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		e, ok, err := decodeFrame(data, "ses_x")
		if ok && (err != nil || e.SessionID != "ses_x" || e.Seq == 0) {
			t.Fatalf("%+v, %v", e, err)
		}
	})
}
