package chat

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"
)

// The template engine gets white space between tags wrong where two tags touch, as in "{% if a %}{{ b }}\n": it trims the
// text behind the second for the first. So we cut the source ourselves, by Jinja's rules with trim_blocks and lstrip_blocks
// as chat templates expect them, and hand the engine a source without any text between tags: each becomes an expression that
// is one string.

type tagKind byte

const (
	noTag     tagKind = 0 // the start or the end of the source
	exprTag   tagKind = '{'
	blockTag  tagKind = '%'
	remarkTag tagKind = '#'
)

// tag is one tag with its white space marks: '-' trims all, '+' switches off the rules for blocks.
type tag struct {
	kind        tagKind
	body        string
	left, right byte
}

var (
	toJSONPattern = regexp.MustCompile(`\|(\s*)tojson\b`)
	endRaw        = regexp.MustCompile(`\{%([-+]?)\s*endraw\s*([-+]?)%\}`)
)

// rewrite returns the source for the engine.
func rewrite(source string) (string, error) {
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.TrimSuffix(source, "\n") // keep_trailing_newline is off
	var out strings.Builder
	prev := tag{}
	for {
		at := tagStart(source)
		text := source[:at]
		if at == len(source) {
			writeText(&out, trimText(text, prev, tag{}))
			return out.String(), nil
		}
		next, rest, err := cutTag(source[at:])
		if err != nil {
			return "", err
		}
		writeText(&out, trimText(text, prev, next))
		source, prev = rest, next
		switch {
		case next.kind == remarkTag:
		case next.kind == blockTag && strings.TrimSpace(next.body) == "raw":
			m := endRaw.FindStringSubmatchIndex(source)
			if m == nil {
				return "", errors.New("raw without endraw")
			}
			end := tag{kind: blockTag, left: mark(source[m[2]:m[3]]), right: mark(source[m[4]:m[5]])}
			writeText(&out, trimText(source[:m[0]], next, end))
			source, prev = source[m[1]:], end
		default:
			open, shut := "{"+string(next.kind), string(next.kind)+"}"
			if next.kind == exprTag {
				shut = "}}"
			}
			body := toJSONPattern.ReplaceAllString(next.body, "|${1}"+toJSON)
			// The spaces keep a minus sign of the body from becoming a mark.
			fmt.Fprintf(&out, "%s %s %s", open, body, shut)
		}
	}
}

func mark(s string) byte {
	if s == "" {
		return 0
	}
	return s[0]
}

// tagStart returns the offset of the first tag in s, or its length.
func tagStart(s string) int {
	for i := 0; i+1 < len(s); i++ {
		if s[i] == '{' && (s[i+1] == '{' || s[i+1] == '%' || s[i+1] == '#') {
			return i
		}
	}
	return len(s)
}

// cutTag cuts the tag off the start of s.
func cutTag(s string) (t tag, rest string, err error) {
	t.kind = tagKind(s[1])
	shut := string(t.kind) + "}"
	if t.kind == exprTag {
		shut = "}}"
	}
	i := 2
	if i < len(s) && (s[i] == '-' || s[i] == '+') {
		t.left = s[i]
		i++
	}
	var body strings.Builder
	depth := 0 // of braces inside an expression
	for i < len(s) {
		c := s[i]
		switch {
		case depth == 0 && strings.HasPrefix(s[i:], shut):
			t.body = body.String()
			return t, s[i+2:], nil
		case depth == 0 && (c == '-' || c == '+') && strings.HasPrefix(s[i+1:], shut):
			t.right = c
			t.body = body.String()
			return t, s[i+3:], nil
		case t.kind == remarkTag:
			i++
			continue
		case c == '"' || c == '\'':
			n := quoted(s[i:])
			body.WriteString(s[i : i+n])
			i += n
			continue
		case c == '{':
			depth++
		case c == '}' && depth > 0:
			depth--
			body.WriteByte(' ') // the engine takes two braces in a row for the end of the tag
		}
		body.WriteByte(c)
		i++
	}
	return t, "", fmt.Errorf("a tag that begins with %.20q has no end", s)
}

// quoted returns the length of the string literal at the start of s.
func quoted(s string) int {
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case s[0]:
			return i + 1
		}
	}
	return len(s)
}

// trimText applies the tags' rules to the text between them.
func trimText(text string, prev, next tag) string {
	full := text
	block := func(k tagKind) bool { return k == blockTag || k == remarkTag }
	switch {
	case next.left == '-':
		text = strings.TrimRightFunc(text, unicode.IsSpace)
	case block(next.kind) && next.left != '+':
		// White space alone on its line before a block goes. A line begins at the start of the source, too.
		line := strings.LastIndexByte(full, '\n') + 1
		if (line > 0 || prev.kind == noTag) && strings.Trim(full[line:], " \t\v\f\r") == "" {
			text = full[:line]
		}
	}
	switch {
	case prev.right == '-':
		text = strings.TrimLeftFunc(text, unicode.IsSpace)
	case block(prev.kind) && prev.right != '+':
		text = strings.TrimPrefix(text, "\n")
	}
	return text
}

var literal = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func writeText(out *strings.Builder, text string) {
	if text != "" {
		fmt.Fprintf(out, `{{ "%s" }}`, literal.Replace(text))
	}
}
