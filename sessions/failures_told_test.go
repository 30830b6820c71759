package sessions

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"rocket/internal/localpg/pgtest"
)

// TestFailuresTold: the addresses with the most failures are named with their
// counts, few enough for a row, and the counts add up to all.
func TestFailuresTold(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var f failures
	times := func(n int, address string) {
		for range n {
			f.add(netip.MustParseAddr(address))
		}
	}
	if got := f.due(now, true); got.count != 0 {
		t.Errorf("of none: %+v", got)
	}
	times(2, "192.0.2.1")
	times(1, "::ffff:192.0.2.1") // the same
	times(1, "2001:db8:1:2::1")
	times(1, "2001:db8:1:2:ffff::9%eth0") // a customer's other address
	f.add(netip.Addr{})
	if got := f.due(now, false); got.count != 6 || got.from != "192.0.2.1 3, 2001:db8:1:2::/64 2, unknown address 1" {
		t.Errorf("%+v", got)
	}
	times(1, "192.0.2.1")
	if got := f.due(now.Add(failureEvery-1), false); got.count != 0 {
		t.Errorf("too early: %+v", got)
	}
	if got := f.due(now.Add(failureEvery), false); got.count != 1 || got.from != "192.0.2.1 1" {
		t.Errorf("what was told is told again: %+v", got)
	}
	for i := range 20 {
		times(20-i, fmt.Sprintf("198.51.100.%d", i))
	}
	if got := f.due(now, true); got.count != 210 || got.from != "198.51.100.0 20, 198.51.100.1 19, 198.51.100.2 18, 198.51.100.3 17, "+
		"198.51.100.4 16, 198.51.100.5 15, 198.51.100.6 14, 198.51.100.7 13, 12 others 78" {
		t.Errorf("%+v", got)
	}
}

// TestFailuresToldBound: memory, the row and the line are bounded, and very
// many addresses do not hide one that guesses much.
func TestFailuresToldBound(t *testing.T) {
	var f failures
	const all, bad = 5 * failuresKnown, "2001:db8:ffff:1::/64"
	guesser := netip.MustParseAddr("2001:db8:ffff:1::1")
	guesses := 0
	for i := range all {
		f.add(netip.AddrFrom16([16]byte{0x20, 1, 4: byte(i >> 16), byte(i >> 8), byte(i)}))
		if i%10 == 9 {
			f.add(guesser)
			guesses++
		}
		if len(f.by) > failuresKnown {
			t.Fatalf("%d addresses in memory", len(f.by))
		}
	}
	got := f.due(time.Unix(1_800_000_000, 0), true)
	others := fmt.Sprintf("%d or more others", failuresKnown-failuresNamed)
	if got.count != all+guesses || !strings.HasPrefix(got.from, fmt.Sprintf("%s %d, ", bad, guesses)) || !strings.Contains(got.from, others) || len(got.from) > 512 {
		t.Errorf("%d failures of %d: %q", got.count, all+guesses, got.from)
	}
}

// TestFailuresAreRecorded: an operator finds who guesses in the audit and in
// the log, once each, and no guess.
func TestFailuresAreRecorded(t *testing.T) {
	r, lines := loggedRig(t, pgtest.New(t), "http://127.0.0.1:1")
	ctx := t.Context()
	fails := &r.Keys().fails
	fails.mu.Lock()
	fails.last = time.Now().Add(time.Hour) // only this test writes them
	fails.mu.Unlock()
	guess := KeySecretPrefix + strings.Repeat("A", keySecretLen-len(KeySecretPrefix))
	for range 5 {
		_, err := r.Keys().Authenticate(ctx, netip.MustParseAddr("192.0.2.7"), guess)
		wantCode(t, err, CodeUnauthenticated, "")
	}
	_, err := r.Keys().Authenticate(ctx, netip.MustParseAddr("192.0.2.8"), "x")
	wantCode(t, err, CodeUnauthenticated, "")
	for range 2 {
		if err := r.Keys().writeFailures(ctx, true); err != nil {
			t.Fatal(err)
		}
	}
	var subjects string
	var count int
	if err := r.pool.QueryRow(ctx, `SELECT string_agg(subject, '; '), sum(count) FROM audit_events WHERE action = $1`, auditAuthFailed).Scan(&subjects, &count); err != nil {
		t.Fatal(err)
	}
	const want = "192.0.2.7 5, 192.0.2.8 1"
	if subjects != want || count != 6 {
		t.Errorf("%d failures of %q, want 6 of %q", count, subjects, want)
	}
	if n := lines.count("level=WARN", "authentications failed", "count=6", want); n != 1 {
		t.Errorf("%d lines of the log", n)
	}
	if lines.count(guess) != 0 {
		t.Error("a guess is in the log")
	}
}
