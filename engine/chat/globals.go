package chat

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// The template engine's own tojson sorts members when it indents and writes floats in Go's way, and its filters cannot be
// replaced. So templates are compiled with the filter's name changed to ours.
const toJSON = "rocket_tojson"

// addGlobals defines what templates of this kind may call beyond the engine's own.
func addGlobals(data map[string]jinja.Value, now time.Time) {
	data["raise_exception"] = jinja.NewCallable("raise_exception", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		message := ""
		if len(args) > 0 {
			if message = args[0].String(); args[0].IsString() {
				message = args[0].AsString()
			}
		}
		return jinja.Undefined(), &RaiseError{message}
	})
	data["strftime_now"] = jinja.NewCallable("strftime_now", func(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
		if len(args) == 0 || !args[0].IsString() {
			return jinja.Undefined(), fmt.Errorf("strftime_now: want a format")
		}
		s, err := strftime(now, args[0].AsString())
		return jinja.NewString(s), err
	})
	data[toJSON] = jinja.NewCallable("tojson", func(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
		if len(args) == 0 {
			return jinja.Undefined(), fmt.Errorf("tojson: want a value")
		}
		w, err := newJSONWriter(args[1:], kwargs)
		if err != nil {
			return jinja.Undefined(), err
		}
		if err := w.write(args[0], 0); err != nil {
			return jinja.Undefined(), err
		}
		return jinja.NewString(w.String()), nil
	})
}

// strftime formats a time by the directives that chat templates use; others are refused by name.
func strftime(t time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		layout, ok := map[byte]string{
			'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM",
			'B': "January", 'b': "Jan", 'A': "Monday", 'a': "Mon", 'j': "002", 'Z': "MST", 'z': "-0700", 'F': "2006-01-02",
		}[format[i]]
		switch {
		case ok:
			b.WriteString(t.Format(layout))
		case format[i] == '%':
			b.WriteByte('%')
		default:
			return "", fmt.Errorf("strftime_now: %%%c is not supported", format[i])
		}
	}
	return b.String(), nil
}

// jsonWriter writes values as Python's json.dumps does with the arguments that templates pass.
type jsonWriter struct {
	strings.Builder
	item, key string
	indent    string // for one level; lines only if newlines is set
	newlines  bool
	sorted    bool
	ascii     bool
}

func newJSONWriter(args []jinja.Value, kwargs map[string]jinja.Value) (*jsonWriter, error) {
	w := &jsonWriter{item: ", ", key: ": "}
	set := map[string]jinja.Value{}
	if len(args) > 0 {
		set["indent"] = args[0]
	}
	if len(args) > 1 {
		return nil, fmt.Errorf("tojson: %d arguments, want at most an indent", len(args))
	}
	for name, v := range kwargs {
		set[name] = v
	}
	for name, v := range set {
		switch name {
		case "indent":
			switch {
			case v.IsInt():
				w.newlines, w.item = true, ","
				w.indent = strings.Repeat(" ", int(min(max(v.AsInt(), 0), 16)))
			case !v.IsNone() && !v.IsUndefined():
				return nil, fmt.Errorf("tojson: indent is no number")
			}
		case "sort_keys":
			w.sorted = v.IsTruthy()
		case "ensure_ascii":
			w.ascii = v.IsTruthy()
		case "separators":
		default:
			return nil, fmt.Errorf("tojson: argument %q is not supported", name)
		}
	}
	if v, ok := set["separators"]; ok && !v.IsNone() {
		if !v.IsList() || v.AsList().Len() != 2 || !v.AsList().Get(0).IsString() || !v.AsList().Get(1).IsString() {
			return nil, fmt.Errorf("tojson: separators are not two strings")
		}
		w.item, w.key = v.AsList().Get(0).AsString(), v.AsList().Get(1).AsString()
	}
	return w, nil
}

func (w *jsonWriter) write(v jinja.Value, depth int) error {
	if depth > MaxDepth+8 {
		return fmt.Errorf("tojson: nested deeper than %d", MaxDepth+8)
	}
	switch {
	case v.IsNone(), v.IsUndefined():
		w.WriteString("null")
	case v.IsBool():
		w.WriteString(strconv.FormatBool(v.AsBool()))
	case v.IsInt():
		w.WriteString(strconv.FormatInt(v.AsInt(), 10))
	case v.IsFloat():
		w.WriteString(pythonFloat(v.AsFloat()))
	case v.IsString():
		w.text(v.AsString())
	case v.IsList():
		return w.list(v.AsList(), depth)
	case v.IsDict():
		return w.dict(v.AsDict(), depth)
	default:
		return fmt.Errorf("tojson: %s has no JSON form", v.String())
	}
	return nil
}

func (w *jsonWriter) list(l *jinja.List, depth int) error {
	w.WriteByte('[')
	for i, v := range l.Items {
		w.separate(i, depth+1)
		if err := w.write(v, depth+1); err != nil {
			return err
		}
	}
	w.close(']', l.Len(), depth)
	return nil
}

func (w *jsonWriter) dict(d *jinja.Dict, depth int) error {
	keys := d.OrderedKeys()
	if w.sorted {
		sort.Strings(keys)
	}
	w.WriteByte('{')
	for i, k := range keys {
		w.separate(i, depth+1)
		w.text(k)
		w.WriteString(w.key)
		v, _ := d.Get(k)
		if err := w.write(v, depth+1); err != nil {
			return err
		}
	}
	w.close('}', len(keys), depth)
	return nil
}

func (w *jsonWriter) separate(i, depth int) {
	if i > 0 {
		w.WriteString(w.item)
	}
	w.line(depth)
}

func (w *jsonWriter) close(c byte, n, depth int) {
	if n > 0 {
		w.line(depth)
	}
	w.WriteByte(c)
}

func (w *jsonWriter) line(depth int) {
	if w.newlines {
		w.WriteByte('\n')
		w.WriteString(strings.Repeat(w.indent, depth))
	}
}

func (w *jsonWriter) text(s string) {
	w.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			w.WriteByte('\\')
			w.WriteRune(r)
		case r == '\n':
			w.WriteString(`\n`)
		case r == '\r':
			w.WriteString(`\r`)
		case r == '\t':
			w.WriteString(`\t`)
		case r == '\b':
			w.WriteString(`\b`)
		case r == '\f':
			w.WriteString(`\f`)
		case r < 0x20, w.ascii && r >= 0x7f && r < 0x10000:
			fmt.Fprintf(w, `\u%04x`, r)
		case w.ascii && r >= utf8.RuneSelf:
			fmt.Fprintf(w, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		default:
			w.WriteRune(r)
		}
	}
	w.WriteByte('"')
}

// pythonFloat is Python's repr of a float, which json.dumps writes.
func pythonFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
