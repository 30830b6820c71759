// Package sessions is the domain: sessions that fork, their turns, their
// events, and the Postgres ledger that is the truth about all of them.
package sessions

import "context"

// Call is who calls, and what makes a repeated call the same call. A zero
// IdempotencyKey means that there is none.
type Call struct {
	Tenant         string
	IdempotencyKey string // scope: (Tenant, Route, IdempotencyKey)
	Route          string // method and path with its ids, as the client sent it
	BodyHash       []byte // SHA-256 of the body
	Wait           bool   // a repeated call waits for the first one instead of CodeIdempotencyRunning
}

// Manager owns the live sessions of one server.
type Manager struct{}

// Create makes a root session; it is visible when Create returns, its prompt
// is prefilled behind.
func (m *Manager) Create(ctx context.Context, call Call, req CreateRequest) (Session, error) {
	return Session{}, fail(CodeInternal, "not built yet")
}

// Get returns one session.
func (m *Manager) Get(ctx context.Context, tenant, id string) (Session, error) {
	return Session{}, fail(CodeInternal, "not built yet")
}

// List returns a page of sessions, newest first.
func (m *Manager) List(ctx context.Context, tenant string, f ListFilter) (SessionPage, error) {
	return SessionPage{}, fail(CodeInternal, "not built yet")
}

// Patch changes title, labels, TTL, pin.
func (m *Manager) Patch(ctx context.Context, call Call, id string, req PatchRequest) (Session, error) {
	return Session{}, fail(CodeInternal, "not built yet")
}

// Delete makes a session unknown from now on; a running turn is cancelled.
func (m *Manager) Delete(ctx context.Context, call Call, id string) error {
	return fail(CodeInternal, "not built yet")
}

// Close makes a session read-only; a running turn is cancelled.
func (m *Manager) Close(ctx context.Context, call Call, id string) (Session, error) {
	return Session{}, fail(CodeInternal, "not built yet")
}

// Tree returns the subtree of id, at most depth levels below it (nil: all).
func (m *Manager) Tree(ctx context.Context, tenant, id string, depth *int) (Tree, error) {
	return Tree{}, fail(CodeInternal, "not built yet")
}

// StartTurn commits a turn and starts it; use WaitTurn for its end.
func (m *Manager) StartTurn(ctx context.Context, call Call, id string, req TurnRequest) (Turn, error) {
	return Turn{}, fail(CodeInternal, "not built yet")
}

// WaitTurn returns the turn when it has ended, or ctx's error.
func (m *Manager) WaitTurn(ctx context.Context, tenant, id, turnID string) (Turn, error) {
	return Turn{}, fail(CodeInternal, "not built yet")
}

// Turn returns one turn with its tokens.
func (m *Manager) Turn(ctx context.Context, tenant, id, turnID string) (Turn, error) {
	return Turn{}, fail(CodeInternal, "not built yet")
}

// Turns returns own and inherited turns, newest first, without token lists.
func (m *Manager) Turns(ctx context.Context, tenant, id string, f TurnFilter) (TurnPage, error) {
	return TurnPage{}, fail(CodeInternal, "not built yet")
}

// Cancel ends the open turn, whatever its phase, and returns it ended. With no
// open turn it returns the last one, or CodeNotFound if there was none.
func (m *Manager) Cancel(ctx context.Context, call Call, id string) (Turn, error) {
	return Turn{}, fail(CodeInternal, "not built yet")
}

// Fork makes children of a session at a token offset, all or none.
func (m *Manager) Fork(ctx context.Context, call Call, id string, req ForkRequest) (ForkResult, error) {
	return ForkResult{}, fail(CodeInternal, "not built yet")
}

// Detach moves the session's bytes off the device. Not while a turn is open.
func (m *Manager) Detach(ctx context.Context, call Call, id string, req DetachRequest) (Session, error) {
	return Session{}, fail(CodeInternal, "not built yet")
}

// Resume brings a detached session back; on an idle one it changes nothing.
func (m *Manager) Resume(ctx context.Context, call Call, id string) (ResumeResult, error) {
	return ResumeResult{}, fail(CodeInternal, "not built yet")
}

// Tokens returns [from, to) of the line; nil means its start and its end.
func (m *Manager) Tokens(ctx context.Context, tenant, id string, from, to *int) (TokenRange, error) {
	return TokenRange{}, fail(CodeInternal, "not built yet")
}

// Log returns the session's event log.
func (m *Manager) Log(ctx context.Context, tenant, id string) (*Log, error) {
	return nil, fail(CodeInternal, "not built yet")
}

// Watch follows the lifecycle events of many sessions from now on.
func (m *Manager) Watch(tenant string, opts WatchOptions) *Watch { return &Watch{} }

// Ready says why the server should get no traffic, or nil.
func (m *Manager) Ready(ctx context.Context) error { return fail(CodeInternal, "not built yet") }

// Shutdown ends all turns at their last committed token, gives the sessions
// back to the ledger and waits for every goroutine.
func (m *Manager) Shutdown(ctx context.Context) error { return nil }
