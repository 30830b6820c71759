package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"rocket/radix"
)

// Options say how a trace is walked.
type Options struct {
	Geometry Geometry
	Budget   int64  // device bytes for pages and states together; 0: no bound
	Policy   string // one of Policies; "": value
	Vocab    int32  // token ids are made in [Low, Low+Vocab); 0: all that int32 has
	Low      int32
	// ShedStates: forks keep hold of the state that they forked off from, once for all of a branch point; when there is
	// no room, idle ones step back to it and give up their own before anybody's pages go.
	ShedStates bool
	// CheckEvery is how many requests lie between two calls of Forest.Check; 0: only at the end.
	CheckEvery int
	Progress   func(done, total int)
	Served     func(request int, s Served) // told of every request, in order of their starts
}

// Served is what a request found.
type Served struct {
	Prompt int // tokens of it
	Cached int // of them, not recomputed
	Known  int // of them, in whole pages that were there, with or without a state
}

// Policies are the orders of eviction that Options.Policy names.
var Policies = []string{"value", "lru"}

const (
	prefillRows = 256     // the engine's default: a prefill's steps end at multiples of it from where it began
	maxPages    = 1 << 24 // of a walk without a budget
	pageBatch   = 8       // pages that one shortage makes room for, as in the engine
)

// seq is one timeline, as in the engine: see engine.Seq.
type seq struct {
	line           []int32
	consumed, have int
	pages          []int32
	slot           int32
	lock           radix.Lock
	captures       []int
	lastCapture    int
	cold           bool
	used           int64 // when its latest turn ended
	busy           bool
	last           int // the request that made the line

	base   int32 // with ShedStates, the state that the session forked off from; radix.None: none
	baseAt int
}

// walker walks one trace.
type walker struct {
	t       *Trace
	o       Options
	pages   *radix.Pool
	slots   *radix.Pool
	f       *radix.Forest
	match   radix.Match
	canon   []int32
	spacing int
	now     int64 // ns
	active  map[int]*seq
	idle    map[int32]*seq // timelines that sessions keep
	waiting []int          // requests that found no room
	budget  int64
	r       Result

	resident *resident // nil unless memory that sessions hold can be told
}

var errStarved = errors.New("no room")

// Walk walks a trace.
func Walk(ctx context.Context, t *Trace, o Options) (Result, error) {
	w, err := newWalker(t, o)
	if err != nil {
		return Result{}, err
	}
	events := t.events()
	for n, e := range events {
		if n%64 == 0 && ctx.Err() != nil {
			return Result{}, ctx.Err()
		}
		w.now = max(w.now+1, e.at*1e6)
		if err := w.event(e); err != nil {
			return Result{}, fmt.Errorf("request %d: %w", e.index, err)
		}
		if o.CheckEvery > 0 && n%o.CheckEvery == 0 {
			if err := w.check(); err != nil {
				return Result{}, fmt.Errorf("after request %d: %w", e.index, err)
			}
		}
		if o.Progress != nil {
			o.Progress(n+1, len(events))
		}
	}
	return w.end()
}

func newWalker(t *Trace, o Options) (*walker, error) {
	g := o.Geometry
	if g.PageBytes <= 0 || g.SlotBytes <= 0 {
		return nil, errors.New("a geometry is needed")
	}
	policy := radix.ByValue
	switch o.Policy {
	case "", "value":
		o.Policy = "value"
	case "lru":
		policy = radix.LRU
	default:
		return nil, fmt.Errorf("policy %q: want one of %v", o.Policy, Policies)
	}
	if o.Vocab == 0 {
		o.Vocab, o.Low = 1<<31-1, 0
	}
	w := &walker{t: t, o: o, spacing: radix.Spacing(g.SlotBytes, g.TokenBytes), active: map[int]*seq{}, idle: map[int32]*seq{}, budget: o.Budget}
	nPages, nSlots := o.Budget/g.PageBytes, o.Budget/g.SlotBytes
	if o.Budget == 0 {
		for _, r := range t.Requests {
			n := int64(r.prompt + r.output)
			nPages += n/radix.PageTokens + 3
			nSlots += n/int64(w.spacing) + 6
		}
		w.budget = nPages*g.PageBytes + nSlots*g.SlotBytes
	}
	if nPages > maxPages {
		return nil, fmt.Errorf("the walk may need %d pages, at most %d fit: give a budget", nPages, maxPages)
	}
	if nPages < 2 || nSlots < 2 {
		return nil, fmt.Errorf("a budget of %d B holds %d pages of %d B or %d states of %d B: at least 2 of each are needed", o.Budget, nPages, g.PageBytes, nSlots, g.SlotBytes)
	}
	w.pages, w.slots = radix.NewPool("page", int(nPages)), radix.NewPool("state slot", int(nSlots))
	w.f = radix.NewForest(w.pages, w.slots, radix.Options{PageBytes: g.PageBytes, SlotBytes: g.SlotBytes, Policy: policy})
	if len(t.Sessions) > 0 && (t.Resident || o.Budget == 0) {
		w.resident = newResident(t, g, int(nPages), int(nSlots))
	}
	return w, nil
}

// event is something that happens at a time of the trace's clock.
type event struct {
	at    int64
	kind  eventKind
	index int // of a request or a session
}

type eventKind uint8

// At one time, what ends goes before what begins, and a session's end goes last.
const (
	eventDone eventKind = iota
	eventFork
	eventStart
	eventClose
)

