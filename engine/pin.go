package engine

import "context"

// Pin keeps what s has on the device there, whatever else needs the room, until it is called with false or s is given
// back. All pins together get at most half of the pages and half of the states; beyond that a pin has no effect until
// others go. After each turn it reaches to the new end.
func (e *Engine) Pin(s *Seq, on bool) {
	_ = e.do(context.Background(), func() { // closed: nothing is kept any more
		if s.dead {
			return
		}
		s.wantPin = on
		e.repin(s)
	})
}

// repin makes the pin what s wants and has now.
func (e *Engine) repin(s *Seq) {
	e.forest.Unpin(&s.pin)
	s.pinned = false
	if s.wantPin && !s.cold && !s.fresh && s.consumed > 0 {
		s.pin, s.pinned = e.forest.Pin(s.ns, s.line[:s.consumed])
	}
}
