package sessions

import (
	"errors"
	"fmt"
	"time"
)

// Code is what callers branch on.
type Code string

const (
	CodeNotFound            Code = "not_found"
	CodeInvalid             Code = "invalid" // Field names what is wrong
	CodeSessionClosed       Code = "session_closed"
	CodeTurnInProgress      Code = "turn_in_progress"
	CodeQueueFull           Code = "queue_full"
	CodeContextLimit        Code = "context_limit"
	CodeIdempotencyMismatch Code = "idempotency_mismatch" // same key, another body
	CodeIdempotencyRunning  Code = "idempotency_running"  // same key, not finished yet
	CodeLedgerUnavailable   Code = "ledger_unavailable"
	CodeGone                Code = "gone" // events past their retention; FirstSeq is what is left
	CodeOverloaded          Code = "overloaded"
	CodeLimit               Code = "limit"               // a tenant's quota; Field names it
	CodeUnauthenticated     Code = "unauthenticated"     // no API key that is good
	CodeModelMismatch       Code = "model_mismatch"      // the session is of another model or class than this server runs
	CodeMoved               Code = "session_moved"       // its epoch has risen under a reader, who must come back with the last one it saw
	CodeTooManyFailures     Code = "too_many_failures"   // of authentication, from one address
	CodeQuarantined         Code = "session_quarantined" // its server is gone and its rows keep it from being taken over
	CodeInternal            Code = "internal"
)

// Error is every error a Manager returns on purpose. Message is for the
// caller; the cause, if there is one, is for the operator.
type Error struct {
	Code     Code
	Message  string
	Field    string // request field, dotted, for CodeInvalid, CodeLimit, CodeContextLimit
	FirstSeq int64  // CodeGone
	// RetryAfter is when another attempt may succeed; 0: nobody knows.
	RetryAfter time.Duration
	cause      error
}

func (e *Error) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.cause)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.cause }

// ErrorCode gives the code of err, CodeInternal for one that has none, ""
// for nil.
func ErrorCode(err error) Code {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return CodeInternal
}

func fail(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func invalid(field, format string, args ...any) *Error {
	return &Error{Code: CodeInvalid, Field: field, Message: fmt.Sprintf(format, args...)}
}

func notFound(kind, id string) *Error {
	return &Error{Code: CodeNotFound, Field: kind + "_id", Message: fmt.Sprintf("%s %q does not exist", kind, id)}
}
