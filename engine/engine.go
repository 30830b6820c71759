package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"rocket/engine/model"
	"rocket/engine/tier"
	"rocket/engine/tokenizer"
	"rocket/kernels"
	"rocket/radix"
)

// Defaults of Options.
const (
	DefaultPageBytes     = 1 << 30   // page arena
	DefaultSnapshotBytes = 512 << 20 // state slots: live timelines and snapshots
	DefaultHostBytes     = 2 << 30
	DefaultDiskBytes     = 8 << 30
	DefaultPrefillRows   = 256 // rows of one step; bounds how long a decode waits behind somebody's prompt
	DefaultMaxSeqs       = 64  // timelines in one step; further runs wait in the queue
	DefaultQueueLen      = 256 // waiting runs; one more is refused with ErrQueueFull
)

// Options configure New. Zero values take the defaults above.
type Options struct {
	Device    *kernels.Device
	Model     *model.Model
	Tokenizer *tokenizer.Tokenizer // nil: no stop strings
	Name      string               // of the model, for people

	PageBytes, SnapshotBytes, HostBytes int64  // HostBytes < 0: no host tier
	DiskDir                             string // "": no disk tier
	DiskBytes                           int64
	PrefillRows, MaxSeqs, QueueLen      int
	Log                                 *slog.Logger
}

// Engine runs timelines on one device. Its methods are safe for concurrent use; a method that takes a context gives
// up only while it waits for the loop.
type Engine struct {
	opts     Options
	commands chan func()
	wake     chan struct{} // capacity 1
	closing  chan struct{}
	stopped  chan struct{}
	closed   sync.Once
	host     *tier.Host     // nil without a host tier
	disk     *tier.Disk     // nil without a disk tier
	io       sync.WaitGroup // copies off the loop

	// Only the loop from here on.
	plan           *kernels.Plan
	pages, slots   *kernels.Buffer
	pageIDs        *radix.Pool
	slotIDs        *radix.Pool
	forest         *radix.Forest
	layout         model.Layout
	eos            []int32
	tokenBytes     int64 // of all caches of one token
	spacing        int   // tokens between snapshots inside long prompts and answers, a multiple of a page
	seqs           map[*Seq]struct{}
	marks          map[*Mark]struct{}
	holding        int    // detaches and cache checks under way: what they hold becomes free when they end
	queue, running []*Run // running: in order of admission, which is Run.order
	behind         []*Seq // timelines filled behind Open
	batch          batch
	match          radix.Match // scratch
	canon          []int32     // scratch
	line           []int32     // scratch
	chains         chains      // scratch
	over           []string    // scratch
	pageKind       resource
	slotKind       resource
	leaving        map[string]int64  // by namespace: bytes on their way to the disk because it is at its limit
	idled          uint64            // rises when a timeline may have become one that can be parked
	barren         map[string]uint64 // by namespace over its limit: idled when it had none, plus one
	spooling       bool              // host copies are on their way to the disk
	admitted       turns             // namespaces, by when the batch last took a run of theirs
	prefilled      turns             // namespaces, by their last rows of prefill
	order          int64
	retry          bool // this step made room without finding work: look again instead of sleeping
	stats          Stats

	fail func(what string) error // tests: fails an allocation or a copy, called from anywhere; nil: none
}

// fault asks a test whether this operation fails.
func (e *Engine) fault(what string) error {
	if e.fail == nil {
		return nil
	}
	return e.fail(what)
}

