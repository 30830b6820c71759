package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// IdempotencyKeyBytesMax bounds a key.
	IdempotencyKeyBytesMax = 255

	// idempotencyTTL is how long a key is kept, see idempotency_room.go.
	idempotencyTTL = 24 * time.Hour
)

type callKey struct{ tenant, route, key string }

// save stores an answer in the transaction of its effect.
type save func(w *work, answer any) error

func noSave(*work, any) error { return nil }

// once runs fn, or gives the stored answer of the same call made before. fn
// must call save in its transaction. Without a key it just runs fn.
func once[T any](ctx context.Context, m *Manager, call Call, fn func(save) (T, error)) (T, error) {
	var zero T
	if call.IdempotencyKey == "" {
		return fn(noSave)
	}
	if len(call.IdempotencyKey) > IdempotencyKeyBytesMax {
		return zero, invalid("Idempotency-Key", "an idempotency key has at most %d bytes", IdempotencyKeyBytesMax)
	}
	leave, err := m.enterCall(ctx, call)
	if err != nil {
		return zero, err
	}
	defer leave()
	out, found, err := stored[T](ctx, m, call)
	if found || err != nil {
		return out, err
	}
	if err := m.admitKey(ctx, call.Tenant); err != nil {
		return zero, err
	}
	out, refused := fn(func(w *work, answer any) error { return insertAnswer(w, call, answer) })
	if !refusedForItself(refused) {
		return out, refused
	}
	// another server was faster, or an earlier call whose commit got no answer: theirs may be stored by now
	if out, found, err := stored[T](ctx, m, call); found || err != nil {
		return out, err
	}
	if isUniqueViolation(refused, "idempotency_pkey") {
		refused = fail(CodeIdempotencyRunning, "a call with this idempotency key is running")
	}
	return zero, refused
}

// stored gives the answer of the same call made before, if there is one.
func stored[T any](ctx context.Context, m *Manager, call Call) (out T, found bool, err error) {
	answer, err := storedAnswer(ctx, m, call)
	if answer == nil || err != nil {
		return out, false, err
	}
	if err := json.Unmarshal(answer, &out); err != nil {
		return out, false, fmt.Errorf("read stored answer: %w", err)
	}
	return out, true, nil
}

// refusedForItself tells whether a call may be refused because of what the same
// call, made before, has done since it was looked for: stored its answer,
// started the turn, deleted the session, changed what it was about.
func refusedForItself(err error) bool {
	switch ErrorCode(err) {
	case CodeNotFound, CodeTurnInProgress, CodeSessionClosed, CodeOverloaded:
		return true
	}
	return isUniqueViolation(err, "idempotency_pkey")
}

// enterCall keeps two calls with one key from running at once.
func (m *Manager) enterCall(ctx context.Context, call Call) (leave func(), err error) {
	k := callKey{call.Tenant, call.Route, call.IdempotencyKey}
	for {
		m.mu.Lock()
		other, busy := m.calls[k]
		if !busy {
			done := make(chan struct{})
			m.calls[k] = done
			m.mu.Unlock()
			return func() {
				m.mu.Lock()
				delete(m.calls, k)
				m.mu.Unlock()
				close(done)
			}, nil
		}
		m.mu.Unlock()
		if !call.Wait {
			return nil, fail(CodeIdempotencyRunning, "a call with this idempotency key is running")
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func storedAnswer(ctx context.Context, m *Manager, call Call) ([]byte, error) {
	var hash, answer []byte
	err := m.pool.QueryRow(ctx, `SELECT body_hash, answer FROM idempotency
		WHERE tenant_id = $1 AND route = $2 AND key = $3 AND expires_at > now()`,
		call.Tenant, call.Route, call.IdempotencyKey).Scan(&hash, &answer)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, ledgerError("read idempotency key", err)
	}
	same := bytes.Equal(hash, call.BodyHash)
	if call.stream != nil {
		if same, err = call.stream.sameBody(ctx, hash); err != nil {
			return nil, err
		}
	}
	if !same {
		return nil, &Error{Code: CodeIdempotencyMismatch, Field: "Idempotency-Key",
			Message: "this idempotency key was used with another body"}
	}
	return answer, nil
}

func insertAnswer(w *work, call Call, answer any) error {
	text, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	hash := call.BodyHash
	if call.stream != nil {
		hash = call.stream.bodyHash()
	}
	if hash == nil {
		hash = []byte{}
	}
	// an expired row that nobody has swept yet gives way
	w.queue(`DELETE FROM idempotency WHERE tenant_id = $1 AND route = $2 AND key = $3 AND expires_at <= now()`,
		call.Tenant, call.Route, call.IdempotencyKey)
	w.queue(`INSERT INTO idempotency (tenant_id, route, key, body_hash, answer, created_at, expires_at)
		VALUES ($1, $2, $3, $4, $5, now(), now() + $6::interval)`,
		call.Tenant, call.Route, call.IdempotencyKey, hash, text, idempotencyTTL)
	return nil
}
