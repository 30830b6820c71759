package bench

import (
	"os"
	"testing"
	"time"
)

func TestParseFrame(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	for text, want := range map[string]struct {
		kind   string
		seq    int64
		tokens int
		at     time.Time
	}{
		`{"seq":12,"epoch":1,"type":"turn.delta","session_id":"ses_a","turn_id":"turn_b","time":"2026-01-02T03:04:05.678Z","text":"a, b","tokens":[1,22,333]}`: {"turn.delta", 12, 3, at},
		`{"seq":13,"epoch":1,"type":"turn.delta","session_id":"ses_a","time":"2026-01-02T03:04:05.678Z","text":"","tokens":[7]}`:                               {"turn.delta", 13, 1, at},
		`{"seq":14,"epoch":1,"type":"turn.delta","session_id":"ses_a","time":"2026-01-02T03:04:05.678Z","text":"held","tokens":[]}`:                            {"turn.delta", 14, 0, at},
		`{"seq":15,"epoch":1,"type":"turn.completed","session_id":"ses_a","time":"2026-01-02T03:04:05.678Z","from":1,"to":2}`:                                  {"turn.completed", 15, 0, at},
		`{"type":"subscribed","session_id":"ses_a","from":1,"epoch":1,"last_seq":3}`:                                                                           {"subscribed", 0, 0, time.Time{}},
	} {
		kind, seq, tokens, got, err := parseFrame([]byte(text))
		if err != nil || kind != want.kind || seq != want.seq || tokens != want.tokens || !got.Equal(want.at) {
			t.Errorf("%s: %q, %d, %d, %v, %v", text, kind, seq, tokens, got, err)
		}
	}
	if _, _, _, _, err := parseFrame([]byte("nonsense")); err == nil {
		t.Error("nonsense is a frame")
	}
}

func TestCPUOfAProcess(t *testing.T) {
	before, err := cpuOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	own, err := ownCPU()
	if err != nil {
		t.Fatal(err)
	}
	for after := before; after.server <= before.server; { // this loop is what it waits for
		if after, err = cpuOf(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}
	if now, err := ownCPU(); err != nil || now <= own || before.monitor > before.server {
		t.Errorf("%v, then %v (%v); %+v", own, now, err, before)
	}
}
