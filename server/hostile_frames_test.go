package server

import (
	"bytes"
	"compress/flate"
	"io"
	"runtime"
	"strings"
	"testing"
)

// TestMalformedFrames: what is no WebSocket frame ends the socket with the code
// that RFC 6455 has for it, what is no frame of ours is told so and forgiven a
// few times.
func TestMalformedFrames(t *testing.T) {
	h := startHostile(t, worldOptions{server: Options{times: standardTimes}})
	before := h.goroutines()
	ping := textFrame(`{"type":"ping","ref":"still here"}`)
	goodbye := rawFrame(fin|opClose, 2, "\x03\xe8")
	big := strings.Repeat("x", frameBytesMax+1)
	for _, c := range []struct {
		name, frames string
		code         int    // 0: cut without a close frame
		text         string // that comes before the end
	}{
		{"good", ping, 1000, "still here"},
		{"ping of the protocol", rawFrame(fin|opPing, 3, "abc") + ping, 1000, "still here"},
		{"fragments", rawFrame(opText, 3, `{"t`) + rawFrame(fin|opPing, 0, "") + rawFrame(fin|opContinue, 12, `ype":"ping"}`) + ping, 1000, `"pong"}`},
		{"frame of 1 MiB", textFrame(strings.Repeat(" ", frameBytesMax-15)+`{"type":"ping"}`) + ping, 1000, "pong"},

		{"reserved bit 1", rawFrame(fin|rsv1|opText, 2, "{}"), 1002, ""},
		{"reserved bit 2", rawFrame(fin|rsv2|opText, 2, "{}"), 1002, ""},
		{"reserved bit 3", rawFrame(fin|rsv3|opText, 2, "{}"), 1002, ""},
		{"reserved opcode", rawFrame(fin|3, 2, "{}"), 1002, ""},
		{"reserved control opcode", rawFrame(fin|0xb, 2, "{}"), 1002, ""},
		{"not masked", "\x81\x02{}", 0, ""},
		{"fragmented ping", rawFrame(opPing, 1, "a"), 1002, ""},
		{"ping of 126 bytes", rawFrame(fin|opPing, 126, strings.Repeat("a", 126)), 1002, ""},
		{"close of 126 bytes", rawFrame(fin|opClose, 126, strings.Repeat("a", 126)), 1002, ""},
		{"close of one byte", rawFrame(fin|opClose, 1, "\x03"), 1002, ""},
		{"close with a code that is none", rawFrame(fin|opClose, 2, "\x00\x01"), 1002, ""},
		{"continuation of nothing", rawFrame(fin|opContinue, 2, "{}"), 1002, ""},
		{"message in a message", rawFrame(opText, 1, "{") + rawFrame(fin|opText, 1, "}"), 1002, ""},
		{"length past 63 bits", "\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00", 0, ""},
		{"larger than the limit", textFrame(big), 1009, ""},
		{"larger than the limit in fragments", rawFrame(opText, 1, "{") + strings.Repeat(rawFrame(opContinue, 1<<16, big[:1<<16]), 17), 1009, ""},
		{"a huge claim, and as much as the limit", rawFrame(fin|opText, 1<<62, big), 1009, ""},

		{"binary", rawFrame(fin|opBinary, 2, "{}") + ping, 1000, "want text"},
		{"not UTF-8", textFrame("{\"type\":\"ping\",\"ref\":\"\xff\xfe\"}") + ping, 1000, "UTF-8"},
		{"UTF-8 cut in fragments", rawFrame(opText, 1, "\xc3") + rawFrame(fin|opContinue, 1, "(") + ping, 1000, "UTF-8"},
		{"empty", textFrame("") + ping, 1000, "not JSON"},
		{"deep", textFrame(strings.Repeat("[", 500_000)) + ping, 1000, codeMalformed},
		{"many values", textFrame("["+strings.Repeat("{},", 300_000)+"1]") + ping, 1000, "more than"},
		{"long number", textFrame(`{"type":"fork","at":`+strings.Repeat("9", 900_000)+"}") + ping, 1000, codeMalformed},
		{"long key", textFrame(`{"type":"ping","`+strings.Repeat("k", 900_000)+`":1}`) + ping, 1000, codeInvalid},
		{"nothing but bad frames", strings.Repeat(textFrame("x"), badFramesMax), 1008, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := h.stream()
			go s.put(c.frames) // all of a frame that is refused is not read
			texts, code, reason := s.closedAfter("still here", goodbye)
			all := strings.Join(texts, "\n")
			if code != c.code || !strings.Contains(all, c.text) {
				t.Errorf("close %d %q, want %d, and %q in %.500q", code, reason, c.code, c.text, all)
			}
			for _, text := range texts {
				if len(text) > 8<<10 {
					t.Errorf("an answer of %d bytes", len(text))
				}
			}
			if (c.code == 1002 || c.code == 1009) && strings.Contains(all, `"type":"error"`) {
				t.Errorf("answered with %.500q", all)
			}
		})
	}
	h.works()
	h.settled(before)
	h = startHostile(t, worldOptions{}) // which does not wait long for the rest of a frame
	before = h.goroutines()
	for name, frames := range map[string]string{ // a watch takes none at all
		"text": textFrame("{}"), "reserved": rawFrame(fin|rsv1|opText, 2, "{}"), "huge": rawFrame(fin|opText, 1<<40, "{"),
	} {
		s := h.upgrade(pathWatch)
		s.put(frames)
		if _, code, reason := s.closed(); code != 1008 && code != 1002 {
			t.Errorf("watch, %s: close %d %q", name, code, reason)
		}
	}
	h.works()
	h.settled(before)
}

