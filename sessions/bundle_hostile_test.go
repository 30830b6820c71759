package sessions

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"rocket/internal/localpg/pgtest"
)

// copse is a small bundle with a line of each kind that matters, without its
// trailer: a cut ancestor, a fork, a closed and a deleted child, turns that
// ended in several ways, stop strings that hold text back, log probabilities.
func (r *rig) copse() []string {
	r.t.Helper()
	root := r.create("func main() {\n")
	r.turn(root.ID, "\treturn", 4)
	top := r.fork(root.ID, ForkRequest{At: ptr(root.Length + 3), Labels: map[string]string{"a": "b"}}).Sessions[0].ID
	first := r.turn(top, "x", 5)
	held := first.Text[len(first.Text)-1:] + "\x7f" // the same line again ends in what may be the start of it
	twin := r.fork(top, ForkRequest{At: ptr(first.From)}).Sessions[0].ID
	r.wait(twin, r.start(twin, TurnRequest{Input: ptr("x"), MaxTokens: ptr(5), IgnoreEOS: true, Stop: []string{held}, Logprobs: ptr(1)}).ID)
	running := r.start(twin, endless)
	r.events(twin, 1, r.get(twin).LastSeq+1)
	if _, err := r.Cancel(r.t.Context(), local, twin); err != nil {
		r.t.Fatal(err)
	}
	r.wait(twin, running.ID)
	gone := r.fork(top, ForkRequest{}).Sessions[0].ID
	r.turn(r.fork(gone, ForkRequest{}).Sessions[0].ID, "y", 1)
	if err := r.Delete(r.t.Context(), local, gone); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.Detach(r.t.Context(), local, top, DetachRequest{}); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.Close(r.t.Context(), local, twin); err != nil {
		r.t.Fatal(err)
	}
	lines := strings.SplitAfter(string(r.export(top)), "\n")
	return lines[:len(lines)-2]
}

// reads tells whether the reader takes a bundle; what it does not take it
// refuses with a line.
func (r *rig) reads(name string, data []byte) bool {
	r.t.Helper()
	err := newBundleReader(bytes.NewReader(data), r.info, r.tok).drain()
	e, _ := err.(*Error)
	if err != nil && (e == nil || e.Code != CodeInvalid || e.Field != "bundle" || !strings.HasPrefix(e.Message, "line ")) {
		r.t.Errorf("%s: %v", name, err)
	}
	return err == nil
}

// works imports a bundle and does with it whatever can be done: it is read by
// every call, exported and read again, taken over from a dead server, and goes
// on. Then it is deleted.
func (r *rig) works(name string, data []byte) {
	r.t.Helper()
	ctx := r.t.Context()
	got, err := r.Import(ctx, local, bytes.NewReader(data))
	if err != nil {
		r.t.Errorf("%s: %v", name, err)
		return
	}
	failed := func(what string, err error) {
		if err != nil {
			r.t.Errorf("%s: %s: %v", name, what, err)
		}
	}
	top := got.Session.ID
	tree, err := r.Tree(ctx, DefaultTenant, top, nil)
	failed("tree", err)
	alive := slices.DeleteFunc(tree.Nodes, func(n Node) bool { return n.Deleted })
	for _, n := range alive {
		r.look(name, n.ID)
	}
	var again bytes.Buffer
	failed("export", r.Export(ctx, DefaultTenant, top, &again))
	failed("read the export", newBundleReader(&again, r.info, r.tok).drain())
	dead := newID()
	r.exec(`INSERT INTO servers (id, lease_until) VALUES ($1, now() - interval '1 hour')`, dead)
	r.exec(`UPDATE sessions SET owner_server = $1, rev = rev + 1 WHERE deleted_at IS NULL`, dead)
	taken, err := r.takeOver(ctx, dead, false)
	failed("take over", err)
	if !taken {
		r.t.Errorf("%s: not taken over", name)
	}
	for _, n := range alive {
		r.look(name, n.ID)
		s := r.get(n.ID)
		if s.Epoch <= n.Epoch {
			r.t.Errorf("%s: epoch %d after a takeover, %d before", name, s.Epoch, n.Epoch)
		}
		if s.State == StateClosed || s.Length == 0 {
			continue
		}
		r.turn(n.ID, "z", 1)
		r.fork(n.ID, ForkRequest{})
	}
	failed("check", r.Check(ctx, DefaultTenant))
	failed("prune", r.Prune(ctx, local, top))
}

