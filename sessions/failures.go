package sessions

import (
	"net/netip"
	"sync"
	"time"
)

// Failed authentications of one address. Keys cannot be guessed; the limit is
// there so that trying costs the ledger and the log little, and so that one
// address that tries does not take the looks of the others.
//
//   - Who locks out whom: nobody a key that this server knows to be good; it is
//     never asked about. An address past its limit gets 429 for every other
//     key, but a key that the server does not know yet is looked up all the
//     same, in a lane of one look at a time that all such addresses share. So a
//     good key that comes from a bad address (a proxy, an office) for the first
//     time waits for its turn in that lane, and is refused only while the lane
//     is full for keyLookupTime.
//   - An address is a /64 of IPv6, which is what one customer has, or one of
//     IPv4. Behind a proxy that the server was not told to trust all clients
//     have the proxy's: the limit is theirs together, and a limit for each of
//     them is the proxy's to keep.
const (
	authFailuresMax  = 60          // at once; more: 429
	authFailureEvery = time.Second // one more is allowed each
	authAddressesMax = 4096        // addresses in memory; one more takes the place of one that has the fewest failures of a few
	authEvictLook    = 32          // that are looked at for one to give up
)

// addressFailures remembers, by address, when its failures are forgotten: each
// adds authFailureEvery to it.
type addressFailures struct {
	mu   sync.Mutex
	free map[netip.Prefix]time.Time // guarded by mu
}

// addressOf is what counts as one address; false for one that is none, which
// has no limit.
func addressOf(a netip.Addr) (netip.Prefix, bool) {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	return p, err == nil && p.IsValid()
}

// wait is how long it takes until a failure is allowed again; 0: it is now.
func (f *addressFailures) wait(a netip.Addr, now time.Time) time.Duration {
	p, ok := addressOf(a)
	if !ok {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	free, known := f.free[p]
	if !known || !free.After(now) {
		return 0
	}
	return max(0, free.Sub(now)-(authFailuresMax-1)*authFailureEvery)
}

// add counts a failure. Past the limit it changes nothing: whoever goes on and
// on is let in again as soon as who stopped.
func (f *addressFailures) add(a netip.Addr, now time.Time) {
	p, ok := addressOf(a)
	if !ok {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	free, known := f.free[p]
	if free.Sub(now) > (authFailuresMax-1)*authFailureEvery {
		return
	}
	if !known {
		f.makeRoomLocked(now)
	}
	if free.Before(now) {
		free = now
	}
	if f.free == nil {
		f.free = map[netip.Prefix]time.Time{}
	}
	f.free[p] = free.Add(authFailureEvery)
}

// makeRoomLocked gives up what is forgotten anyway, or has the fewest failures,
// of a few addresses when there are too many. Whoever has very many addresses
// is not limited by this, but by keyLookupsMax.
func (f *addressFailures) makeRoomLocked(now time.Time) {
	if len(f.free) < authAddressesMax {
		return
	}
	var victim netip.Prefix
	var first time.Time
	seen := 0
	for p, free := range f.free { // in no order, which is good enough
		if !free.After(now) {
			delete(f.free, p)
		} else if !victim.IsValid() || free.Before(first) {
			victim, first = p, free
		}
		if seen++; seen >= authEvictLook {
			break
		}
	}
	if len(f.free) >= authAddressesMax {
		delete(f.free, victim)
	}
}

// tooManyFailures is the answer past the limit, whether the key was looked up
// or not.
func tooManyFailures(wait time.Duration) *Error {
	e := fail(CodeTooManyFailures, "too many failed authentications came from this address")
	e.RetryAfter = max(wait, authFailureEvery)
	return e
}
