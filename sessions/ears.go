package sessions

import (
	"context"
	"strings"
	"time"

	"github.com/google/uuid"
)

// ownerChannel is where a server says that it has taken a session that nobody
// had. Those who remember it as nobody's, and may have readers waiting on it,
// would never hear of it again.
const ownerChannel = "rocket_owner"

// earsRetry is how long a server waits before it listens anew.
const earsRetry = time.Second

func ownerPayload(k liveKey) string { return k.id.String() + " " + k.tenant }

func parseOwnerPayload(text string) (liveKey, bool) {
	id, tenant, _ := strings.Cut(text, " ")
	u, err := uuid.Parse(id)
	return liveKey{tenant, u}, err == nil
}

// keepEars listens to what others take.
func (m *Manager) keepEars() {
	for m.ctx.Err() == nil {
		err := m.listen(m.ctx)
		m.kept(err)
		select {
		case <-time.After(earsRetry):
		case <-m.ctx.Done():
		}
	}
}

func (m *Manager) listen(ctx context.Context) error {
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	defer conn.Conn().Close(context.WithoutCancel(ctx)) // it must not go back to the pool listening
	if _, err := conn.Exec(ctx, "LISTEN "+ownerChannel); err != nil {
		return err
	}
	for _, s := range m.sessions() { // what was said while nobody listened
		m.distrust(s)
	}
	for {
		n, err := conn.Conn().WaitForNotification(ctx)
		if err != nil {
			return err
		}
		k, ok := parseOwnerPayload(n.Payload)
		if !ok {
			continue // somebody else's use of the channel
		}
		m.mu.Lock()
		s := m.live[k]
		m.mu.Unlock()
		if s != nil {
			m.distrust(s)
		}
	}
}

// distrust forgets a session that is not this server's, once its row is read
// and whatever operates on it is done.
func (m *Manager) distrust(s *session) {
	m.wg.Go(func() {
		<-s.loaded
		if s.loadErr != nil || s.ops.lock(m.ctx) != nil {
			return
		}
		defer s.ops.unlock()
		s.mu.Lock()
		mine := s.mineLocked()
		s.mu.Unlock()
		if !mine {
			m.forget(s)
			s.dropSeq()
		}
	})
}
