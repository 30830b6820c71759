package chat

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// ErrNoSuffix says that the template does not let messages be rendered by themselves: what it writes about them depends on
// the messages before, or the other way round. The whole conversation must be rendered anew.
var ErrNoSuffix = errors.New("the chat template cannot render a suffix")

// ending is what the template writes behind the content of an assistant message that is the last.
type ending struct {
	closing string // up to and with the end token; "" if there is no end token
	id      int32  // the end token, or -1
	token   string // its text
	trail   string // what follows it
	err     error  // why it is not known
}

// stubs are a question and an answer that stand for the conversation so far. Their contents are private characters, so that
// they are found again in the rendered text whatever the template does around them.
func stubs(m *marks) []Message {
	return []Message{{Role: "user", Content: m.stub(stubUser)}, {Role: "assistant", Content: m.stub(stubAnswer)}}
}

// toolStubs are stubs whose answer calls the tools that the messages are results of: some templates insist on that.
func toolStubs(results []Message) func(m *marks) []Message {
	return func(m *marks) []Message {
		s := stubs(m)
		calls := make([]string, 0, 1)
		for _, r := range results {
			if r.Role != "tool" {
				break
			}
			id, name := `"stub"`, `"stub"`
			if v, ok := r.field("tool_call_id"); ok {
				id = string(v)
			}
			if v, ok := r.field("name"); ok {
				name = string(v)
			}
			calls = append(calls, fmt.Sprintf(`{"id":%s,"type":"function","function":{"name":%s,"arguments":{}}}`, id, name))
		}
		s[1].Fields = []Field{{"tool_calls", []byte("[" + strings.Join(calls, ",") + "]")}}
		return s
	}
}

// findEnding asks the template about the stubs alone.
func (c *Template) findEnding() ending {
	e := ending{id: -1}
	text, m, err := c.renderStubbed(stubs, nil, Options{Now: time.Unix(0, 0)})
	if err != nil {
		e.err = err
		return e
	}
	after, ok := behindStub(text, m)
	if !ok {
		e.err = errors.New("the template does not write an assistant's content")
		return e
	}
	e.trail = after
	at, token := -1, c.vars["eos_token"]
	if id, ok := c.tok.ID(token); ok && c.tok.IsAdded(id) {
		at = strings.LastIndex(after, token)
	}
	if at < 0 {
		at, token = c.lastSpecial(after)
	}
	if at >= 0 {
		e.id, _ = c.tok.ID(token)
		e.token, e.closing, e.trail = token, after[:at+len(token)], after[at+len(token):]
	}
	return e
}

// lastSpecial returns the last special token in text and its offset; -1 if there is none.
func (c *Template) lastSpecial(text string) (at int, token string) {
	at = -1
	for _, a := range c.tok.AddedTokens() {
		if !a.Special {
			continue
		}
		if i := strings.LastIndex(text, a.Content); i > at || i == at && len(a.Content) > len(token) {
			at, token = i, a.Content
		}
	}
	return at, token
}

// behindStub returns what follows the stub answer's content.
func behindStub(text string, m *marks) (string, bool) {
	_, after, ok := strings.Cut(text, m.stub(stubAnswer))
	return after, ok
}

// findUnknownRoles asks the template which roles it writes nothing about. A template that raises is believed to know the
// role.
func (c *Template) findUnknownRoles() map[string]bool {
	unknown := map[string]bool{}
	_, users := c.writes(Message{Role: "user"}, nil)
	for _, role := range roles {
		written, added := c.writes(Message{Role: role}, nil)
		known := written && (added || !users)
		if !known && role == "tool" {
			// Some templates write a tool's result together with the call that it answers.
			call := toolStubs([]Message{{Role: "tool"}})
			known, _ = c.writes(Message{Role: role, Fields: []Field{{"tool_call_id", []byte(`"stub"`)}}}, call)
		}
		unknown[role] = !known
	}
	return unknown
}

// writes reports whether the template writes the content of such a message behind the stubs, and whether it writes an added
// token before it.
func (c *Template) writes(msg Message, before func(*marks) []Message) (written, added bool) {
	probe := func(m *marks) []Message {
		msg := msg
		msg.Content = m.stub(stubProbe)
		if before == nil {
			return []Message{msg}
		}
		return append(before(m), msg)
	}
	text, m, err := c.renderStubbed(probe, nil, Options{Now: time.Unix(0, 0)})
	if err != nil {
		return true, true
	}
	head, _, ok := strings.Cut(text, m.stub(stubProbe))
	at, _ := c.lastSpecial(head)
	return ok, at >= 0
}

// takesParts reports whether the template makes of a list of one text part what it makes of the text.
func (c *Template) takesParts() bool {
	opts := Options{Now: time.Unix(0, 0)}
	plain, _, err := c.renderStubbed(func(m *marks) []Message { return stubs(m)[:1] }, nil, opts)
	if err != nil {
		return true
	}
	parts, _, err := c.renderStubbed(func(m *marks) []Message {
		content := fmt.Sprintf(`[{"type":"text","text":"%s"}]`, m.stub(stubUser))
		return []Message{{Role: "user", Fields: []Field{{"content", []byte(content)}}}}
	}, nil, opts)
	return err == nil && parts == plain
}

// End returns the token that ends an assistant message in this template; false if it ends with none.
func (c *Template) End() (int32, bool) { return c.end.id, c.end.id >= 0 }

// suffix is what new messages add to a conversation.
type suffix struct {
	text  string // behind the end token, marked
	marks *marks
}