func (t *Trace) events() []event {
	events := make([]event, 0, 2*len(t.Requests)+2*len(t.Sessions))
	for i, r := range t.Requests {
		events = append(events, event{r.At, eventStart, i})
		if r.Done > r.At {
			events = append(events, event{r.Done, eventDone, i})
		}
	}
	for i, s := range t.Sessions {
		if t.Resident && s.Parent >= 0 {
			events = append(events, event{s.Fork, eventFork, i})
		}
		events = append(events, event{s.Close, eventClose, i})
	}
	slices.SortStableFunc(events, func(a, b event) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.kind, b.kind))
	})
	return events
}

func (w *walker) event(e event) error {
	switch e.kind {
	case eventStart:
		return w.start(e.index)
	case eventDone:
		if err := w.done(e.index); err != nil {
			return err
		}
		return w.retry()
	case eventFork:
		return w.fork(int32(e.index))
	case eventClose:
		w.distances()
		w.resident.release(int32(e.index))
		if s := w.idle[int32(e.index)]; s != nil && !s.busy {
			w.close(s)
			delete(w.idle, int32(e.index))
			return w.retry()
		}
	}
	return nil
}

// start runs a request's prompt. One that finds no room waits for others to end; alone, it is refused.
func (w *walker) start(i int) error {
	r := &w.t.Requests[i]
	s := w.timeline(r)
	if s.busy {
		return errors.New("its session's turn before has not ended")
	}
	s.line = appendTokens(s.line[:0:0], r.Prompt, w.o.Low, w.o.Vocab)
	w.begin(s)
	got := w.found(s)
	s.busy, s.last = true, i
	w.active[i] = s
	n := len(s.line)
	s.line = appendTokens(s.line, r.Output, w.o.Low, w.o.Vocab)
	if err := w.advance(s, min(n, len(s.line)-1), prefillRows); err != nil {
		return w.starve(i, s, err)
	}
	w.serve(i, got)
	if r.Done == r.At {
		return w.done(i)
	}
	return nil
}

// timeline is the session's, if it keeps one, or a new one.
func (w *walker) timeline(r *Request) *seq {
	if w.t.Resident && r.Session >= 0 {
		if s := w.idle[r.Session]; s != nil {
			return s
		}
		s := newSeq()
		w.idle[r.Session] = s
		return s
	}
	return newSeq()
}

func newSeq() *seq { return &seq{slot: radix.None, base: radix.None, cold: true} }

// done runs a request's answer to its last token, which stays pending, and publishes the exact end.
func (w *walker) done(i int) error {
	s := w.active[i]
	if s == nil { // it was refused, or waits
		return nil
	}
	r := &w.t.Requests[i]
	err := w.advance(s, len(s.line)-1, 1)
	if err != nil && !errors.Is(err, errStarved) {
		return err
	}
	if err != nil {
		w.r.Starved++
	}
	if err := w.publish(s); err != nil {
		return err
	}
	delete(w.active, i)
	s.busy = false
	s.used = w.now
	w.resident.hold(r.Session, s, len(s.line))
	s.line = nil // made again when it is needed
	if !w.t.Resident {
		w.drop(s)
	}
	return nil
}

// starve makes a request wait that found no room; when nobody is left whose end could make any, it is refused.
func (w *walker) starve(i int, s *seq, err error) error {
	if !errors.Is(err, errStarved) {
		return err
	}
	delete(w.active, i)
	s.busy = false
	if err := w.park(s); err != nil {
		return err
	}
	if len(w.active) == 0 {
		w.refuse(i)
		return nil
	}
	w.waiting = append(w.waiting, i)
	return nil
}

// retry runs requests that waited, in order, until one finds no room again. One whose end is past ends at once.
func (w *walker) retry() error {
	for len(w.waiting) > 0 {
		i := w.waiting[0]
		w.waiting = w.waiting[1:]
		n := len(w.waiting)
		w.r.Waited++
		if err := w.start(i); err != nil {
			return err
		}
		if len(w.waiting) > n { // again
			w.waiting = append([]int{i}, w.waiting[:n]...)
			return nil
		}
		if w.active[i] != nil && w.t.Requests[i].Done*1e6 <= w.now {
			if err := w.done(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// check verifies the tree and that the pools hold what the tree and the timelines say.
func (w *walker) check() error {
	for _, err := range []error{w.f.Check(), w.pages.Check(), w.slots.Check()} {
		if err != nil {
			return err
		}
	}
	if used := w.used(); used > w.budget {
		return fmt.Errorf("%d bytes in use, the budget is %d", used, w.budget)
	}
	return nil
}

// end lets go of what is left and checks that nothing else is held.
func (w *walker) end() (Result, error) {
	for i, s := range w.active {
		w.drop(s)
		delete(w.active, i)
	}
	for i, s := range w.idle {
		w.close(s)
		delete(w.idle, i)
	}
	for _, i := range w.waiting {
		w.refuse(i)
	}
	if err := w.check(); err != nil {
		return Result{}, fmt.Errorf("at the end: %w", err)
	}
	st := w.f.Stats()
	if st.LockedPages+st.LockedSnapshots+st.InFlight > 0 {
		return Result{}, fmt.Errorf("at the end: %d pages and %d states are locked, %d evictions open", st.LockedPages, st.LockedSnapshots, st.InFlight)
	}
	if n := st.Pages[radix.Device] + st.Tails[radix.Device]; n != w.pages.Used() || st.Snapshots[radix.Device] != w.slots.Used() {
		return Result{}, fmt.Errorf("at the end: %d pages and %d states in use, the tree has %d and %d", w.pages.Used(), w.slots.Used(), n, st.Snapshots[radix.Device])
	}
	w.finish()
	return w.r, nil
}
