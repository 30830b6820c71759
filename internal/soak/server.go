package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"rocket/client"
)

const (
	startMax = time.Minute // for a server to say where it is
	endMax   = time.Minute // for an ordered stop
	connsMax = 1024        // idle connections that are kept to one server
)

// server is a `rocket serve` process, and the next one in its place.
type server struct {
	n       int
	command func(args ...string) *exec.Cmd
	args    []string
	log     *os.File
	url     string
	api     *client.Client // repeats nothing by itself
	failed  func(error)

	proc *process // only the goroutine of Run

	mu sync.Mutex
	up chan struct{} // guarded by mu; closed while it serves
}

// process is one life of a server.
type process struct {
	cmd    *exec.Cmd
	hello  chan error    // cap 1: whether it has said where it is
	done   chan struct{} // closed when it has ended
	asked  chan struct{} // closed before it is ended by us
	status error         // after done
}

func newServer(opts Options, n int, failed func(error)) (*server, error) {
	addr, err := freeAddress()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(opts.Dir, "server"+strconv.Itoa(n))
	threads := max(1, runtime.NumCPU()/opts.Servers)
	s := &server{n: n, command: opts.Command, url: "http://" + addr, failed: failed, up: make(chan struct{})}
	s.args = []string{"--json", "serve", "--listen", addr, "--data-dir", dir, "--threads", strconv.Itoa(threads),
		"--page-bytes", "64MiB", "--snapshot-bytes", "64MiB", "--host-bytes", "64MiB", "--disk-bytes", "1GiB"}
	if opts.DatabaseURL != "" {
		s.args = append(s.args, "--database-url", opts.DatabaseURL)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns, transport.MaxIdleConnsPerHost = connsMax, connsMax
	if s.api, err = client.New(s.url, client.Options{HTTP: &http.Client{Transport: transport}, Retries: -1}); err != nil {
		return nil, err
	}
	s.log, err = os.OpenFile(filepath.Join(opts.Dir, fmt.Sprintf("server%d.log", n)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the log of a server: %w", err)
	}
	return s, nil
}

// freeAddress is an address that nobody listened on a moment ago.
func freeAddress() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

// start launches the server, unless it runs, and waits until it serves.
func (s *server) start() error {
	if s.proc == nil {
		if err := s.launch(); err != nil {
			return err
		}
	}
	return s.ready()
}

// launch starts a process and does not wait for it.
func (s *server) launch() error {
	p := &process{cmd: s.command(s.args...), hello: make(chan error, 1), done: make(chan struct{}), asked: make(chan struct{})}
	p.cmd.Stderr = s.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start server %d: %w", s.n, err)
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start server %d: %w", s.n, err)
	}
	s.proc = p
	go func() {
		var hello struct{ URL string }
		p.hello <- json.NewDecoder(out).Decode(&hello)
		_, _ = io.Copy(io.Discard, out) // until it ends
		p.status = p.cmd.Wait()
		close(p.done)
		select {
		case <-p.asked:
		default:
			s.failed(fmt.Errorf("server %d ended by itself: %v; its log is %s", s.n, p.status, s.log.Name()))
		}
	}()
	return nil
}

// ready waits until the launched process serves.
func (s *server) ready() error {
	late := time.NewTimer(startMax)
	defer late.Stop()
	select {
	case err := <-s.proc.hello:
		if err != nil {
			return fmt.Errorf("server %d did not start: %w; its log is %s", s.n, err, s.log.Name())
		}
	case <-late.C:
		return fmt.Errorf("server %d does not serve after %v; its log is %s", s.n, startMax, s.log.Name())
	}
	s.present()
	return nil
}

// serving is closed while the server serves, as far as Run knows.
func (s *server) serving() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

// kill ends the process as a crash would: after it was asked to stop, while
// it drains, if drain is more than 0.
func (s *server) kill(drain time.Duration) {
	p := s.proc
	s.proc = nil
	close(p.asked)
	if drain > 0 {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself, which is told
		select {
		case <-p.done:
		case <-time.After(drain):
		}
	}
	s.away()
	_ = p.cmd.Process.Kill()
	<-p.done
}

// freeze stops the process where it stands, for as long as it is told to.
func (s *server) freeze(ctx context.Context, d time.Duration) error {
	if err := s.proc.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop server %d: %w", s.n, err)
	}
	s.away()
	err := pause(ctx, d)
	if contErr := s.proc.cmd.Process.Signal(syscall.SIGCONT); contErr != nil {
		return fmt.Errorf("continue server %d: %w", s.n, contErr)
	}
	s.present()
	return err
}

// present and away say whether clients are to call it.
func (s *server) present() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.up)
}

func (s *server) away() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.up:
		s.up = make(chan struct{})
	default:
	}
}

// complaints are the lines of level error in what the server logged, in all its lives.
func (s *server) complaints() (lines []string, err error) {
	text, err := os.ReadFile(s.log.Name())
	if err != nil {
		return nil, fmt.Errorf("read the log of a server: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "level=ERROR") {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	return lines, nil
}

// end stops the server in order.
func (s *server) end() error {
	defer s.log.Close()
	defer s.api.Close()
	p := s.proc
	if p == nil {
		return nil
	}
	s.proc = nil
	close(p.asked)
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself, which is told
	late := time.AfterFunc(endMax, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	<-p.done
	if p.status != nil && !errors.Is(p.status, os.ErrProcessDone) {
		return fmt.Errorf("server %d did not stop in order: %w; its log is %s", s.n, p.status, s.log.Name())
	}
	return nil
}
