package sessions

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rocket/engine"
	"rocket/engine/chat"
	"rocket/engine/model"
	"rocket/engine/tokenizer"
	"rocket/internal/leaktest"
	"rocket/internal/localpg/pgtest"
	"rocket/kernels"
)

const nanoDir = "../models/nano"

var testEngine = sync.OnceValues(func() (*engine.Engine, error) { return openEngine() })

// nano is the model, loaded once a process.
var nano = sync.OnceValues(func() (engine.Options, error) {
	dev, err := kernels.Open("auto", 1)
	if err != nil {
		return engine.Options{}, err
	}
	m, err := model.Load(dev, nanoDir, model.Options{Class: kernels.ClassBF16})
	if err != nil {
		return engine.Options{}, err
	}
	tok, err := tokenizer.Load(nanoDir + "/tokenizer.json")
	return engine.Options{Device: dev, Model: m, Tokenizer: tok, Name: "nano",
		PageBytes: 96 << 20, SnapshotBytes: 64 << 20, HostBytes: 128 << 20}, err
})

func openEngine(change ...func(*engine.Options)) (*engine.Engine, error) {
	o, err := nano()
	if err != nil {
		return nil, err
	}
	for _, f := range change {
		f(&o)
	}
	return engine.New(o)
}

func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) != "" {
		crashServer()
	}
	code := m.Run()
	if e, err := testEngine(); err == nil {
		if err := e.Check(); err != nil {
			fmt.Fprintln(os.Stderr, "engine:", err)
			code = 1
		}
		e.Close()
	}
	os.Exit(leaktest.Check(code, goleak.IgnoreAnyFunction("rocket/internal/localpg.(*Cluster).supervise"),
		goleak.IgnoreAnyFunction("rocket/internal/localpg.(*Cluster).launch.func1")))
}

// rig is a manager on a database of its own.
type rig struct {
	*Manager
	t   testing.TB
	url string
}

func newRig(t testing.TB) *rig {
	t.Helper()
	return openRig(t, pgtest.New(t))
}

func openRig(t testing.TB, url string) *rig {
	t.Helper()
	eng, err := testEngine()
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(nanoDir, eng.Tokenizer())
	if err != nil {
		t.Fatal(err)
	}
	return startRig(t, Options{DatabaseURL: url, Engine: eng, Template: tmpl})
}

func startRig(t testing.TB, o Options) *rig {
	t.Helper()
	if o.DeltaInterval == 0 {
		o.DeltaInterval = time.Nanosecond // many events, whose number tests count on
	}
	m, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{m, t, o.DatabaseURL}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if !m.draining.Load() {
			if err := m.Check(ctx, DefaultTenant); err != nil {
				t.Error("check:", err)
			}
		}
		if err := m.Shutdown(ctx); err != nil {
			t.Error("shutdown:", err)
		}
	})
	return r
}

var local = Call{Tenant: DefaultTenant}

func ptr[T any](v T) *T { return &v }

func (r *rig) create(input string) Session {
	r.t.Helper()
	s, err := r.Create(r.t.Context(), local, CreateRequest{Input: &input})
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// turn runs a greedy turn of n tokens to its end.
func (r *rig) turn(id, input string, n int) Turn {
	r.t.Helper()
	t := r.start(id, TurnRequest{Input: &input, MaxTokens: &n, IgnoreEOS: true})
	return r.wait(id, t.ID)
}

func (r *rig) start(id string, req TurnRequest) Turn {
	r.t.Helper()
	t, err := r.StartTurn(r.t.Context(), local, id, req)
	if err != nil {
		r.t.Fatal(err)
	}
	return t
}

func (r *rig) wait(id, turn string) Turn {
	r.t.Helper()
	out, err := r.WaitTurn(r.t.Context(), DefaultTenant, id, turn)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *rig) get(id string) Session {
	r.t.Helper()
	s, err := r.Get(r.t.Context(), DefaultTenant, id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) fork(id string, req ForkRequest) ForkResult {
	r.t.Helper()
	f, err := r.Fork(r.t.Context(), local, id, req)
	if err != nil {
		r.t.Fatal(err)
	}
	return f
}

func (r *rig) line(id string) []int32 {
	r.t.Helper()
	ids, err := r.Tokens(r.t.Context(), DefaultTenant, id, nil, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return ids.Tokens
}

// events reads [from, to] of a log, waiting for the last.
func (r *rig) events(id string, from, to int64) []Event {
	r.t.Helper()
	l, err := r.Log(r.t.Context(), DefaultTenant, id)
	if err != nil {
		r.t.Fatal(err)
	}
	var out []Event
	for from <= to {
		if ok, err := l.Wait(r.t.Context(), from); err != nil || !ok {
			r.t.Fatalf("wait for seq %d: %v, %v", from, ok, err)
		}
		part, err := l.Read(r.t.Context(), from, int(to-from+1))
		if err != nil {
			r.t.Fatal(err)
		}
		out = append(out, part...)
		from += int64(len(part))
	}
	return out
}

func wantCode(t testing.TB, err error, code Code, field string) {
	t.Helper()
	e, _ := err.(*Error)
	if e == nil || e.Code != code || e.Field != field && code != CodeNotFound {
		t.Errorf("error %v, want code %s with field %q", err, code, field)
	}
}
