package sessions

import "context"

const (
	// logWindowMax is how many committed events of a session stay in memory.
	// A reader further behind reads from the ledger.
	logWindowMax = 1024

	// ReadMax bounds one Read.
	ReadMax = 1000

	// readBytesMax bounds what one reader of a log takes at once, so that many
	// slow ones hold little. One event that is larger comes alone.
	readBytesMax = 64 << 10
)

// window is the tail of a session's log.
//
//	seq  [1 ...... first)            only in the ledger
//	     [first ........... next)    in memory
//	     [first .. committed]        in both
//	     [first ...... visible]      readers may have them: committed ones, and deltas with none but deltas before
//
// Events before kept are gone by retention: kept is what memory knows of the
// ledger's first_seq, and never past first.
type window struct {
	first, next        int64
	committed, visible int64
	kept               int64
	events             []Event
}

func (w *window) init(last int64) {
	*w = window{first: last + 1, next: last + 1, committed: last, visible: last}
}

// append adds an event, giving it its seq.
func (w *window) append(e Event) Event {
	e.Seq = w.next
	w.next++
	w.events = append(w.events, e)
	return e
}

func (w *window) commit(seq int64) { w.committed = max(w.committed, seq) }

// advance moves visible on and lets go of what is old.
func (w *window) advance() (moved bool) {
	old := w.visible
	w.visible = max(w.visible, w.committed)
	for w.visible+1 < w.next && w.events[w.visible+1-w.first].Type == EventTurnDelta {
		w.visible++
	}
	// trimmed by halves, so that the copying is paid for by as many appends
	if len(w.events) > 2*logWindowMax {
		if n := min(int64(len(w.events)-logWindowMax), w.committed+1-w.first); n > 0 {
			w.events = append([]Event(nil), w.events[n:]...)
			w.first += n
		}
	}
	return w.visible > old
}

// drop lets go of committed events before seq, which retention has dropped.
func (w *window) drop(seq int64) {
	seq = min(seq, w.committed+1)
	w.kept = max(w.kept, seq)
	if n := seq - w.first; n > 0 {
		w.events = append([]Event(nil), w.events[n:]...) // readers may have the others
		w.first = seq
	}
}

// pending are the events that no transaction has committed yet.
func (w *window) pending() []Event { return w.events[w.committed+1-w.first:] }

// visibleLocked tells readers and watchers what they may see by now.
func (s *session) visibleLocked() {
	from := s.log.visible + 1
	if !s.log.advance() {
		return
	}
	for i := max(from, s.log.first); i <= s.log.visible; i++ {
		if e := s.log.events[i-s.log.first]; e.Type != EventTurnDelta {
			s.m.hub.publish(s.key.tenant, sessionID(s.row.root), e)
		}
	}
	s.wakeLocked()
}

// Log is a session's event log. Readers hold an offset (the next seq they
// want), never a channel: a slow one only lags.
//
// A log is read in one epoch. When that rises under a reader, what it has seen
// last may never have happened: it gets CodeMoved, and comes back with the
// epoch that it knows. So it does when it waits for another server's session,
// whose events are told there.
type Log struct {
	m     *Manager
	key   liveKey
	epoch int64
}

// Log returns the session's event log.
func (m *Manager) Log(ctx context.Context, tenant, id string) (*Log, error) {
	u, err := parseSession(id)
	if err != nil {
		return nil, err
	}
	s, err := m.acquire(ctx, tenant, u)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := m.canRead(&s.row); err != nil {
		return nil, err
	}
	return &Log{m, liveKey{tenant, u}, s.row.epoch}, nil
}

// movedLocked refuses to read on in another epoch.
func (l *Log) movedLocked(s *session) error {
	if s.row.epoch == l.epoch {
		return nil
	}
	return fail(CodeMoved, "the session was taken over: come back with the last epoch you saw")
}

