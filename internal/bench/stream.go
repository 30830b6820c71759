package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// StreamOptions size the measurement of streams.
type StreamOptions struct {
	URL     string // of the server, a process of its own on this machine
	PID     int    // of that process
	Readers []int  // WebSockets that follow one session, a row each
	Tokens  int    // that it generates meanwhile
	Idle    int    // sockets that follow a session where nothing happens

	// Session makes a session with a short line; Turn runs one turn of n tokens on it, to its end.
	Session func(ctx context.Context) (id string, err error)
	Turn    func(ctx context.Context, id string, n int) error
}

// StreamRow is one number of readers. The server's CPU is that of its process without the engine's threads (the loop and
// the kernels' workers) and without Postgres; the readers' process is not in it either.
type StreamRow struct {
	Readers       int     `json:"readers"`
	Tokens        int     `json:"tokens"`
	Events        int     `json:"events"`
	TokensPerSec  float64 `json:"tokens_per_second"` // delivered, to all readers together
	ServerUS      float64 `json:"server_us_per_token"`
	MonitorUS     float64 `json:"runtime_monitor_us_per_token"` // of it: the thread with which the Go runtime watches over long calls to C, the engine's
	DeliveryUS    float64 `json:"server_us_per_token_and_reader"`
	DelayMSP50    float64 `json:"delay_ms_p50"` // from the event's own time, which is in whole milliseconds
	DelayMSP99    float64 `json:"delay_ms_p99"`
	GapMSP50      float64 `json:"gap_ms_p50"` // between two deltas at a reader
	GapMSP99      float64 `json:"gap_ms_p99"`
	LostOrTwice   int     `json:"events_lost_or_twice"`
	EngineCPUSecs float64 `json:"engine_cpu_seconds"`
	ServerCPUSecs float64 `json:"server_cpu_seconds"`
	LoadCPUSecs   float64 `json:"load_cpu_seconds"` // of the readers' process
	Seconds       float64 `json:"seconds"`
}

// StreamResult is what streams cost.
type StreamResult struct {
	Rows            []StreamRow `json:"rows"`
	IdleSockets     int         `json:"idle_sockets"`
	IdleSocketBytes float64     `json:"bytes_per_idle_socket"` // growth of the server's resident memory

	*DetachedResult // where it was measured
}

// Streams measures a server from outside.
func Streams(ctx context.Context, o StreamOptions, progress Progress) (StreamResult, error) {
	var out StreamResult
	id, err := o.Session(ctx)
	if err == nil {
		err = o.Turn(ctx, id, warmTokens)
	}
	if err != nil {
		return out, fmt.Errorf("warm up: %w", err)
	}
	if o.Idle > 0 { // first: memory that readers of a row have used would not grow for these
		bytes, err := o.idle(ctx)
		if err != nil {
			return out, fmt.Errorf("%d idle sockets: %w", o.Idle, err)
		}
		out.IdleSockets, out.IdleSocketBytes = o.Idle, bytes
	}
	progress.step("rows", 1, len(o.Readers)+1)
	for i, n := range o.Readers {
		row, err := o.row(ctx, n)
		if err != nil {
			return out, fmt.Errorf("%d readers: %w", n, err)
		}
		out.Rows = append(out.Rows, row)
		progress.step("rows", i+2, len(o.Readers)+1)
	}
	return out, nil
}

// warmTokens are generated before anything is measured.
const warmTokens = 64

// streamFrame is what a reader looks at.
type streamFrame struct {
	Type   string    `json:"type"`
	Seq    int64     `json:"seq"`
	Tokens []int32   `json:"tokens"`
	Time   time.Time `json:"time"`
}

// parseFrame takes a delta apart by hand: the readers share the machine with what they measure.
func parseFrame(data []byte) (kind string, seq int64, tokens int, at time.Time, err error) {
	field := func(name string, end byte) string {
		_, rest, ok := bytes.Cut(data, []byte(name))
		n := bytes.IndexByte(rest, end)
		if !ok || n < 0 {
			return ""
		}
		return string(rest[:n])
	}
	if list := field(`,"tokens":[`, ']'); list != "" && field(`"type":"`, '"') == "turn.delta" {
		seq, err = strconv.ParseInt(field(`{"seq":`, ','), 10, 64)
		if err == nil {
			at, err = time.Parse(time.RFC3339Nano, field(`"time":"`, '"'))
		}
		if err == nil {
			return "turn.delta", seq, strings.Count(list, ",") + 1, at, nil
		}
	}
	var f streamFrame
	if err := json.Unmarshal(data, &f); err != nil {
		return "", 0, 0, at, fmt.Errorf("decode frame: %w", err)
	}
	return f.Type, f.Seq, len(f.Tokens), f.Time, nil
}

// reader follows a session and notes what came.
type reader struct {
	conn   *websocket.Conn
	tokens int
	events int
	wrong  int
	delays []float64
	gaps   []float64
}

func (o StreamOptions) dial(ctx context.Context, id string) (*reader, error) {
	url := "ws" + strings.TrimPrefix(o.URL, "http") + "/v1/sessions/" + id + "/stream?from=1"
	conn, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{Subprotocols: []string{"rocket.v1"}})
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(16 << 20)
	return &reader{conn: conn}, nil
}

