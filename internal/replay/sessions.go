package replay

import "rocket/radix"

// SessionsResult says what the sessions held at the moment when they held most.
type SessionsResult struct {
	Live          int     `json:"live"`           // sessions between their first and their last event
	SharedBytes   int64   `json:"shared_bytes"`   // pages and states that they held together, each counted once
	UnsharedBytes int64   `json:"unshared_bytes"` // what they would take if each had its own: full pages and one state
	RootBytes     int64   `json:"root_bytes"`     // of SharedBytes, the beginning that all have in common
	SharingRatio  float64 `json:"sharing_ratio"`  // SharedBytes / UnsharedBytes
	PageRatio     float64 `json:"page_ratio"`     // the same of pages alone
	States        int     `json:"states"`         // distinct ones
	FurtherTokens float64 `json:"further_tokens"` // past the root, mean of the sessions, in whole pages
	OwnTokens     float64 `json:"own_tokens"`     // of them held once, mean, in whole pages

	FitShared   int `json:"fit_shared,omitempty"`   // sessions in the budget with the root counted once
	FitSpread   int `json:"fit_spread,omitempty"`   // with the root spread over all of Live
	FitUnshared int `json:"fit_unshared,omitempty"` // each with its own
	// FitResident is measured: how many sessions were whole on the device, each with its state, when for the first time
	// there was no room without taking something from one of them. 0: that never happened.
	FitResident int `json:"fit_resident,omitempty"`
	// ResidentMax is measured: the most sessions that were whole on the device at once, while others were put away to
	// make room.
	ResidentMax int `json:"resident_max,omitempty"`
	// ReplayMean is how many tokens a resident session computes again before its next turn, mean, when the first
	// session retires; ReplayMax the most.
	ReplayMean float64 `json:"replay_mean"`
	ReplayMax  int     `json:"replay_max"`
}

// resident counts what sessions hold: what their timelines refer to, or, of sessions that keep none, what the tree has
// of their latest line (only in a walk without a budget, where it stays).
type resident struct {
	g          Geometry
	root       int
	pages      []int32 // holders by id
	slots      []int32
	held       map[int32]holding
	uniqPages  int
	uniqSlots  int
	sumPages   int // of all sessions, shared ones counted again
	most       int // sessions in held, at most
	replayed   bool
	replayMean float64
	replayMax  int
	peak       SessionsResult
	firstStuck int
}

type holding struct {
	pages []int32
	slot  int32
	full  int // pages that its line fills or begins
}

func newResident(t *Trace, g Geometry, pages, slots int) *resident {
	return &resident{g: g, root: t.Root, pages: make([]int32, pages), slots: make([]int32, slots), held: map[int32]holding{}}
}

// hold notes what a session's timeline has after a turn or a fork; the line is of the given length.
func (r *resident) hold(session int32, s *seq, line int) {
	if r == nil || session < 0 {
		return
	}
	r.release(session)
	h := holding{pages: append([]int32{}, s.pages...), slot: s.slot, full: (line - 1 + radix.PageTokens - 1) / radix.PageTokens}
	for _, id := range h.pages {
		if r.pages[id]++; r.pages[id] == 1 {
			r.uniqPages++
		}
	}
	if h.slot != radix.None {
		if r.slots[h.slot]++; r.slots[h.slot] == 1 {
			r.uniqSlots++
		}
	}
	r.sumPages += h.full
	r.held[session] = h
	r.most = max(r.most, len(r.held))
	r.measure()
}

// release forgets a session.
func (r *resident) release(session int32) {
	if r == nil {
		return
	}
	h, ok := r.held[session]
	if !ok {
		return
	}
	for _, id := range h.pages {
		if r.pages[id]--; r.pages[id] == 0 {
			r.uniqPages--
		}
	}
	if h.slot != radix.None {
		if r.slots[h.slot]--; r.slots[h.slot] == 0 {
			r.uniqSlots--
		}
	}
	r.sumPages -= h.full
	delete(r.held, session)
}

// shed notes that a session holds another state now.
func (r *resident) shed(session, slot int32) {
	if r == nil {
		return
	}
	h := r.held[session]
	if r.slots[h.slot]--; r.slots[h.slot] == 0 {
		r.uniqSlots--
	}
	if r.slots[slot]++; r.slots[slot] == 1 {
		r.uniqSlots++
	}
	h.slot = slot
	r.held[session] = h
}

func (r *resident) measure() {
	shared := int64(r.uniqPages)*r.g.PageBytes + int64(r.uniqSlots)*r.g.SlotBytes
	if shared <= r.peak.SharedBytes {
		return
	}
	n := len(r.held)
	rootPages := r.root / radix.PageTokens
	r.peak = SessionsResult{
		Live: n, SharedBytes: shared, States: r.uniqSlots, RootBytes: int64(rootPages) * r.g.PageBytes,
		UnsharedBytes: int64(r.sumPages)*r.g.PageBytes + int64(n)*r.g.SlotBytes,
		PageRatio:     float64(r.uniqPages) / float64(r.sumPages),
		FurtherTokens: float64(r.sumPages-n*rootPages) * radix.PageTokens / float64(n),
		OwnTokens:     float64(r.uniqPages-rootPages) * radix.PageTokens / float64(n),
	}
	r.peak.SharingRatio = float64(shared) / float64(r.peak.UnsharedBytes)
}

// stuck notes the first time that no room was left but in what sessions hold.
func (r *resident) stuck() {
	if r != nil && r.firstStuck == 0 {
		r.firstStuck = len(r.held)
	}
}

func (r *resident) result() *SessionsResult {
	if r == nil || r.peak.Live == 0 {
		return nil
	}
	out := r.peak
	out.FitResident, out.ResidentMax, out.ReplayMean, out.ReplayMax = r.firstStuck, r.most, r.replayMean, r.replayMax
	return &out
}

// fit fills in how many sessions of the measured kind the budget holds.
func (s *SessionsResult) fit(budget int64) {
	n := int64(s.Live)
	s.FitUnshared = int(budget * n / s.UnsharedBytes)
	s.FitSpread = int(float64(budget) / (float64(s.SharedBytes) / float64(n)))
	if own := float64(s.SharedBytes-s.RootBytes) / float64(n); own > 0 {
		s.FitShared = int(max(0, float64(budget-s.RootBytes)/own))
	}
}

// distances measures, once, how far the resident sessions are from a state that they could go on from.
func (w *walker) distances() {
	r := w.resident
	if r == nil || r.replayed || !w.t.Resident {
		return
	}
	r.replayed = true
	n, sum := 0, 0
	for i := range w.t.Sessions {
		s := w.idle[int32(i)]
		if s == nil || s.cold || s.busy {
			continue
		}
		n++
		req := &w.t.Requests[s.last]
		d := max(0, req.prompt+req.output-1-s.consumed)
		if w.t.Sessions[i].Parent >= 0 && req.Session != int32(i) {
			d = 0 // it has not run yet
		}
		sum += d
		r.replayMax = max(r.replayMax, d)
	}
	if n > 0 {
		r.replayMean = float64(sum) / float64(n)
	}
}