// Start turns what a client knows into the first seq to read. epoch is the
// last one it saw, 0 for none: when that is over, the stream starts at the
// next epoch's first event if from lies behind it. CodeGone when events that
// the client lacks are gone by retention.
func (l *Log) Start(ctx context.Context, from, epoch int64) (int64, error) {
	if from < 1 {
		from = 1
	}
	s, err := l.m.acquire(ctx, l.key.tenant, l.key.id)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	stale, here, gone := epoch > 0 && epoch < s.row.epoch, from >= s.log.first, s.log.kept
	s.mu.Unlock()
	switch {
	case stale:
	case here:
		return from, nil
	case from < gone:
		return 0, goneBefore(gone)
	}
	kept, goneEpoch, err := keptEvents(ctx, l.m.pool, l.key.tenant, l.key.id)
	if err != nil {
		return 0, err
	}
	if stale {
		if epoch < goneEpoch { // the start of the next epoch, which says what never happened, is among them
			return 0, goneBefore(kept)
		}
		first, err := epochStart(ctx, l.m.pool, l.key.tenant, l.key.id, epoch)
		if err != nil {
			return 0, err
		}
		if first != 0 {
			from = min(from, first)
		}
	}
	if from < kept && !here {
		return 0, goneBefore(kept)
	}
	return from, nil
}

// Read returns up to max events from seq from on, from memory or from the
// ledger, fewer where they are large; none when from is past the end. CodeGone
// when they are purged.
func (l *Log) Read(ctx context.Context, from int64, max int) ([]Event, error) {
	events, _, err := l.read(ctx, from, max, readBytesMax)
	return events, err
}

// Page is Read for an answer of up to PageBytesMax bytes.
func (l *Log) Page(ctx context.Context, from int64, max int) ([]Event, error) {
	events, more, err := l.read(ctx, from, max, readBytesMax)
	if err != nil || !more {
		return events, err
	}
	events = nil // whoever waits holds nothing
	if err := l.m.holdAnswer(ctx, l.key.tenant, l.m.answers.page); err != nil {
		return nil, err
	}
	events, _, err = l.read(ctx, from, max, l.m.answers.page)
	return events, err
}

// read returns up to max events of at most so many bytes, at least one, and
// whether the bytes cut them short.
func (l *Log) read(ctx context.Context, from int64, max int, bytes int64) (events []Event, cut bool, err error) {
	if max <= 0 || max > ReadMax {
		max = ReadMax
	}
	if from < 1 {
		from = 1
	}
	s, err := l.m.acquire(ctx, l.key.tenant, l.key.id)
	if err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	if err := l.movedLocked(s); err != nil {
		s.mu.Unlock()
		return nil, false, err
	}
	first, visible := s.log.first, s.log.visible
	if from >= first || from > visible {
		var out []Event
		if n := min(int64(max), visible-from+1); n > 0 {
			there := s.log.events[from-first : from-first+n]
			fit := fitting(there, bytes)
			out, cut = append(out, there[:fit]...), fit < len(there)
		}
		s.mu.Unlock()
		return out, cut, nil
	}
	s.mu.Unlock()
	to := min(first-1, from+int64(max)-1)
	events, err = l.older(ctx, from, to, bytes)
	return events, err == nil && from+int64(len(events)) <= to, err
}

// fitting is how many of the first events are at most so many bytes, at least
// one.
func fitting(events []Event, bytes int64) int {
	for i := range events {
		if bytes -= events[i].bytes(); bytes < 0 {
			return max(i, 1)
		}
	}
	return len(events)
}

// older reads the events [from, to] from the ledger, or the first of them that
// are at most so many bytes, at least one.
func (l *Log) older(ctx context.Context, from, to, bytes int64) ([]Event, error) {
	events, err := selectEvents(ctx, l.m.pool, l.m.tok, l.key.tenant, l.key.id, from, to, bytes)
	if err != nil {
		return nil, err
	}
	if len(events) == 0 || events[0].Seq != from {
		kept, _, err := keptEvents(ctx, l.m.pool, l.key.tenant, l.key.id)
		if err != nil {
			return nil, err
		}
		if len(events) > 0 && events[0].Seq > kept {
			kept = events[0].Seq
		}
		return nil, goneBefore(kept)
	}
	return events, nil
}

// Last returns the current epoch and the seq of the newest visible event.
func (l *Log) Last(ctx context.Context) (epoch, seq int64, err error) {
	s, err := l.m.acquire(ctx, l.key.tenant, l.key.id)
	if err != nil {
		return 0, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.row.epoch, s.log.visible, nil
}
