// Package chat renders conversations through a model's chat template and turns them into token ids.
//
// Invariants:
//
//   - Only what the template itself writes becomes an added token, as "<|user|>" does. Text from outside (contents, names,
//     tool arguments and descriptions, further arguments) stays text, whatever it spells.
//   - The text of a rendering is what the template gives for the plain values, unless the template looks into a text from
//     outside for what a special token spells; then that text is as opaque to the template as it is to the model.
//   - Append gives what is added to a line behind its last assistant message: never a token that the line has already.
//   - The members of JSON objects keep their order.
//   - Text that is no UTF-8, an unknown role, a template's own complaint: an error that names the field.
//
// How outside text is kept apart: before the template runs, the characters of it that could begin or end an added token are
// replaced by private-use characters that occur nowhere in the request (mark.go). Added tokens are then looked for in the
// rendered text, where a match can hold no such character, and the parts in between get their characters back before they are
// tokenised. The text is rendered a second time without marks; if the two differ once the characters are back, the template
// has looked at what was replaced, and a third rendering replaces as little as possible: one character in each whole special
// token and at an edge that could complete one. What is left to a template is to write both ends of a marker around a piece
// of outside text, as "<|" + role + "|>" does; roles are checked against a fixed list.
//
// A Template is immutable after Load and may be used by any number of goroutines.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"

	"rocket/engine/tokenizer"
)

const (
	// MaxTemplateBytes limits a template's source.
	MaxTemplateBytes = 1 << 20
	// MaxConfigBytes limits tokenizer_config.json.
	MaxConfigBytes = 16 << 20
	// MaxMessages limits the messages of one call.
	MaxMessages = 1 << 16
)

// ErrNoTemplate says that a model comes without a chat template: it can go on from raw text only.
var ErrNoTemplate = errors.New("the model has no chat template")

// RaiseError is a template's own complaint about a conversation.
type RaiseError struct{ Message string }

func (e *RaiseError) Error() string { return "the chat template refuses: " + e.Message }

// roles are the roles a message may have.
var roles = []string{"system", "developer", "user", "assistant", "tool"}

// Template is a model's chat template together with the tokenizer that its text is meant for.
type Template struct {
	tok     *tokenizer.Tokenizer
	edges   *edges
	main    source
	tools   *source // used instead of main when there are tools, if the model has one
	vars    map[string]string
	unknown map[string]bool // roles that the template writes nothing about
	joins   bool            // the template takes a content that is a string only: text parts are joined
	end     ending
}

type source struct {
	text string
	tmpl *jinja.Template
}

// Options are what a template may be told besides the messages.
type Options struct {
	AddGenerationPrompt bool
	Tools               json.RawMessage // a JSON array; nil for none
	Args                []Field         // further variables: enable_thinking, documents
	Now                 time.Time       // for strftime_now; the zero value takes the clock
}

// Load reads the chat template of the model in dir: chat_template.jinja, else chat_template of tokenizer_config.json. It
// returns ErrNoTemplate if there is none.
func Load(dir string, tok *tokenizer.Tokenizer) (*Template, error) {
	t, err := load(dir, tok)
	if err != nil {
		return nil, fmt.Errorf("open chat template of %s: %w", dir, err)
	}
	return t, nil
}

