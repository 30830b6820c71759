package engine

import (
	"math/rand/v2"
	"testing"

	"rocket/radix"
)

// TestCorruptHostBytesCostAColdStart: a flipped bit in any blob of a detached line is found, costs a recomputation,
// never a wrong state, and the bad copy is not tried again.
func TestCorruptHostBytesCostAColdStart(t *testing.T) {
	e := newTestEngine(t, 64, 32, nil)
	r := rand.New(rand.NewPCG(31, 32))
	for blob := range 3 { // two full pages, then the state with its partial page
		line := randomLine(r, 300)
		s, _ := open(t, e, line)
		turn(t, e, s, line, 1)
		if _, err := e.Detach(t.Context(), s, TierHost); err != nil {
			t.Fatal(err)
		}
		var handles []int64
		if err := e.do(t.Context(), func() {
			e.forest.Match("", line, &e.match)
			for _, p := range e.match.Pages {
				handles = append(handles, p.Host)
			}
			handles = append(handles, e.match.Snapshot.Host)
		}); err != nil {
			t.Fatal(err)
		}
		if len(handles) != 3 || handles[blob] == 0 {
			t.Fatalf("handles %v", handles)
		}
		parts, err := e.host.Get(handles[blob])
		if err != nil {
			t.Fatal(err)
		}
		parts[0][r.IntN(len(parts[0]))] ^= 1 << r.IntN(8)
		back, got := open(t, e, line)
		if got.Host != 0 || got.Recomputed == 0 || got.ColdReason != ColdCorrupt {
			t.Fatalf("blob %d: restored %+v (%s)", blob, got, got.ColdReason)
		}
		a, _ := turn(t, e, back, line, 3)
		b, _ := cold(t, e, line, 3)
		sameLogits(t, "after a bad blob", a, b, 3)
		e.Release(back)
		if again, got := open(t, e, line); got.Device == 0 {
			t.Errorf("blob %d: the second try restored %+v", blob, got)
		} else {
			e.Release(again)
		}
	}
}

// TestHostWithoutRoomKeepsOrDrops: what does not fit into the host tier stays on the device until room is needed, and
// is recomputed after that. It never fails a request.
func TestHostWithoutRoomKeepsOrDrops(t *testing.T) {
	e := newTestEngine(t, 10, 6, func(o *Options) { o.HostBytes = 1000 }) // less than one page
	r := rand.New(rand.NewPCG(33, 34))
	first := randomLine(r, 400)
	s, _ := open(t, e, first)
	turn(t, e, s, first, 1)
	res, err := e.Detach(t.Context(), s, TierHost)
	if err != nil {
		t.Fatal(err)
	}
	if res.Host != 0 || res.Device == 0 {
		t.Fatalf("residency %+v", res)
	}
	for range 3 { // push it out
		other := randomLine(r, 700)
		o, _ := open(t, e, other)
		turn(t, e, o, other, 1)
		e.Release(o)
	}
	back, got := open(t, e, first)
	if got.Recomputed == 0 {
		t.Fatalf("restored %+v: nothing was pushed out", got)
	}
	a, _ := turn(t, e, back, first, 3)
	b, _ := cold(t, e, first, 3)
	sameLogits(t, "recomputed", a, b, 3)
	hosted := 0
	if err := e.do(t.Context(), func() { hosted = e.forest.Stats().Pages[radix.Host] }); err != nil {
		t.Fatal(err)
	}
	if st := e.Stats(); st.HostBytes != 0 || hosted != 0 {
		t.Errorf("%d bytes and %d pages on a host tier without room", st.HostBytes, hosted)
	}
}