// deflated is text as a compressed message.
func deflated(text string) string {
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, flate.BestCompression)
	_, _ = io.WriteString(w, text)
	_ = w.Flush()
	return strings.TrimSuffix(b.String(), "\x00\x00\xff\xff")
}

// TestCompressedFrames: what a message becomes is bounded like one that is not
// compressed, however small it came, and nothing is made of the rest.
func TestCompressedFrames(t *testing.T) {
	h := startHostile(t, worldOptions{})
	before := h.goroutines()
	open := func() *rawConn {
		return h.upgrade(pathSessions+"/"+h.sid+"/stream", "Sec-WebSocket-Extensions: permessage-deflate; client_no_context_takeover; server_no_context_takeover")
	}
	frame := func(first byte, payload string) string { return rawFrame(first, uint64(len(payload)), payload) }
	ping := textFrame(`{"type":"ping","ref":"still here"}`)
	bomb := deflated(`{"type":"turn.create","input":"` + strings.Repeat("x", 32<<20) + `"}`)
	for _, c := range []struct {
		name, frames string
		code         int // 0: cut without a close frame
		text         string
	}{
		{"good", frame(fin|rsv1|opText, deflated(`{"type":"ping","ref":"still here"}`)), 1000, "still here"},
		{"good after a plain one", ping + frame(fin|rsv1|opText, deflated(`{"type":"ping","ref":"still here"}`)), 1000, "still here"},
		{"not JSON", frame(fin|rsv1|opText, deflated(`{"type`)) + ping, 1000, codeMalformed},
		{"as much as there may be", frame(fin|rsv1|opText, deflated(strings.Repeat(" ", frameBytesMax-15)+`{"type":"ping"}`)) + ping, 1000, "pong"},
		{"a bomb", frame(fin|rsv1|opText, bomb), 1009, ""},
		{"a bomb in fragments", frame(rsv1|opText, bomb[:100]) + frame(opContinue, bomb[100:2000]) + frame(fin|opContinue, bomb[2000:]), 1009, ""},
		{"garbage", frame(fin|rsv1|opText, strings.Repeat("\xff", 100)), 0, ""},
		{"nothing", frame(fin|rsv1|opText, "") + ping, 1000, "not JSON"},
		{"blocks of nothing without an end", "\xc1\xff\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00", 1008, ""},
		{"a compressed ping", frame(fin|rsv1|opPing, deflated("a")), 1002, ""},
		{"a compressed continuation", frame(rsv1|opText, "") + frame(fin|rsv1|opContinue, bomb), 1002, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := open()
			var m0, m1 runtime.MemStats
			runtime.ReadMemStats(&m0)
			go func() {
				s.put(c.frames)
				if c.code == 1008 { // five bytes are an empty block; the mask is zero
					s.dribble(strings.Repeat("\x00\x00\x00\xff\xff", 1<<10))
				}
			}()
			texts, code, reason := s.closedAfter("still here", rawFrame(fin|opClose, 2, "\x03\xe8"))
			runtime.ReadMemStats(&m1)
			if all := strings.Join(texts, "\n"); code != c.code || !strings.Contains(all, c.text) {
				t.Errorf("close %d %q, want %d, and %q in %.500q", code, reason, c.code, c.text, all)
			}
			if made := m1.TotalAlloc - m0.TotalAlloc; made > 24<<20 {
				t.Errorf("%d bytes were allocated for %d", made, len(c.frames))
			}
		})
	}
	h.works()
	h.settled(before)
}
