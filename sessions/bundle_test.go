package sessions

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rocket/internal/localpg/pgtest"
)

// grove is a subtree with everything that a bundle can hold: a cut ancestor, a
// deleted session in between, closed, detached and interrupted ones, a second
// epoch, a log whose beginning is gone, stop strings, log probabilities.
func (r *rig) grove() (top string) {
	r.t.Helper()
	root := r.create("func main() {\n")
	r.turn(root.ID, "\treturn", 9)
	top = r.fork(root.ID, ForkRequest{At: ptr(root.Length + 5), Title: ptr("top \x01 \u2028 é"), Labels: map[string]string{"a": "b"}}).Sessions[0].ID
	req := TurnRequest{Input: ptr("x \\u0000 \"y\""), MaxTokens: ptr(12), IgnoreEOS: true, Stop: []string{"zzz", "}"}, Logprobs: ptr(2)}
	r.wait(top, r.start(top, req).ID)
	r.turn(top, "", 7)
	length := r.get(top).Length
	kids := r.fork(top, ForkRequest{N: ptr(3)}).Sessions
	low := r.fork(top, ForkRequest{At: ptr(3)}).Sessions[0].ID // below top's own part
	for _, id := range []string{kids[0].ID, kids[1].ID, low} {
		r.turn(id, id[len(id)-3:], 6)
	}
	deep := r.fork(kids[0].ID, ForkRequest{At: ptr(length + 4)}).Sessions[0].ID
	r.turn(deep, "q", 4)
	running := r.start(kids[1].ID, endless)
	r.events(kids[1].ID, 1, r.get(kids[1].ID).LastSeq+2)
	if _, err := r.Cancel(r.t.Context(), local, kids[1].ID); err != nil {
		r.t.Fatal(err)
	}
	r.wait(kids[1].ID, running.ID)
	if err := r.Delete(r.t.Context(), local, kids[0].ID); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.Close(r.t.Context(), local, kids[2].ID); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.Detach(r.t.Context(), local, low, DetachRequest{}); err != nil {
		r.t.Fatal(err)
	}
	r.age(low, r.get(low).LastSeq-1)
	r.keep()
	return top
}

func (r *rig) export(id string) []byte {
	r.t.Helper()
	var out bytes.Buffer
	if err := r.Export(r.t.Context(), DefaultTenant, id, &out); err != nil {
		r.t.Fatal(err)
	}
	return out.Bytes()
}

// told is all that a tree says of itself.
type told struct {
	Nodes  []Node
	Lines  [][]int32
	Turns  [][]Turn
	Events [][]Event
}

func (r *rig) tell(top string) (w told) {
	r.t.Helper()
	w.Nodes = must(r.Tree(r.t.Context(), DefaultTenant, top, nil)).Nodes
	for i, n := range w.Nodes {
		if n.Deleted {
			w.Nodes[i] = Node{Deleted: true, Session: Session{ID: n.ID, ParentID: n.ParentID, RootID: n.RootID, ForkedAt: n.ForkedAt}}
			continue
		}
		w.Nodes[i].Residency = Residency{} // where the bytes are is the server's
		w.Lines = append(w.Lines, r.line(n.ID))
		w.Events = append(w.Events, r.ledgerEvents(n.ID))
		var turns []Turn
		for _, t := range must(r.Turns(r.t.Context(), DefaultTenant, n.ID, TurnFilter{})).Data {
			turns = append(turns, must(r.Turn(r.t.Context(), DefaultTenant, n.ID, t.ID)))
		}
		w.Turns = append(w.Turns, turns)
	}
	return w
}

