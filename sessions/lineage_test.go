package sessions

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"pgregory.net/rapid"
)

// kin is a session of a lineage by the simplest reading: its line is a list of
// the names of those who wrote each token.
type kin struct {
	id      string
	parent  *kin
	line    []string
	deleted bool
}

func (k *kin) up() (list []*kin) {
	for ; k != nil; k = k.parent {
		list = append(list, k)
	}
	return list
}

// common is the nearest session that both come from, and how much of their
// lines they have of the same hands.
func (k *kin) common(other *kin) (*kin, int) {
	for _, a := range k.up() {
		if slices.Contains(other.up(), a) {
			n := 0
			for n < min(len(k.line), len(other.line)) && k.line[n] == other.line[n] {
				n++
			}
			return a, n
		}
	}
	return nil, 0
}

// insertKin writes a session's row and nothing else: lineage is read from rows.
func (r *rig) insertKin(t testing.TB, k *kin, forkedAt int) {
	var parent *uuid.UUID
	var at *int
	root := k.up()[len(k.up())-1]
	if k.parent != nil {
		parent, at = ptr(must(parseSession(k.parent.id))), &forkedAt
	}
	_, err := r.pool.Exec(t.Context(), `INSERT INTO sessions (tenant_id, id, parent_id, forked_at, root_id, model, model_digest,
			tokenizer_digest, parity_class, length, created_at, updated_at)
		VALUES ('kin', $1, $2, $3, $4, 'm', '', '', '', $5, now(), now())`,
		must(parseSession(k.id)), parent, at, must(parseSession(root.id)), len(k.line))
	if err != nil {
		t.Fatal(err)
	}
}

// Random forests: every answer is that of the model, for every pair.
func TestLineageAgainstAModel(t *testing.T) {
	r := newRig(t)
	if _, err := r.pool.Exec(t.Context(), "INSERT INTO tenants (id) VALUES ('kin')"); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(rt *rapid.T) {
		if _, err := r.pool.Exec(t.Context(), "DELETE FROM sessions WHERE tenant_id = 'kin'"); err != nil {
			rt.Fatal(err)
		}
		var all []*kin
		for i := range rapid.IntRange(1, 6).Draw(rt, "sessions") {
			k := &kin{id: sessionID(newID())}
			at := 0
			if p := rapid.IntRange(-1, i-1).Draw(rt, "parent"); p >= 0 {
				k.parent = all[p]
				at = rapid.IntRange(0, len(k.parent.line)).Draw(rt, "forked at")
				k.line = slices.Clone(k.parent.line[:at])
			}
			for range rapid.IntRange(0, 3).Draw(rt, "tokens") {
				k.line = append(k.line, k.id)
			}
			r.insertKin(t, k, at)
			all = append(all, k)
		}
		for _, k := range all {
			if k.deleted = rapid.IntRange(0, 4).Draw(rt, "deleted") == 0; k.deleted {
				_, err := r.pool.Exec(t.Context(), `UPDATE sessions SET state = 'closed', closed_at = now(), deleted_at = now(), kept_to = 0
					WHERE tenant_id = 'kin' AND id = $1`, must(parseSession(k.id)))
				if err != nil {
					rt.Fatal(err)
				}
			}
		}
		for _, a := range all {
			r.checkAncestors(rt, a, rapid.IntRange(0, 3).Draw(rt, "depth"))
			for _, b := range all {
				r.checkPair(rt, a, b)
			}
		}
	})
}

func (r *rig) checkAncestors(rt *rapid.T, a *kin, depth int) {
	got, err := r.Ancestors(r.t.Context(), "kin", a.id, nil)
	near, nearErr := r.Ancestors(r.t.Context(), "kin", a.id, &depth)
	if a.deleted {
		if ErrorCode(err) != CodeNotFound || ErrorCode(nearErr) != CodeNotFound {
			rt.Errorf("ancestors of a deleted session: %v, %v", err, nearErr)
		}
		return
	}
	want := a.up()[1:]
	slices.Reverse(want)
	if err != nil || !sameNodes(got.Nodes, want) {
		rt.Errorf("ancestors of %s: %v, %v, want %d", a.id, got.Nodes, err, len(want))
	}
	if nearErr != nil || !sameNodes(near.Nodes, want[max(0, len(want)-depth):]) {
		rt.Errorf("ancestors of %s, %d levels: %v, %v", a.id, depth, near.Nodes, nearErr)
	}
}

func sameNodes(got []Node, want []*kin) bool {
	return got != nil && slices.EqualFunc(got, want, func(n Node, k *kin) bool { return n.ID == k.id && n.Deleted == k.deleted })
}

