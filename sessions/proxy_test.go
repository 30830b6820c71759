package sessions

import (
	"bytes"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// proxy stands between a manager and a real Postgres, and loses connections
// when it is told to.
type proxy struct {
	t      testing.TB
	target string // socket
	ln     net.Listener
	url    string

	mu      sync.Mutex
	down    bool
	conns   map[net.Conn]bool
	swallow []byte // lose the connection behind the next message to the server that contains this, once it is sent
	fuse    int    // lose the connection at this message to the server, before it is sent; 0: none
}

func newProxy(t testing.TB, dbURL string) *proxy {
	t.Helper()
	u, err := url.Parse(dbURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	dir, err := os.MkdirTemp("/tmp", "rkproxy")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, target: filepath.Join(q.Get("host"), ".s.PGSQL.5432"), conns: map[net.Conn]bool{}}
	if p.ln, err = net.Listen("unix", filepath.Join(dir, ".s.PGSQL.5432")); err != nil {
		t.Fatal(err)
	}
	q.Set("host", dir)
	u.RawQuery = q.Encode()
	p.url = u.String()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := p.ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		p.ln.Close()
		p.cut()
		wg.Wait()
		os.RemoveAll(dir)
	})
	return p
}

func (p *proxy) serve(c net.Conn) {
	defer c.Close()
	p.mu.Lock()
	if p.down {
		p.mu.Unlock()
		return
	}
	s, err := net.Dial("unix", p.target)
	if err != nil {
		p.mu.Unlock()
		return
	}
	p.conns[c], p.conns[s] = true, true
	p.mu.Unlock()
	defer s.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(c, s)
		c.Close()
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			p.mu.Lock()
			if p.fuse > 0 {
				if p.fuse--; p.fuse == 0 {
					p.mu.Unlock()
					break
				}
			}
			lose := p.swallow != nil && bytes.Contains(buf[:n], p.swallow)
			if lose {
				p.swallow = nil
				c.Close() // the server does it, nobody hears the answer
			}
			p.mu.Unlock()
			if _, err := s.Write(buf[:n]); err != nil {
				break
			}
			if lose {
				io.Copy(io.Discard, io.LimitReader(s, 1)) // it has answered
				break
			}
		}
		if err != nil {
			break
		}
	}
	s.Close()
	<-done
	p.mu.Lock()
	delete(p.conns, c)
	delete(p.conns, s)
	p.mu.Unlock()
}

// cut loses every connection and takes no more.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) restore() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
}

// loseAnswer loses the connection on which the next such statement is sent,
// after it has reached the server.
func (p *proxy) loseAnswer(statement string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallow = []byte(statement)
}

// loseAt loses the connection on which the n-th message from now on (from 1)
// is sent, before it reaches the server. It returns whether an earlier fuse
// has burnt down.
func (p *proxy) loseAt(n int) (burnt bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	burnt = p.fuse == 0
	p.fuse = n
	return burnt
}
