package client

import (
	"context"
	"net/http"
	"time"
)

// Server is one of the servers on the ledger.
type Server struct {
	ID          string    `json:"id"`
	Self        bool      `json:"self"` // the one that answered
	Address     string    `json:"address,omitempty"`
	Model       string    `json:"model"`
	ParityClass string    `json:"parity_class"`
	StartedAt   time.Time `json:"started_at"`
	Alive       bool      `json:"alive"`
}

// ServerList is the servers of the ledger, oldest first.
type ServerList struct {
	Data []Server `json:"data"`
}

// ReleaseRequest says what of a session its server gives up.
type ReleaseRequest struct {
	Subtree bool `json:"subtree,omitempty"` // also what is forked from it, as far as that server has it
	Cancel  bool `json:"cancel,omitempty"`  // open turns; else a session with one is refused
	Check   bool `json:"check,omitempty"`   // only say what would be released
}

// ReleaseResult counts the sessions that were given up.
type ReleaseResult struct {
	Released int `json:"released"`
}

// Servers lists the servers of the ledger; where keys are wanted, an admin
// key's call.
func (c *Client) Servers(ctx context.Context) ([]Server, error) {
	list, err := call[ServerList](ctx, c, http.MethodGet, "/v1/servers", nil, nil, CallOptions{})
	return list.Data, err
}

// Release has a session's server give it up; the server that is called next
// with it has it from then on.
func (c *Client) Release(ctx context.Context, id string, req ReleaseRequest) (ReleaseResult, error) {
	return call[ReleaseResult](ctx, c, http.MethodPost, sessionPath(id, "/release"), nil, req, CallOptions{})
}