func (r *rig) checkPair(rt *rapid.T, a, b *kin) {
	c, err := r.Common(r.t.Context(), "kin", a.id, b.id)
	p, pathErr := r.Path(r.t.Context(), "kin", a.id, b.id)
	if a.deleted || b.deleted {
		if ErrorCode(err) != CodeNotFound || ErrorCode(pathErr) != CodeNotFound {
			rt.Errorf("pair with a deleted session: %v, %v", err, pathErr)
		}
		return
	}
	if err != nil || pathErr != nil {
		rt.Fatal(err, pathErr)
	}
	meet, at := a.common(b)
	if (c.Ancestor == nil) != (meet == nil) || c.At != at || p.At != at {
		rt.Errorf("%s and %s part at %d and %d, want %d", a.id, b.id, c.At, p.At, at)
	}
	if meet == nil {
		if p.Ancestor != nil || p.Nodes == nil || len(p.Nodes) != 0 {
			rt.Errorf("path between trees: %+v", p)
		}
		return
	}
	down := slices.Clone(b.up()[:slices.Index(b.up(), meet)])
	slices.Reverse(down)
	want := append(slices.Clone(a.up()[:slices.Index(a.up(), meet)+1]), down...)
	if c.Ancestor.ID != meet.id || c.Ancestor.Deleted != meet.deleted || *p.Ancestor != meet.id || !sameNodes(p.Nodes, want) {
		rt.Errorf("%s and %s meet at %+v by %+v, want %s", a.id, b.id, c.Ancestor, p.Nodes, meet.id)
	}
}

// The same over real forks, where a line's tokens are there to compare.
func TestLinesPartWhereLineageSays(t *testing.T) {
	r := newRig(t)
	root := r.create("func main() {\n\treturn")
	r.turn(root.ID, "", 6)
	a := r.fork(root.ID, ForkRequest{At: ptr(root.Length + 4)}).Sessions[0].ID
	r.turn(a, " one", 4)
	b := r.fork(a, ForkRequest{At: ptr(root.Length + 2)}).Sessions[0].ID // below a's own part
	r.turn(b, " two", 4)
	for _, pair := range [][2]string{{root.ID, a}, {a, b}, {b, root.ID}} {
		c := must(r.Common(t.Context(), DefaultTenant, pair[0], pair[1]))
		x, y := r.line(pair[0]), r.line(pair[1])
		if !slices.Equal(x[:c.At], y[:c.At]) || c.At == 0 {
			t.Errorf("lines differ below %d", c.At)
		}
	}
	if c := must(r.Common(t.Context(), DefaultTenant, a, b)); c.Ancestor.ID != a || c.At != root.Length+2 {
		t.Errorf("common %+v", c)
	}
	if c := must(r.Common(t.Context(), DefaultTenant, b, b)); c.Ancestor.ID != b || c.At != r.get(b).Length {
		t.Errorf("common with itself %+v", c)
	}
}

// Another tenant's ids look like ones that do not exist, on either side.
func TestLineageOfOtherTenants(t *testing.T) {
	r := newRig(t)
	mine := r.create("a")
	if _, err := r.pool.Exec(t.Context(), "INSERT INTO tenants (id) VALUES ('kin')"); err != nil {
		t.Fatal(err)
	}
	theirs := &kin{id: sessionID(newID())}
	r.insertKin(t, theirs, 0)
	never := sessionID(newID())
	said := func(err error, id string) string {
		e, _ := err.(*Error)
		if e == nil {
			t.Fatalf("error %v", err)
		}
		return string(e.Code) + e.Field + strings.ReplaceAll(e.Message, id, "")
	}
	for name, f := range map[string]func(id string) error{
		"ancestors":   func(id string) error { _, err := r.Ancestors(t.Context(), DefaultTenant, id, nil); return err },
		"common":      func(id string) error { _, err := r.Common(t.Context(), DefaultTenant, id, mine.ID); return err },
		"common with": func(id string) error { _, err := r.Common(t.Context(), DefaultTenant, mine.ID, id); return err },
		"path":        func(id string) error { _, err := r.Path(t.Context(), DefaultTenant, id, mine.ID); return err },
		"path to":     func(id string) error { _, err := r.Path(t.Context(), DefaultTenant, mine.ID, id); return err },
	} {
		want := said(f(never), never)
		for _, id := range []string{theirs.id, "nonsense"} {
			if got := said(f(id), id); got != want {
				t.Errorf("%s of %s: %s, want %s", name, id, got, want)
			}
		}
	}
	_, err := r.Ancestors(t.Context(), DefaultTenant, mine.ID, ptr(-1))
	wantCode(t, err, CodeInvalid, "depth")
}
