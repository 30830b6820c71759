package sessions

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/uuid"
)

// skew makes the server believe another time until it looks at the ledger's
// clock again.
func (r *rig) skew(by time.Duration) {
	r.clock.seen.Store(&clockLook{time.Now().Add(by), time.Now()})
}

func TestLedgerClock(t *testing.T) {
	var c ledgerClock
	start := time.Now()
	there := time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)
	c.set(there, start, 0)
	if off := c.now().Sub(there); off < 0 || off > time.Hour {
		t.Errorf("%s off", off)
	}
	first := c.seen.Load()
	for _, x := range []struct {
		name   string
		ledger time.Duration // what its clock has gone on
		round  time.Duration
		moves  bool
	}{
		{"as expected", time.Minute, 0, false},
		{"a little later", time.Minute + clockStep/2, 0, false},
		{"a day later", 24 * time.Hour, 0, true},
		{"a day earlier", -24 * time.Hour, 0, true},
		{"a day later, but nobody knows when", 24 * time.Hour, 2 * clockRoundMax, false},
	} {
		c.seen.Store(first)
		c.set(there.Add(x.ledger), start.Add(time.Minute), x.round)
		if moved := c.seen.Load() != first; moved != x.moves {
			t.Errorf("%s: moved %v", x.name, moved)
		}
	}
	c.seen.Store(first)
	c.set(there.Add(time.Hour), start.Add(time.Minute), 10*time.Second)
	if c.seen.Load() != first {
		t.Error("a slow look counts")
	}
}

// Whatever a server's clock shows, its sessions live as long by the ledger's as
// they may, and its events are kept as long.
func TestServersClockIsOffByADay(t *testing.T) {
	r := newRig(t)
	for _, by := range []time.Duration{24 * time.Hour, -24 * time.Hour} {
		s := must(r.Create(t.Context(), local, CreateRequest{Input: ptr("a"), TTLSeconds: ptr(3600)}))
		r.skew(by)
		conn := must(r.pool.Acquire(t.Context()))
		for time.Until(r.clock.now()).Abs() > time.Hour { // a look that took long does not count
			if err := r.clock.read(t.Context(), conn); err != nil { // as with each renewal of the lease
				t.Fatal(err)
			}
		}
		conn.Release()
		r.turn(s.ID, "b", 3)
		var left, age time.Duration
		u, _ := parseSession(s.ID)
		err := r.pool.QueryRow(t.Context(), `SELECT expires_at - now(), (SELECT max(abs(extract(epoch FROM e.time - now())) * interval '1 second')
			FROM events e WHERE e.session_id = s.id) FROM sessions s WHERE id = $1`, u).Scan(&left, &age)
		if err != nil {
			t.Fatal(err)
		}
		if left < 50*time.Minute || left > time.Hour || age > 10*time.Minute {
			t.Errorf("off by %s: expires in %s, an event is off by %s", by, left, age)
		}
		if err := r.closeExpired(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := r.get(s.ID); got.State != StateIdle {
			t.Errorf("off by %s: %+v", by, got)
		}
		// and what is over is over
		if _, err := r.pool.Exec(t.Context(), `UPDATE sessions SET expires_at = now() - interval '1 second' WHERE id = $1`, u); err != nil {
			t.Fatal(err)
		}
		live := must(r.acquire(t.Context(), DefaultTenant, u))
		live.mu.Lock()
		live.row.expires = ptr(r.clock.now().Add(-time.Second))
		live.mu.Unlock()
		if err := r.closeExpired(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := r.get(s.ID); got.State != StateClosed {
			t.Errorf("off by %s: %+v", by, got)
		}
	}
}

// Turns come in the order in which they are on the line, whatever the clocks
// say that their ids were drawn by: a server's that has jumped back, or
// another server's.
func TestTurnsInOrderOfTheLine(t *testing.T) {
	r := newRig(t)
	s := r.create("a")
	var want []string
	for range 5 {
		want = append([]string{r.turn(s.ID, "b", 2).ID}, want...)
	}
	// the newest three have ids of long ago
	for i, id := range want[:3] {
		old, _ := parseID(turnPrefix, id)
		drawn := uuid.UUID{0, 0, 0, 0, 0, byte(i), 0x70, 0, 0x80}
		for _, sql := range []string{`UPDATE turns SET id = $2 WHERE id = $1`, `UPDATE events SET turn_id = $2 WHERE turn_id = $1`,
			`UPDATE token_runs SET turn_id = $2 WHERE turn_id = $1`} {
			if _, err := r.pool.Exec(t.Context(), sql, old, drawn); err != nil {
				t.Fatal(err)
			}
		}
		want[i] = turnID(drawn)
	}
	var got []string
	for after := ""; ; {
		page := must(r.Turns(t.Context(), DefaultTenant, s.ID, TurnFilter{Limit: 2, After: after}))
		for _, turn := range page.Data {
			got = append(got, turn.ID)
		}
		if !page.HasMore {
			break
		}
		after = *page.Next
	}
	if len(got) != len(want) {
		t.Fatalf("turns %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("turns %v, want %v", got, want)
		}
	}
	if last := must(r.Cancel(t.Context(), local, s.ID)); last.ID != want[0] {
		t.Errorf("the last turn is %s, want %s", last.ID, want[0])
	}
	var bundle bytes.Buffer
	if err := r.Export(t.Context(), DefaultTenant, s.ID, &bundle); err != nil {
		t.Fatal(err)
	}
	if made, err := r.Import(t.Context(), local, &bundle); err != nil || made.Turns != len(want) {
		t.Errorf("import: %+v, %v", made, err)
	}
	if err := r.Check(t.Context(), DefaultTenant); err != nil {
		t.Error(err)
	}
}