// Export, import into another ledger: every line, turn and event is equal, and
// forks go on with equal tokens. Again: the ids are taken, all are new.
func TestExportImport(t *testing.T) {
	a := newRig(t)
	top := a.grove()
	bundle := a.export(top)
	want := a.tell(top)
	b := openRig(t, pgtest.New(t))
	got, err := b.Import(t.Context(), local, bytes.NewReader(bundle))
	if err != nil {
		t.Fatal(err)
	}
	if got.NewIDs || got.Session.ID != top || got.Sessions != 7 || got.Tokens == 0 || got.Turns == 0 {
		t.Errorf("result %+v", got)
	}
	if diff := cmp.Diff(want, b.tell(top)); diff != "" {
		t.Errorf("imported:\n%s", diff)
	}
	if err := b.Check(t.Context(), DefaultTenant); err != nil {
		t.Error(err)
	}
	for i, n := range want.Nodes {
		if n.Deleted || n.State == StateClosed {
			continue
		}
		for _, at := range []int{n.Length, 4} {
			x, y := a.fork(n.ID, ForkRequest{At: &at}).Sessions[0].ID, b.fork(n.ID, ForkRequest{At: &at}).Sessions[0].ID
			one, two := a.turn(x, "go on", 5), b.turn(y, "go on", 5)
			if !slices.Equal(one.Tokens, two.Tokens) {
				t.Errorf("node %d goes on with %v and %v", i, one.Tokens, two.Tokens)
			}
		}
	}
	again, err := b.Import(t.Context(), local, bytes.NewReader(bundle))
	if err != nil || !again.NewIDs || again.Session.ID == top {
		t.Fatalf("imported again: %+v, %v", again, err)
	}
	old := b.tell(again.Session.ID)
	if diff := cmp.Diff(want.Lines, old.Lines); diff != "" {
		t.Errorf("lines under new ids:\n%s", diff)
	}
	if diff := cmp.Diff(b.shape(want), b.shape(old)); diff != "" {
		t.Errorf("events and turns under new ids:\n%s", diff)
	}
	// what was imported can be exported: with the ids it came with, the same bundle
	third := openRig(t, pgtest.New(t))
	if _, err := third.Import(t.Context(), local, bytes.NewReader(bundle)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(body(bundle), body(third.export(top))); diff != "" {
		t.Errorf("exported again:\n%s", diff)
	}
}

// body is a bundle without the times of its export, and its sum.
func body(bundle []byte) string {
	lines := strings.SplitAfter(string(bundle), "\n")
	return strings.Join(lines[2:len(lines)-2], "") // the first session is a cut ancestor, "deleted" by the export
}

// shape is what is told without ids.
func (r *rig) shape(w told) string {
	data, _ := json.Marshal(struct {
		E [][]Event
		T [][]Turn
	}{w.Events, w.Turns})
	names := map[string]string{}
	return anyID.ReplaceAllStringFunc(string(data), func(id string) string {
		if names[id] == "" {
			names[id] = fmt.Sprint("#", len(names))
		}
		return names[id]
	})
}

var anyID = regexp.MustCompile(`(ses|turn)_[0-9a-f-]{36}`)

// A root's bundle has no ancestors, and needs no second look.
func TestExportRoot(t *testing.T) {
	a := newRig(t)
	s := a.create("package a\n")
	a.turn(s.ID, "b", 5)
	b := openRig(t, pgtest.New(t))
	got, err := b.Import(t.Context(), Call{Tenant: DefaultTenant, IdempotencyKey: "i", Route: "import"}, bytes.NewReader(a.export(s.ID)))
	if err != nil || got.Sessions != 1 || got.Session.ParentID != nil {
		t.Fatalf("%+v, %v", got, err)
	}
	bundle := a.export(s.ID)
	_, err = b.Import(t.Context(), Call{Tenant: DefaultTenant, IdempotencyKey: "i", Route: "import"}, bytes.NewReader(bundle))
	wantCode(t, err, CodeIdempotencyMismatch, "Idempotency-Key") // exported at another time
	call := Call{Tenant: DefaultTenant, IdempotencyKey: "j", Route: "import"}
	one, err := b.Import(t.Context(), call, bytes.NewReader(bundle))
	two, err2 := b.Import(t.Context(), call, bytes.NewReader(bundle))
	if err != nil || err2 != nil || one.Session.ID != two.Session.ID || b.count("SELECT count(*) FROM sessions") != 2 {
		t.Errorf("repeated import: %+v, %v, %+v, %v", one, err, two, err2)
	}
}

func TestExportErrors(t *testing.T) {
	r := newRig(t)
	s := r.create("x")
	for _, id := range []string{"nonsense", sessionID(newID())} {
		wantCode(t, r.Export(t.Context(), DefaultTenant, id, io.Discard), CodeNotFound, "")
	}
	wantCode(t, r.Export(t.Context(), "other", s.ID, io.Discard), CodeNotFound, "")
	r.start(r.fork(s.ID, ForkRequest{}).Sessions[0].ID, endless)
	wantCode(t, r.Export(t.Context(), DefaultTenant, s.ID, io.Discard), CodeTurnInProgress, "")
	broken := errors.New("broken pipe")
	if err := r.Export(t.Context(), DefaultTenant, r.create("y").ID, failingWriter{broken}); !errors.Is(err, broken) {
		t.Errorf("a writer that fails: %v", err)
	}
	if err := r.Prune(t.Context(), local, s.ID); err != nil {
		t.Fatal(err)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// reseal makes a bundle's trailer right again after a change.
func reseal(lines []string) []byte {
	text := strings.Join(lines, "")
	sum := sha256.Sum256([]byte(text))
	return fmt.Appendf([]byte(text), `{"type":"trailer","lines":%d,"sha256":"%s"}`+"\n", len(lines), hex.EncodeToString(sum[:]))
}

// Whatever is wrong with a bundle: it is refused with the line, and nothing of
// it is in the ledger.
func TestImportRefuses(t *testing.T) {
	a := newRig(t)
	bundle := a.export(a.grove())
	lines := strings.SplitAfter(string(bundle), "\n")
	lines = lines[:len(lines)-2] // the trailer, and what is behind the last line end
	b := openRig(t, pgtest.New(t))
	refused := func(name string, data []byte, wants ...string) {
		t.Helper()
		_, err := b.Import(t.Context(), local, bytes.NewReader(data))
		e, _ := err.(*Error)
		if e == nil || e.Code != CodeInvalid || e.Field != "bundle" || !strings.HasPrefix(e.Message, "line ") {
			t.Errorf("%s: %v", name, err)
			return
		}
		for _, want := range wants {
			if !strings.Contains(e.Message, want) {
				t.Errorf("%s: %q, want %q in it", name, e.Message, want)
			}
		}
	}
	find := func(kind string, nth int) int {
		for i, l := range lines {
			if strings.HasPrefix(l, `{"type":"`+kind+`"`) {
				if nth--; nth < 0 {
					return i
				}
			}
		}
		t.Fatalf("no line of type %s", kind)
		return 0
	}
	swap := func(name string, at int, old, new string, wants ...string) {
		t.Helper()
		if !strings.Contains(lines[at], old) {
			t.Fatalf("%s: no %s in %s", name, old, lines[at])
		}
		changed := slices.Clone(lines)
		changed[at] = strings.Replace(changed[at], old, new, 1)
		refused(name, reseal(changed), wants...)
	}
	for cut := range lines {
		refused(fmt.Sprint("cut before line ", cut+1), []byte(strings.Join(lines[:cut], "")), fmt.Sprintf("line %d: ", cut+1), "ends early")
		if cut%3 == 1 { // some of each kind
			refused(fmt.Sprint("without line ", cut+1), reseal(slices.Concat(lines[:cut], lines[cut+1:])))
			refused(fmt.Sprint("line twice ", cut+1), reseal(slices.Concat(lines[:cut+1], lines[cut:])))
		}
	}
	refused("cut in the trailer", bundle[:len(bundle)-5], "ends early")
	refused("empty", nil, "line 1: the bundle ends early")
	refused("not JSON", []byte("hello\n"), "line 1: ")
	refused("not UTF-8", append([]byte(`{"type":"header","model":"`), "\xff\"}\n"...), "line 1: not valid UTF-8")
	refused("something behind", append(bytes.Clone(bundle), '\n'), fmt.Sprintf("line %d: there is something after", len(lines)+2))
	refused("flipped bit", bytes.Replace(bundle, []byte(`"b"`), []byte(`"c"`), 1), "sha256")
	refused("a line without end", append([]byte(`{"type":"`), bytes.Repeat([]byte("x"), BundleLineBytesMax)...), "line 1: it has more than")

	event, run, turn, child := find(lineEvent, 3), find(lineTokens, 1), find(lineTurn, 1), find(lineSession, 3)
	swap("version", 0, `"version":1`, `"version":2`, "line 1: ", "version 2")
	swap("format", 0, bundleFormat, "other", "line 1: ")
	swap("tokenizer", 0, `"tokenizer_digest":"`, `"tokenizer_digest":"x`, "line 1: ", "tokenizer is not this server's")
	swap("model", 0, `"model_digest":"`, `"model_digest":"x`, "line 1: ", "weights are not this server's")
	swap("sessions", 0, `"sessions":7`, `"sessions":2000000000`, "line 1: ")
	swap("fewer sessions", 0, `"sessions":7`, `"sessions":6`, "more sessions than")
	swap("unknown field", child, `{"type"`, `{"extra":1,"type"`, fmt.Sprintf("line %d: ", child+1), "extra")
	swap("state", child, `"state":"`, `"state":"x`, fmt.Sprintf("line %d: state", child+1))
	swap("length", child, `"length":`, `"length":9`, "the tokens [")
	swap("epoch", child, `"epoch":1`, `"epoch":0`, "epoch")
	swap("epoch without room", child, `"epoch":1`, `"epoch":9223372036854775807`, fmt.Sprintf("line %d: epoch", child+1))
	swap("more turns than an integer", child, `"turn_count":`, `"turn_count":2147483648`, fmt.Sprintf("line %d: turn_count", child+1))
	swap("seq without room", child, `"last_seq":`, `"last_seq":9007199254740993`, fmt.Sprintf("line %d: ", child+1), "last_seq")
	swap("longer than the context", child, `"length":`, `"length":99999`, fmt.Sprintf("line %d: length", child+1))
	swap("a time without JSON", run, regexp.MustCompile(`"time":"\d+`).FindString(lines[run]), `"time":"9999`, fmt.Sprintf("line %d: time", run+1))
	swap("another text", turn, `"text":"`, `"text":"x`, fmt.Sprintf("the text of the turn of line %d", turn+1))
	swap("more text than tokens", turn, `"text":"`, `"text":"`+strings.Repeat("x", 1<<20), fmt.Sprintf("the text of the turn of line %d", turn+1))
	swap("temperature", turn, `"temperature":0`, `"temperature":-1`, fmt.Sprintf("line %d: request.temperature", turn+1))
	swap("finish", turn, `"finish_reason":"`, `"finish_reason":"error","error":"`, fmt.Sprintf("line %d: ", turn+1))
	swap("usage", turn, `"prompt_tokens":`, `"prompt_tokens":-`, fmt.Sprintf("line %d: usage", turn+1))
	done := func(kind string) int {
		return slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, `"event":"`+kind+`"`) })
	}
	end := done("turn.completed")
	swap("an interruption that was none", end, `"event":"turn.completed"`, `"event":"turn.interrupted"`, fmt.Sprintf("line %d: data", end+1))
	swap("an interruption that drops the log", end, `"event":"turn.completed"`, `"event":"turn.interrupted"`, fmt.Sprintf("line %d: ", end+1))
	forked := done("session.forked")
	swap("a fork elsewhere", forked, `"at":`, `"at":1`, fmt.Sprintf("line %d: data.children", forked+1))
	swap("turn of nobody", run, `"turn_id":"turn_`, `"turn_id":"turn_0`, fmt.Sprintf("line %d: turn_id", run+1))
	swap("token", run, `"ids":[`, `"ids":[99999999,`, fmt.Sprintf("line %d: ", run+1))
	swap("gap", run, `"from":`, `"from":1`, fmt.Sprintf("line %d: from", run+1))
	swap("turn state", turn, `"state":"completed"`, `"state":"running"`, fmt.Sprintf("line %d: state", turn+1))
	swap("NUL in a request", turn, `"request":{`, `"request":{"messages":[{"role":"\u0000"}],`, fmt.Sprintf("line %d: request", turn+1))
	swap("request", turn, `"request":{`, `"request":{"stop":5,`, fmt.Sprintf("line %d: request", turn+1))
	swap("event", event, `"event":"`, `"event":"x`, fmt.Sprintf("line %d: event", event+1))
	swap("seq", event, `"seq":`, `"seq":7`, fmt.Sprintf("line %d: seq", event+1))
	if n := b.count("SELECT count(*) FROM sessions") + b.count("SELECT count(*) FROM turns") + b.count("SELECT count(*) FROM events"); n != 0 {
		t.Errorf("%d rows of refused bundles", n)
	}
	slow, reading, held := make(chan error), make(chan struct{}), make(chan error)
	go func() {
		_, err := b.Import(t.Context(), local, slowReader{reading, slow})
		held <- err
	}()
	<-reading // one at a time
	_, err := b.Import(t.Context(), local, bytes.NewReader(bundle))
	wantCode(t, err, CodeOverloaded, "")
	gone := errors.New("the client is gone")
	slow <- gone
	if err := <-held; !errors.Is(err, gone) {
		t.Errorf("a body that fails: %v", err)
	}
	if _, err := b.Import(t.Context(), local, bytes.NewReader(bundle)); err != nil {
		t.Errorf("the bundle itself: %v", err)
	}
}

// slowReader says when it is read from, and fails when it is told to.
type slowReader struct {
	reading chan struct{}
	fail    chan error
}

func (r slowReader) Read([]byte) (int, error) {
	close(r.reading)
	return 0, <-r.fail
}
