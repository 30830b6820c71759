package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
)

// Ancestry is where a session comes from, the root first and the parent last.
type Ancestry struct {
	ID    string `json:"id"`
	Nodes []Node `json:"nodes"`
}

// Common is what two sessions have in common: their lines are the same in
// [0, At). Ancestor is nil, and At 0, where they are of different trees.
type Common struct {
	ID       string `json:"id"`
	With     string `json:"with"`
	Ancestor *Node  `json:"ancestor"`
	At       int    `json:"at"`
}

// Path leads from a session up to the nearest common ancestor and down to
// another, both ends included; it is empty between different trees.
type Path struct {
	From     string  `json:"from"`
	To       string  `json:"to"`
	Ancestor *string `json:"ancestor"`
	At       int     `json:"at"`
	Nodes    []Node  `json:"nodes"`
}

// Ancestors returns what a session was forked from, up to depth levels;
// negative: all.
func (c *Client) Ancestors(ctx context.Context, id string, depth int) (Ancestry, error) {
	query := url.Values{}
	if depth >= 0 {
		query.Set("depth", strconv.Itoa(depth))
	}
	return call[Ancestry](ctx, c, http.MethodGet, sessionPath(id, "/ancestors"), query, nil, CallOptions{})
}

// Common finds where the lines of two sessions part.
func (c *Client) Common(ctx context.Context, id, with string) (Common, error) {
	return call[Common](ctx, c, http.MethodGet, sessionPath(id, "/common"), url.Values{"with": {with}}, nil, CallOptions{})
}

// Path returns the sessions between two.
func (c *Client) Path(ctx context.Context, id, to string) (Path, error) {
	return call[Path](ctx, c, http.MethodGet, sessionPath(id, "/path"), url.Values{"to": {to}}, nil, CallOptions{})
}
