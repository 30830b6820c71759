package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"
)

const (
	subprotocol  = "rocket.v1"
	frameMax     = 16 << 20        // server frames are small; a delta of a long stall may not be
	idleMax      = 2 * time.Minute // without even a heartbeat the connection is dead
	eventLineMax = 16 << 20
)

// Position is where reading events begins: From is the first seq wanted (0:
// the oldest there is), Epoch the last epoch seen (0: none).
type Position struct {
	From  int64
	Epoch int64
}

func (p Position) query() url.Values {
	query := url.Values{}
	if p.From != 0 {
		query.Set("from", strconv.FormatInt(p.From, 10))
	}
	if p.Epoch != 0 {
		query.Set("epoch", strconv.FormatInt(p.Epoch, 10))
	}
	return query
}

// after is the position behind e.
func after(e Event) Position { return Position{From: e.Seq + 1, Epoch: e.Epoch} }

// FollowOptions tune Follow; the zero value works.
type FollowOptions struct {
	SSE         bool              // over server-sent events instead of a WebSocket
	Reconnected func(cause error) // called before each new attempt
	Retries     int               // attempts in a row without an event before Follow gives up; 0: until ctx ends
}

// Follow yields the events of a session from pos on, live, until ctx ends or
// the session is unknown; it reconnects by itself and yields each event once.
//
// An event of a higher epoch than the one before it is turn.interrupted or what
// follows a restart: events of older epochs past its LastSeq never happened.
func (c *Client) Follow(ctx context.Context, id string, pos Position, opts FollowOptions) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		failures := 0
		for {
			stopped := false
			took := false
			err := c.connection(ctx, id, pos, opts.SSE, func(e Event) error {
				next, ok, err := advance(pos, e)
				if err != nil || !ok {
					return err
				}
				pos, took = next, true
				if !yield(e, nil) {
					stopped = true
					return errStopped
				}
				return nil
			})
			switch {
			case stopped:
				return
			case ctx.Err() != nil:
				yield(Event{}, ctx.Err())
				return
			case final(err):
				yield(Event{}, err)
				return
			}
			if failures++; took {
				failures = 0
			}
			if opts.Retries > 0 && failures > opts.Retries {
				yield(Event{}, fmt.Errorf("follow %s: %w", id, err))
				return
			}
			if opts.Reconnected != nil {
				opts.Reconnected(err)
			}
			if err := pause(ctx, failures, err); err != nil {
				yield(Event{}, err)
				return
			}
		}
	}
}

var (
	errStopped = errors.New("the caller stopped")
	errGap     = errors.New("events are missing")
	errIdle    = errors.New("the server sent not even a heartbeat")
)

// advance says whether e is the next event at pos, and where reading goes on.
func advance(pos Position, e Event) (next Position, ok bool, err error) {
	switch {
	case pos.Epoch != 0 && e.Epoch > pos.Epoch:
		return after(e), true, nil // the log was cut at a restart: seqs begin behind what was committed
	case e.Seq < pos.From:
		return pos, false, nil // seen already
	case pos.From > 1 && e.Seq > pos.From:
		return pos, false, fmt.Errorf("%w: seq %d came, %d is next", errGap, e.Seq, pos.From)
	}
	return after(e), true, nil
}

// final says whether an error stays when the call is repeated.
func final(err error) bool {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return false
	}
	return e.Status >= 400 && e.Status < 500 && e.Status != http.StatusTooManyRequests && e.Status != http.StatusRequestTimeout
}

// connection reads one connection's events until it ends; it always returns an
// error.
func (c *Client) connection(ctx context.Context, id string, pos Position, sse bool, take func(Event) error) error {
	if sse {
		return c.readSSE(ctx, id, pos, take)
	}
	return c.readSocket(ctx, id, pos, take)
}

func (c *Client) readSocket(ctx context.Context, id string, pos Position, take func(Event) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(idleMax, func() { cancel(errIdle) })
	defer idle.Stop()
	conn, err := c.dial(ctx, sessionPath(id, "/stream"), pos.query(), func() { idle.Reset(idleMax) })
	if err != nil {
		return err
	}
	defer conn.CloseNow()
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			if errors.Is(context.Cause(ctx), errIdle) {
				err = errIdle
			}
			return fmt.Errorf("read stream: %w", err)
		}
		idle.Reset(idleMax)
		e, ok, err := decodeFrame(data, id)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := take(e); err != nil {
			return err
		}
	}
}

