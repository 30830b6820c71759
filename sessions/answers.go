package sessions

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/jackc/pgx/v5"
)

// What clients ask for is in memory until it is sent, and they may ask for much
// at once, and read it slowly.
const (
	// PageBytesMax bounds a page of a list: it ends early and says that there is
	// more. One item that is larger is a page of its own.
	PageBytesMax = 4 << 20

	// TreeBytesMax bounds a tree, ancestors and a path, which have no pages. It
	// has room for TreeNodesMax nodes with short labels; more is refused with
	// CodeInvalid.
	TreeBytesMax = 32 << 20

	answerFree       = 64 << 10  // bytes of an answer that are not counted below: connections bound them
	answersBytesMax  = 256 << 20 // of all answers that are under way; one that would be more waits
	answersTenantMax = 64 << 20  // of one tenant's: it leaves others theirs
)

// answers counts what answers hold that are made or sent.
type answers struct {
	page, tree int64 // PageBytesMax, TreeBytesMax; tests have smaller ones

	mu      sync.Mutex
	all     int64            // guarded by mu
	most    int64            // guarded by mu; the largest that all has been
	tenants map[string]int64 // guarded by mu; those that hold something
	changed chan struct{}    // guarded by mu; closed when one is sent
	waiting int              // guarded by mu; answers that there is no room for yet
}

// take waits until n more bytes of a tenant's may be held. Who holds some
// already waits for nobody: two of them would wait for each other.
func (a *answers) take(ctx context.Context, tenant string, n int64, wait bool) error {
	ctx, cancel := context.WithTimeout(ctx, opTimeout)
	defer cancel()
	for {
		a.mu.Lock()
		if !wait || a.fitsLocked(tenant, n) {
			a.addLocked(tenant, n)
			a.mu.Unlock()
			return nil
		}
		if a.changed == nil {
			a.changed = make(chan struct{})
		}
		changed := a.changed
		a.waiting++
		a.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		a.mu.Lock()
		a.waiting--
		a.mu.Unlock()
		if ctx.Err() != nil {
			if context.Cause(ctx) == context.DeadlineExceeded {
				return errAnswers()
			}
			return ctx.Err()
		}
	}
}

func errAnswers() *Error {
	return fail(CodeOverloaded, "answers that are under way hold %d bytes of all tenants, %d of one: read them first", answersBytesMax, answersTenantMax)
}

// try is take for one that does not wait.
func (a *answers) try(tenant string, n int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.fitsLocked(tenant, n) {
		return errAnswers()
	}
	a.addLocked(tenant, n)
	return nil
}

func (a *answers) fitsLocked(tenant string, n int64) bool {
	return a.all+n <= answersBytesMax && a.tenants[tenant]+n <= answersTenantMax
}

func (a *answers) addLocked(tenant string, n int64) {
	if a.tenants == nil {
		a.tenants = map[string]int64{}
	}
	a.all += n
	a.most = max(a.most, a.all)
	a.tenants[tenant] += n
}

func (a *answers) give(tenant string, n int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all -= n
	if a.tenants[tenant] -= n; a.tenants[tenant] == 0 {
		delete(a.tenants, tenant)
	}
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// heldAnswer is what one call's answer holds.
type heldAnswer struct {
	mu      sync.Mutex
	answers *answers // guarded by mu; nil: nothing yet
	tenant  string   // guarded by mu
	bytes   int64    // guarded by mu
	sent    bool     // guarded by mu
}

type heldKey struct{}

// CountAnswer has the reads of a call count what their results hold, until sent
// is called: when the answer is sent, and its results are let go of.
func CountAnswer(ctx context.Context) (counted context.Context, sent func()) {
	h := &heldAnswer{}
	return context.WithValue(ctx, heldKey{}, h), h.send
}

func (h *heldAnswer) send() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sent = true
	if h.answers != nil {
		h.answers.give(h.tenant, h.bytes)
		h.answers = nil
	}
}

// holdAnswer waits for room for a result of so many bytes, in a call that counts its
// answer. One that is larger than all of a tenant's room waits for all of it.
func (m *Manager) holdAnswer(ctx context.Context, tenant string, bytes int64) error {
	h, _ := ctx.Value(heldKey{}).(*heldAnswer)
	if h == nil || bytes <= answerFree {
		return nil
	}
	return h.hold(ctx, &m.answers, tenant, min(bytes, answersTenantMax), true)
}

// HoldAnswer counts so many bytes for what became of a result, in a call that
// counts its answer, in place of what its reads have counted. With wait it waits
// for room as reads do, without it is CodeOverloaded at once where there is none.
func (m *Manager) HoldAnswer(ctx context.Context, tenant string, bytes int64, wait bool) error {
	h, _ := ctx.Value(heldKey{}).(*heldAnswer)
	if h == nil {
		return nil
	}
	h.mu.Lock()
	more := min(bytes, answersTenantMax) - h.bytes
	if more <= 0 && h.answers != nil {
		h.answers.give(h.tenant, -more)
		h.bytes += more
	}
	h.mu.Unlock()
	if more <= 0 {
		return nil
	}
	return h.hold(ctx, &m.answers, tenant, more, wait)
}

func (h *heldAnswer) hold(ctx context.Context, a *answers, tenant string, bytes int64, wait bool) error {
	h.mu.Lock()
	first := h.answers == nil
	h.mu.Unlock()
	var err error
	if first && !wait {
		err = a.try(tenant, bytes)
	} else {
		err = a.take(ctx, tenant, bytes, first)
	}
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sent {
		a.give(tenant, bytes)
		return ctx.Err()
	}
	h.answers, h.tenant = a, tenant
	h.bytes += bytes
	return nil
}

