package sessions

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// LineageNodesMax bounds one answer about ancestors or a path; more is refused
// with CodeInvalid. The walk itself is bounded by SessionsPerTenantMax.
const LineageNodesMax = 10_000

// Ancestry is where a session comes from, the root first and the parent last.
// Deleted ancestors whose tokens are kept for it are there as their places.
type Ancestry struct {
	ID    string `json:"id"`
	Nodes []Node `json:"nodes"` // never null; empty for a root
}

// Common is what two sessions have in common by lineage. Their lines are the
// same in [0, At) and part there; that both go on with equal tokens by chance
// does not count. Sessions of different trees have no ancestor, and At is 0.
type Common struct {
	ID       string `json:"id"`
	With     string `json:"with"`
	Ancestor *Node  `json:"ancestor"` // the nearest session that both are or come from
	At       int    `json:"at"`       // tokens
}

// Path leads from one session up to the nearest common ancestor and down to
// the other, both ends included. Sessions of different trees have none.
type Path struct {
	From     string  `json:"from"`
	To       string  `json:"to"`
	Ancestor *string `json:"ancestor"` // which of Nodes is the turning point
	At       int     `json:"at"`       // where the two lines part, as of Common
	Nodes    []Node  `json:"nodes"`    // never null
}

// Ancestors returns what a session was forked from, at most depth levels above
// it (nil: up to the root).
func (m *Manager) Ancestors(ctx context.Context, tenant, id string, depth *int) (Ancestry, error) {
	if depth != nil && *depth < 0 {
		return Ancestry{}, invalid("depth", "must not be negative")
	}
	u, err := parseSession(id)
	if err != nil {
		return Ancestry{}, err
	}
	// the session itself is the first level: without it there is no such session
	list, err := m.nodes(ctx, tenant, "read ancestors", `WITH RECURSIVE up AS (
			SELECT s.id, s.parent_id, 0 AS depth FROM sessions s WHERE s.tenant_id = $1 AND s.id = $2 AND s.deleted_at IS NULL
			UNION ALL
			SELECT p.id, p.parent_id, u.depth + 1 FROM up u JOIN sessions p ON p.tenant_id = $1 AND p.id = u.parent_id
			WHERE u.depth < $3), picked AS (SELECT u.id, -u.depth AS place FROM up u)`,
		LineageNodesMax+1, nil, u, min(valueOr(depth, LineageNodesMax+1), LineageNodesMax+1))
	switch n := len(list) - 1; {
	case errors.Is(err, errTooLarge):
		return Ancestry{}, invalid("depth", "the session has more than %d ancestors, or they have more than %d bytes: ask for fewer levels", LineageNodesMax, TreeBytesMax)
	case err != nil:
		return Ancestry{}, err
	case n < 0:
		return Ancestry{}, notFound("session", id)
	default:
		return Ancestry{ID: id, Nodes: list[:n]}, nil
	}
}

// pairCTE walks up from two sessions at once. cut is how much of a walked
// session's line the one that the walk began at has; meet is where the two
// walks meet first.
const pairCTE = `WITH RECURSIVE up AS (
	SELECT k.side, s.id, s.parent_id, s.forked_at, s.length AS cut, 0 AS depth
	FROM (VALUES (0, $2::uuid), (1, $3::uuid)) AS k (side, id)
	JOIN sessions s ON s.tenant_id = $1 AND s.id = k.id AND s.deleted_at IS NULL
	UNION ALL
	SELECT u.side, p.id, p.parent_id, p.forked_at, least(u.cut, u.forked_at), u.depth + 1
	FROM up u JOIN sessions p ON p.tenant_id = $1 AND p.id = u.parent_id
), meet AS (
	SELECT a.id, least(a.cut, b.cut) AS at, a.depth AS a_depth, b.depth AS b_depth
	FROM up a JOIN up b ON b.side = 1 AND b.id = a.id
	WHERE a.side = 0 ORDER BY a.depth LIMIT 1
)`

// Common finds the nearest common ancestor of two sessions, either of which may
// be it, and the offset where their lines part.
func (m *Manager) Common(ctx context.Context, tenant, id, with string) (Common, error) {
	a, b, err := parsePair(id, with, "with")
	if err != nil {
		return Common{}, err
	}
	c := Common{ID: id, With: with}
	rows, err := m.pool.Query(ctx, pairCTE+` SELECT `+rowColumns+`, m.at
		FROM meet m JOIN sessions s ON s.tenant_id = $1 AND s.id = m.id`, tenant, a, b)
	if err != nil {
		return c, ledgerError("find common ancestor", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, func(r pgx.CollectableRow) (row, error) { return scanRowAnd(r, &c.At) })
	if errors.Is(err, pgx.ErrNoRows) {
		return c, m.bothExist(ctx, tenant, a, b, "with")
	}
	if err != nil {
		return c, ledgerError("find common ancestor", err)
	}
	c.Ancestor = new(m.node(&x))
	return c, nil
}

// Path returns the sessions between two, through their nearest common ancestor.
func (m *Manager) Path(ctx context.Context, tenant, from, to string) (Path, error) {
	a, b, err := parsePair(from, to, "to")
	if err != nil {
		return Path{}, err
	}
	p := Path{From: from, To: to, Nodes: []Node{}}
	var meet uuid.UUID
	list, err := m.nodes(ctx, tenant, "find path", pairCTE+`, picked AS (
		SELECT u.id, CASE u.side WHEN 0 THEN u.depth - m.a_depth ELSE m.b_depth - u.depth END AS place, m.at, m.id AS meet
		FROM meet m JOIN up u ON u.side = 0 AND u.depth <= m.a_depth OR u.side = 1 AND u.depth < m.b_depth)`,
		LineageNodesMax, []any{&p.At, &meet}, a, b)
	switch {
	case errors.Is(err, errTooLarge):
		return p, invalid("to", "more than %d sessions lie between, or more than %d bytes of them", LineageNodesMax, TreeBytesMax)
	case err != nil:
		return p, err
	case len(list) == 0:
		return p, m.bothExist(ctx, tenant, a, b, "to")
	}
	turn := sessionID(meet)
	p.Ancestor, p.Nodes = &turn, list
	return p, nil
}

// parsePair gives the second id's error the field that it came in.
func parsePair(id, other, field string) (a, b uuid.UUID, err error) {
	if a, err = parseSession(id); err != nil {
		return a, b, err
	}
	var ok bool
	if b, ok = parseID(sessionPrefix, other); !ok {
		return a, b, &Error{Code: CodeNotFound, Field: field, Message: fmt.Sprintf("session %q does not exist", other)}
	}
	return a, b, nil
}

// bothExist says which of two sessions that have nothing in common does not
// exist, if one does not.
func (m *Manager) bothExist(ctx context.Context, tenant string, a, b uuid.UUID, field string) error {
	if _, err := selectRow(ctx, m.pool, tenant, a); err != nil {
		return err
	}
	_, err := selectRow(ctx, m.pool, tenant, b)
	if ErrorCode(err) == CodeNotFound {
		return &Error{Code: CodeNotFound, Field: field, Message: fmt.Sprintf("session %q does not exist", sessionID(b))}
	}
	return err
}

func valueOr[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}
