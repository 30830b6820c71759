package server

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// forwardedMax is how many addresses of a request's headers are looked at. More
// proxies in a row are not; the last one that was looked at counts then.
const forwardedMax = 32

// ParseProxy reads an address or a range (CIDR) of reverse proxies. One of all
// addresses is refused: everybody could say where they come from.
func ParseProxy(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return p, fmt.Errorf("%q: want an address or a range, as 10.0.0.5 or 10.0.0.0/24", text)
	case p.Bits() == 0:
		return p, fmt.Errorf("%q: everybody is no proxy", text)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%q: want a range of IPv4 written as one", text)
	}
	return p.Masked(), nil
}

// proxies are the reverse proxies that are believed when they say whom they
// call for.
type proxies []netip.Prefix

func (p proxies) trust(a netip.Addr) bool {
	return a.IsValid() && slices.ContainsFunc(p, func(x netip.Prefix) bool { return x.Contains(a) })
}

// clientOf is where a request comes from: the connection's other end. If that
// is a trusted proxy, it is the address that the proxy has put at the end of
// X-Forwarded-For or Forwarded, and so on to the left for as long as that is a
// trusted proxy's too. What stands left of the first other address is that
// client's own to write, and is not read.
//
// A proxy writes one of the headers, as a rule, and passes on the other as it
// comes. So when both are there and do not agree, neither is believed: the
// call counts as the proxy's own, as one without a header does.
func (p proxies) clientOf(r *http.Request) netip.Addr {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{} // no network that has such: no limit
	}
	peer := plainAddr(from.Addr())
	if !p.trust(peer) {
		return peer
	}
	list, element := r.Header.Values("X-Forwarded-For"), r.Header.Values("Forwarded")
	switch {
	case len(element) == 0:
		return p.behind(peer, list, splitList)
	case len(list) == 0:
		return p.behind(peer, element, splitForwarded)
	}
	if a := p.behind(peer, list, splitList); a == p.behind(peer, element, splitForwarded) {
		return a
	}
	return peer
}

// behind walks from the last address of the last header to the left, until one
// is no trusted proxy's or cannot be read. split gives the addresses of one
// header, nil if it cannot be read.
func (p proxies) behind(at netip.Addr, headers []string, split func(string) []string) netip.Addr {
	looked := 0
	for _, h := range slices.Backward(headers) {
		parts := split(h)
		if parts == nil {
			return at
		}
		for _, text := range slices.Backward(parts) {
			a, ok := nodeAddr(text)
			if !ok || looked == forwardedMax {
				return at
			}
			looked++
			if at = a; !p.trust(a) {
				return a
			}
		}
	}
	return at
}

// plainAddr is an address without what makes it look like another one.
func plainAddr(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// nodeAddr reads an address of either header, with or without a port: 10.0.0.1,
// 10.0.0.1:80, 2001:db8::1, [2001:db8::1], [2001:db8::1]:80.
func nodeAddr(text string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(text); err == nil {
		return plainAddr(a), true
	}
	if a, err := netip.ParseAddrPort(text); err == nil {
		return plainAddr(a.Addr()), true
	}
	if inner, ok := strings.CutPrefix(text, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); ok {
			a, err := netip.ParseAddr(inner)
			return plainAddr(a), err == nil && a.Is6()
		}
	}
	return netip.Addr{}, false
}

// splitList splits one X-Forwarded-For header.
func splitList(h string) []string {
	parts := strings.Split(h, ",")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

// splitForwarded gives the for= of each element of one Forwarded header (RFC
// 7239), "" for one without; nil for a header that breaks the grammar: who
// opens a quotation must not have what a proxy appends taken for its inside.
func splitForwarded(h string) []string {
	parts := []string{}
	node, named := "", false
	for {
		var name, value string
		var ok bool
		if name, value, h, ok = forwardedPair(h); !ok || named && strings.EqualFold(name, "for") {
			return nil
		}
		if strings.EqualFold(name, "for") {
			node, named = value, true
		}
		h = strings.TrimLeft(h, " \t")
		switch {
		case h == "":
			return append(parts, node)
		case h[0] == ',':
			parts, node, named = append(parts, node), "", false
		case h[0] != ';':
			return nil
		}
		h = h[1:]
	}
}

// forwardedPair reads a name, "=", and a token or a quoted string.
func forwardedPair(h string) (name, value, rest string, ok bool) {
	name, h, ok = strings.Cut(strings.TrimLeft(h, " \t"), "=")
	if !ok || name == "" || strings.ContainsAny(name, ",;\" \t") {
		return "", "", "", false
	}
	if !strings.HasPrefix(h, `"`) {
		end := strings.IndexAny(h, ",; \t")
		if end < 0 {
			end = len(h)
		}
		return name, h[:end], h[end:], !strings.Contains(h[:end], `"`)
	}
	var text strings.Builder
	for i := 1; i < len(h); i++ {
		switch {
		case h[i] == '"':
			return name, text.String(), h[i+1:], true
		case h[i] == '\\':
			if i++; i == len(h) {
				return "", "", "", false
			}
		}
		text.WriteByte(h[i])
	}
	return "", "", "", false
}
