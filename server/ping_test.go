package server

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// TestPeersThatAreGone: a socket or a watch whose peer answers no ping loses its connection; one that answers stays.
func TestPeersThatAreGone(t *testing.T) {
	h := startHostile(t, worldOptions{server: Options{Heartbeat: 20 * time.Millisecond, WriteTimeout: 500 * time.Millisecond, CallTimeout: time.Second}})
	stays := h.dialWith(h.sid, "", &websocket.DialOptions{HTTPHeader: map[string][]string{"X-Api-Key": {h.key.Secret}}})
	ponged := make(chan error, 1)
	go func() { // who reads answers pings
		for {
			_, data, err := stays.conn.Read(h.ctx())
			if err != nil || bytes.Contains(data, []byte(`"pong"`)) {
				ponged <- err
				return
			}
		}
	}()
	for name, c := range map[string]*rawConn{"socket": h.stream(), "watch": h.upgrade(pathWatch)} {
		pings := 0
		for head := make([]byte, 2); ; {
			if _, err := io.ReadFull(c.in, head); err != nil {
				break // cut: there is no close frame, which the peer would not see
			}
			n := int64(head[1])
			if n == 126 {
				var length uint16
				_ = binary.Read(c.in, binary.BigEndian, &length)
				n = int64(length)
			}
			if _, err := io.CopyN(io.Discard, c.in, n); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			switch head[0] & 0xf {
			case opPing:
				pings++
			case opClose:
				t.Errorf("%s: a close frame", name)
			}
		}
		if pings != 1 {
			t.Errorf("%s: cut after %d pings, want 1: the next waits for its answer", name, pings)
		}
	}
	stays.send(`{"type":"ping","ref":"still here"}`)
	if err := <-ponged; err != nil {
		t.Errorf("the peer that answers: %v", err)
	}
}
