package client

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
)

const bundleType = "application/jsonl"

// ImportResult is what an import made.
type ImportResult struct {
	Session  Session `json:"session"` // the one that was exported
	Sessions int     `json:"sessions"`
	Turns    int     `json:"turns"`
	Tokens   int     `json:"tokens"`
	Events   int     `json:"events"`
	NewIDs   bool    `json:"new_ids"` // the bundle's ids were taken
}

// Export writes a bundle of a session and everything forked from it to w. What
// w has after an error is no bundle. It is not repeated: w has part of it then.
func (c *Client) Export(ctx context.Context, id string, w io.Writer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url(sessionPath(id, "/export"), nil), nil)
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	req.Header = c.auth.Clone()
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return readError(resp)
	}
	if _, err := io.Copy(w, resp.Body); err != nil {
		return fmt.Errorf("read export: %w", err)
	}
	return nil
}

// Import has the server load a bundle, whole or not at all. It is not repeated,
// as r can be read once; the caller may repeat it with the same key.
func (c *Client) Import(ctx context.Context, r io.Reader, opts CallOptions) (ImportResult, error) {
	var out ImportResult
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url("/v1/sessions/import", nil), io.NopCloser(r))
	if err != nil {
		return out, fmt.Errorf("import: %w", err)
	}
	if opts.IdempotencyKey == "" {
		opts.IdempotencyKey = rand.Text()
	}
	req.Header = c.auth.Clone()
	req.Header.Set("Content-Type", bundleType)
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Idempotency-Key", opts.IdempotencyKey)
	resp, err := c.http.Do(req)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return out, readError(resp)
	}
	if err := readAnswer(resp, &out); err != nil {
		return out, fmt.Errorf("decode answer of import: %w", err)
	}
	return out, nil
}
