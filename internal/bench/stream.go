package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	DeliveryUS    float64 `json:"server_us_per_token_and_reader"`
	DelayMSP50    float64 `json:"delay_ms_p50"` // from the event's own time, which is in whole milliseconds
	DelayMSP99    float64 `json:"delay_ms_p99"`
	LostOrTwice   int     `json:"events_lost_or_twice"`
	EngineCPUSecs float64 `json:"engine_cpu_seconds"`
}

// StreamResult is what streams cost.
type StreamResult struct {
	Rows            []StreamRow `json:"rows"`
	IdleSockets     int         `json:"idle_sockets"`
	IdleSocketBytes float64     `json:"bytes_per_idle_socket"` // growth of the server's resident memory
}

// Streams measures a server from outside.
func Streams(ctx context.Context, o StreamOptions, progress Progress) (StreamResult, error) {
	var out StreamResult
	for i, n := range o.Readers {
		row, err := o.row(ctx, n)
		if err != nil {
			return out, fmt.Errorf("%d readers: %w", n, err)
		}
		out.Rows = append(out.Rows, row)
		progress.step("rows", i+1, len(o.Readers)+1)
	}
	if o.Idle > 0 {
		bytes, err := o.idle(ctx)
		if err != nil {
			return out, fmt.Errorf("%d idle sockets: %w", o.Idle, err)
		}
		out.IdleSockets, out.IdleSocketBytes = o.Idle, bytes
	}
	progress.step("rows", len(o.Readers)+1, len(o.Readers)+1)
	return out, nil
}

// streamFrame is what a reader looks at.
type streamFrame struct {
	Type   string    `json:"type"`
	Seq    int64     `json:"seq"`
	Tokens []int32   `json:"tokens"`
	Time   time.Time `json:"time"`
}

// reader follows a session and notes what came.
type reader struct {
	conn   *websocket.Conn
	tokens int
	events int
	wrong  int
	delays []float64
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
	for {
		_, data, err := r.conn.Read(ctx)
		if err != nil {
			return err
		}
		now := time.Now()
		var f streamFrame
		if err := json.Unmarshal(data, &f); err != nil {
			return fmt.Errorf("decode frame: %w", err)
		}
		if f.Type == "subscribed" {
			joined()
			continue
		}
		if next != 0 && f.Seq != next {
			r.wrong++
		}
		next = f.Seq + 1
		r.events++
		if f.Type == "turn.delta" {
			r.tokens += len(f.Tokens)
			r.delays = append(r.delays, ms(now.Sub(f.Time)))
		}
		if f.Type == "turn.completed" {
			return nil
		}
	}
}

func (o StreamOptions) row(ctx context.Context, n int) (StreamRow, error) {
	row := StreamRow{Readers: n, Tokens: o.Tokens}
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
	row.fill(readers, took, before, after)
	return row, nil
}

func (row *StreamRow) fill(readers []*reader, took time.Duration, before, after cpuTime) {
	var delays []float64
	tokens := 0
	for _, r := range readers {
		tokens += r.tokens
		row.Events = max(row.Events, r.events)
		row.LostOrTwice += r.wrong
		delays = append(delays, r.delays...)
	}
	if want := row.Tokens * row.Readers; tokens != want {
		row.LostOrTwice += want - tokens
	}
	row.TokensPerSec = float64(tokens) / took.Seconds()
	row.ServerUS = us(after.server-before.server) / float64(row.Tokens)
	row.DeliveryUS = row.ServerUS / float64(row.Readers)
	row.EngineCPUSecs = (after.engine - before.engine).Seconds()
	row.DelayMSP50, row.DelayMSP99 = percentile(delays, 0.5), percentile(delays, 0.99)
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

// cpuTime is a process's CPU, the engine's threads apart.
type cpuTime struct{ server, engine time.Duration }

// engineThreads begin with this name.
const engineThreads = "rk-"

// cpuOf sums the threads of a process, from /proc.
func cpuOf(pid int) (cpuTime, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(tasks) == 0 {
		return cpuTime{}, fmt.Errorf("no threads of process %d under /proc: %w", pid, err)
	}
	var out cpuTime
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended; the runtime keeps almost all of its threads
		}
		if err != nil {
			return out, fmt.Errorf("read a thread's times: %w", err)
		}
		name, ticks, err := parseStat(string(text))
		if err != nil {
			return out, fmt.Errorf("%s: %w", path, err)
		}
		d := time.Duration(ticks) * time.Second / ticksPerSecond
		if strings.HasPrefix(name, engineThreads) {
			out.engine += d
		} else {
			out.server += d
		}
	}
	return out, nil
}

// ticksPerSecond is the unit of /proc's times: USER_HZ, 100 on Linux whatever the kernel's own rate.
const ticksPerSecond = 100

// parseStat reads a thread's name and its user and system ticks: fields 2, 14 and 15 of proc_pid_stat(5). The name may
// hold spaces and brackets.
func parseStat(text string) (name string, ticks int64, err error) {
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return "", 0, fmt.Errorf("no thread name in %q", text)
	}
	fields := strings.Fields(text[end+1:])
	if len(fields) < 13 {
		return "", 0, fmt.Errorf("%d fields after the name", len(fields))
	}
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return "", 0, fmt.Errorf("times: %w", err)
		}
		ticks += n
	}
	return text[open+1 : end], ticks, nil
}

// residentOf is a process's resident memory in bytes.
func residentOf(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, fmt.Errorf("read memory use: %w", err)
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("memory use is %q", text)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("memory use: %w", err)
	}
	return pages * int64(os.Getpagesize()), nil
}
