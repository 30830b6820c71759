package sessions

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
)

// keyLike is an API key, whole or cut, and what one is without its prefix. No
// id of ours looks like that.
var keyLike = regexp.MustCompile(KeySecretPrefix + `[A-Za-z0-9]{8,}|[A-Z2-7]{32,}`)

// RedactKeys takes API keys out of a text. Nobody puts one there on purpose,
// but clients put them everywhere: into addresses, ids and names of fields,
// which logs and error answers repeat.
func RedactKeys(text string) string {
	return keyLike.ReplaceAllString(text, KeySecretPrefix+"…")
}

// RedactLog is a log that no API key gets into.
func RedactLog(log *slog.Logger) *slog.Logger {
	if _, ok := log.Handler().(redactor); ok {
		return log
	}
	return slog.New(redactor{log.Handler()})
}

type redactor struct{ slog.Handler }

// Handle passes on a record without keys.
func (h redactor) Handle(ctx context.Context, r slog.Record) error {
	clean := slog.NewRecord(r.Time, r.Level, RedactKeys(r.Message), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		clean.AddAttrs(redactAttr(a))
		return true
	})
	return h.Handler.Handle(ctx, clean)
}

// WithAttrs keeps the attributes without keys.
func (h redactor) WithAttrs(attrs []slog.Attr) slog.Handler {
	clean := make([]slog.Attr, len(attrs))
	for i, a := range attrs {
		clean[i] = redactAttr(a)
	}
	return redactor{h.Handler.WithAttrs(clean)}
}

// WithGroup goes on taking keys out.
func (h redactor) WithGroup(name string) slog.Handler { return redactor{h.Handler.WithGroup(name)} }

func redactAttr(a slog.Attr) slog.Attr {
	a.Value = a.Value.Resolve()
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(RedactKeys(a.Value.String()))
	case slog.KindGroup:
		group := a.Value.Group()
		clean := make([]slog.Attr, len(group))
		for i := range group {
			clean[i] = redactAttr(group[i])
		}
		a.Value = slog.GroupValue(clean...)
	case slog.KindAny: // errors above all
		a.Value = slog.StringValue(RedactKeys(fmt.Sprint(a.Value.Any())))
	}
	return a
}
