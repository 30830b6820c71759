package sessions

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestAddressFailures(t *testing.T) {
	var f addressFailures
	now := time.Unix(1_800_000_000, 0)
	addr := netip.MustParseAddr
	bad := addr("2001:db8:1:2::1")
	for i := range authFailuresMax {
		if w := f.wait(bad, now); w != 0 {
			t.Fatalf("after %d failures: wait %v", i, w)
		}
		f.add(bad, now)
	}
	for range 1000 { // goes on and on
		if w := f.wait(bad, now); w != authFailureEvery {
			t.Fatalf("past the limit: wait %v", w)
		}
		f.add(bad, now)
	}
	for _, c := range []struct {
		address string
		limited bool
	}{
		{"2001:db8:1:2:ffff:ffff:ffff:ffff", true}, {"2001:db8:1:2::1%eth0", true},
		{"2001:db8:1:3::1", false}, {"192.0.2.1", false}, {"::ffff:192.0.2.1", false},
	} {
		if w := f.wait(addr(c.address), now); (w > 0) != c.limited {
			t.Errorf("%s: wait %v", c.address, w)
		}
	}
	if w := f.wait(bad, now.Add(authFailureEvery)); w != 0 {
		t.Errorf("a while later: wait %v", w)
	}
	f.add(bad, now.Add(authFailureEvery))
	if w := f.wait(bad, now.Add(authFailureEvery)); w != authFailureEvery {
		t.Errorf("one more: wait %v", w)
	}
	for range authFailuresMax { // one address in two forms
		f.add(addr("192.0.2.1"), now)
	}
	if w := f.wait(addr("::ffff:192.0.2.1"), now); w == 0 {
		t.Error("a mapped address is another one")
	}
	if w := f.wait(netip.Addr{}, now); w != 0 {
		t.Errorf("no address: wait %v", w)
	}
	f.add(netip.Addr{}, now)
}

// TestAddressesBound: memory stays bounded, and an address that is limited is
// not pushed out by many with one failure each.
func TestAddressesBound(t *testing.T) {
	var f addressFailures
	now := time.Unix(1_800_000_000, 0)
	bad := netip.MustParseAddr("192.0.2.1")
	for range authFailuresMax {
		f.add(bad, now)
	}
	for i := range 3 * authAddressesMax {
		f.add(netip.AddrFrom16([16]byte{0x20, 1, 4: byte(i >> 16), byte(i >> 8), byte(i)}), now)
		if len(f.free) > authAddressesMax {
			t.Fatalf("%d addresses", len(f.free))
		}
	}
	if f.wait(bad, now) == 0 {
		t.Error("the limited address is forgotten")
	}
	f.add(netip.MustParseAddr("192.0.2.2"), now.Add(time.Hour))
	if len(f.free) > authAddressesMax-authEvictLook/2 {
		t.Errorf("%d addresses of long ago are kept", len(f.free))
	}
}

func guess() string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
	var b strings.Builder
	b.WriteString(KeySecretPrefix)
	for b.Len() < keySecretLen {
		b.WriteByte(letters[rand.IntN(len(letters))])
	}
	return b.String()
}

// TestFailuresOfAnAddress: past the limit an address gets 429 for what is no
// key, and locks out no key that is one, its own or another's.
func TestFailuresOfAnAddress(t *testing.T) {
	r := newRig(t)
	keys := r.Keys()
	known, unknown := r.key("a"), r.key("a")
	bad, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	if _, err := keys.Authenticate(t.Context(), bad, known.Secret); err != nil {
		t.Fatal(err)
	}
	for i := range authFailuresMax + 20 {
		secret := guess()
		if i%2 == 0 {
			secret = "rk_short"
		}
		_, err := keys.Authenticate(t.Context(), bad, secret)
		code := ErrorCode(err)
		if i < authFailuresMax && code != CodeUnauthenticated || i > authFailuresMax+5 && code != CodeTooManyFailures { // in between time may have passed
			t.Fatalf("failure %d: %v", i, err)
		}
		if e, ok := err.(*Error); !ok || code == CodeTooManyFailures && (e.RetryAfter < authFailureEvery || e.RetryAfter > 2*authFailureEvery) {
			t.Fatalf("failure %d: %+v", i, err)
		}
	}
	_, err := keys.Authenticate(t.Context(), other, guess())
	wantCode(t, err, CodeUnauthenticated, "")
	var all sync.WaitGroup
	stop := make(chan struct{})
	for range 16 { // the attack goes on meanwhile
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := keys.Authenticate(t.Context(), bad, guess())
				if code := ErrorCode(err); code != CodeTooManyFailures && code != CodeOverloaded && code != CodeUnauthenticated {
					t.Errorf("a guess: %v", err)
					return
				}
			}
		})
	}
	for _, c := range []struct {
		from   netip.Addr
		secret string
	}{{bad, known.Secret}, {other, r.key("a").Secret}, {bad, unknown.Secret}} {
		var err error
		for range 20 { // a lane that is full is no refusal of the key
			var who Identity
			if who, err = keys.Authenticate(t.Context(), c.from, c.secret); err == nil {
				if who.Tenant != "a" {
					t.Errorf("%+v", who)
				}
				break
			}
			if ErrorCode(err) != CodeOverloaded {
				break
			}
		}
		if err != nil {
			t.Errorf("a good key from %v: %v", c.from, err)
		}
	}
	close(stop)
	all.Wait()
}

// FuzzAddressOf: whatever address comes, it has one form, and its neighbours
// in the same customer's range have the same.
func FuzzAddressOf(f *testing.F) {
	for _, seed := range []string{"192.0.2.1", "::ffff:192.0.2.1", "2001:db8::1%eth0", "::", ""} {
		a, _ := netip.ParseAddr(seed)
		b, _ := a.MarshalBinary()
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var a netip.Addr
		if a.UnmarshalBinary(data) != nil {
			return
		}
		p, ok := addressOf(a)
		if ok != a.IsValid() {
			t.Fatalf("%v: %v", a, ok)
		}
		if !ok {
			return
		}
		if again, _ := addressOf(p.Addr()); again != p || !p.Contains(a.Unmap().WithZone("")) {
			t.Fatalf("%v: %v, %v", a, p, again)
		}
		if fmt.Sprint(p.Bits()) != map[bool]string{true: "64", false: "32"}[a.Unmap().Is6()] {
			t.Fatalf("%v: %v", a, p)
		}
	})
}
