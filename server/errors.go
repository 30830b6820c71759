package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"rocket/sessions"
)

// Codes of errors that arise before a call reaches sessions.
const (
	codeMalformed        = "malformed" // the body or frame is not JSON, or not UTF-8
	codeInvalid          = string(sessions.CodeInvalid)
	codeInternal         = string(sessions.CodeInternal)
	codeTooLarge         = "too_large"
	codeMediaType        = "unsupported_media_type"
	codeNoRoute          = "no_such_route"
	codeMethod           = "method_not_allowed"
	codeBodyTimeout      = "body_timeout"
	codeNotAcceptable    = "not_acceptable"
	codeHostNotAllowed   = "host_not_allowed"
	codeCrossOrigin      = "cross_origin"
	codeUpgradeRequired  = "upgrade_required"
	codeDraining         = "draining"
	codeTimeout          = "timeout" // a command on a socket took longer than Options.CallTimeout
	codeSubscriptionsMax = "too_many_subscriptions"
	codeConnectionsMax   = "too_many_connections"
	codeHeldMax          = "too_many_bodies"
	codeAdminKey         = "admin_key_required"
	codePeerGone         = "owner_unreachable" // another server has the session and does not answer
)

// statuses is the one mapping from error codes to HTTP status; a code that is
// not here is a fault of ours and becomes 500.
var statuses = map[string]int{
	string(sessions.CodeNotFound):            http.StatusNotFound,
	string(sessions.CodeInvalid):             http.StatusUnprocessableEntity,
	string(sessions.CodeSessionClosed):       http.StatusConflict,
	string(sessions.CodeTurnInProgress):      http.StatusConflict,
	string(sessions.CodeQueueFull):           http.StatusTooManyRequests,
	string(sessions.CodeContextLimit):        http.StatusUnprocessableEntity,
	string(sessions.CodeIdempotencyMismatch): http.StatusUnprocessableEntity,
	string(sessions.CodeIdempotencyRunning):  http.StatusConflict,
	string(sessions.CodeLedgerUnavailable):   http.StatusServiceUnavailable,
	string(sessions.CodeGone):                http.StatusGone,
	string(sessions.CodeOverloaded):          http.StatusServiceUnavailable,
	string(sessions.CodeLimit):               http.StatusTooManyRequests,
	string(sessions.CodeUnauthenticated):     http.StatusUnauthorized,
	string(sessions.CodeModelMismatch):       http.StatusConflict,
	string(sessions.CodeMoved):               http.StatusServiceUnavailable,
	string(sessions.CodeTooManyFailures):     http.StatusTooManyRequests,
	string(sessions.CodeQuarantined):         http.StatusConflict,
	string(sessions.CodeInternal):            http.StatusInternalServerError,
	codeMalformed:                            http.StatusBadRequest,
	codeTooLarge:                             http.StatusRequestEntityTooLarge,
	codeMediaType:                            http.StatusUnsupportedMediaType,
	codeNoRoute:                              http.StatusNotFound,
	codeMethod:                               http.StatusMethodNotAllowed,
	codeBodyTimeout:                          http.StatusRequestTimeout,
	codeNotAcceptable:                        http.StatusNotAcceptable,
	codeHostNotAllowed:                       http.StatusForbidden,
	codeCrossOrigin:                          http.StatusForbidden,
	codeUpgradeRequired:                      http.StatusUpgradeRequired,
	codeDraining:                             http.StatusServiceUnavailable,
	codeTimeout:                              http.StatusServiceUnavailable,
	codeAdminKey:                             http.StatusForbidden,
	codePeerGone:                             http.StatusServiceUnavailable,
	codeSubscriptionsMax:                     http.StatusTooManyRequests,
	codeConnectionsMax:                       http.StatusServiceUnavailable,
	codeHeldMax:                              http.StatusServiceUnavailable,
}

const (
	// problemTextMax bounds what an answer repeats of a request: more is cut.
	problemTextMax = 512
	// problemErrorsMax is how many wrong fields are told of.
	problemErrorsMax = 20
)

// cut shortens what an answer repeats, and leaves out what looks like a key.
func cut(text string) string {
	if len(text) > 4*problemTextMax {
		text = text[:4*problemTextMax]
	}
	text = sessions.RedactKeys(text)
	if len(text) <= problemTextMax {
		return text
	}
	return strings.ToValidUTF8(text[:problemTextMax], "") + "…"
}

// retryAfterSeconds is how long a client that was refused for load waits.
const retryAfterSeconds = 1

// Problem is the body of every error answer (RFC 9457). Code is what clients
// branch on; Field names the offending request field, dotted.
type Problem struct {
	Type     string         `json:"type" doc:"urn:rocket:problem:CODE"`
	Title    string         `json:"title"`
	Status   int            `json:"status"`
	Detail   string         `json:"detail"`
	Code     string         `json:"code"`
	Field    string         `json:"field,omitempty" doc:"the request field that is wrong, dotted"`
	FirstSeq int64          `json:"first_seq,omitempty" doc:"with code gone: the first seq that is left"`
	Errors   []ProblemField `json:"errors,omitempty" doc:"the fields that are wrong, 20 at most, where there is more than one"`

	retryAfter int // seconds; 0: not told
}

// ProblemField is one wrong field of a request.
type ProblemField struct {
	Location string `json:"location" doc:"body, query, path or header, then the field"`
	Message  string `json:"message"`
}