func load(dir string, tok *tokenizer.Tokenizer) (*Template, error) {
	var cfg struct {
		ChatTemplate json.RawMessage `json:"chat_template"`
	}
	config, err := readLimited(filepath.Join(dir, "tokenizer_config.json"), MaxConfigBytes)
	switch {
	case err == nil:
		if err := json.Unmarshal(config, &cfg); err != nil {
			return nil, fmt.Errorf("tokenizer_config.json: %w", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	named, err := namedTemplates(cfg.ChatTemplate)
	if err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: chat_template: %w", err)
	}
	file, err := readLimited(filepath.Join(dir, "chat_template.jinja"), MaxTemplateBytes)
	switch {
	case err == nil:
		named = map[string]string{"default": string(file)}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	vars, err := tokenVars(config)
	if err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	return New(named, vars, tok)
}

func readLimited(path string, limit int64) ([]byte, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if fi.Size() > limit {
		return nil, fmt.Errorf("%s: %d bytes, the limit is %d", filepath.Base(path), fi.Size(), limit)
	}
	return os.ReadFile(path)
}

// namedTemplates reads chat_template: a string, or a list of {name, template}.
func namedTemplates(raw json.RawMessage) (map[string]string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if err := json.Unmarshal(raw, &one); err == nil {
		return map[string]string{"default": one}, nil
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, errors.New("want a string or a list of {name, template}")
	}
	named := map[string]string{}
	for i, t := range list {
		if t.Name == "" || t.Template == "" {
			return nil, fmt.Errorf("[%d]: name or template is missing", i)
		}
		named[t.Name] = t.Template
	}
	return named, nil
}

// tokenVars returns the members of tokenizer_config.json that templates use by name: bos_token and its like, each a string or
// an object with a content.
func tokenVars(config []byte) (map[string]string, error) {
	vars := map[string]string{}
	if len(config) == 0 {
		return vars, nil
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(config, &all); err != nil {
		return nil, err
	}
	for name, raw := range all {
		if !strings.HasSuffix(name, "_token") {
			continue
		}
		var s string
		var o struct {
			Content *string `json:"content"`
		}
		switch {
		case raw[0] == '"' && json.Unmarshal(raw, &s) == nil:
			vars[name] = s
		case raw[0] == '{' && json.Unmarshal(raw, &o) == nil && o.Content != nil:
			vars[name] = *o.Content
		}
	}
	return vars, nil
}

// New makes a Template from sources by name ("default", "tool_use") and the variables that stand for tokens.
func New(named map[string]string, vars map[string]string, tok *tokenizer.Tokenizer) (*Template, error) {
	text, ok := named["default"]
	if !ok {
		return nil, ErrNoTemplate
	}
	t := &Template{tok: tok, edges: newEdges(tok.AddedTokens()), vars: vars}
	main, err := compile(text)
	if err != nil {
		return nil, err
	}
	t.main = main
	if text, ok := named["tool_use"]; ok {
		s, err := compile(text)
		if err != nil {
			return nil, fmt.Errorf("tool_use: %w", err)
		}
		t.tools = &s
	}
	t.end = t.findEnding()
	t.unknown = t.findUnknownRoles()
	t.joins = !t.takesParts()
	return t, nil
}

func compile(text string) (s source, err error) {
	if len(text) > MaxTemplateBytes {
		return s, fmt.Errorf("%d bytes, the limit is %d", len(text), MaxTemplateBytes)
	}
	if !utf8.ValidString(text) {
		return s, errors.New("is not UTF-8")
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("jinja parse: %v", p)
		}
	}()
	own, err := rewrite(text)
	if err != nil {
		return s, err
	}
	tmpl, err := jinja.Compile(own)
	return source{text, tmpl}, err
}

// Render returns the text of a conversation.
func (c *Template) Render(msgs []Message, opts Options) (string, error) {
	text, m, err := c.render(msgs, opts)
	if err != nil {
		return "", fmt.Errorf("render messages: %w", err)
	}
	return m.restore(text), nil
}

// Prompt returns the token ids of a conversation.
func (c *Template) Prompt(msgs []Message, addGenerationPrompt bool) ([]int32, error) {
	return c.PromptWith(msgs, Options{AddGenerationPrompt: addGenerationPrompt})
}

// PromptWith is Prompt with options.
func (c *Template) PromptWith(msgs []Message, opts Options) ([]int32, error) {
	text, m, err := c.render(msgs, opts)
	if err != nil {
		return nil, fmt.Errorf("render messages: %w", err)
	}
	return c.tok.EncodeMarked(text, m.restore), nil
}

// render returns the text with its marks.
func (c *Template) render(msgs []Message, opts Options) (string, *marks, error) {
	if err := c.check(msgs); err != nil {
		return "", nil, err
	}
	return c.renderStubbed(func(*marks) []Message { return nil }, msgs, opts)
}

// check refuses what no template is asked about.
func (c *Template) check(msgs []Message) error {
	if len(msgs) > MaxMessages {
		return &FieldError{"messages", fmt.Sprintf("%d messages, the limit is %d", len(msgs), MaxMessages)}
	}
	for i := range msgs {
		role := msgs[i].Role
		if !slices.Contains(roles, role) {
			return &FieldError{fmt.Sprintf("messages[%d].role", i), fmt.Sprintf("%q is none of %s", role, strings.Join(roles, ", "))}
		}
		if c.unknown[c.roleOf(role)] {
			return &FieldError{fmt.Sprintf("messages[%d].role", i), fmt.Sprintf("the model's chat template has no %q messages", role)}
		}
	}
	return nil
}

// roleOf returns the role that the template is given: a developer's message is a system message to a model that does not know
// developers.
func (c *Template) roleOf(role string) string {
	if role == "developer" && c.unknown[role] {
		return "system"
	}
	return role
}

// renderStubbed renders the stubs and the messages at the strongest level of marks that does not change the text.
func (c *Template) renderStubbed(stubs func(*marks) []Message, msgs []Message, opts Options) (string, *marks, error) {
	if opts.Now.IsZero() {
		opts.Now = time.Now()
	}
	base, err := window(c.outside(msgs, opts))
	if err != nil {
		return "", nil, &FieldError{"messages", err.Error()}
	}
	at := func(l level) (string, *marks, error) {
		m := &marks{edges: c.edges, level: l, base: base}
		text, err := c.execute(m, stubs(m), msgs, opts)
		if err == nil && m.full {
			err = &FieldError{"messages", "more kinds of characters than can be kept apart from added tokens"}
		}
		return text, m, err
	}
	text, m, err := at(allMarks)
	if !m.used {
		return text, m, err
	}
	if err == nil {
		plain, _, plainErr := at(noMarks)
		if plainErr == nil && plain == m.restore(text) {
			return text, m, nil
		}
	}
	return at(fewMarks)
}

// outside returns every text from outside, and the template's own.
func (c *Template) outside(msgs []Message, opts Options) [][]byte {
	all := [][]byte{[]byte(c.main.text), opts.Tools}
	if c.tools != nil {
		all = append(all, []byte(c.tools.text))
	}
	for _, m := range msgs {
		all = append(all, []byte(m.Content))
		for _, f := range m.Fields {
			all = append(all, []byte(f.Name), f.JSON)
		}
	}
	for _, a := range opts.Args {
		all = append(all, a.JSON)
	}
	return all
}

// execute runs the template once.
func (c *Template) execute(m *marks, stubs, msgs []Message, opts Options) (text string, err error) {
	mark := marker{m}
	list := make([]jinja.Value, 0, len(stubs)+len(msgs))
	for i := range stubs {
		v, err := stubs[i].value(c.roleOf(stubs[i].Role), marker{})
		if err != nil {
			return "", err
		}
		list = append(list, v)
	}
	for i := range msgs {
		msg, err := msgs[i], error(nil)
		if c.joins {
			msg, err = msg.joined()
		}
		var v jinja.Value
		if err == nil {
			v, err = msg.value(c.roleOf(msg.Role), mark)
		}
		if err != nil {
			return "", within(fmt.Sprintf("messages[%d]", i), err)
		}
		list = append(list, v)
	}
	data := map[string]jinja.Value{}
	for _, a := range opts.Args {
		v, err := jsonValue(a.JSON, mark)
		if err != nil {
			return "", &FieldError{"chat_template_kwargs." + a.Name, err.Error()}
		}
		data[a.Name] = v
	}
	src := c.main
	if len(opts.Tools) > 0 && string(opts.Tools) != "null" {
		v, err := jsonValue(opts.Tools, mark)
		if err != nil {
			return "", &FieldError{"tools", err.Error()}
		}
		if !v.IsList() {
			return "", &FieldError{"tools", "is no array"}
		}
		if v.AsList().Len() > 0 {
			data["tools"] = v
			if c.tools != nil {
				src = *c.tools
			}
		}
	}
	for name, s := range c.vars {
		data[name] = jinja.NewString(s)
	}
	data["messages"] = jinja.NewList(list)
	data["add_generation_prompt"] = jinja.NewBool(opts.AddGenerationPrompt)
	addGlobals(data, opts.Now)
	return run(src.tmpl, data)
}

// within puts the parent's name before the field of err.
func within(parent string, err error) error {
	var f *FieldError
	if errors.As(err, &f) {
		return &FieldError{parent + "." + f.Field, f.Problem}
	}
	return fmt.Errorf("%s: %w", parent, err)
}

// run executes a template; a panic in the template engine is an error.
func run(tmpl *jinja.Template, data map[string]jinja.Value) (text string, err error) {
	defer func() {
		if p := recover(); p != nil {
			text, err = "", fmt.Errorf("chat template: %v", p)
		}
	}()
	text, err = tmpl.RenderValues(data)
	var raised *RaiseError
	if err != nil && !errors.As(err, &raised) {
		err = fmt.Errorf("chat template: %w", err)
	}
	return text, err
}
