package server

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"rocket/client"
	"rocket/internal/linear"
)

var (
	linearRounds = flag.Int("linear", 1, "rounds of TestLinearizableOverTheWire")
	linearSeed   = flag.Uint64("linear.seed", 0, "seed of the first round; 0: drawn")
)

const wirePrompt = "x y"

// wireLoad makes the calls of a load: clients with even numbers over HTTP, the
// others over a WebSocket each where there is a frame for the call.
type wireLoad struct {
	*world
	sockets []*websocket.Conn
}

// TestLinearizableOverTheWire: what many clients of a server are told, over
// HTTP and WebSockets, is what some sequence of their calls gives.
func TestLinearizableOverTheWire(t *testing.T) {
	seed := *linearSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test ./server -run %s -linear.seed=%d", t.Name(), seed)
	for n := range uint64(*linearRounds) {
		x := &wireLoad{world: start(t, worldOptions{})}
		prompt := x.create(wirePrompt)
		l := &linear.Load{Do: x.do, Seed: seed + n, Clients: 6, Calls: 20, Sessions: 8, Prompt: prompt.Length, Max: 40}
		for range l.Clients {
			conn, err := x.api.Dial(x.ctx(), prompt.ID, client.Position{})
			if err != nil {
				t.Fatal(err)
			}
			x.sockets = append(x.sockets, conn)
		}
		h := linear.NewHistory()
		for i := range 3 {
			s := x.create(fmt.Sprint("package p", i))
			l.Begin(h, s.ID, wireView(s))
		}
		l.Run(x.ctx(), h)
		if err := h.Check(time.Minute); err != nil {
			t.Error(err)
		}
		for _, id := range l.Alive() {
			x.checkPrefix(id)
		}
		operations, sessions := h.Len()
		t.Logf("%d calls on %d sessions", operations, sessions)
		for _, conn := range x.sockets {
			conn.CloseNow()
		}
		x.stop()
	}
}

// checkPrefix compares a child's line with its parent's.
func (x *wireLoad) checkPrefix(id string) {
	x.t.Helper()
	s, err := x.api.Get(x.ctx(), id)
	if err != nil {
		x.t.Fatal(err)
	}
	if s.ParentID == nil {
		return
	}
	parent, err := x.api.Tokens(x.ctx(), *s.ParentID, 0, *s.ForkedAt)
	if client.CodeOf(err) == linear.NotFound {
		return
	}
	child, err2 := x.api.Tokens(x.ctx(), id, 0, *s.ForkedAt)
	if err != nil || err2 != nil || !slices.Equal(parent.Tokens, child.Tokens) {
		x.t.Errorf("%s is not its parent's line: %v, %v, %s", id, err, err2, cmp.Diff(parent.Tokens, child.Tokens))
	}
}

func wireView(s client.Session) linear.View {
	return linear.View{State: s.State, Length: s.Length, Turns: s.TurnCount, Children: s.ChildCount, Title: s.Title}
}

func (x *wireLoad) do(ctx context.Context, n int, id string, c linear.Call) (a linear.Answer, children []string) {
	var turn client.Turn
	var s client.Session
	var f client.ForkResult
	var none client.CallOptions
	var err error
	ask := client.TurnRequest{Input: new(wirePrompt), MaxTokens: &c.Max, IgnoreEOS: true}
	fork := client.ForkRequest{N: &c.N}
	if c.At >= 0 {
		fork.At = &c.At
	}
	wire := n%2 == 1
	switch {
	case wire && c.Kind == linear.Start:
		err = x.frame(ctx, n, "turn.create", id, ask, &turn)
	case wire && c.Kind == linear.Cancel:
		err = x.frame(ctx, n, "turn.cancel", id, nil, &turn)
	case wire && c.Kind == linear.Fork:
		err = x.frame(ctx, n, "fork", id, fork, &f)
	case wire && c.Kind == linear.Detach:
		err = x.frame(ctx, n, "detach", id, nil, &s)
	case wire && c.Kind == linear.Resume:
		err = x.frame(ctx, n, "resume", id, nil, &s)
	case c.Kind == linear.Start:
		turn, err = x.api.StartTurn(ctx, id, ask, none)
	case c.Kind == linear.End:
		for turn, err = x.api.Turn(ctx, id, c.Turn); err == nil && (turn.State == "queued" || turn.State == "running"); {
			turn, err = x.api.Turn(ctx, id, c.Turn)
		}
	case c.Kind == linear.Cancel:
		turn, err = x.api.Cancel(ctx, id, none)
	case c.Kind == linear.Fork:
		f, err = x.api.Fork(ctx, id, fork, none)
	case c.Kind == linear.Detach:
		s, err = x.api.Detach(ctx, id, client.DetachRequest{}, none)
	case c.Kind == linear.Resume:
		var r client.ResumeResult
		r, err = x.api.Resume(ctx, id, none)
		s = r.Session
	case c.Kind == linear.Get:
		s, err = x.api.Get(ctx, id)
	case c.Kind == linear.Patch:
		s, err = x.api.Patch(ctx, id, client.PatchRequest{Title: &c.Title}, none)
	case c.Kind == linear.Close:
		s, err = x.api.CloseSession(ctx, id, none)
	case c.Kind == linear.Delete:
		err = x.api.Delete(ctx, id, none)
	}
	if err != nil {
		if client.CodeOf(err) == "" {
			x.t.Errorf("%s of %s: %v", c, id, err)
		}
		return linear.Answer{Code: client.CodeOf(err)}, nil
	}
	a = linear.Answer{View: wireView(s), Turn: turn.ID, Turned: turn.State, From: turn.From, To: turn.To, At: f.At}
	for _, child := range f.Sessions {
		children, a.Title = append(children, child.ID), child.Title
	}
	return a, children
}

// frame makes a call over the client's socket, which carries nothing else.
func (x *wireLoad) frame(ctx context.Context, n int, kind, id string, request, result any) error {
	fields := map[string]any{}
	if request != nil {
		text, err := json.Marshal(request)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &fields); err != nil {
			return err
		}
	}
	fields["type"], fields["session_id"], fields["ref"] = kind, id, kind
	text, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	if err := x.sockets[n].Write(ctx, websocket.MessageText, text); err != nil {
		return err
	}
	for {
		_, data, err := x.sockets[n].Read(ctx)
		if err != nil {
			return err
		}
		var f struct {
			Type, Ref, Code, Detail string
			Result                  json.RawMessage
		}
		if err := json.Unmarshal(data, &f); err != nil {
			return err
		}
		switch {
		case f.Ref != kind:
		case f.Type == "error":
			return &client.Error{Code: f.Code, Detail: f.Detail}
		default:
			return json.Unmarshal(f.Result, result)
		}
	}
}
