package server

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"rocket/sessions"
)

func proxiesOf(t testing.TB, all ...string) (p proxies) {
	t.Helper()
	for _, text := range all {
		one, err := ParseProxy(text)
		if err != nil {
			t.Fatal(err)
		}
		p = append(p, one)
	}
	return p
}

func TestParseProxy(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.5": "10.0.0.5/32", "10.0.0.5/8": "10.0.0.0/8", "::1": "::1/128", "2001:db8::/32": "2001:db8::/32", "::ffff:10.0.0.5": "10.0.0.5/32",
		"": "", "x": "", "10.0.0.0/33": "", "0.0.0.0/0": "", "::/0": "", "::ffff:10.0.0.0/104": "", "fe80::1%eth0": "", "10.0.0.5:80": "",
	} {
		p, err := ParseProxy(text)
		if (err != nil) != (want == "") || err == nil && p.String() != want {
			t.Errorf("%q: %v, %v, want %q", text, p, err, want)
		}
	}
}

// Whose address counts, by connection and headers. What a client writes itself never decides.
func TestClientOf(t *testing.T) {
	p := proxiesOf(t, "10.0.0.0/24", "2001:db8::5")
	const proxy = "10.0.0.1"
	for _, c := range []struct {
		name, from string
		xff, fwd   []string
		want       string
	}{
		{"no proxy", "6.6.6.6", nil, nil, "6.6.6.6"},
		{"no proxy that says so", "6.6.6.6", []string{"1.1.1.1"}, []string{"for=1.1.1.1"}, "6.6.6.6"},
		{"one that looks like a proxy", "10.0.1.1", []string{"1.1.1.1"}, nil, "10.0.1.1"},
		{"a proxy that says nothing", proxy, nil, nil, proxy},
		{"a proxy", proxy, []string{"1.1.1.1"}, nil, "1.1.1.1"},
		{"mapped into IPv6", "[::ffff:10.0.0.1]", []string{"::ffff:1.1.1.1"}, nil, "1.1.1.1"},
		{"over IPv6", "[2001:db8::5]", []string{"[2001:db8::6]:99"}, nil, "2001:db8::6"},
		{"spoofed before", proxy, []string{"9.9.9.9, 6.6.6.6"}, nil, "6.6.6.6"},
		{"spoofed as a proxy", proxy, []string{"9.9.9.9, 10.0.0.7, 6.6.6.6"}, nil, "6.6.6.6"},
		{"spoofed in another line", proxy, []string{"9.9.9.9", "6.6.6.6"}, nil, "6.6.6.6"},
		{"proxies in a row", proxy, []string{"9.9.9.9,1.1.1.1 ,10.0.0.9", " 10.0.0.8"}, nil, "1.1.1.1"},
		{"proxies only", proxy, []string{"10.0.0.9, 10.0.0.8"}, nil, "10.0.0.9"},
		{"nonsense", proxy, []string{"hello"}, nil, proxy},
		{"nonsense at the end", proxy, []string{"1.1.1.1, unknown"}, nil, proxy},
		{"nonsense behind a proxy", proxy, []string{"1.1.1.1, , 10.0.0.9"}, nil, "10.0.0.9"},
		{"with a port", proxy, []string{"1.1.1.1:8080"}, nil, "1.1.1.1"},
		{"with a zone", proxy, []string{"fe80::1%eth0"}, nil, "fe80::1"},
		{"too many", proxy, []string{"1.1.1.1" + strings.Repeat(", 10.0.0.2", forwardedMax-1) + ", 10.0.0.3"}, nil, "10.0.0.2"},
		{"forwarded", proxy, nil, []string{"for=1.1.1.1;proto=https"}, "1.1.1.1"},
		{"forwarded, quoted", proxy, nil, []string{`By=x; For="[2001:db8::6]:47011"`}, "2001:db8::6"},
		{"forwarded, several", proxy, nil, []string{"for=9.9.9.9, for=1.1.1.1, for=10.0.0.3"}, "1.1.1.1"},
		{"forwarded, hidden", proxy, nil, []string{"for=1.1.1.1, for=_secret"}, proxy},
		{"forwarded, no for", proxy, nil, []string{"for=1.1.1.1, proto=http"}, proxy},
		{"forwarded, for twice", proxy, nil, []string{"for=1.1.1.1;for=2.2.2.2"}, proxy},
		{"forwarded, a comma in quotes", proxy, nil, []string{`for=9.9.9.9;x="a, for=8.8.8.8", for=6.6.6.6`}, "6.6.6.6"},
		{"forwarded, an open quotation", proxy, nil, []string{`for="9.9.9.9, for=6.6.6.6`}, proxy},
		{"forwarded, a quotation closed by the proxy's", proxy, nil, []string{`for=9.9.9.9;x=", for="[2001:db8::6]"`}, proxy},
		{"forwarded, an escaped quotation", proxy, nil, []string{`for=9.9.9.9;x="\", for=8.8.8.8", for=6.6.6.6`}, "6.6.6.6"},
		{"forwarded, an open quotation in another line", proxy, nil, []string{`for="`, "for=6.6.6.6"}, "6.6.6.6"},
		{"both", proxy, []string{"1.1.1.1"}, []string{"for=1.1.1.1"}, "1.1.1.1"},
		{"both, and one is the client's", proxy, []string{"6.6.6.6"}, []string{"for=9.9.9.9"}, proxy},
		{"both, and the other is the client's", proxy, []string{"9.9.9.9"}, []string{"for=6.6.6.6"}, proxy},
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = c.from + ":4711"
		r.Header["X-Forwarded-For"], r.Header["Forwarded"] = c.xff, c.fwd
		if got := p.clientOf(r); got.String() != c.want {
			t.Errorf("%s: %v, want %s", c.name, got, c.want)
		}
		if got := proxies(nil).clientOf(r); got != plainAddr(netip.MustParseAddrPort(r.RemoteAddr).Addr()) {
			t.Errorf("%s: without proxies %v", c.name, got)
		}
	}
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "@"
	if got := p.clientOf(r); got.IsValid() {
		t.Errorf("an address that is none: %v", got)
	}
}

