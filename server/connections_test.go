package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"

	"rocket/sessions"
)

// TestConnectionsAreBounded: connections without a request give way to new
// ones, those at work do not, and who finds no place is told at once.
func TestConnectionsAreBounded(t *testing.T) {
	const most = 6
	h := startHostile(t, worldOptions{server: Options{ConnectionsMax: most, times: standardTimes}})
	h.victim.Close()
	call := h.with("GET "+pathSessions) + "\r\n"
	var idle []*rawConn
	for range 3 * most { // from the first that finds no place on, each closes the one that waits for longest
		c := h.connect()
		c.put(call)
		if a := c.answer(); a.status != http.StatusOK {
			t.Fatalf("status %d %s", a.status, a.body)
		}
		idle = append(idle, c)
	}
	ended := make(chan bool, len(idle))
	for _, c := range idle {
		go func() {
			_, err := io.Copy(io.Discard, c.in)
			ended <- !errors.Is(err, errTimeout(err))
		}()
	}
	for range 2 * most { // those that it knew first to wait, which need not be those that were answered first
		if !<-ended {
			t.Error("an old connection stays open")
		}
	}
	var busy []*rawConn
	for ctx := h.ctx(); len(busy) < most; {
		// A client may have its answer a moment before the server knows that
		// the connection waits, and so find no place yet.
		if c, resp, err := h.tryUpgrade(pathSessions + "/" + h.sid + "/stream"); err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
			busy = append(busy, c)
		} else if ctx.Err() != nil {
			t.Fatalf("connections that wait do not give way to a socket: %v, %v", resp, err)
		}
	}
	for range 2 * most { // nobody gives way
		c := h.connect()
		c.put(call)
		if a := c.answer(); a.status != 0 {
			t.Errorf("one connection more than there may be: %d %s", a.status, a.body)
		}
	}
	for _, c := range busy {
		c.put(textFrame(`{"type":"ping","ref":"still here"}`))
		if _, code, _ := c.closedAfter("still here", rawFrame(fin|opClose, 2, "\x03\xe8")); code != 1000 {
			t.Errorf("a socket at work was closed with %d", code)
		}
	}
	for ctx, status := h.ctx(), 0; status != http.StatusOK; { // until the server has seen their ends
		if ctx.Err() != nil {
			t.Fatal("there is no room again")
		}
		c := h.connect()
		c.put(call)
		status = c.answer().status
	}
	h.works()
}

// TestStreamShares: one tenant cannot take the places of all others.
func TestStreamShares(t *testing.T) {
	s := bare(t, Options{})
	var ends []func()
	open := func(tenant string) error {
		end, err := s.beginStream(withCaller(context.Background(), sessions.Identity{Tenant: tenant}))
		if err == nil {
			ends = append(ends, end)
		}
		return err
	}
	for range streamsShared {
		if err := open("a"); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if p, ok := open("a").(*Problem); !ok || p.Code != codeConnectionsMax || p.Status != http.StatusServiceUnavailable {
			t.Errorf("%+v", p)
		}
	}
	others := 0
	for _, tenant := range []string{"b", "c", "d"} {
		for open(tenant) == nil {
			others++
		}
	}
	if others != 3*streamsFew {
		t.Errorf("three tenants got %d", others)
	}
	for _, end := range ends {
		end()
	}
	if s.streamed != 0 || len(s.streamBy) != 0 {
		t.Errorf("%d streams are left, of %v", s.streamed, s.streamBy)
	}
	if err := open("a"); err != nil {
		t.Error(err)
	}
	ends[len(ends)-1]()
}

// TestHeldBytes: bodies and frames hold so much, of one tenant and of all, and
// give it back; small ones are not counted.
func TestHeldBytes(t *testing.T) {
	var held heldBytes
	const most = 32 << 20
	var all []*holding
	hold := func(tenant string) error {
		h := &holding{held: &held, tenant: tenant}
		all = append(all, h)
		for n := 0; n < most; n += 1 << 10 {
			if err := h.add(1 << 10); err != nil {
				return err
			}
		}
		return nil
	}
	small := &holding{held: &held, tenant: "a"}
	if err := small.add(heldFreeBytes); err != nil || held.all != 0 {
		t.Errorf("a small body: %v, %d bytes", err, held.all)
	}
	taken := map[string]int{}
	for _, tenant := range []string{"a", "b", "c"} {
		for hold(tenant) == nil {
			taken[tenant]++
		}
	}
	if one := heldTenantMax / (most - heldFreeBytes); taken["a"] != one || taken["b"] != one || taken["c"] != 0 {
		t.Errorf("%v bodies of %d bytes were held", taken, most)
	}
	if held.all > heldBytesMax || held.tenants["a"] > heldTenantMax {
		t.Errorf("%d bytes are held, %v", held.all, held.tenants)
	}
	for _, h := range all {
		h.release()
		h.release()
	}
	if held.all != 0 || len(held.tenants) != 0 {
		t.Errorf("%d bytes are left, of %v", held.all, held.tenants)
	}
}