// look reads all that there is of a session.
func (r *rig) look(name, id string) {
	r.t.Helper()
	ctx := r.t.Context()
	failed := func(what string, err error) {
		if err != nil {
			r.t.Errorf("%s: %s: %v", name, what, err)
		}
	}
	_, err := r.Get(ctx, DefaultTenant, id)
	failed("get", err)
	_, err = r.Tokens(ctx, DefaultTenant, id, nil, nil)
	failed("tokens", err)
	page, err := r.Turns(ctx, DefaultTenant, id, TurnFilter{})
	failed("turns", err)
	for _, t := range page.Data {
		t, err = r.Turn(ctx, DefaultTenant, id, t.ID)
		failed("turn", err)
		_, err = json.Marshal(t)
		failed("encode turn", err)
	}
	log, err := r.Log(ctx, DefaultTenant, id)
	if err != nil {
		failed("log", err)
		return
	}
	next, err := log.Start(ctx, 1, 0)
	if e, ok := err.(*Error); ok && e.Code == CodeGone {
		next, err = e.FirstSeq, nil
	}
	failed("start of log", err)
	_, last, err := log.Last(ctx)
	failed("end of log", err)
	for err == nil && next <= last {
		var events []Event
		if events, err = log.Read(ctx, next, 100); err != nil || len(events) == 0 {
			r.t.Errorf("%s: %d events from %d of %d: %v", name, len(events), next, last, err)
			return
		}
		_, err = json.Marshal(events)
		failed("encode events", err)
		for _, e := range events {
			if e.LastSeq != nil && *e.LastSeq != e.Seq-1 {
				r.t.Errorf("%s: event %d says that those behind %d never happened", name, e.Seq, *e.LastSeq)
			}
		}
		next = events[len(events)-1].Seq + 1
	}
}

// hostileValues are put in the place of every value of a bundle.
var hostileValues = []string{"-1", "0", "1", "3", "2147483647", "2147483648", "281474976710656", "9007199254740993", "9223372036854775807",
	"1e300", "1.5", "null", `""`, `"x"`, `"\u0000"`, `"9999-12-31T23:59:59.999Z"`, `"9999-12-31T23:59:59-23:00"`, `"9998-12-31T23:59:59Z"`,
	`"1969-12-31T23:59:59Z"`, "[]", "{}", "true", `"` + strings.Repeat("long", 5_000) + `"`}

// mutate gives every line that differs from line in one value.
func mutate(line string, others map[string][]string, f func(path, line string)) {
	dec := json.NewDecoder(strings.NewReader(line))
	dec.UseNumber()
	var top any
	if dec.Decode(&top) != nil {
		panic(line)
	}
	var walk func(path string, v any, set func(any))
	each := func(path, key string, old any, set func(any)) {
		was, err := json.Marshal(old)
		if err != nil {
			panic(err)
		}
		for _, v := range slices.Concat(hostileValues, others[key]) {
			if v == string(was) {
				continue
			}
			set(json.RawMessage(v))
			text, err := json.Marshal(top)
			if err != nil {
				panic(err)
			}
			f(path+" = "+v[:min(len(v), 60)], string(text)+"\n")
		}
		set(old)
	}
	walk = func(path string, v any, set func(any)) {
		each(path, path[strings.LastIndex(path, ".")+1:], v, set)
		switch v := v.(type) {
		case map[string]any:
			for key := range v {
				walk(path+"."+key, v[key], func(x any) { v[key] = x })
			}
		case []any:
			if len(v) > 0 {
				last := len(v) - 1
				walk(fmt.Sprintf("%s[%d]", path, last), v[last], func(x any) { v[last] = x })
			}
		}
	}
	fields := top.(map[string]any)
	for key := range fields {
		if key != "type" {
			walk(key, fields[key], func(x any) { fields[key] = x })
		}
	}
}

// change is a line of a bundle with another value.
type change struct {
	at         int
	name, line string
}

var bundleBatches = flag.Int("bundles", 2, "how many bundles of hostile values that the reader takes are imported; from 10 on more values are tried")

// Every value of a bundle is replaced by what no server writes, and by those
// that other lines have there. What is not refused must work.
func TestImportHostileValues(t *testing.T) {
	r := openRig(t, pgtest.New(t))
	lines := r.copse()
	if bundle := reseal(lines); !r.reads("as it is", bundle) {
		t.Fatal(newBundleReader(bytes.NewReader(bundle), r.info, r.tok).drain())
	}
	others := map[string][]string{}
	for _, line := range lines {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		for key, v := range fields {
			if !slices.Contains(others[key], string(v)) && len(others[key]) < 5 {
				others[key] = append(others[key], string(v))
			}
		}
	}
	tried := map[string]int{}
	var taken []change
	all := slices.Clone(lines)
	for i, line := range lines {
		mutate(line, others, func(path, changed string) {
			kind := changed[strings.Index(changed, `"type":`):]
			kind = kind[:strings.IndexAny(kind, ",}")] + path
			if tried[kind]++; tried[kind] > 1 && *bundleBatches < 10 {
				return
			}
			all[i] = changed
			if name := fmt.Sprintf("line %d, %s", i+1, path); r.reads(name, reseal(all)) {
				taken = append(taken, change{i, name, changed})
			}
			all[i] = line
		})
	}
	t.Logf("%d values, %d taken", len(tried), len(taken))
	imported := 0
	for n := 0; n < *bundleBatches && len(taken) > 0; n++ {
		var name string
		var left []change
		all := slices.Clone(lines)
		for _, c := range taken { // as many at once as go together
			was := all[c.at]
			all[c.at] = c.line
			if was != lines[c.at] || !r.reads(c.name, reseal(all)) {
				all[c.at] = was
				left = append(left, c)
				continue
			}
			imported++
			name += "\n" + c.name
		}
		if len(left) == len(taken) {
			t.Fatalf("%s is not taken any more", taken[0].name)
		}
		taken = left
		r.works(name, reseal(all))
	}
	t.Logf("%d imported", imported)
}