// Error gives the detail.
func (p *Problem) Error() string { return p.Detail }

// GetStatus makes a Problem a huma.StatusError.
func (p *Problem) GetStatus() int { return p.Status }

// GetHeaders makes a Problem a huma.HeadersError.
func (p *Problem) GetHeaders() http.Header {
	h := http.Header{}
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(p.retryAfter))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="rocket"`)
	}
	return h
}

// ContentType makes huma write a Problem with its own media type.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

func newProblem(status int, code, detail, field string) *Problem {
	p := &Problem{
		Type: "urn:rocket:problem:" + code, Title: http.StatusText(status), Status: status,
		Detail: cut(detail), Code: code, Field: cut(field),
	}
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		p.retryAfter = retryAfterSeconds
	}
	return p
}

func codeProblem(code, detail, field string) *Problem {
	status, ok := statuses[code]
	if !ok {
		status = http.StatusInternalServerError
	}
	return newProblem(status, code, detail, field)
}

// problem turns any error of a call into what the client is told. Errors that
// sessions did not make on purpose are logged in full and told as "internal".
func (s *Server) problem(err error) *Problem {
	if p, ok := errors.AsType[*Problem](err); ok {
		return p
	}
	if e, ok := errors.AsType[*sessions.Error](err); ok {
		p := codeProblem(string(e.Code), e.Message, e.Field)
		p.FirstSeq = e.FirstSeq
		if e.RetryAfter > 0 {
			p.retryAfter = int((e.RetryAfter + time.Second - 1) / time.Second)
		}
		if p.Status == http.StatusInternalServerError {
			s.log.Error("call failed", "err", err)
		}
		return p
	}
	switch {
	case errors.Is(err, errNoCredentials):
		return codeProblem(string(sessions.CodeUnauthenticated), "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", "")
	case errors.Is(err, errKeyGone):
		return codeProblem(string(sessions.CodeUnauthenticated), "the API key is not valid any more; what the call began goes on", "")
	case errors.Is(err, errDraining):
		return codeProblem(codeDraining, "the server is shutting down", "")
	case errors.Is(err, errPeerGone):
		return codeProblem(codePeerGone, "another server has the session and does not answer; it is taken over if that server is gone", "")
	case errors.Is(err, errPeerAddress):
		return codeProblem(codePeerGone, "another server has the session, and its address does not lead there", "")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		// The caller went away, or waited as long as it may: no fault of ours.
		return codeProblem(codeTimeout, "the call was given up; it may have had its effect", "")
	}
	s.log.Error("call failed", "err", err)
	return codeProblem(codeInternal, "internal error; the server's log has the cause", "")
}

// humaProblem takes the place of huma.NewError: it gives huma's own refusals
// (types, unknown fields, sizes) the same shape and codes as all the others.
func humaProblem(status int, msg string, errs ...error) huma.StatusError {
	p := newProblem(status, humaCode(status), msg, "")
	for _, err := range errs {
		if err == nil || len(p.Errors) == problemErrorsMax {
			continue
		}
		if inner, ok := errors.AsType[*Problem](err); ok {
			return inner
		}
		f := ProblemField{Message: err.Error()}
		if d, ok := err.(huma.ErrorDetailer); ok {
			detail := d.ErrorDetail()
			f = ProblemField{Location: detail.Location, Message: detail.Message}
			if m := missingProperty.FindStringSubmatch(f.Message); m != nil {
				f.Location += "." + m[1]
			}
		}
		f.Location, f.Message = cut(f.Location), cut(f.Message)
		p.Errors = append(p.Errors, f)
	}
	if msg == "cannot read request body" { // the client went away or sent less than it promised
		*p = *codeProblem(codeMalformed, "the request body ended early", "body")
		return p
	}
	if status == http.StatusRequestEntityTooLarge {
		p.Field, p.Detail = "body", fmt.Sprintf("the request body is larger than %d bytes", bodyBytesMax)
	}
	if len(p.Errors) > 0 {
		first := p.Errors[0]
		p.Field = fieldOf(first.Location)
		p.Detail = first.Message
		if p.Field != "" {
			p.Detail = cut(p.Field + ": " + first.Message)
		}
	}
	if len(p.Errors) == 1 {
		p.Errors = nil
	}
	return p
}

var missingProperty = regexp.MustCompile(`^expected required property (\S+) to be present$`)

func humaCode(status int) string {
	switch status {
	case http.StatusBadRequest:
		return codeMalformed
	case http.StatusRequestEntityTooLarge:
		return codeTooLarge
	case http.StatusUnsupportedMediaType:
		return codeMediaType
	case http.StatusUnprocessableEntity:
		return codeInvalid
	case http.StatusRequestTimeout:
		return codeBodyTimeout
	case http.StatusNotAcceptable:
		return codeNotAcceptable
	}
	return codeInternal
}

// fieldOf turns huma's location ("body.stop[2]", "query.limit") into the field
// that a client knows.
func fieldOf(location string) string {
	where, field, found := strings.Cut(location, ".")
	if !found || field == "" {
		return where
	}
	switch where {
	case "body", "frame", "query", "path", "header":
		return field
	}
	return location
}

// writeProblem answers outside of huma.
func writeProblem(w http.ResponseWriter, p *Problem) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	for k, v := range p.GetHeaders() {
		h[k] = v
	}
	w.WriteHeader(p.Status)
	// A failed write means that the client is gone; nobody is left to tell.
	_ = json.NewEncoder(w).Encode(p)
}