// decodeFrame is the event of session id that a frame is; not ok: it is none.
// An error is what the server says is wrong, or that the frame is.
func decodeFrame(data []byte, id string) (e Event, ok bool, err error) {
	var head struct {
		Type      string `json:"type"`
		SessionID string `json:"session_id"`
		Seq       int64  `json:"seq"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return e, false, fmt.Errorf("decode frame: %w", err)
	}
	if head.Type == "error" {
		e := &Error{}
		if err := json.Unmarshal(data, e); err != nil {
			return Event{}, false, fmt.Errorf("decode frame: %w", err)
		}
		return Event{}, false, e
	}
	if head.Seq == 0 || head.SessionID != id {
		return e, false, nil // "subscribed", or what a later server adds
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return Event{}, false, fmt.Errorf("decode event: %w", err)
	}
	return e, true, nil
}

// Dial opens a session's WebSocket for a caller who speaks its frames.
func (c *Client) Dial(ctx context.Context, id string, pos Position) (*websocket.Conn, error) {
	return c.dial(ctx, sessionPath(id, "/stream"), pos.query(), nil)
}

// DialWatch opens /v1/watch; root "" watches all sessions.
func (c *Client) DialWatch(ctx context.Context, root string, turns bool) (*websocket.Conn, error) {
	query := url.Values{}
	set(query, "root", root)
	if turns {
		query.Set("turns", "true")
	}
	return c.dial(ctx, "/v1/watch", query, nil)
}

// dial opens a WebSocket; pinged is told of the server's heartbeats.
func (c *Client) dial(ctx context.Context, path string, query url.Values, pinged func()) (*websocket.Conn, error) {
	opts := &websocket.DialOptions{HTTPClient: c.http, HTTPHeader: c.auth.Clone(), Subprotocols: []string{subprotocol}}
	if pinged != nil {
		opts.OnPingReceived = func(context.Context, []byte) bool {
			pinged()
			return true
		}
	}
	conn, resp, err := websocket.Dial(ctx, c.url(path, query), opts)
	if err != nil {
		if resp != nil && resp.StatusCode >= 400 && resp.Body != nil {
			return nil, readError(resp)
		}
		return nil, fmt.Errorf("open stream: %w", err)
	}
	conn.SetReadLimit(frameMax)
	return conn, nil
}

func (c *Client) readSSE(ctx context.Context, id string, pos Position, take func(Event) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url(sessionPath(id, "/events"), pos.query()), nil)
	if err != nil {
		return fmt.Errorf("open stream: %w", err)
	}
	req.Header = c.auth.Clone()
	req.Header.Set("Accept", "text/event-stream")
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return readError(resp)
	}
	idle := time.AfterFunc(idleMax, func() { cancel(errIdle) })
	defer idle.Stop()
	if err := scanEvents(resp.Body, func() { idle.Reset(idleMax) }, take); err != nil {
		return err
	}
	return fmt.Errorf("read stream: %w", io.EOF)
}

// scanEvents reads an event stream to its end. beat is told of every line.
func scanEvents(r io.Reader, beat func(), take func(Event) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), eventLineMax)
	var kind string
	var data bytes.Buffer
	for lines.Scan() {
		beat()
		line := lines.Text()
		if line == "" {
			if err := dispatch(kind, data.Bytes(), take); err != nil {
				return err
			}
			kind = ""
			data.Reset()
			continue
		}
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch name {
		case "event":
			kind = value
		case "data":
			if data.Len() > 0 {
				data.WriteByte('\n')
			}
			data.WriteString(value)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read stream: %w", err)
	}
	return nil
}

func dispatch(kind string, data []byte, take func(Event) error) error {
	if len(data) == 0 {
		return nil
	}
	if kind == "stream.error" {
		e := &Error{}
		if err := json.Unmarshal(data, e); err != nil {
			return fmt.Errorf("decode error event: %w", err)
		}
		return e
	}
	var e Event
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("decode event: %w", err)
	}
	return take(e)
}
