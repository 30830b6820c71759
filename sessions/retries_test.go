package sessions

import (
	"testing"
	"testing/synctest"
	"time"
)

// What fails is tried again after ever longer times, up to a bound, and at once
// after it went well; what is remembered of it is bounded.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r retries[int]
		want := retryFirst
		for range 20 {
			if !r.due(1) || len(r.resting()) != 0 {
				t.Fatal("not due in time")
			}
			if got := r.failed(1); got != want || r.due(1) || len(r.resting()) != 1 {
				t.Fatalf("rests for %v, want %v", got, want)
			}
			time.Sleep(want)
			want = min(2*want, retryMost)
		}
		r.done(1)
		if got := r.failed(1); got != retryFirst {
			t.Errorf("after it went well: %v", got)
		}
		for i := range 2 * retriesMax {
			r.failed(i)
		}
		if len(r.by) != retriesMax {
			t.Errorf("%d remembered", len(r.by))
		}
	})
}