// New allocates the arenas and starts the loop. Close stops it.
func New(opts Options) (*Engine, error) {
	defaults(&opts)
	layout := opts.Model.Layout()
	pageStride, slotStride := int64(layout.PageStride), int64(layout.SlotStride)
	nPages, nSlots := int(opts.PageBytes/pageStride), int(opts.SnapshotBytes/slotStride)
	if nPages < 2 || nSlots < 2 {
		return nil, fmt.Errorf("%w: %d B hold %d pages of %d B, %d B hold %d states of %d B, at least 2 of each are needed",
			ErrBudget, opts.PageBytes, nPages, pageStride, opts.SnapshotBytes, nSlots, slotStride)
	}
	e := &Engine{
		opts: opts, layout: layout, eos: opts.Model.EOS(),
		commands: make(chan func(), maxCommands), wake: make(chan struct{}, 1),
		closing: make(chan struct{}), stopped: make(chan struct{}),
		pageIDs: radix.NewPool("page", nPages), slotIDs: radix.NewPool("state slot", nSlots),
		seqs: map[*Seq]struct{}{}, marks: map[*Mark]struct{}{}, leaving: map[string]int64{}, barren: map[string]uint64{},
	}
	e.tokenBytes = int64(layout.SlabBytes / radix.PageTokens)
	e.spacing = radix.Spacing(slotStride, e.tokenBytes)
	e.forest = radix.NewForest(e.pageIDs, e.slotIDs, radix.Options{PageBytes: pageStride, SlotBytes: slotStride})
	e.pageKind = resource{e.pageIDs, pageStride, e.forest.AllocPage, e.forest.EvictPages, e.forest.EvictOwnPages}
	e.slotKind = resource{e.slotIDs, slotStride, e.forest.AllocSlot, e.forest.EvictSlots, e.forest.EvictOwnSlots}
	if opts.HostBytes > 0 {
		e.host = tier.NewHost(opts.HostBytes)
	}
	var err error
	if e.pages, err = opts.Device.NewBuffer(int(pageStride) * nPages); err != nil {
		return nil, fmt.Errorf("allocate page arena of %d pages: %w", nPages, err)
	}
	if e.slots, err = opts.Device.NewBuffer(int(slotStride) * nSlots); err != nil {
		e.pages.Free()
		return nil, fmt.Errorf("allocate state arena of %d slots: %w", nSlots, err)
	}
	if e.plan, err = opts.Model.Plan(e.pages, e.slots, opts.PrefillRows, opts.MaxSeqs); err != nil {
		e.pages.Free()
		e.slots.Free()
		return nil, fmt.Errorf("build step plan: %w", err)
	}
	e.stats.PagesTotal, e.stats.SlotsTotal = nPages, nSlots
	e.stats.PageBytes, e.stats.SlotBytes = pageStride, slotStride
	e.stats.HostBytesMax = max(0, opts.HostBytes)
	if err := e.openDisk(); err != nil {
		e.free()
		return nil, err
	}
	digest := ""
	if opts.Tokenizer != nil {
		digest = opts.Tokenizer.Digest()
	}
	e.stats.Model = ModelInfo{Name: opts.Name, Digest: opts.Model.Digest, TokenizerDigest: digest,
		ParityClass: opts.Model.Class.String(), Arithmetic: opts.Device.Arithmetic(),
		Context: opts.Model.ContextLimit(), Vocab: opts.Model.Vocab()}
	go e.loop()
	return e, nil
}

func defaults(o *Options) {
	set := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.PageBytes, DefaultPageBytes)
	set(&o.SnapshotBytes, DefaultSnapshotBytes)
	set(&o.HostBytes, DefaultHostBytes)
	set(&o.DiskBytes, DefaultDiskBytes)
	for _, p := range []struct {
		v *int
		d int
	}{{&o.PrefillRows, DefaultPrefillRows}, {&o.MaxSeqs, DefaultMaxSeqs}, {&o.QueueLen, DefaultQueueLen}} {
		if *p.v == 0 {
			*p.v = p.d
		}
	}
	o.PrefillRows = max(o.PrefillRows, o.MaxSeqs)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// Close ends every run with ErrClosed, stops the loop and frees the arenas. It may be called twice. Readers of Runs
// may still Read afterwards. No Detach or Open may be in flight.
func (e *Engine) Close() {
	e.closed.Do(func() {
		close(e.closing)
		<-e.stopped
		e.io.Wait()
		e.free()
	})
}

func (e *Engine) free() {
	e.plan.Free()
	e.pages.Free()
	e.slots.Free()
	if e.disk != nil {
		if err := e.disk.Close(); err != nil {
			e.opts.Log.Error("close disk tier failed", "error", err)
		}
	}
}

// Info names the model, its digests and its numeric class.
func (e *Engine) Info() ModelInfo { return e.stats.Model } // constant after New

// Tokenizer is the model's tokenizer.
func (e *Engine) Tokenizer() *tokenizer.Tokenizer { return e.opts.Tokenizer }

