package sessions

import (
	"encoding/json"
	"strconv"
	"time"
	"unicode/utf8"
)

// MarshalJSON gives every delta both its fields, empty ones too.
func (e Event) MarshalJSON() ([]byte, error) { return e.AppendJSON(nil) }

// AppendJSON appends the event as JSON on one line. A delta is written without
// reflection: a server writes one for every few tokens, and the ids of a long
// delta are most of what it sends.
func (e *Event) AppendJSON(b []byte) ([]byte, error) {
	if e.Type != EventTurnDelta || e.Time.Year() < 0 || e.Time.Year() > 9999 {
		type plain Event
		data, err := json.Marshal((*plain)(e))
		return append(b, data...), err
	}
	if b == nil {
		b = make([]byte, 0, 256+8*len(e.Tokens))
	}
	b = strconv.AppendInt(append(b, `{"seq":`...), e.Seq, 10)
	b = strconv.AppendInt(append(b, `,"epoch":`...), e.Epoch, 10)
	b = appendString(append(b, `,"type":`...), string(e.Type))
	b = appendString(append(b, `,"session_id":`...), e.SessionID)
	if e.TurnID != "" {
		b = appendString(append(b, `,"turn_id":`...), e.TurnID)
	}
	b = e.Time.AppendFormat(append(b, `,"time":"`...), time.RFC3339Nano)
	text := ""
	if e.Text != nil {
		text = *e.Text
	}
	b = appendString(append(b, `","text":`...), text)
	b = append(b, `,"tokens":[`...)
	for i, id := range e.Tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(id), 10)
	}
	return append(b, "]}"...), nil
}

// appendString appends s as a JSON string (RFC 8259, section 7). What is not
// UTF-8 becomes U+FFFD, as in encoding/json.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				b = append(append(b, s[from:i]...), "\ufffd"...)
				from = i + 1
			}
			i += n
			continue
		}
		if c < ' ' || c == '"' || c == '\\' {
			b = append(b, s[from:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, `\n`...)
			case '\t':
				b = append(b, `\t`...)
			default:
				b = append(b, `\u00`...)
				b = append(b, hex[c>>4], hex[c&15])
			}
			from = i + 1
		}
		i++
	}
	return append(append(b, s[from:]...), '"')
}
