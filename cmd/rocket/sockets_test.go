package main

import (
	"bufio"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"rocket/client"
)

var (
	sockets     = flag.Int("sockets", 400, "how many sockets TestIdleSockets opens")
	socketsStay = flag.Duration("sockets.stay", 0, "for how long they stay: more than 15s sees pings")
)

// idleSocket is a WebSocket that answers pings and its end, with no more memory
// than that takes.
type idleSocket struct {
	conn  net.Conn
	pings int
	texts int
	code  int // of the close frame; 0: none came
}

func dialIdle(base, path string) (*idleSocket, error) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", path)
	return &idleSocket{conn: conn}, err
}

// run reads until the server ends it; opened is called after the handshake.
func (s *idleSocket) run(opened func()) error {
	defer s.conn.Close()
	in := bufio.NewReaderSize(s.conn, 512)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return fmt.Errorf("upgrade: %s", resp.Status)
	}
	opened()
	for {
		var head [2]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return err
		}
		n := int(head[1] & 0x7f)
		if n == 126 {
			var long [2]byte
			if _, err := io.ReadFull(in, long[:]); err != nil {
				return err
			}
			n = int(binary.BigEndian.Uint16(long[:]))
		}
		payload := make([]byte, n)
		if _, err := io.ReadFull(in, payload); err != nil {
			return err
		}
		switch head[0] {
		case 0x81:
			s.texts++
		case 0x89:
			s.pings++
			if _, err := s.conn.Write(append([]byte{0x8a, 0x80 | byte(n), 0, 0, 0, 0}, payload...)); err != nil {
				return err
			}
		case 0x88:
			s.code = int(binary.BigEndian.Uint16(payload))
			_, err := s.conn.Write(append([]byte{0x88, 0x80 | byte(n), 0, 0, 0, 0}, payload...))
			return err
		default:
			return fmt.Errorf("a frame of kind %#x", head[0])
		}
	}
}

// scrape reads one number of /metrics.
func scrape(t *testing.T, url, name string) float64 {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("no %s in the metrics", name)
	}
	v, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// residentKiB is how much memory a process has.
func residentKiB(t *testing.T, pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	m := regexp.MustCompile(`VmRSS:\s+(\d+) kB`).FindSubmatch(text)
	n, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestIdleSockets: many sockets that do nothing stay open and cost little,
// turns stream meanwhile, those that leave are forgotten, and the rest are told
// that the server restarts. With -sockets 10000 -sockets.stay 40s it is the
// test of the ledger's aim.
func TestIdleSockets(t *testing.T) {
	server := serve(t, "--listen", "127.0.0.1:0", "--data-dir", dataDirectory(t))
	api := connect(t, server.url)
	ctx := testContext(t)
	prompt := "package main"
	var ids []string
	for range 16 {
		s, err := api.Create(ctx, client.CreateRequest{Input: &prompt}, client.CallOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	busy := ids[0]
	if _, err := api.RunTurn(ctx, busy, sampled(50), client.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	goroutines, memory := scrape(t, server.url, "go_goroutines"), residentKiB(t, server.cmd.Process.Pid)
	all := make([]*idleSocket, *sockets)
	var open, ended sync.WaitGroup
	open.Add(len(all))
	room := make(chan struct{}, 64) // handshakes at once
	failures := make(chan error, len(all))
	for i := range all {
		room <- struct{}{}
		s, err := dialIdle(server.url, "/v1/sessions/"+ids[1+i%(len(ids)-1)]+"/stream")
		if err != nil {
			t.Fatalf("socket %d: %v", i, err)
		}
		all[i] = s
		ended.Go(func() {
			var once sync.Once
			opened := func() { once.Do(func() { <-room; open.Done() }) }
			err := s.run(opened)
			opened()
			if s.code != 1012 && i < len(all)/2 || err != nil && s.code != 0 {
				failures <- fmt.Errorf("socket %d: close %d after %d frames and %d pings: %w", i, s.code, s.texts, s.pings, err)
			}
		})
	}
	open.Wait()
	for { // it counts a socket after it has answered
		n := scrape(t, server.url, "rocket_websocket_connections")
		if n == float64(len(all)) {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("the server has %v sockets of %d", n, len(all))
		}
		time.Sleep(20 * time.Millisecond)
	}
	for end := time.Now().Add(*socketsStay); ; {
		turn, err := api.RunTurn(ctx, busy, sampled(50), client.CallOptions{})
		if err != nil || len(turn.Tokens) != 50 {
			t.Fatalf("a turn beside %d idle sockets: %d tokens, %v", len(all), len(turn.Tokens), err)
		}
		left := time.Until(end)
		if left <= 0 {
			break
		}
		time.Sleep(min(left, time.Second)) // what -sockets.stay asks for
	}
	t.Logf("%d sockets: %.1f KiB of the server's memory and %.2f goroutines each", len(all),
		float64(residentKiB(t, server.cmd.Process.Pid)-memory)/float64(len(all)), (scrape(t, server.url, "go_goroutines")-goroutines)/float64(len(all)))
	half := len(all) / 2
	for _, s := range all[half:] {
		s.conn.Close()
	}
	for scrape(t, server.url, "rocket_websocket_connections") != float64(half) || scrape(t, server.url, "go_goroutines") > goroutines+4*float64(half)+64 {
		if ctx.Err() != nil {
			t.Fatalf("of %d sockets %d left, and the server still has %v and %v goroutines", len(all), half,
				scrape(t, server.url, "rocket_websocket_connections"), scrape(t, server.url, "go_goroutines"))
		}
		time.Sleep(20 * time.Millisecond)
	}
	if code := server.end(t, syscall.SIGTERM); code != 0 {
		t.Errorf("exit %d", code)
	}
	ended.Wait()
	close(failures)
	for err := range failures {
		t.Fatal(err)
	}
	pinged := 0
	for _, s := range all[:half] {
		if s.pings > 0 {
			pinged++
		}
	}
	if *socketsStay > 20*time.Second && pinged < half {
		t.Errorf("%d of %d sockets saw pings", pinged, half)
	}
	t.Logf("%d of %d sockets saw pings", pinged, half)
}

func TestConnectionsOf(t *testing.T) {
	for files, want := range map[uint64]int{0: 1, 4: 3, 1024: 768, 4096: 3072, 20_000: 18_976, 1 << 20: connectionsMost, 1<<64 - 1: connectionsMost} {
		if got := connectionsOf(files); got != want {
			t.Errorf("of %d files %d connections, want %d", files, got, want)
		}
	}
}