// EOS are the tokens that end a turn.
func (e *Engine) EOS() []int32 { return slices.Clone(e.eos) }

// Start queues a turn on s. t.Line is the whole line with the new prompt; it must begin with s's line and be longer
// than nothing. ErrQueueFull when too many runs wait, ErrBusy when s runs one, ErrContextLimit when no token fits,
// ErrQuota when the open turns of s's namespace fill its limit.
func (e *Engine) Start(ctx context.Context, s *Seq, t TurnRequest) (*Run, error) {
	if len(t.Line) == 0 {
		return nil, fmt.Errorf("start turn on an empty line: %w", ErrRange)
	}
	if len(t.Line) >= e.opts.Model.ContextLimit() {
		return nil, fmt.Errorf("start turn on a line of %d tokens, context %d: %w", len(t.Line), e.opts.Model.ContextLimit(), ErrContextLimit)
	}
	if err := e.vocab(t.Line); err != nil {
		return nil, err
	}
	if len(t.Stop) > 0 && e.opts.Tokenizer == nil {
		return nil, errors.New("stop strings need a tokenizer")
	}
	r := &Run{e: e, seq: s, req: t, wake: make(chan struct{}, 1), done: make(chan struct{}), sampler: newSampler(t), stop: newStopMatcher(t.Stop), started: time.Now()}
	r.req.Line = nil // the Seq holds the line
	r.state.StopBytes = -1
	var job *restoring
	var err error
	if doErr := e.do(ctx, func() {
		if err = e.start(s, r, t.Line); err == nil && s.cold && !s.moving {
			job = e.beginRestore(s) // nil when the pool is full: the loop tries again when it gets there
		}
	}); doErr != nil {
		return nil, doErr
	}
	if err != nil {
		return nil, err
	}
	if err := e.endFetch(ctx, s, job); err != nil {
		return nil, err
	}
	return r, nil
}

// start runs on the loop.
func (e *Engine) start(s *Seq, r *Run, line []int32) error {
	switch {
	case s.dead:
		return ErrClosed
	case s.run != nil:
		return ErrBusy
	case e.queueFull(s.ns):
		return ErrQueueFull
	case len(line) < len(s.line) || !slices.Equal(line[:len(s.line)], s.line):
		return ErrLine
	case e.quotaFull(s.ns, s):
		return ErrQuota
	}
	s.line = append(s.line, line[len(s.line):]...)
	s.mark(r.req.Mark)
	e.order++
	s.used = e.order
	s.run = r
	r.state.Usage.PromptTokens = len(line)
	if !s.cold && !s.moving && !s.fresh { // a sibling may have computed this prompt already
		if e.forest.Match(s.ns, s.line, &e.match); e.match.Start() > s.consumed {
			e.park(s)
		}
	}
	if !s.cold {
		e.planCaptures(s)
	}
	e.unfollow(s)
	e.queue = append(e.queue, r)
	return nil
}

// Stats returns the counters as of the last command; zero after Close.
func (e *Engine) Stats() Stats {
	var out Stats
	_ = e.do(context.Background(), func() { out = e.snapshotStats() }) // closed: zero
	return out
}

func (e *Engine) snapshotStats() Stats {
	st := e.stats
	st.PagesUsed, st.SlotsUsed = e.pageIDs.Used(), e.slotIDs.Used()
	st.Seqs = len(e.seqs)
	for s := range e.seqs {
		if s.cold {
			st.SeqsCold++
		}
	}
	st.QueueDepth, st.Running = len(e.queue), len(e.running)
	e.quotaStats(&st)
	if e.host != nil {
		st.HostBytes = e.host.Bytes()
	}
	if e.disk != nil {
		st.DiskBytes, st.DiskBytesMax = e.disk.Bytes(), e.disk.Max()
	}
	return st
}

// vocab refuses token ids that the model has no row for.
func (e *Engine) vocab(line []int32) error {
	for i, id := range line {
		if id < 0 || int(id) >= e.opts.Model.Vocab() {
			return fmt.Errorf("token %d at offset %d, vocabulary %d: %w", id, i, e.opts.Model.Vocab(), ErrRange)
		}
	}
	return nil
}
