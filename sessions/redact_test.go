package sessions

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

type secretive struct{ text string }

func (s secretive) LogValue() slog.Value { return slog.StringValue(s.text) }

func TestRedactLog(t *testing.T) {
	secret := guess()
	var out bytes.Buffer
	log := RedactLog(slog.New(slog.NewTextHandler(&out, nil)))
	if RedactLog(log) != log {
		t.Error("a log is redacted twice")
	}
	log.Info("key "+secret, "path", "/v1/"+secret, "err", fmt.Errorf("read %q: %w", secret, errors.New("gone")), "n", 7)
	log.With("with", secret).WithGroup("g").Info("x", slog.Group("deep", slog.String("s", "a"+secret+"b")), "lazy", secretive{secret}, "list", []string{secret})
	log.Info("bare", "k", strings.TrimPrefix(secret, KeySecretPrefix), "cut", secret[:20])
	if text := out.String(); strings.Contains(text, secret[3:20]) || strings.Count(text, "rk_…") != 9 {
		t.Errorf("%d places, log %s", strings.Count(text, "rk_…"), text)
	}
	if text := out.String(); !strings.Contains(text, "n=7") || !strings.Contains(text, "gone") || !strings.Contains(text, "g.deep.s=ark_…") {
		t.Errorf("log %s", text)
	}
	for _, text := range []string{"", "ses_01a22a7e-0000-7000-8000-000000000000", "rk_", "sha256:0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0", "the text of a prompt, in words"} {
		if got := RedactKeys(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

// FuzzRedactKeys: wherever a key stands in a text, it is gone.
func FuzzRedactKeys(f *testing.F) {
	f.Add("GET /v1/", " 404")
	f.Add("", "")
	f.Add("rk_", "AAAA")
	f.Add("\xff", "\x00")
	secret := KeySecretPrefix + strings.Repeat("Q7", 26)
	f.Fuzz(func(t *testing.T, before, after string) {
		if got := RedactKeys(before + secret + after); strings.Contains(got, secret[3:]) {
			t.Fatalf("%q", got)
		}
	})
}
