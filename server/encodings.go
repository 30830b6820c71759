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
	byKey map[eventKey]encoded    // guarded by mu
	ring  [encodingsKept]eventKey // guarded by mu; the keys in the order of their coming
	next  int                     // guarded by mu
}

// eventKey names an event among those that are read now. It is no name for
// good: a session that was deleted can be imported under its old id, here or at
// another server, and its log then goes other ways under the same numbers. So
// bytes are given only for an event that is equal to the one they were made of.
type eventKey struct {
	tenant     string // ids are unique in a tenant
	session    string
	epoch, seq int64
}

type encoded struct {
	event sessions.Event
	data  []byte
}

// encode returns the event's JSON on one line. The bytes are shared: nobody may
// change them.
func (c *encodings) encode(tenant string, e *sessions.Event) ([]byte, error) {
	k := eventKey{tenant, e.SessionID, e.Epoch, e.Seq}
	c.mu.RLock()
	kept, there := c.byKey[k]
	c.mu.RUnlock()
	if there && kept.event.Equal(e) {
		return kept.data, nil
	}
	data, err := e.AppendJSON(nil)
	if err != nil || len(data) > encodingBytesMax {
		return data, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if kept, there = c.byKey[k]; there {
		if kept.event.Equal(e) {
			return kept.data, nil
		}
		c.byKey[k] = encoded{*e, data} // in the place of the one that was
		return data, nil
	}
	if c.byKey == nil {
		c.byKey = make(map[eventKey]encoded, encodingsKept)
	}
	delete(c.byKey, c.ring[c.next])
	c.ring[c.next], c.byKey[k] = k, encoded{*e, data}
	c.next = (c.next + 1) % encodingsKept
	return data, nil
}
