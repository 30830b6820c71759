package pgtest

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Proxy stands between a server and a real Postgres and does to the connection
// what networks do: it delays, throttles, cuts, swallows, loses one answer or
// one message. It works on sockets of the file system, where a private cluster
// listens, and counts messages of the client, which a general proxy of bytes
// cannot; that is why it is not one.
//
// A message is what the client writes at once: pgx writes a batch so.
type Proxy struct {
	URL string // of the database, through the proxy

	target string // socket
	ln     net.Listener

	mu        sync.Mutex
	pairs     map[*pair]bool // guarded by mu, as all below
	down      bool           // takes no connections
	halfOpen  bool           // new connections and new bytes go nowhere
	latency   time.Duration  // of each message, to the server and back
	perSecond int            // bytes, each way; 0: no limit
	lateClose chan struct{}  // not nil: the server does not learn that a client is gone until it is closed
	rule      *rule          // for messages to come
	holding   int            // messages held back
	messages  int            // seen since the last CountMessages
}

// pair is one client's connection and the server's for it.
type pair struct {
	client, server net.Conn
	swallow        bool          // guarded by the proxy's mu: nothing passes any more
	mute           bool          // guarded by the proxy's mu: the next answer ends the client's connection
	answered       chan struct{} // closed when no more answers are carried
}

// rule is a fault of one message to the server.
type rule struct {
	text  []byte // only those with this text count; nil: all
	count int    // messages until then, from 1; 0 as well: the next
	do    fault
	wait  chan struct{} // holdMessage: until it may pass
	hit   chan struct{} // closed when it has happened
}

type fault int

const (
	loseMessage fault = iota // the connection ends before the message is sent
	loseAnswer               // and after it, so that nobody hears the answer
	swallow                  // the message and all after it go nowhere, and nothing ends
	holdMessage              // the client's connection ends; the message arrives late
)

// NewProxy puts a proxy before the database at dbURL.
func NewProxy(t testing.TB, dbURL string) *Proxy {
	t.Helper()
	u, err := url.Parse(dbURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	const socket = ".s.PGSQL.5432"
	dir, err := os.MkdirTemp("/tmp", "rkproxy") // short: paths of sockets are
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{target: filepath.Join(q.Get("host"), socket), pairs: map[*pair]bool{}}
	if p.ln, err = net.Listen("unix", filepath.Join(dir, socket)); err != nil {
		t.Fatal(err)
	}
	q.Set("host", dir)
	u.RawQuery = q.Encode()
	p.URL = u.String()
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := p.ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		p.ln.Close()
		p.CloseLate(false)
		p.Cut()
		all.Wait()
		os.RemoveAll(dir)
	})
	return p
}

// Cut loses every connection and takes no more.
func (p *Proxy) Cut() {
	p.mu.Lock()
	p.down = true
	p.mu.Unlock()
	p.Reset()
}

// Reset loses every connection; new ones work.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for x := range p.pairs {
		x.client.Close()
		x.server.Close()
	}
}

// Drop loses the clients' ends of all connections. With CloseLate the server
// has not noticed yet.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for x := range p.pairs {
		x.client.Close()
	}
}

// HalfOpen makes the connections that there are, and those to come, swallow
// what they are given. Nobody is told.
func (p *Proxy) HalfOpen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.halfOpen = true
	for x := range p.pairs {
		x.swallow = true
	}
}

// Restore ends every fault. Connections that swallow stay so.
func (p *Proxy) Restore() {
	p.CloseLate(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down, p.halfOpen, p.latency, p.perSecond, p.rule = false, false, 0, 0, nil
}

// Delay holds each message back for d, to the server and back.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latency = d
}

// Throttle lets that many bytes a second through each way.
func (p *Proxy) Throttle(perSecond int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.perSecond = perSecond
}

// CloseLate keeps it from the server that a client has gone, with all locks of
// its transaction, until it is switched off.
func (p *Proxy) CloseLate(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on && p.lateClose == nil:
		p.lateClose = make(chan struct{})
	case !on && p.lateClose != nil:
		close(p.lateClose)
		p.lateClose = nil
	}
}

// LoseAnswer loses the connection on which the next message with this text is
// sent, after it has reached the server and been answered.
func (p *Proxy) LoseAnswer(text string) (hit <-chan struct{}) {
	return p.set(&rule{text: []byte(text), do: loseAnswer})
}

// LoseAnswerAt is LoseAnswer for the n-th message from now on, from 1.
func (p *Proxy) LoseAnswerAt(n int) (hit <-chan struct{}) {
	return p.set(&rule{count: n, do: loseAnswer})
}

// LoseAt loses the connection on which the n-th message from now on, from 1,
// is sent, before it reaches the server.
func (p *Proxy) LoseAt(n int) (hit <-chan struct{}) {
	return p.set(&rule{count: n, do: loseMessage})
}

