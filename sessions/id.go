package sessions

import (
	"strings"

	"github.com/google/uuid"
)

// Ids are UUIDv7 inside, so that their order is that of creation, and carry a
// prefix outside, so that one kind is not taken for another.
const (
	sessionPrefix = "ses_"
	turnPrefix    = "turn_"
)

func sessionID(id uuid.UUID) string { return sessionPrefix + id.String() }
func turnID(id uuid.UUID) string    { return turnPrefix + id.String() }

// newID never fails in practice: it would mean no randomness.
func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// parseID accepts the canonical form only: one thing has one name.
func parseID(prefix, text string) (uuid.UUID, bool) {
	rest, ok := strings.CutPrefix(text, prefix)
	if !ok {
		return uuid.UUID{}, false
	}
	id, err := uuid.Parse(rest)
	return id, err == nil && id.String() == rest
}

// parseSession treats an id that no session can have like one that none has.
func parseSession(text string) (uuid.UUID, error) {
	id, ok := parseID(sessionPrefix, text)
	if !ok {
		return id, notFound("session", text)
	}
	return id, nil
}

func parseTurn(text string) (uuid.UUID, error) {
	id, ok := parseID(turnPrefix, text)
	if !ok {
		return id, notFound("turn", text)
	}
	return id, nil
}
