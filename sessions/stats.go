package sessions

import (
	"sync/atomic"
	"time"

	"rocket/engine"
)

// Stats are the engine's and this package's numbers. Durations are sums in
// seconds, to be divided by their counts.
type Stats struct {
	Engine engine.Stats

	SessionsLive   int // in memory
	TurnsOpen      int
	Readers        int // of logs
	Forks          int64
	Commits        int64 // of operations
	CommitSeconds  float64
	Batches        int64 // of the writer
	BatchSeconds   float64
	TokensFlushed  int64
	TokensPending  int // seen, not committed
	LedgerConns    int
	LedgerDown     time.Duration // 0: it answers
	WatchedEvents  int64
	AnswerBytes    int64 // of large answers that are made or sent
	AnswersWaiting int   // for room for theirs
	ServerID       string
	LedgerConnsMax int
}

// counters are written by many goroutines.
type counters struct {
	forks, commits, commitNanos, batches, batchNanos, tokens atomic.Int64
}

func (c *counters) committed(d time.Duration) {
	c.commits.Add(1)
	c.commitNanos.Add(int64(d))
}

func (c *counters) batch(d time.Duration) {
	c.batches.Add(1)
	c.batchNanos.Add(int64(d))
}

func (c *counters) flushed(tokens int64) { c.tokens.Add(tokens) }

// Stats returns the numbers of this moment.
func (m *Manager) Stats() Stats {
	st := Stats{
		Engine: m.eng.Stats(), ServerID: m.me.String(),
		Forks: m.counts.forks.Load(), Commits: m.counts.commits.Load(), Batches: m.counts.batches.Load(),
		CommitSeconds: time.Duration(m.counts.commitNanos.Load()).Seconds(),
		BatchSeconds:  time.Duration(m.counts.batchNanos.Load()).Seconds(),
		TokensFlushed: m.counts.tokens.Load(),
	}
	for _, s := range m.sessions() {
		st.SessionsLive++
		s.mu.Lock()
		st.Readers += s.readers
		if s.turn != nil {
			st.TurnsOpen++
			st.TokensPending += len(s.line) - s.row.length
		}
		s.mu.Unlock()
	}
	pool := m.pool.Stat()
	st.LedgerConns, st.LedgerConnsMax = int(pool.TotalConns()), int(pool.MaxConns())
	if since := m.writer.downSince.Load(); since != 0 {
		st.LedgerDown = time.Since(time.Unix(0, since))
	}
	m.hub.mu.Lock()
	st.WatchedEvents = m.hub.published
	m.hub.mu.Unlock()
	m.answers.mu.Lock()
	st.AnswerBytes, st.AnswersWaiting = m.answers.all, m.answers.waiting
	m.answers.mu.Unlock()
	return st
}
