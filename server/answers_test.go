package server

import (
	"bytes"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"rocket/client"
	"rocket/sessions"
)

// TestListsAreWrittenItemByItem: what is written so is what would be written at
// once.
func TestListsAreWrittenItemByItem(t *testing.T) {
	text := "a <b> & \"c\"\n\u2028"
	next := "ses_2"
	node := sessions.Node{Session: sessions.Session{ID: "ses_1", Title: strings.Repeat(text, 3000), Labels: map[string]string{`"data":[`: `"nodes":[`}}}
	gone := sessions.Node{Session: sessions.Session{ID: "ses_2"}, Deleted: true}
	nodes := []sessions.Node{node, gone, node}
	event := sessions.Event{Seq: 3, Type: sessions.EventTurnDelta, EventData: sessions.EventData{Text: &text}}
	for _, v := range []any{
		sessions.SessionPage{Data: []sessions.Session{node.Session, gone.Session}, HasMore: true, Next: &next},
		sessions.SessionPage{Data: []sessions.Session{}},
		sessions.TurnPage{Data: []sessions.Turn{{ID: "turn_1", Text: text, Tokens: []int32{}}, {ID: "turn_2"}}},
		EventPage{Data: []sessions.Event{event, {Seq: 4, Type: sessions.EventSessionClosed}}, HasMore: true, Next: 5, Epoch: 1, LastSeq: 9},
		sessions.Tree{Root: "ses_1", Nodes: nodes},
		sessions.Ancestry{ID: "ses_1", Nodes: []sessions.Node{}},
		sessions.Path{From: "ses_1", To: "ses_2", Ancestor: &next, At: 3, Nodes: nodes[:1]},
	} {
		var whole, parts bytes.Buffer
		if err := encoder(&whole).Encode(v); err != nil {
			t.Fatal(err)
		}
		if err := marshalJSON(&parts, v); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(whole.Bytes(), parts.Bytes()) {
			t.Errorf("%T:\n%.300s\nwant\n%.300s", v, parts.Bytes(), whole.Bytes())
		}
	}
	if err := marshalList(&bytes.Buffer{}, struct{}{}, "data", []int{1}); err == nil {
		t.Error("a list without a place was written")
	}
}

// TestLargeAnswersAreBounded: a client that asks for much at once, and reads
// none of it, has the server hold its share and no more; another tenant's large
// answer comes meanwhile. A tree that is larger than answers may be is refused.
func TestLargeAnswersAreBounded(t *testing.T) {
	const askers, children, label = 8, 32, 512 << 10 // a tree of 16 MiB
	h := startHostile(t, worldOptions{listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} }})
	conn, err := pgx.Connect(t.Context(), h.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	attacker, err := client.New(h.base, client.Options{APIKey: h.key.Secret, Retries: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer attacker.Close()
	for c, id := range map[*client.Client]string{attacker: h.sid, h.victim: h.work} {
		if _, err := c.Fork(h.ctx(), id, client.ForkRequest{N: new(children)}, client.CallOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	fill := func(tenant string, n int) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), "UPDATE sessions SET labels = jsonb_build_object('a', repeat('x', $2)) WHERE parent_id IS NOT NULL AND tenant_id = $1", tenant, n); err != nil {
			t.Fatal(err)
		}
	}
	fill("attacker", label)
	fill("victim", label/64) // enough to need a place
	before, base := h.goroutines(), heap()
	var open []*rawConn
	for range askers {
		c := h.connect()
		_ = c.Conn.(*net.TCPConn).SetReadBuffer(1 << 10)
		c.put(h.with("GET "+pathSessions+"/"+h.sid+"/tree") + "\r\n")
		open = append(open, c)
	}
	wait := func(want string, enough func(sessions.Stats) bool) {
		t.Helper()
		for end := time.Now().Add(patience); !enough(h.manager.Stats()); time.Sleep(time.Millisecond) {
			if st := h.manager.Stats(); time.Now().After(end) {
				t.Fatalf("answers hold %d bytes and %d wait; want %s", st.AnswerBytes, st.AnswersWaiting, want)
			}
		}
	}
	wait("three trees held, the others waiting", func(st sessions.Stats) bool {
		return st.AnswerBytes >= 3*children*label && st.AnswerBytes < 4*children*label && st.AnswersWaiting == askers-3
	})
	if tree, err := h.victim.Tree(h.ctx(), h.work, -1); err != nil || len(tree.Nodes) != children+1 {
		t.Errorf("another tenant's tree: %d nodes, %v", len(tree.Nodes), err)
	}
	if grown := heap() - base; grown > 110<<20 {
		t.Errorf("%d answers of %d bytes hold %d", askers, children*label, grown)
	}
	for _, c := range open {
		c.Close()
	}
	wait("none", func(st sessions.Stats) bool { return st.AnswerBytes == 0 && st.AnswersWaiting == 0 })
	h.settled(before)

	fill("attacker", 3*label)
	got := h.do("GET", pathSessions+"/"+h.sid+"/tree", "", "Authorization", "Bearer "+h.key.Secret)
	wantProblem(t, got.header, got.body, http.StatusUnprocessableEntity, "invalid", "depth")
	h.works()
}

// TestAnswersReadSlowly: a client that takes a little of its answer now and then
// does not keep what that holds from others for ever.
func TestAnswersReadSlowly(t *testing.T) {
	times := shortTimes
	times.answer = time.Second
	h := startHostile(t, worldOptions{server: Options{times: times}, listener: func(ln net.Listener) net.Listener { return smallBuffers{ln} }})
	conn, err := pgx.Connect(t.Context(), h.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	const label = 8 << 20
	if _, err := conn.Exec(t.Context(), "UPDATE sessions SET labels = jsonb_build_object('a', repeat('x', $1)) WHERE tenant_id = 'attacker'", label); err != nil {
		t.Fatal(err)
	}
	c := h.connect()
	_ = c.Conn.(*net.TCPConn).SetReadBuffer(1 << 10)
	c.put(h.with("GET "+pathSessions+"/"+h.sid+"/tree") + "\r\n")
	got := 0
	for buf := make([]byte, 1<<10); ; time.Sleep(5 * time.Millisecond) {
		n, err := c.Read(buf)
		if got += n; err != nil {
			break
		}
	}
	if got >= label { // none, where a busy machine takes all of the time to make the answer
		t.Errorf("a slow client got %d bytes of %d", got, label)
	}
	for end := time.Now().Add(patience); h.manager.Stats().AnswerBytes != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("answers hold %d bytes", h.manager.Stats().AnswerBytes)
		}
	}
	h.works()
}
