package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
)

// Create makes a root session.
func (c *Client) Create(ctx context.Context, req CreateRequest, opts CallOptions) (Session, error) {
	return call[Session](ctx, c, http.MethodPost, "/v1/sessions", nil, req, opts)
}

// ListOptions selects sessions, newest first.
type ListOptions struct {
	State, Root, Parent string
	Labels              map[string]string
	Limit               int // 0: the server's default
	After               string
}

// List returns one page of sessions.
func (c *Client) List(ctx context.Context, opts ListOptions) (SessionPage, error) {
	query := url.Values{}
	set(query, "state", opts.State)
	set(query, "root", opts.Root)
	set(query, "parent", opts.Parent)
	set(query, "after", opts.After)
	if opts.Limit != 0 {
		query.Set("limit", strconv.Itoa(opts.Limit))
	}
	for key, value := range opts.Labels {
		query.Add("label", key+"="+value)
	}
	return call[SessionPage](ctx, c, http.MethodGet, "/v1/sessions", query, nil, CallOptions{})
}

// Get returns one session.
func (c *Client) Get(ctx context.Context, id string) (Session, error) {
	return call[Session](ctx, c, http.MethodGet, sessionPath(id, ""), nil, nil, CallOptions{})
}

// Patch changes title, labels, TTL or pin.
func (c *Client) Patch(ctx context.Context, id string, req PatchRequest, opts CallOptions) (Session, error) {
	return call[Session](ctx, c, http.MethodPatch, sessionPath(id, ""), nil, req, opts)
}

// Delete makes a session unknown.
func (c *Client) Delete(ctx context.Context, id string, opts CallOptions) error {
	return c.do(ctx, http.MethodDelete, sessionPath(id, ""), nil, nil, nil, opts)
}

// Prune deletes a session and everything forked from it, all or nothing.
func (c *Client) Prune(ctx context.Context, id string, opts CallOptions) error {
	return c.do(ctx, http.MethodDelete, sessionPath(id, ""), url.Values{"subtree": {"true"}}, nil, nil, opts)
}

// CloseSession makes a session read-only.
func (c *Client) CloseSession(ctx context.Context, id string, opts CallOptions) (Session, error) {
	return call[Session](ctx, c, http.MethodPost, sessionPath(id, "/close"), nil, nil, opts)
}

// Tree returns the subtree of a session, down to depth levels; negative: all.
func (c *Client) Tree(ctx context.Context, id string, depth int) (Tree, error) {
	query := url.Values{}
	if depth >= 0 {
		query.Set("depth", strconv.Itoa(depth))
	}
	return call[Tree](ctx, c, http.MethodGet, sessionPath(id, "/tree"), query, nil, CallOptions{})
}

// StartTurn appends a prompt; the turn goes on by itself.
func (c *Client) StartTurn(ctx context.Context, id string, req TurnRequest, opts CallOptions) (Turn, error) {
	return call[Turn](ctx, c, http.MethodPost, sessionPath(id, "/turns"), nil, req, opts)
}

// RunTurn appends a prompt and returns the turn at its end.
func (c *Client) RunTurn(ctx context.Context, id string, req TurnRequest, opts CallOptions) (Turn, error) {
	return call[Turn](ctx, c, http.MethodPost, sessionPath(id, "/turns"), url.Values{"wait": {"true"}}, req, opts)
}

// Turns returns one page of a session's turns, newest first.
func (c *Client) Turns(ctx context.Context, id string, limit int, after string) (TurnPage, error) {
	query := url.Values{}
	set(query, "after", after)
	if limit != 0 {
		query.Set("limit", strconv.Itoa(limit))
	}
	return call[TurnPage](ctx, c, http.MethodGet, sessionPath(id, "/turns"), query, nil, CallOptions{})
}

// Turn returns one turn with its tokens.
func (c *Client) Turn(ctx context.Context, id, turn string) (Turn, error) {
	return call[Turn](ctx, c, http.MethodGet, sessionPath(id, "/turns/"+url.PathEscape(turn)), nil, nil, CallOptions{})
}

// Cancel ends the open turn.
func (c *Client) Cancel(ctx context.Context, id string, opts CallOptions) (Turn, error) {
	return call[Turn](ctx, c, http.MethodPost, sessionPath(id, "/cancel"), nil, nil, opts)
}

// Fork makes children of a session.
func (c *Client) Fork(ctx context.Context, id string, req ForkRequest, opts CallOptions) (ForkResult, error) {
	return call[ForkResult](ctx, c, http.MethodPost, sessionPath(id, "/fork"), nil, req, opts)
}

// Detach moves a session's bytes off the device.
func (c *Client) Detach(ctx context.Context, id string, req DetachRequest, opts CallOptions) (Session, error) {
	return call[Session](ctx, c, http.MethodPost, sessionPath(id, "/detach"), nil, req, opts)
}

// Resume brings a session back.
func (c *Client) Resume(ctx context.Context, id string, opts CallOptions) (ResumeResult, error) {
	return call[ResumeResult](ctx, c, http.MethodPost, sessionPath(id, "/resume"), nil, nil, opts)
}

// Tokens returns [from, to) of the line; to < 0 means its end.
func (c *Client) Tokens(ctx context.Context, id string, from, to int) (TokenRange, error) {
	query := url.Values{"from": {strconv.Itoa(from)}}
	if to >= 0 {
		query.Set("to", strconv.Itoa(to))
	}
	return call[TokenRange](ctx, c, http.MethodGet, sessionPath(id, "/tokens"), query, nil, CallOptions{})
}

// Events returns one page of a session's log. limit 0 is the server's default.
func (c *Client) Events(ctx context.Context, id string, pos Position, limit int) (EventPage, error) {
	query := pos.query()
	if limit != 0 {
		query.Set("limit", strconv.Itoa(limit))
	}
	return call[EventPage](ctx, c, http.MethodGet, sessionPath(id, "/events"), query, nil, CallOptions{})
}

// CheckCache has the server prove a share of its cached snapshots.
func (c *Client) CheckCache(ctx context.Context, sample float64) (CacheCheck, error) {
	return call[CacheCheck](ctx, c, http.MethodPost, "/v1/check-cache", nil, map[string]float64{"sample": sample}, CallOptions{})
}

// Stats returns the server's numbers as they come.
func (c *Client) Stats(ctx context.Context) (json.RawMessage, error) {
	return call[json.RawMessage](ctx, c, http.MethodGet, "/v1/stats", nil, nil, CallOptions{})
}

// Version returns what the server is built from.
func (c *Client) Version(ctx context.Context) (Version, error) {
	return call[Version](ctx, c, http.MethodGet, "/version", nil, nil, CallOptions{})
}

// Ready returns nil when the server takes traffic.
func (c *Client) Ready(ctx context.Context) error {
	return c.once(ctx, http.MethodGet, "/readyz", nil, nil, nil, CallOptions{})
}

func call[T any](ctx context.Context, c *Client, method, path string, query url.Values, in any, opts CallOptions) (T, error) {
	var out T
	err := c.do(ctx, method, path, query, in, &out, opts)
	return out, err
}

func sessionPath(id, rest string) string { return "/v1/sessions/" + url.PathEscape(id) + rest }

func set(query url.Values, name, value string) {
	if value != "" {
		query.Set(name, value)
	}
}