// What a token takes of an answer: in memory and as JSON, its id, its text, and
// the piece of its own that may be asked for; in a list of turns only the text.
const (
	tokenBytes     = 48
	tokenTextBytes = 8
)

// jsonBytes is how long a text is as a JSON string.
func jsonBytes(s string) int64 {
	n := len(s) + 2
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ' && c != '\n' && c != '\t' && c != '\r':
			n += 5
		case c < ' ' || c == '"' || c == '\\':
			n++
		}
	}
	return int64(n)
}

// sessionBytes is about what a session without title and labels takes as JSON.
const sessionBytes = 700

// bytes is about what a session takes, in memory and as JSON.
func (s *Session) bytes() int64 {
	n := sessionBytes + jsonBytes(s.Title)
	for k, v := range s.Labels {
		n += jsonBytes(k) + jsonBytes(v) + 32
	}
	return n
}

// scanView scans a row as clients see it.
func (m *Manager) scanView(r pgx.CollectableRow) (Session, error) {
	x, err := scanRow(r)
	if err != nil {
		return Session{}, err
	}
	return m.viewRow(&x), nil
}

func (m *Manager) node(x *row) Node {
	return Node{Session: m.viewRow(x), Deleted: x.deleted != nil}
}

// pageOf reads the rows of a page, of at most PageBytesMax bytes but one row at
// least, and tells whether it left some off. A large page is read a second
// time, when there is room for it: who waits holds neither rows nor a
// connection.
func pageOf[T any](ctx context.Context, m *Manager, tenant string, scan pgx.RowToFunc[T], bytes func(*T) int64, query func() (pgx.Rows, error)) (list []T, cut bool, err error) {
	return readHeld(ctx, m, tenant, m.answers.page, scan, bytes, query)
}

// errTooLarge: more nodes, or bytes of them, than one answer has.
var errTooLarge = errors.New("the answer is too large")

// nodes reads the sessions that the table picked of a WITH clause names, in the
// order of its column place, and more, its further columns. There are most of
// them at most, of about TreeBytesMax bytes. Large ones are read when there is
// room for them: their size is asked for first, with those that need none.
func (m *Manager) nodes(ctx context.Context, tenant, what, with string, most int, more []any, args ...any) ([]Node, error) {
	columns := "k.bytes"
	if more != nil {
		columns += ", k.at, k.meet"
	}
	n := len(args) + 1
	sql := fmt.Sprintf(`%s, sized AS (
			SELECT k.*, %d + octet_length(s.title) + CASE WHEN pg_column_size(s.labels) < 64 THEN 64 ELSE octet_length(s.labels::text) END AS own
			FROM picked k JOIN sessions s ON s.tenant_id = $1 AND s.id = k.id LIMIT $%d
		), summed AS (
			SELECT k.*, (sum(k.own) OVER ())::bigint AS bytes, sum(k.own) OVER (ORDER BY k.place) - k.own AS before FROM sized k)
		SELECT %s, %s FROM summed k JOIN sessions s ON s.tenant_id = $1 AND s.id = k.id
		WHERE k.before <= $%d ORDER BY k.place`, with, sessionBytes, n+1, rowColumns, columns, n+2)
	args = append([]any{tenant}, append(args, most+1)...)
	var bytes int64
	scanned := append([]any{&bytes}, more...)
	read := func(upTo int64) ([]Node, error) {
		rows, err := m.pool.Query(ctx, sql, append(args, upTo)...)
		if err != nil {
			return nil, ledgerError(what, err)
		}
		list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (Node, error) {
			x, err := scanRowAnd(r, scanned...)
			if err != nil {
				return Node{}, err
			}
			return m.node(&x), nil
		})
		return list, ledgerError(what, err)
	}
	list, err := read(answerFree)
	if err == nil && bytes > answerFree {
		if bytes > m.answers.tree {
			return nil, errTooLarge
		}
		list = nil // whoever waits holds nothing
		if err := m.holdAnswer(ctx, tenant, bytes); err != nil {
			return nil, err
		}
		list, err = read(m.answers.tree)
	}
	if err == nil && (len(list) > most || bytes > m.answers.tree) {
		return nil, errTooLarge
	}
	return list, err
}

// readHeld reads rows of at most most bytes, at least one.
func readHeld[T any](ctx context.Context, m *Manager, tenant string, most int64, scan pgx.RowToFunc[T], bytes func(*T) int64, query func() (pgx.Rows, error)) (list []T, cut bool, err error) {
	read := func(keep int64) (list []T, total int64, cut bool, err error) {
		rows, err := query()
		if err != nil {
			return nil, 0, false, err
		}
		defer rows.Close()
		for n := 0; rows.Next(); n++ {
			x, err := scan(rows)
			if err != nil {
				return nil, 0, false, err
			}
			size := bytes(&x)
			if n > 0 && total+size > most {
				return list, total, true, nil
			}
			if total += size; total > keep {
				list = nil // only its size is asked for
				continue
			}
			list = append(list, x)
		}
		return list, total, false, rows.Err()
	}
	list, total, cut, err := read(answerFree)
	if err != nil || total <= answerFree {
		return list, cut, err
	}
	if err := m.holdAnswer(ctx, tenant, total); err != nil {
		return nil, false, err
	}
	list, _, cut, err = read(math.MaxInt64) // which most bounds
	return list, cut, err
}