// FuzzForwarded: whatever a client writes into the headers, it counts as the address that the proxy appends, or as the
// proxy.
func FuzzForwarded(f *testing.F) {
	p := proxiesOf(f, "10.0.0.0/24")
	for _, s := range []string{"", "9.9.9.9", "10.0.0.2", "for=9.9.9.9", `for="`, `for=9.9.9.9;x="`, `x="\`, "for=10.0.0.2, for=9.9.9.9;", `for="[::1]"`, "a,b;c=d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		proxy, client := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("2001:db8::6")
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "10.0.0.1:80"
		for _, header := range []string{"X-Forwarded-For", "Forwarded"} {
			appended := "2001:db8::6"
			if header == "Forwarded" {
				appended = `for="[2001:db8::6]"`
			}
			for _, lines := range [][]string{{text + ", " + appended}, {text, appended}} {
				r.Header = http.Header{header: lines}
				if got := p.clientOf(r); got != client && (got != proxy || header != "Forwarded") {
					t.Errorf("%s %q: %v", header, lines, got)
				}
			}
		}
	})
}

// TestFailuresBehindAProxy: clients of a trusted proxy fail each for themselves, and cannot fail as others; a header of
// anybody else is not believed.
func TestFailuresBehindAProxy(t *testing.T) {
	w := start(t, worldOptions{server: Options{RequireKeys: true, TrustedProxies: proxiesOf(t, "127.0.3.1")}})
	k, _ := w.key("a", false)
	wrong := sessions.KeySecretPrefix + strings.Repeat("A", len(k.Secret)-len(sessions.KeySecretPrefix))
	fails := func(forwarded string) int {
		t.Helper()
		return w.do("GET", pathSessions, "", "X-Api-Key", wrong, "X-Forwarded-For", forwarded).status
	}
	limited := func(forwarded string) bool {
		for range 3 { // one is let through if a second has passed; who has not failed yet may do so many times
			if fails(forwarded) == http.StatusTooManyRequests {
				return true
			}
		}
		return false
	}
	w.from = net.IPv4(127, 0, 3, 1)
	for i := 0; fails("9.9.9.9, 6.6.6.6") != http.StatusTooManyRequests; i++ {
		if i > 1000 {
			t.Fatalf("no limit after %d failures", i)
		}
	}
	for _, other := range []string{"9.9.9.9", "6.6.6.6, 7.7.7.7", ""} {
		if got := fails(other); got != http.StatusUnauthorized {
			t.Errorf("a failure of %q: %d", other, got)
		}
	}
	if !limited("8.8.8.8, 6.6.6.6") {
		t.Error("the same client under another name is not limited")
	}
	w.from = net.IPv4(127, 0, 3, 2)
	for i := 0; fails("5.5.5.5") != http.StatusTooManyRequests; i++ {
		if i > 1000 {
			t.Fatalf("no limit after %d failures", i)
		}
	}
	if !limited("4.4.4.4") {
		t.Error("one that is no proxy is not limited under another name")
	}
	w.from = net.IPv4(127, 0, 3, 1)
	if got := fails("5.5.5.5"); got != http.StatusUnauthorized {
		t.Errorf("the one whose name was used: %d", got)
	}
}