// SwallowAt makes the connection on which the n-th message from now on, from
// 1, is sent swallow it and everything after it.
func (p *Proxy) SwallowAt(n int) (hit <-chan struct{}) {
	return p.set(&rule{count: n, do: swallow})
}

// Hold loses the client's connection at the n-th message with this text, and
// delivers the message when pass is called.
func (p *Proxy) Hold(n int, text string) (hit <-chan struct{}, pass func()) {
	r := &rule{text: []byte(text), count: n, do: holdMessage, wait: make(chan struct{})}
	return p.set(r), sync.OnceFunc(func() { close(r.wait) })
}

func (p *Proxy) set(r *rule) <-chan struct{} {
	r.hit = make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule = r
	return r.hit
}

// Unset takes back a fault of one message that has not happened.
func (p *Proxy) Unset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule = nil
}

// CountMessages tells how many messages the clients have sent since it was
// last asked.
func (p *Proxy) CountMessages() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.messages
	p.messages = 0
	return n
}

func (p *Proxy) serve(c net.Conn) {
	defer c.Close()
	p.mu.Lock()
	down := p.down
	p.mu.Unlock()
	if down {
		return
	}
	s, err := net.Dial("unix", p.target)
	if err != nil {
		return // Postgres is away
	}
	x := &pair{client: c, server: s, answered: make(chan struct{})}
	p.mu.Lock()
	if p.down {
		p.mu.Unlock()
		s.Close()
		return
	}
	x.swallow = p.halfOpen
	p.pairs[x] = true
	p.mu.Unlock()
	go func() {
		defer close(x.answered)
		defer c.Close()
		p.answers(x)
	}()
	p.requests(x)
	p.mu.Lock()
	late := p.lateClose
	p.mu.Unlock()
	c.Close()
	if late != nil {
		<-late
	}
	s.Close()
	<-x.answered
	p.mu.Lock()
	delete(p.pairs, x)
	p.mu.Unlock()
}

// requests carries what the client sends.
func (p *Proxy) requests(x *pair) {
	buf := make([]byte, 1<<16)
	for {
		n, err := x.client.Read(buf)
		if n > 0 && !p.request(x, buf[:n]) || err != nil {
			return
		}
	}
}

// request carries one message; false: the connection is over.
func (p *Proxy) request(x *pair, data []byte) bool {
	p.mu.Lock()
	if p.holding > 0 && cancels(data) { // what is held shall happen
		p.mu.Unlock()
		return false
	}
	p.messages++
	r := p.rule
	if r != nil && !x.swallow {
		switch {
		case r.text != nil && !bytes.Contains(data, r.text):
			r = nil
		case r.count > 1:
			r.count--
			r = nil
		default:
			p.rule = nil
		}
	} else {
		r = nil
	}
	p.mu.Unlock()
	if r != nil {
		close(r.hit)
		switch r.do {
		case loseMessage:
			return false
		case swallow:
			p.mu.Lock()
			x.swallow = true
			p.mu.Unlock()
		case loseAnswer:
			p.mu.Lock()
			x.mute = true // and the client waits until then: it would cancel what it cannot hear of
			p.mu.Unlock()
		case holdMessage:
			p.mu.Lock()
			p.holding++
			p.mu.Unlock()
			x.client.Close()
			<-r.wait
			if _, err := x.server.Write(data); err == nil {
				<-x.answered
			}
			p.mu.Lock()
			p.holding--
			p.mu.Unlock()
			return false
		}
	}
	return p.carry(x, x.server, data)
}

// cancels tells whether data is the request to cancel another connection's
// statement, which the client makes when it gives a connection up.
func cancels(data []byte) bool {
	return len(data) >= 8 && binary.BigEndian.Uint32(data[4:]) == 80877102
}

func (p *Proxy) answers(x *pair) {
	buf := make([]byte, 1<<16)
	for {
		n, err := x.server.Read(buf)
		if n > 0 && !p.carry(x, x.client, buf[:n]) || err != nil {
			return
		}
	}
}

// carry passes bytes on as slowly as it must.
func (p *Proxy) carry(x *pair, to net.Conn, data []byte) bool {
	p.mu.Lock()
	delay, perSecond := p.latency, p.perSecond
	p.mu.Unlock()
	if perSecond > 0 {
		delay += time.Duration(len(data)) * time.Second / time.Duration(perSecond)
	}
	if delay > 0 {
		time.Sleep(delay)
	}
	p.mu.Lock()
	swallowed, mute := x.swallow, x.mute && to == x.client
	p.mu.Unlock()
	if mute {
		return false
	}
	if swallowed {
		return true
	}
	_, err := to.Write(data)
	return err == nil
}
