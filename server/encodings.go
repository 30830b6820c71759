package server

import (
	"sync"

	"rocket/sessions"
)

const (
	// encodingsKept is how many events' JSON is kept for further readers; the
	// readers of a live event come within moments of each other.
	encodingsKept = 1024

	// encodingBytesMax is the longest that is kept. A longer one is encoded for
	// each reader.
	encodingBytesMax = 16 << 10
)

// encodings encodes an event once for all its readers.
type encodings struct {
	mu    sync.RWMutex
	byKey map[eventKey][]byte     // guarded by mu
	ring  [encodingsKept]eventKey // guarded by mu; the keys in the order of their coming
	next  int                     // guarded by mu
}

// eventKey names an event for good: within an epoch a seq is never used again.
type eventKey struct {
	tenant     string // ids are unique in a tenant
	session    string
	epoch, seq int64
}

// encode returns the event's JSON on one line. The bytes are shared: nobody may
// change them.
func (c *encodings) encode(tenant string, e *sessions.Event) ([]byte, error) {
	k := eventKey{tenant, e.SessionID, e.Epoch, e.Seq}
	c.mu.RLock()
	data := c.byKey[k]
	c.mu.RUnlock()
	if data != nil {
		return data, nil
	}
	data, err := e.AppendJSON(nil)
	if err != nil || len(data) > encodingBytesMax {
		return data, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if kept := c.byKey[k]; kept != nil {
		return kept, nil
	}
	if c.byKey == nil {
		c.byKey = make(map[eventKey][]byte, encodingsKept)
	}
	delete(c.byKey, c.ring[c.next])
	c.ring[c.next], c.byKey[k] = k, data
	c.next = (c.next + 1) % encodingsKept
	return data, nil
}
