package server

import (
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"rocket/sessions"
)

// TestHostileHTTP: requests that lie, that are too large, or that are none.
// Each is answered with a status, or its connection is closed, at once.
func TestHostileHTTP(t *testing.T) {
	patient := shortTimes // but with what is sent: on a busy machine it may take its time
	patient.header, patient.bodyRead, patient.bodyAll = patience, patience, patience
	h := startHostile(t, worldOptions{server: Options{times: patient}})
	before := h.goroutines()
	list := h.with("GET " + pathSessions)
	post := h.with("POST "+pathSessions, "Content-Type: application/json")
	get := "GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
	kib := strings.Repeat("x", 1<<10)
	mib := strings.Repeat("x", 1<<20)
	var cookies, headers strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&cookies, "Cookie: a%d=b\r\n", i)
		fmt.Fprintf(&headers, "X-%d: y\r\n", i)
	}
	for _, c := range []struct {
		name, request string
		status        int // 0: closed without an answer
	}{
		{"thousands of cookies", get + cookies.String() + "\r\n", 200},
		{"thousands of headers", get + headers.String() + "\r\n", 200},
		{"more headers than fit", get + strings.Repeat(headers.String(), 3) + "\r\n", 431},
		{"a huge header", get + "X-A: " + mib + "\r\n\r\n", 431},
		{"a huge header's name", get + mib + ": a\r\n\r\n", 431},
		{"a huge address", "GET /" + mib + " HTTP/1.1\r\nHost: localhost\r\n\r\n", 431},
		{"a huge method", mib + " / HTTP/1.1\r\nHost: localhost\r\n\r\n", 431},
		{"a huge line without an end", mib, 431},
		{"a large address", h.with("GET "+pathSessions+"/"+strings.Repeat("x", 40<<10)) + "\r\n", 404},
		{"a query that is none", h.with("GET "+pathSessions+"?limit=%zz") + "\r\n", 400},
		{"a large query", h.with("GET "+pathSessions+"?"+strings.Repeat("a&", 20<<10)) + "\r\n", 400},
		{"thousands of keys", get[:len(get)-0] + strings.Repeat("X-Api-Key: a\r\n", 3000) + "\r\n", 200},
		{"thousands of keys where one is wanted", "GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\n" + strings.Repeat("X-Api-Key: a\r\n", 3000) + "\r\n", 401},
		{"a list of protocols", "GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nSec-WebSocket-Protocol: " + strings.Repeat(keyProtocol+"a,", 3000) + "\r\n\r\n", 401},

		{"no host", "GET /healthz HTTP/1.1\r\n\r\n", 400},
		{"two hosts", get + "Host: other\r\n\r\n", 400},
		{"no version", "GET /healthz\r\n\r\n", 400},
		{"version 0.9", "GET /healthz HTTP/0.9\r\n\r\n", 505},
		{"version 2", "GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n", 505},
		{"the preface of version 2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405},
		{"no request", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400},
		{"folded header", get + "X-A: b\r\n c\r\n\r\n", 200},
		{"space before the colon", get + "X-A : b\r\n\r\n", 400},
		{"NUL in a header", get + "X-A: a\x00b\r\n\r\n", 400},
		{"bare CR", get + "X-A: a\rX-B: b\r\n\r\n", 400},
		{"no name", get + ": b\r\n\r\n", 400},
		{"method with a space", "GE T /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
		{"another server's address", "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", 405},
		{"asterisk", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 200},

		{"negative length", post + "Content-Length: -1\r\n\r\n", 400},
		{"length that is no number", post + "Content-Length: many\r\n\r\n", 400},
		{"length past 63 bits", post + "Content-Length: 9223372036854775808\r\n\r\n", 400},
		{"length with a sign", post + "Content-Length: +2\r\n\r\n{}", 400},
		{"two lengths", post + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400},
		{"length and chunks", post + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 201}, // the chunks count, as RFC 9112 has it
		{"coding that is none", post + "Transfer-Encoding: gzip\r\n\r\n", 501},
		{"two codings", post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
		{"chunk of a long size", post + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("0", 1<<20) + "1\r\n{", 400},
		{"chunk that is no number", post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", 400},
		{"chunk that does not end", post + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx\r\n", 400},
		{"chunks with long extensions", post + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1;"+kib+"\r\n \r\n", 1<<10), 400},
		{"endless trailers", post + "Transfer-Encoding: chunked\r\n\r\n0\r\n" + strings.Repeat("X-A: "+kib+"\r\n", 1<<10), 400},
		{"10 GB promised, nothing wanted", list + "Content-Length: 10000000000\r\n\r\n" + mib, 200},
		{"a body where none is taken", list + "Content-Length: 2\r\n\r\n{}", 200},
		{"compressed", post + "Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00", 400},
		{"another type", h.with("POST "+pathSessions, "Content-Type: application/xml", "Content-Length: 2") + "\r\n{}", 415},
		{"a form", h.with("POST "+pathSessions, "Content-Type: multipart/form-data; boundary="+kib, "Content-Length: 2") + "\r\n{}", 415},

		{"upgrade to something else", h.with("GET "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: h2c") + "\r\n", 426},
		{"upgrade of another version", h.with("GET "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 8", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==") + "\r\n", 400},
		{"upgrade without a key", h.with("GET "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13") + "\r\n", 400},
		{"upgrade by POST", h.with("POST "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==") + "\r\n", 405},
		{"Last-Event-ID that is none", h.with("GET "+pathSessions+"/"+h.sid+"/events", "Last-Event-ID: "+strings.Repeat("9", 40<<10)) + "\r\n", 422},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := h.connect()
			go s.put(c.request) // not all of it is read
			a := s.answer()
			if a.status != c.status {
				t.Errorf("status %d, want %d: %.300s", a.status, c.status, a.body)
			}
			if len(a.body) > 8<<10 {
				t.Errorf("an answer of %d bytes", len(a.body))
			}
			s.Close()
		})
	}
	t.Run("pipelined", func(t *testing.T) { pipelined(t, h) })
	h.works()
	h.settled(before)
}

// TestUnfinishedBodies: what is promised and does not come is waited for, and not for long.
func TestUnfinishedBodies(t *testing.T) {
	impatient := shortTimes
	impatient.header, impatient.bodyAll = patience, patience
	h := startHostile(t, worldOptions{server: Options{times: impatient}})
	post := h.with("POST "+pathSessions, "Content-Type: application/json")
	var all sync.WaitGroup
	for _, c := range []struct {
		name, request string
		status        int
	}{
		{"chunk past 63 bits", post + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}", 408},
		{"less than promised", post + "Content-Length: 9\r\n\r\n{}", 408},
		{"10 GB promised, 9 MiB sent", post + "Content-Length: 10000000000\r\n\r\n" + strings.Repeat("x", 9<<20), 413},
	} {
		s := h.connect()
		all.Go(func() {
			s.put(c.request)
			if a := s.answer(); a.status != c.status {
				t.Errorf("%s: status %d, want %d: %.300s", c.name, a.status, c.status, a.body)
			}
		})
	}
	all.Wait()
}

// pipelined: what follows a request that cannot be read is not taken for
// another one.
func pipelined(t *testing.T, h *hostile) {
	sessionsNow := func() int {
		page, err := h.manager.List(h.ctx(), "attacker", sessions.ListFilter{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		return len(page.Data)
	}
	had := sessionsNow()
	good := "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
	smuggled := h.with("POST "+pathSessions, "Content-Type: application/json", "Content-Length: 2") + "\r\n{}"
	post := h.with("POST "+pathSessions, "Content-Type: application/json")
	for _, c := range []struct {
		name, requests string
		statuses       []int
	}{
		{"good ones", strings.Repeat(good, 100) + "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", slices.Repeat([]int{200}, 101)},
		{"a bad line", good + "nonsense\r\n\r\n" + smuggled, []int{200, 400}},
		{"a broken chunk", post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n" + smuggled, []int{400}},
		{"two lengths", post + "Content-Length: 0\r\nContent-Length: 2\r\n\r\n" + smuggled, []int{400}},
		{"a body that nobody reads", "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n" + smuggled, []int{401}},
		{"a frame of a socket that was refused", h.with("GET "+pathSessions+"/"+h.sid+"/stream", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 8", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==") + "\r\n" + textFrame("{}") + "\r\n\r\n", []int{400, 400}},
	} {
		s := h.connect()
		go s.put(c.requests)
		var got []int
		for len(got) <= len(c.statuses) {
			a := s.answer()
			if a.status == 0 {
				break
			}
			got = append(got, a.status)
		}
		if fmt.Sprint(got) != fmt.Sprint(c.statuses) {
			t.Errorf("%s: %v, want %v", c.name, got, c.statuses)
		}
		s.Close()
	}
	if n := sessionsNow(); n != had {
		t.Errorf("%d sessions of %d before: a request that was none had an effect", n, had)
	}
}

// TestOversizedRequests: what would take memory or time out of proportion is
// refused by name, with an answer that is short, and costs no more than a few
// times its own size.
func TestOversizedRequests(t *testing.T) {
	h := startHostile(t, worldOptions{server: Options{times: standardTimes}})
	before := h.goroutines()
	session := pathSessions + "/" + h.sid
	labels := func(n, size int) string {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprintf(`"k%d":"%s"`, i, strings.Repeat("v", size)))
		}
		return "{" + strings.Join(all, ",") + "}"
	}
	children := func(n, labelled, size int) string {
		child := `{"title":"` + strings.Repeat("t", sessions.TitleBytesMax) + `","labels":` + labels(labelled, size) + `}`
		return `{"children":[` + strings.Repeat(child+",", n-1) + child + `]}`
	}
	mib := strings.Repeat("x", 1<<20)
	many := strings.Repeat("{},", 1<<20/3)
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		field                    string
	}{
		{"64 children with all labels there may be", "POST", session + "/fork", children(64, sessions.LabelsMax, sessions.LabelValueBytesMax), 201, ""},
		{"65 children", "POST", session + "/fork", children(65, 0, 0), 422, "children"},
		{"children with too many labels", "POST", session + "/fork", children(64, sessions.LabelsMax+1, 1), 422, "children[0].labels"},
		{"children with huge labels", "POST", session + "/fork", children(64, 1, 100_000), 422, "children[0].labels.k0"},
		{"a huge label's name", "POST", pathSessions, `{"labels":{"` + mib + `":"v"}}`, 422, "*"},
		{"a huge title", "POST", pathSessions, `{"title":"` + mib + `"}`, 422, "title"},
		{"a huge field's name", "POST", pathSessions, `{"` + mib + `":1}`, 422, "*"},
		{"a thousand fields", "POST", pathSessions, `{"x":1` + strings.Repeat(`,"xxxxxxxx":1`, 1000) + `}`, 422, "*"},
		{"max_tokens of 2^31", "POST", session + "/turns", `{"max_tokens":2147483648}`, 422, "max_tokens"},
		{"max_tokens of 2^63", "POST", session + "/turns", `{"max_tokens":9223372036854775807}`, 422, "max_tokens"},
		{"max_tokens of 1e18", "POST", session + "/turns", `{"max_tokens":1e18}`, 422, "max_tokens"},
		{"max_tokens of 1e999", "POST", session + "/turns", `{"max_tokens":1e999}`, 400, "body"},
		{"a number of a million digits", "POST", session + "/turns", `{"max_tokens":` + strings.Repeat("9", 1<<20) + `}`, 400, "body"},
		{"seed of 2^64", "POST", session + "/turns", `{"seed":18446744073709551616}`, 422, "seed"},
		{"temperature of 1e300", "POST", session + "/turns", `{"temperature":1e300}`, 422, "temperature"},
		{"top_k of 2^40", "POST", session + "/turns", `{"top_k":1099511627776}`, 422, "top_k"},
		{"top_logprobs of 2^31", "POST", session + "/turns", `{"logprobs":2147483648}`, 422, "logprobs"},
		{"too many stop strings", "POST", session + "/turns", `{"stop":["a"` + strings.Repeat(`,"a"`, 50_000) + `]}`, 422, "stop"},
		{"a huge stop string", "POST", session + "/turns", `{"stop":["` + mib + `"]}`, 422, "stop[0]"},
		{"stop strings that are none", "POST", session + "/turns", `{"stop":[1` + strings.Repeat(`,1`, 50_000) + `]}`, 422, "stop[0]"},
		{"messages that are none", "POST", session + "/turns", `{"messages":[1` + strings.Repeat(`,1`, 50_000) + `]}`, 422, "messages[0]"},
		{"too many messages", "POST", session + "/turns", `{"messages":[{"role":"user","content":""}` + strings.Repeat(`,{"role":"user","content":""}`, sessions.MessagesMax) + `]}`, 422, "messages"},
		{"fork at 2^62", "POST", session + "/fork", `{"at":4611686018427387904}`, 422, "at"},
		{"a ttl of 2^62", "POST", pathSessions, `{"ttl_seconds":4611686018427387904}`, 422, "ttl_seconds"},
		{"nested lists", "POST", pathSessions, strings.Repeat("[", 1<<20), 400, "body"},
		{"nested objects", "POST", pathSessions, strings.Repeat(`{"a":`, 1<<18), 400, "body"},
		{"nested lists that end", "POST", pathSessions, strings.Repeat("[", 9000) + strings.Repeat("]", 9000), 400, "body"},
		{"millions of values", "POST", pathSessions, "[" + many + "1]", 400, "body"},
		{"millions of fields", "POST", pathSessions, `{"labels":{"":1` + strings.Repeat(`,"":1`, 1<<18) + `}}`, 400, "body"},
		{"prompt of a MiB in one word", "POST", session + "/turns", `{"input":"` + mib + `"}`, 422, "input"},
		{"a list of 2^31", "GET", pathSessions + "?limit=2147483648", "", 422, "limit"},
		{"tokens from 2^62", "GET", session + "/tokens?from=4611686018427387904", "", 422, "from"},
		{"events from 2^63", "GET", session + "/events?from=9223372036854775808", "", 422, "from"},
		{"a depth of 2^62", "GET", session + "/tree?depth=4611686018427387904", "", 200, ""},
		{"an id of another kind", "GET", pathSessions + "/turn_01a22a7e-0000-7000-8000-000000000000", "", 404, "session_id"},
		{"an id in upper case", "GET", pathSessions + "/" + strings.ToUpper(h.sid), "", 404, "session_id"},
		{"an id with NUL", "GET", session + "%00", "", 404, "session_id"},
		{"an id that climbs", "GET", pathSessions + "/..%2f..%2fetc%2fpasswd", "", 404, "session_id"},
		{"an id that is SQL", "GET", pathSessions + "/'%20OR%201=1--", "", 404, "session_id"},
		{"an id that is not UTF-8", "GET", pathSessions + "/%ff%fe", "", 404, "session_id"},
		{"a label with NUL", "GET", pathSessions + "?label=a%00=b", "", 422, "label"},
		{"a label that is not UTF-8", "GET", pathSessions + "?label=a=%ff", "", 422, "label"},
		{"a parameter twice", "GET", pathSessions + "?limit=1&limit=9999", "", 422, "limit"},
		{"a name with NUL", "POST", session + "/turns", `{"messages":[{"role":"user","content":"x","name":"\u0000"}]}`, 422, "messages[0].name"},
		{"a call's id with NUL", "POST", session + "/turns", `{"messages":[{"role":"tool","content":"x","tool_call_id":"\u0000"}]}`, 422, "messages[0].tool_call_id"},
		{"calls with NUL", "POST", session + "/turns", `{"messages":[{"role":"assistant","content":"x","tool_calls":[{"a\u0000":1}]}]}`, 422, "messages[0].tool_calls"},
		{"calls deep down", "POST", session + "/turns", `{"messages":[{"role":"assistant","content":"x","tool_calls":` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `}]}`, 400, "body"},
		{"an id of 40 KiB", "GET", pathSessions + "/" + strings.Repeat("9", 40<<10), "", 404, "session_id"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var m0, m1 runtime.MemStats
			runtime.ReadMemStats(&m0)
			a := h.do(c.method, c.path, c.body, "X-Api-Key", h.key.Secret)
			runtime.ReadMemStats(&m1)
			if a.status != c.status {
				t.Fatalf("status %d, want %d: %.300s", a.status, c.status, a.body)
			}
			// what a request of this size may cost, the client's side and other goroutines included
			if made, most := m1.TotalAlloc-m0.TotalAlloc, uint64(24*len(c.body)+(96<<20)); made > most {
				t.Errorf("%d bytes were allocated for a request of %d", made, len(c.body))
			}
			if c.status < 400 {
				return
			}
			var p Problem
			a.into(t, c.status, &p)
			if c.field != "*" && p.Field != c.field || p.Field == "" || len(a.body) > 4<<10 {
				t.Errorf("field %q, want %q; %d bytes: %.300s", p.Field, c.field, len(a.body), a.body)
			}
		})
	}
	for _, key := range []string{"\xff\xfe", strings.Repeat("k", idempotencyKeyMax+1)} {
		if a := h.do("POST", pathSessions, "{}", "X-Api-Key", h.key.Secret, "Idempotency-Key", key); a.status != 422 {
			t.Errorf("Idempotency-Key %q: %d %s", key, a.status, a.body)
		}
	}
	if a := h.do("POST", pathSessions+"/%00/close", "", "X-Api-Key", h.key.Secret, "Idempotency-Key", "k"); a.status != 404 {
		t.Errorf("an id that is none, with a key: %d %s", a.status, a.body)
	}
	a := h.do("POST", pathSessions+"/"+h.sid+"/turns?wait=true", `{"max_tokens":1073741824,"stop":["a"]}`, "X-Api-Key", h.key.Secret)
	if a.status != http.StatusOK { // the context is the limit
		t.Errorf("as many tokens as there may be: %d %.300s", a.status, a.body)
	}
	h.works()
	h.settled(before)
}
