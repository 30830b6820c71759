// Package client is a Go client of Rocket's native API.
//
// Invariants:
//   - Every mutating call carries an idempotency key, so that a call which is
//     repeated after a lost answer has its effect once.
//   - Follow gives each event of a session once, in order of seq, over any
//     number of connections; after a server crash the first event of the next
//     epoch says which ones never happened.
//   - Nothing here needs the server's packages: the types are the wire's.
package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Limits of the client's own patience.
const (
	retriesDefault  = 4
	retryFirst      = 200 * time.Millisecond
	retryMax        = 5 * time.Second
	answerBytesMax  = 256 << 20 // larger answers are an error, not an exhausted memory
	problemBytesMax = 1 << 20
	retryAfterMax   = 24 * 60 * 60 // seconds; what a server says beyond that is no time to wait
)

// Options configures a Client; the zero value works.
type Options struct {
	HTTP    *http.Client // default: one of its own, without a timeout; calls take contexts
	APIKey  string       // sent with every call; "" for a server without keys
	Retries int          // repeated attempts after lost connections, 429 and 503; default 4, negative none
}

// Client calls one server. Its methods may be used by many goroutines.
type Client struct {
	base    *url.URL
	http    *http.Client
	auth    http.Header // of every request
	retries int
}

// Error is what a server answered instead of a result.
type Error struct {
	Status     int           `json:"status"`
	Code       string        `json:"code"` // what to branch on
	Title      string        `json:"title"`
	Detail     string        `json:"detail"`
	Field      string        `json:"field"`     // the request field that is wrong
	FirstSeq   int64         `json:"first_seq"` // with code "gone": the first event that is left
	RetryAfter time.Duration `json:"-"`

	lost error // why the rest of the answer did not come; nil: it is whole
}

func (e *Error) Error() string {
	text := e.Detail
	if text == "" {
		text = e.Title
	}
	if e.Code == "" {
		return fmt.Sprintf("server answered %d: %s", e.Status, text)
	}
	return fmt.Sprintf("%s (%s)", text, e.Code)
}

// CodeOf gives the code of a server's error, "" for any other error.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

// New makes a client of the server at base, as "http://127.0.0.1:8080".
func New(base string, opts Options) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil {
		return nil, fmt.Errorf("server address: %w", err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("server address %q: want http://HOST:PORT", base)
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	c := &Client{base: u, http: opts.HTTP, auth: http.Header{}, retries: opts.Retries}
	if opts.APIKey != "" {
		c.auth.Set("Authorization", "Bearer "+opts.APIKey)
	}
	if c.http == nil {
		c.http = &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	}
	if c.retries == 0 {
		c.retries = retriesDefault
	}
	return c, nil
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// CallOptions are what a mutating call can be told beside its request.
type CallOptions struct {
	IdempotencyKey string // default: a random one, for this call's own repetitions
}

func (c *Client) url(path string, query url.Values) string {
	u := *c.base
	// Ids are put in as they are: the server knows no id that needs escaping,
	// and refuses the others.
	u = *u.JoinPath(path)
	u.RawQuery = query.Encode()
	return u.String()
}

// do sends a request, again after lost connections and refusals for load, and
// decodes the answer into out (nil: none is wanted).
func (c *Client) do(ctx context.Context, method, path string, query url.Values, in, out any, opts CallOptions) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
	}
	if method != http.MethodGet && opts.IdempotencyKey == "" {
		opts.IdempotencyKey = rand.Text()
	}
	for attempt := 0; ; attempt++ {
		err := c.once(ctx, method, path, query, body, out, opts)
		if err == nil || attempt >= c.retries || ctx.Err() != nil || !again(err) {
			return err
		}
		if err := pause(ctx, attempt, err); err != nil {
			return err
		}
	}
}

// again says whether a call that failed so may succeed when repeated. A call
// that the server did not answer may have had its effect: the key sees to it
// that it has none twice.
func again(err error) bool {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.lost != nil || e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable || e.Code == "idempotency_running"
	}
	_, network := errors.AsType[*url.Error](err)
	_, lost := errors.AsType[*lostError](err)
	return network || lost
}

// lostError is the end of a connection in the middle of an answer, however the
// network or the transport names it.
type lostError struct{ cause error }

func (e *lostError) Error() string { return "the answer was cut: " + e.cause.Error() }

// Unwrap gives what the transport said.
func (e *lostError) Unwrap() error { return e.cause }

var errAnswerTooLarge = fmt.Errorf("the answer is larger than %d bytes", answerBytesMax)

// answerReader reads an answer's body, and tells its ends apart: a connection
// that is lost, and more than the client holds.
type answerReader struct {
	body io.Reader
	left int64
}

func (r *answerReader) Read(p []byte) (int, error) {
	if r.left <= 0 {
		return 0, errAnswerTooLarge
	}
	n, err := r.body.Read(p[:min(int64(len(p)), r.left)])
	r.left -= int64(n)
	if err != nil && err != io.EOF {
		err = &lostError{err}
	}
	return n, err
}

// readAnswer decodes the body of an answer.
func readAnswer(resp *http.Response, out any) error {
	err := json.NewDecoder(&answerReader{resp.Body, answerBytesMax}).Decode(out)
	if err == io.EOF || err == io.ErrUnexpectedEOF { // a body without a length ends where its connection does
		err = &lostError{io.ErrUnexpectedEOF}
	}
	return err
}

// pause waits before attempt+1: as long as the server asked for, else longer
// each time.
func pause(ctx context.Context, attempt int, cause error) error {
	wait := min(retryFirst<<min(attempt, 10), retryMax)
	if e, ok := errors.AsType[*Error](cause); ok && e.RetryAfter > 0 {
		wait = min(e.RetryAfter, retryMax)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func (c *Client) once(ctx context.Context, method, path string, query url.Values, body []byte, out any, opts CallOptions) error {
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url(path, query), reader)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	req.Header = c.auth.Clone()
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if opts.IdempotencyKey != "" && method != http.MethodGet {
		req.Header.Set("Idempotency-Key", opts.IdempotencyKey)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err // names method and address already
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return readError(resp)
	}
	if out == nil || resp.StatusCode == http.StatusNoContent {
		if _, err = io.Copy(io.Discard, io.LimitReader(resp.Body, problemBytesMax)); err != nil {
			return fmt.Errorf("read answer of %s %s: %w", method, path, &lostError{err})
		}
		return nil
	}
	if err := readAnswer(resp, out); err != nil {
		return fmt.Errorf("decode answer of %s %s: %w", method, path, err)
	}
	return nil
}

// readError makes an Error of an answer, whether it is a problem or not.
func readError(resp *http.Response) error {
	e := &Error{Status: resp.StatusCode, Title: http.StatusText(resp.StatusCode)}
	data, err := io.ReadAll(io.LimitReader(resp.Body, problemBytesMax)) // what came is all there is to tell
	e.lost = err
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "application/problem+json" {
		if err := json.Unmarshal(data, e); err != nil {
			e.Detail = string(data)
		}
	}
	e.Status = resp.StatusCode
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(min(max(seconds, 0), retryAfterMax)) * time.Second
	}
	return e
}
