package server

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// pinger finds out that a socket's peer is gone without a word. Whoever writes
// to the socket calls ping at each tick.
type pinger struct {
	*time.Ticker
	conn    *wsConn
	answer  time.Duration   // what an answer may take
	all     *sync.WaitGroup // the socket's goroutines
	waiting atomic.Bool     // for an answer
}

// newPinger is for a socket whose reader is busy with other things for as long
// as busy: it does not see an answer meanwhile.
func (s *Server) newPinger(conn *wsConn, all *sync.WaitGroup, busy time.Duration) *pinger {
	return &pinger{Ticker: time.NewTicker(s.opts.Heartbeat), conn: conn, answer: s.opts.WriteTimeout + busy, all: all}
}

// ping sends one and does not wait, unless the last one has no answer yet. A
// peer that does not answer loses its connection, which ends the reader.
func (p *pinger) ping() {
	if p.waiting.Swap(true) {
		return
	}
	p.all.Go(func() {
		defer p.waiting.Store(false)
		wait, cancel := context.WithTimeout(context.Background(), p.answer)
		defer cancel()
		if p.conn.Ping(wait) != nil {
			_ = p.conn.CloseNow()
		}
	})
}
