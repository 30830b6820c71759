package sessions

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"
)

// FuzzDeltaJSON: a delta's hand-written JSON says what encoding/json would.
func FuzzDeltaJSON(f *testing.F) {
	f.Add("if a < b && c > \"d\" {\n\t\\", "turn_1", int64(1), int64(1), int64(1_700_000_000_123_456_789), []byte{1, 2, 255})
	f.Add("", "", int64(0), int64(-1), int64(0), []byte{})
	f.Add("\x00\x1f\x7f\u2028\xff\xc3é\U0001F600\xe2\x80", "t", int64(1<<62), int64(3), int64(-1), []byte{0})
	f.Fuzz(func(t *testing.T, text, turn string, seq, epoch, at int64, tokens []byte) {
		e := Event{Seq: seq, Epoch: epoch, Type: EventTurnDelta, SessionID: "sess_" + text, TurnID: turn, Time: time.Unix(0, at).UTC()}
		e.Text = &text
		ids := []int32{}
		for _, x := range tokens {
			ids = append(ids, int32(x)<<20-1)
		}
		e.Tokens = ids
		type plain Event
		want, err := json.Marshal(struct {
			plain
			Text   string  `json:"text"`
			Tokens []int32 `json:"tokens"`
		}{plain(e), text, ids})
		if err != nil {
			t.Fatal(err)
		}
		got, err := json.Marshal(e)
		if err != nil {
			t.Fatalf("not valid: %v", err)
		}
		var a, b any
		if err := json.Unmarshal(got, &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(want, &b); err != nil {
			t.Fatal(err)
		}
		x, y := again(t, a), again(t, b)
		if !bytes.Equal(x, y) {
			t.Errorf("%s, want %s", x, y)
		}
		whole, err := e.AppendJSON([]byte("data: "))
		if err != nil || !bytes.HasPrefix(whole, []byte("data: {")) || bytes.ContainsAny(whole, "\n\r") {
			t.Errorf("%q, %v", whole, err)
		}
	})
}

func again(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestDeltaHasBothFields: clients need not tell an absent field from an empty one.
func TestDeltaHasBothFields(t *testing.T) {
	e := Event{Seq: 3, Epoch: 2, Type: EventTurnDelta, SessionID: "s", Time: time.Unix(1, 5e6).UTC()}
	const want = `{"seq":3,"epoch":2,"type":"turn.delta","session_id":"s","time":"1970-01-01T00:00:01.005Z","text":"","tokens":[]}`
	if got, err := e.AppendJSON(nil); err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
	e.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)
	if got, err := e.AppendJSON(nil); err == nil {
		t.Errorf("the year 10000 has no form: %s", got)
	}
}
