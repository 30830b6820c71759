package sessions

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"rocket/internal/localpg/pgtest"
)

const (
	longAncestors = 200
	longTokens    = 1_000_000
	longOthers    = 20_000 // sessions beside it
	longRun       = 250    // tokens a row: about what a merged turn has
)

// longLine writes a session with so many ancestors and tokens as rows, each
// ancestor with a tail that the line leaves out, and returns the youngest.
func longLine(t testing.TB, r *rig) uuid.UUID {
	t.Helper()
	each := longTokens / (longAncestors + 1)
	ids := make([]uuid.UUID, longAncestors+1)
	for i := range ids {
		ids[i] = newID()
	}
	// others, among which the line's are to be found
	_, err := r.pool.Exec(t.Context(), `INSERT INTO sessions (tenant_id, id, root_id, model, model_digest, tokenizer_digest, parity_class, created_at, updated_at)
		SELECT 'local', id, id, 'm', '', '', '', now(), now() FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, $1::int)) k`, longOthers)
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		`INSERT INTO sessions (tenant_id, id, parent_id, forked_at, root_id, model, model_digest, tokenizer_digest, parity_class,
				length, child_count, created_at, updated_at)
			SELECT 'local', k.id, lag(k.id) OVER w, CASE WHEN n > 1 THEN (n - 1)::int * $2 END, first_value(k.id) OVER w, 'm', '', '', '',
				n::int * $2 + CASE WHEN n < cardinality($1::uuid[]) THEN $3 ELSE 0 END, (n < cardinality($1::uuid[]))::int, now(), now()
			FROM unnest($1::uuid[]) WITH ORDINALITY AS k (id, n) WINDOW w AS (ORDER BY n)`,
		`INSERT INTO token_runs (tenant_id, session_id, tok_from, ids, first_seq, base_time, epoch)
			SELECT 'local', k.id, at, array_fill(n::int, ARRAY[least($3, n::int * $2 + CASE WHEN n < cardinality($1::uuid[]) THEN $3 ELSE 0 END - at)]), 1, now(), 1
			FROM unnest($1::uuid[]) WITH ORDINALITY AS k (id, n), generate_series((n::int - 1) * $2,
				n::int * $2 + CASE WHEN n < cardinality($1::uuid[]) THEN $3 ELSE 0 END - 1, $3) AS at`,
	} {
		if _, err := r.pool.Exec(t.Context(), sql, ids, each, longRun); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.pool.Exec(t.Context(), "ANALYZE sessions, token_runs"); err != nil {
		t.Fatal(err)
	}
	return ids[len(ids)-1]
}

// BenchmarkLongLine reads a line of a million tokens over 200 ancestors, its
// last thousand tokens, and its ancestors.
func BenchmarkLongLine(b *testing.B) {
	r := openRig(b, pgtest.New(b))
	id := longLine(b, r)
	end := longTokens / (longAncestors + 1) * (longAncestors + 1)
	for _, from := range []int{0, end - 1000} {
		b.Run(fmt.Sprintf("tokens=%d", end-from), func(b *testing.B) {
			for b.Loop() {
				line, err := selectLine(b.Context(), r.pool, DefaultTenant, id, from, end)
				if err != nil || len(line) != end-from {
					b.Fatal(len(line), err)
				}
			}
			b.ReportMetric(float64(end-from)*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
	b.Run("ancestors", func(b *testing.B) {
		for b.Loop() {
			if a, err := r.Ancestors(b.Context(), DefaultTenant, sessionID(id), nil); err != nil || len(a.Nodes) != longAncestors {
				b.Fatal(len(a.Nodes), err)
			}
		}
	})
	if _, err := r.pool.Exec(context.Background(), "DELETE FROM sessions"); err != nil { // Check would find no events
		b.Fatal(err)
	}
}

// Reading a line, its end or its lineage uses indexes only, however many other
// sessions there are.
func TestLinesAreReadByIndex(t *testing.T) {
	r := newRig(t)
	id := longLine(t, r)
	defer r.pool.Exec(context.Background(), "DELETE FROM sessions")
	end := longTokens / (longAncestors + 1) * (longAncestors + 1)
	for name, q := range map[string]struct {
		sql  string
		args []any
	}{
		"line":      {selectLineSQL, []any{DefaultTenant, id, end, 0}},
		"end":       {selectLineSQL, []any{DefaultTenant, id, end, end - 1000}},
		"common":    {pairCTE + " SELECT id FROM meet", []any{DefaultTenant, id, id}},
		"subtree":   {subtreeCTE + " SELECT count(*) FROM tree", []any{DefaultTenant, id}},
		"ancestors": {linesCTE + " SELECT count(*) FROM line", []any{DefaultTenant, id, end}},
	} {
		rows, err := r.pool.Query(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF) "+q.sql, q.args...)
		if err != nil {
			t.Fatal(err)
		}
		var plan []string
		for rows.Next() {
			var l string
			if err := rows.Scan(&l); err != nil {
				t.Fatal(err)
			}
			plan = append(plan, l)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		text := strings.Join(plan, "\n")
		if strings.Contains(text, "Seq Scan") || !strings.Contains(text, "Index") {
			t.Errorf("%s is not read by an index:\n%s", name, text)
		}
		t.Logf("%s:\n%s", name, text)
	}
}