// read takes frames up to the end of the turn. joined is called at the frame that says where reading begins.
func (r *reader) read(ctx context.Context, joined func()) error {
	next := int64(0)
	var last time.Time
	for {
		_, data, err := r.conn.Read(ctx)
		if err != nil {
			return err
		}
		now := time.Now()
		kind, seq, tokens, at, err := parseFrame(data)
		if err != nil {
			return err
		}
		if kind == "subscribed" {
			joined()
			continue
		}
		if next != 0 && seq != next {
			r.wrong++
		}
		next = seq + 1
		r.events++
		if kind == "turn.delta" {
			r.tokens += tokens
			r.delays = append(r.delays, ms(now.Sub(at)))
			if !last.IsZero() {
				r.gaps = append(r.gaps, ms(now.Sub(last)))
			}
			last = now
		}
		if kind == "turn.completed" {
			return nil
		}
	}
}

func (o StreamOptions) row(ctx context.Context, n int) (StreamRow, error) {
	row := StreamRow{Readers: n, Tokens: o.Tokens}
	if err := o.settle(ctx); err != nil {
		return row, err
	}
	id, err := o.Session(ctx)
	if err != nil {
		return row, err
	}
	readers, err := o.connect(ctx, id, n)
	defer func() {
		for _, r := range readers {
			if r != nil {
				_ = r.conn.CloseNow() // the measurement is over
			}
		}
	}()
	if err != nil {
		return row, err
	}
	var joined, done sync.WaitGroup
	joined.Add(n)
	errs := make([]error, n)
	for i, r := range readers {
		done.Go(func() {
			var once sync.Once
			errs[i] = r.read(ctx, func() { once.Do(joined.Done) })
			once.Do(joined.Done)
		})
	}
	joined.Wait()
	load, err := ownCPU()
	if err != nil {
		return row, err
	}
	before, err := cpuOf(o.PID)
	if err != nil {
		return row, err
	}
	began := time.Now()
	if err := o.Turn(ctx, id, o.Tokens); err != nil {
		return row, err
	}
	done.Wait()
	took := time.Since(began)
	after, err := cpuOf(o.PID)
	if err := errors.Join(append(errs, err)...); err != nil {
		return row, err
	}
	loaded, err := ownCPU()
	row.fill(readers, took, before, after)
	row.LoadCPUSecs = (loaded - load).Seconds()
	return row, err
}

func (row *StreamRow) fill(readers []*reader, took time.Duration, before, after cpuTime) {
	var delays, gaps []float64
	tokens := 0
	for _, r := range readers {
		tokens += r.tokens
		row.Events = max(row.Events, r.events)
		row.LostOrTwice += r.wrong
		delays, gaps = append(delays, r.delays...), append(gaps, r.gaps...)
	}
	if want := row.Tokens * row.Readers; tokens != want {
		row.LostOrTwice += want - tokens
	}
	row.TokensPerSec = float64(tokens) / took.Seconds()
	row.ServerUS = us(after.server-before.server) / float64(row.Tokens)
	row.MonitorUS = us(after.monitor-before.monitor) / float64(row.Tokens)
	row.DeliveryUS = row.ServerUS / float64(row.Readers)
	row.EngineCPUSecs = (after.engine - before.engine).Seconds()
	row.ServerCPUSecs, row.Seconds = (after.server - before.server).Seconds(), took.Seconds()
	row.DelayMSP50, row.DelayMSP99 = percentile(delays, 0.5), percentile(delays, 0.99)
	row.GapMSP50, row.GapMSP99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
}

// dialAtOnce bounds handshakes under way.
const dialAtOnce = 32

func (o StreamOptions) connect(ctx context.Context, id string, n int) ([]*reader, error) {
	out, errs := make([]*reader, n), make([]error, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, dialAtOnce) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				out[i], errs[i] = o.dial(ctx, id)
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return out, fmt.Errorf("connect reader %d of %d: %w", i+1, n, err)
		}
	}
	return out, nil
}

// idle opens sockets that only get the frame which says where they are, and compares resident memory.
func (o StreamOptions) idle(ctx context.Context) (float64, error) {
	if err := o.settle(ctx); err != nil {
		return 0, err
	}
	id, err := o.Session(ctx)
	if err != nil {
		return 0, err
	}
	before, err := residentOf(o.PID)
	if err != nil {
		return 0, err
	}
	readers, err := o.connect(ctx, id, o.Idle)
	defer func() {
		for _, r := range readers {
			if r != nil {
				_ = r.conn.CloseNow()
			}
		}
	}()
	if err != nil {
		return 0, err
	}
	for _, r := range readers {
		if _, _, err := r.conn.Read(ctx); err != nil {
			return 0, fmt.Errorf("first frame: %w", err)
		}
	}
	after, err := residentOf(o.PID)
	return float64(after-before) / float64(o.Idle), err
}

// settleEvery is how often it is looked whether the sockets of the last row are gone.
const settleEvery = 50 * time.Millisecond

// settle waits until the server has no sockets: ending those of one row must not count in the next.
func (o StreamOptions) settle(ctx context.Context) error {
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.URL+"/metrics", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return fmt.Errorf("read metrics: %w", err)
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			return fmt.Errorf("read metrics: %w", err)
		}
		if bytes.Contains(text, []byte("\nrocket_websocket_connections 0\n")) {
			return nil
		}
		select {
		case <-time.After(settleEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
