package server

import (
	"strings"
	"testing"
)

// TestMalformedFrames: what is no WebSocket frame ends the socket with the code
// that RFC 6455 has for it, what is no frame of ours is told so and forgiven a
// few times.
func TestMalformedFrames(t *testing.T) {
	h := startHostile(t, worldOptions{})
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
		{"nothing but bad frames", strings.Repeat(textFrame("x"), badFramesMax), 1008, codeMalformed},
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
			if c.code != 1000 && c.text == "" && strings.Contains(all, `"type":"error"`) {
				t.Errorf("answered with %.500q", all)
			}
		})
	}
	h.works()
	h.settled(before)
}

// TestFramesOfWatch: that socket takes none.
func TestFramesOfWatch(t *testing.T) {
	h := startHostile(t, worldOptions{})
	before := h.goroutines()
	for name, frames := range map[string]string{
		"text": textFrame("{}"), "reserved": rawFrame(fin|rsv1|opText, 2, "{}"), "huge": rawFrame(fin|opText, 1<<40, "{"),
	} {
		s := h.upgrade(pathWatch)
		s.put(frames)
		if _, code, reason := s.closed(); code != 1008 && code != 1002 {
			t.Errorf("%s: close %d %q", name, code, reason)
		}
	}
	h.works()
	h.settled(before)
}
