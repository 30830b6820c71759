package linear

import (
	"fmt"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// History records calls of many clients.
type History struct {
	began time.Time

	mu       sync.Mutex
	sessions map[string][]porcupine.Operation // guarded by mu
}

// NewHistory starts a history.
func NewHistory() *History {
	return &History{began: time.Now(), sessions: map[string][]porcupine.Operation{}}
}

// Now is the time of a call that begins, or of an answer that came.
func (h *History) Now() int64 { return int64(time.Since(h.began)) }

// Add records a call on a session that began at a time and has its answer now.
func (h *History) Add(client int, session string, c Call, began int64, a Answer) {
	h.add(client, session, c, began, h.Now(), a)
}

func (h *History) add(client int, session string, c Call, began, ended int64, a Answer) {
	if a.Unknown {
		if c.Kind == Get || c.Kind == Cancel { // it says nothing; what a cancel does is the end of a turn
			return
		}
		ended = never
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sessions[session] = append(h.sessions[session],
		porcupine.Operation{ClientId: client, Input: c, Call: began, Output: a, Return: ended})
}

// Len is how many operations were recorded.
func (h *History) Len() (operations, sessions int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, ops := range h.sessions {
		operations += len(ops)
	}
	return operations, len(h.sessions)
}

// model is the sequential session as porcupine takes it.
var model = porcupine.NondeterministicModel{
	Init: func() []any { return []any{state{}} },
	Step: func(s, in, out any) []any {
		var next []any
		for _, x := range step(s.(state), in.(Call), out.(Answer)) {
			next = append(next, x)
		}
		return next
	},
}

// Check looks, for each session, for a sequence of its calls that gives what
// was seen. It returns an error that tells the first session without one, or
// one whose search took longer than patience.
func (h *History) Check(patience time.Duration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := model.ToModel()
	ids := make([]string, 0, len(h.sessions))
	for id := range h.sessions {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	for _, id := range ids {
		switch porcupine.CheckOperationsTimeout(m, h.sessions[id], patience) {
		case porcupine.Illegal:
			return fmt.Errorf("no sequence of the calls on %s gives what was seen:\n%s", id, describe(h.sessions[id]))
		case porcupine.Unknown:
			return fmt.Errorf("no sequence of the %d calls on %s was found in %s", len(h.sessions[id]), id, patience)
		}
	}
	return nil
}

// describe lists a session's operations in the order in which they began.
func describe(ops []porcupine.Operation) string {
	ops = append([]porcupine.Operation(nil), ops...)
	sort.Slice(ops, func(i, j int) bool { return ops[i].Call < ops[j].Call })
	var b strings.Builder
	for _, op := range ops {
		c, a := op.Input.(Call), op.Output.(Answer)
		until := "..."
		if op.Return != never {
			until = fmt.Sprint(op.Return / 1000)
		}
		fmt.Fprintf(&b, "[%d, %s] us, client %d: %s -> %s\n", op.Call/1000, until, op.ClientId, c, a)
	}
	return b.String()
}

func (c Call) String() string {
	switch c.Kind {
	case Start:
		return fmt.Sprintf("turn of %d+%d tokens", c.Prompt, c.Max)
	case End:
		return "end of " + c.Turn
	case Fork:
		return fmt.Sprintf("fork at %d into %d", c.At, c.N)
	case Patch:
		return fmt.Sprintf("patch %q", c.Title)
	}
	return string(c.Kind)
}

func (a Answer) String() string {
	switch {
	case a.Unknown:
		return "no answer"
	case a.Code != "":
		return a.Code
	case a.Turn != "" || a.Turned != "":
		return fmt.Sprintf("%s %s [%d, %d)", a.Turn, a.Turned, a.From, a.To)
	}
	return fmt.Sprintf("%+v at %d", a.View, a.At)
}

// Alter goes through the operations of all sessions until f has changed an
// answer; undo is nil if it changed none. It is for proofs that Check can fail.
func (h *History) Alter(f func(session string, c Call, a *Answer) (changed bool)) (undo func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, ops := range h.sessions {
		for i, op := range ops {
			a := op.Output.(Answer)
			if f(id, op.Input.(Call), &a) {
				ops[i].Output = a
				return func() { ops[i].Output = op.Output }
			}
		}
	}
	return nil
}