// suffixOf renders the new messages behind the stubs.
func (c *Template) suffixOf(msgs []Message, opts Options) (suffix, error) {
	if c.end.err != nil {
		return suffix{}, fmt.Errorf("%w: %w", ErrNoSuffix, c.end.err)
	}
	if err := c.check(msgs); err != nil {
		return suffix{}, err
	}
	kinds := []func(*marks) []Message{stubs}
	if len(msgs) > 0 && msgs[0].Role == "tool" {
		kinds = []func(*marks) []Message{toolStubs(msgs), stubs}
	}
	var first error
	for _, kind := range kinds {
		s, err := c.behindStubs(kind, msgs, opts)
		if err == nil {
			return s, nil
		}
		if first == nil {
			first = err
		}
	}
	return suffix{}, first
}

func (c *Template) behindStubs(kind func(*marks) []Message, msgs []Message, opts Options) (suffix, error) {
	text, m, err := c.renderStubbed(kind, msgs, opts)
	if err != nil {
		return suffix{}, err
	}
	after, ok := behindStub(text, m)
	if !ok || strings.Contains(after, m.stub(stubAnswer)) || strings.Contains(after, m.stub(stubUser)) {
		return suffix{}, fmt.Errorf("%w: it does not write an assistant's content once", ErrNoSuffix)
	}
	if c.end.id >= 0 {
		_, rest, ok := strings.Cut(after, c.end.token)
		if !ok {
			return suffix{}, fmt.Errorf("%w: it ends no assistant message with %s", ErrNoSuffix, c.end.token)
		}
		return suffix{rest, m}, nil
	}
	// No end token: the suffix begins where the stubs alone stop.
	opts.AddGenerationPrompt = false
	alone, am, err := c.renderStubbed(kind, nil, opts)
	if err != nil {
		return suffix{}, err
	}
	base, _ := behindStub(alone, am)
	rest, ok := strings.CutPrefix(after, strings.TrimSuffix(base, c.end.trail))
	if !ok {
		return suffix{}, fmt.Errorf("%w: messages change how an assistant message ends", ErrNoSuffix)
	}
	return suffix{rest, m}, nil
}

// Append returns the ids that new messages add behind an assistant message that the model has written. openAssistant says
// that the model has not ended it (it was stopped by a limit): it is closed first. Otherwise the line's last token is the end
// token.
func (c *Template) Append(openAssistant bool, newMsgs []Message, addGen bool) ([]int32, error) {
	s, err := c.suffixOf(newMsgs, Options{AddGenerationPrompt: addGen})
	if err != nil {
		return nil, fmt.Errorf("append messages: %w", err)
	}
	text := s.text
	if openAssistant {
		text = c.end.closing + text
	}
	return c.tok.EncodeMarked(text, s.marks.restore), nil
}

// AppendTo returns the ids that new messages add to a line of tokens, whatever its end is: nothing, the end token, a whole
// rendered message, or an assistant message that is still open (even one without a token yet).
func (c *Template) AppendTo(line []int32, newMsgs []Message, opts Options) ([]int32, error) {
	if len(line) == 0 {
		return c.PromptWith(newMsgs, opts)
	}
	s, err := c.suffixOf(newMsgs, opts)
	if err != nil {
		return nil, fmt.Errorf("append messages: %w", err)
	}
	text := s.text
	last := line[len(line)-1]
	switch {
	case c.end.id < 0:
		// The model ends its message with the token that begins the next one, or with nothing.
		if c.endsWithTrail(line) {
			text = strings.TrimPrefix(text, c.end.trail)
		}
		ids := c.tok.EncodeMarked(text, s.marks.restore)
		if len(ids) > 0 && ids[0] == last && c.tok.IsSpecial(last) {
			ids = ids[1:]
		}
		return ids, nil
	case last == c.end.id:
	case c.endsWithTrail(line):
		rest, ok := strings.CutPrefix(text, c.end.trail)
		if !ok {
			return nil, fmt.Errorf("append messages: %w: messages change what follows the end token", ErrNoSuffix)
		}
		text = rest
	default:
		text = c.end.closing + text
	}
	return c.tok.EncodeMarked(text, s.marks.restore), nil
}

// endsWithTrail reports whether the line ends with the end token, if there is one, and what the template writes behind it.
func (c *Template) endsWithTrail(line []int32) bool {
	trail := c.tok.EncodeSpecial(c.end.trail)
	at := len(line) - len(trail)
	if len(trail) == 0 || at < 0 || !slices.Equal(line[at:], trail) {
		return false
	}
	return c.end.id < 0 || at > 0 && line[at-1] == c.end.id
}

// Sound reports whether new messages can be appended to the rendered history: that rendering everything gives the text of
// the history and then the suffix. If it is false, the template changes older text when messages are added.
func (c *Template) Sound(history, newMsgs []Message, opts Options) (bool, error) {
	if len(history) == 0 {
		return true, nil
	}
	if opts.Now.IsZero() {
		opts.Now = time.Now()
	}
	full, err := c.Render(slices.Concat(history, newMsgs), opts)
	if err != nil {
		return false, err
	}
	before := opts
	before.AddGenerationPrompt = false
	prefix, err := c.Render(history, before)
	if err != nil {
		return false, err
	}
	s, err := c.suffixOf(newMsgs, opts)
	if errors.Is(err, ErrNoSuffix) {
		return false, nil
	}
	var raised *RaiseError
	if errors.As(err, &raised) {
		// The template has no complaint about the whole, only about the new messages by themselves.
		return false, nil
	}
	if err != nil {
		return false, err
	}
	head, ok := strings.CutSuffix(prefix, c.end.trail)
	if !ok || !utf8.ValidString(head) {
		return false, nil
	}
	return full == head+s.marks.restore(s.text), nil
}
