package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// MaxDepth limits how deep the JSON of a message, a tool or an argument may be nested.
const MaxDepth = 64

// Message is one message of a conversation. A plain one needs Role and Content only.
type Message struct {
	Role    string
	Content string  // unless Fields has a "content"
	Fields  []Field // further members in their order: tool_calls, tool_call_id, name, reasoning_content; content when it is no string

	noContent bool // decoded from JSON without a content
}

// Field is a named JSON value.
type Field struct {
	Name string
	JSON json.RawMessage
}

// FieldError says what is wrong with which part of a request.
type FieldError struct {
	Field   string // "messages[1].role"
	Problem string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// UnmarshalJSON decodes an object and keeps the order of its members.
func (m *Message) UnmarshalJSON(data []byte) error {
	fields, err := members(data)
	if err != nil {
		return err
	}
	*m = Message{noContent: true}
	for _, f := range fields {
		switch {
		case f.Name == "role":
			if err := json.Unmarshal(f.JSON, &m.Role); err != nil {
				return &FieldError{"role", "is no string"}
			}
		case f.Name == "content" && f.JSON[0] == '"':
			m.noContent = false
			if !utf8.Valid(f.JSON) {
				return &FieldError{"content", "is not UTF-8"}
			}
			if err := json.Unmarshal(f.JSON, &m.Content); err != nil {
				return err
			}
		default:
			m.Fields = append(m.Fields, f)
		}
	}
	return nil
}

// MarshalJSON writes role, content and the other members in their order.
func (m Message) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	member := func(name string, value any) error {
		k, err := json.Marshal(name)
		if err != nil {
			return err
		}
		v, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(v)
		return nil
	}
	b.WriteByte('{')
	if err := member("role", m.Role); err != nil {
		return nil, err
	}
	if m.plainContent() {
		if err := member("content", m.Content); err != nil {
			return nil, err
		}
	}
	for _, f := range m.Fields {
		if err := member(f.Name, f.JSON); err != nil {
			return nil, err
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// plainContent reports whether Content is the content.
func (m *Message) plainContent() bool {
	_, ok := m.field("content")
	return !ok && !m.noContent
}

func (m *Message) field(name string) (json.RawMessage, bool) {
	for _, f := range m.Fields {
		if f.Name == name {
			return f.JSON, true
		}
	}
	return nil, false
}

// members returns the members of a JSON object in order. Of two with one name the last counts, in the first one's place.
func members(data []byte) ([]Field, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	if t != json.Delim('{') {
		return nil, errors.New("is no object")
	}
	var fields []Field
	at := map[string]int{}
	for d.More() {
		k, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := k.(string)
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		if i, ok := at[name]; ok {
			fields[i].JSON = raw
			continue
		}
		at[name] = len(fields)
		fields = append(fields, Field{name, raw})
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	return fields, nil
}

// joined returns the message with a content of text parts turned into one string, for templates that know no parts. A part
// that is no text is refused.
func (m Message) joined() (Message, error) {
	raw, ok := m.field("content")
	if !ok || len(raw) == 0 || raw[0] != '[' {
		return m, nil
	}
	var parts []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if !utf8.Valid(raw) {
		return m, &FieldError{"content", "is not UTF-8"}
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return m, &FieldError{"content", "is no list of parts: " + err.Error()}
	}
	out := Message{Role: m.Role}
	for i, p := range parts {
		switch p.Type {
		case "text", "input_text", "output_text":
		default:
			return m, &FieldError{fmt.Sprintf("content[%d].type", i), fmt.Sprintf("the model takes text only, not %q", p.Type)}
		}
		if p.Text == nil {
			return m, &FieldError{fmt.Sprintf("content[%d].text", i), "missing"}
		}
		out.Content += *p.Text
	}
	for _, f := range m.Fields {
		if f.Name != "content" {
			out.Fields = append(out.Fields, f)
		}
	}
	return out, nil
}

// value returns the message as the template sees it; mark is applied to every text from outside.
func (m *Message) value(role string, mark marker) (jinja.Value, error) {
	v := jinja.NewDict()
	d := v.AsDict()
	d.Set("role", jinja.NewString(role))
	if m.plainContent() {
		if !utf8.ValidString(m.Content) {
			return v, &FieldError{"content", "is not UTF-8"}
		}
		d.Set("content", jinja.NewString(mark.text(m.Content)))
	}
	for _, f := range m.Fields {
		if f.Name == "role" {
			return v, &FieldError{"role", "is there twice"}
		}
		if !utf8.ValidString(f.Name) {
			return v, &FieldError{fmt.Sprintf("%q", f.Name), "is not UTF-8"}
		}
		fv, err := jsonValue(f.JSON, mark)
		if err != nil {
			return v, &FieldError{f.Name, err.Error()}
		}
		d.Set(f.Name, fv)
	}
	return v, nil
}

// jsonValue decodes one JSON value with the members of objects in order and integers kept apart from floats.
func jsonValue(data []byte, mark marker) (jinja.Value, error) {
	if !utf8.Valid(data) {
		return jinja.None(), errors.New("is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	v, err := nextValue(d, mark, "", 0)
	if err != nil {
		return v, err
	}
	if _, err := d.Token(); err != io.EOF {
		return v, errors.New("has data behind the JSON value")
	}
	return v, nil
}

func nextValue(d *json.Decoder, mark marker, key string, depth int) (jinja.Value, error) {
	if depth > MaxDepth {
		return jinja.None(), fmt.Errorf("is nested deeper than %d", MaxDepth)
	}
	t, err := d.Token()
	if err != nil {
		return jinja.None(), err
	}
	switch t := t.(type) {
	case string:
		if key == "type" {
			// Templates compare types; they never print a text of the user's from one.
			return jinja.NewString(mark.key(t)), nil
		}
		return jinja.NewString(mark.text(t)), nil
	case json.Delim:
		if t == '[' {
			list := []jinja.Value{}
			for d.More() {
				v, err := nextValue(d, mark, "", depth+1)
				if err != nil {
					return v, err
				}
				list = append(list, v)
			}
			_, err := d.Token()
			return jinja.NewList(list), err
		}
		return nextObject(d, mark, depth)
	case json.Number, bool, nil:
		return jinja.FromGoValue(t), nil
	}
	return jinja.None(), fmt.Errorf("has an unexpected %v", t)
}

func nextObject(d *json.Decoder, mark marker, depth int) (jinja.Value, error) {
	v := jinja.NewDict()
	for d.More() {
		k, err := d.Token()
		if err != nil {
			return v, err
		}
		name, _ := k.(string)
		member, err := nextValue(d, mark, name, depth+1)
		if err != nil {
			return v, err
		}
		v.AsDict().Set(mark.key(name), member)
	}
	_, err := d.Token()
	return v, err
}
