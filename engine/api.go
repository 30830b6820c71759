// Package engine runs inference timelines on one device.
//
// A Seq is one timeline: a line of tokens, the caches of the consumed ones and one recurrent state. One goroutine,
// the loop, owns every Seq, the page and slot pools, the prefix tree and the device; everybody else sends it commands.
//
// Invariants (checked by Engine.Check, run by tests on cleanup):
//   - A line of n tokens has consumed at most n-1: the last token is pending, its logits are not computed yet.
//   - A page that is full, or that more than one holder references, is never written; a state slot that more than one
//     holder references is never advanced. Whoever goes on first copies the partial page and the slot.
//   - Tokens of a Run are appended, never changed; appending never waits for a reader.
//   - A forked, resumed or restored Seq gives the same bits as a cold run of its line (the kernels' row results do not
//     depend on batch, chunking or threads, and replay runs the same arithmetic).
//   - References held by Seqs, Marks and the tree add up to the pools' counts.
//   - A namespace over its limit of resident bytes has nothing inactive (quota.go).
//
// Callers pass the whole line (Open, Start); the engine decides what to reuse.
package engine

import (
	"errors"
	"time"
)

// Errors that callers branch on. Others are faults of the device or of the program.
var (
	ErrClosed       = errors.New("engine is closed")
	ErrQueueFull    = errors.New("engine queue is full")
	ErrContextLimit = errors.New("line is longer than the model's context")
	ErrPoolFull     = errors.New("page or state pool is full and nothing can be evicted")
	ErrRange        = errors.New("offset is outside the line")
	ErrBusy         = errors.New("a turn is running on this timeline")
	ErrLine         = errors.New("line does not extend the timeline's tokens")
	ErrNoDisk       = errors.New("there is no disk tier")
	ErrQuota        = errors.New("open turns fill the namespace's limit of resident bytes")
	ErrBudget       = errors.New("memory budget is too small") // of New: pages or states
	ErrDiskTier     = errors.New("open disk tier")             // of New: the folder or its size
)

// MaxUncommitted is how many tokens a Run may be ahead of Ack; at the limit the loop leaves the Run out of its batches
// until Ack moves on.
const MaxUncommitted = 1024

// Restored says where the tokens that a Seq did not have to recompute came from; the four add up to the consumed
// length that was asked for.
type Restored struct {
	Device     int    `json:"device"`
	Host       int    `json:"host"`
	Disk       int    `json:"disk"`
	Recomputed int    `json:"recomputed"`
	ColdReason string `json:"-"` // why Recomputed is not 0: see the Cold constants; "" when it is 0
	ColdAt     int    `json:"-"` // the first token that was recomputed for that reason
}

// Reasons why tokens were recomputed: the first one on the line, since what follows could not have been used.
const (
	ColdNew        = "new"         // nobody had computed these tokens after that beginning
	ColdDiverged   = "diverged"    // the line goes another way than what is known, from ColdAt on
	ColdEvicted    = "evicted"     // it was known, and gave way to other lines
	ColdNoSnapshot = "no_snapshot" // caches were there, the state was not: replayed from an earlier one
	ColdCorrupt    = "corrupt"     // bytes from another tier could not be read or failed their checksum
)

// Residency is where a Seq's consumed tokens are cached: tokens by tier, and the number of its snapshots.
type Residency struct {
	Device    int `json:"device"`
	Host      int `json:"host"`
	Disk      int `json:"disk"`
	Snapshots int `json:"snapshots"`
}

// Tier names where Detach puts exclusive pages and states.
type Tier string

// Tiers below the device.
const (
	TierHost Tier = "host"
	TierDisk Tier = "disk"
)

// OpenOptions refine Open. The zero value is an ordinary line in the shared cache.
type OpenOptions struct {
	Namespace string // cache salt, from the server, never from a request body: only equal ones share
	Fresh     bool   // neither reads nor feeds the prefix tree: the cold run that exactness checks compare with
	Lazy      bool   // prefill when a Run starts, not behind Open
	Mark      int    // a token offset where other lines are expected to part, e.g. the end of a system prompt: a state is kept there; 0: none
}

// TurnRequest asks for tokens after Line.
type TurnRequest struct {
	Line        []int32 // the whole line, prompt included; must extend the Seq's line
	MaxTokens   int     // >= 1
	Temperature float32 // 0: greedy
	TopP        float32 // (0,1]; 0 means 1
	TopK        int     // 0: no limit
	Seed        uint64  // noise is a function of (Seed, absolute position, token id)
	Stop        []string
	IgnoreEOS   bool
	Logprobs    int  // how many alternatives to report a token; -1: none, and no logprob either
	Mark        int  // as in OpenOptions
	KeepLogits  bool // keep every step's logits for Run.Logits (exactness checks)
}

// Token is one sampled token.
type Token struct {
	ID      int32
	Logprob float32 // natural log, of the unfiltered distribution at temperature 1; 0 when not asked for
	Top     []TokenLogprob
}

// TokenLogprob is an alternative that was considered at a position.
type TokenLogprob struct {
	ID      int32
	Logprob float32
}

// Phase is how far a Run is.
type Phase int

const (
	Queued Phase = iota
	Prefilling
	Decoding
	Done
)

// Finish reasons of a Run.
const (
	FinishEnd       = "end_token"
	FinishStop      = "stop_string"
	FinishLength    = "length"
	FinishContext   = "context_limit"
	FinishCancelled = "cancelled"
	FinishError     = "error"
)

// Usage is what a Run cost. Prompt tokens are those that Start added to the Seq's line and everything before.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	CachedTokens     int // of the prompt, not recomputed
	CacheWriteTokens int // of the prompt and completion, newly put into the tree
	BySource         Restored
	TTFT             time.Duration // Start to the first token
	Decode           time.Duration // first token to the last
}

// RunState is a Run's condition at the time of a Read.
type RunState struct {
	Phase     Phase
	Finish    string // set when Phase is Done
	Err       error  // set when Finish is FinishError
	StopBytes int    // length in bytes of the generated text before the stop string; -1 when none matched
	Usage     Usage  // complete when Phase is Done
}

// Stats are the loop's counters and gauges. Bytes are device or host memory; tokens count since the start.
type Stats struct {
	PagesUsed, PagesTotal    int
	SlotsUsed, SlotsTotal    int
	PageBytes, SlotBytes     int64 // of one page's slab with its padding, of one state slot
	HostBytes, HostBytesMax  int64
	DiskBytes, DiskBytesMax  int64
	Seqs, SeqsCold           int
	QueueDepth, Running      int
	Prefilling               int
	Steps                    int64
	RowsPrefill, RowsDecode  int64
	TokensGenerated          int64
	TokensDevice, TokensHost int64 // restored, by tier
	TokensDisk               int64
	RestoresFailed           int64 // whose bytes could not be read or were corrupt
	CheckedSnapshots         int64 // by CheckCache
	CheckMismatches          int64
	ColdSalted               int64 // lines that only another namespace knew: for operators, not for callers, who must not learn that
	TokensRecomputed         int64
	TokensPreempted          int64 // recomputed because a Seq was preempted, not counted above
	Preemptions              int64
	CopyOnExtend             int64
	EvictedPages             int64
	EvictedSnapshots         int64
	Forks, Snapshots         int64
	NamespacesLimited        int     // that have a limit of resident bytes
	NamespacesFull           int     // of them, those that take a page more only if they give something up
	QuotaEvicted             int64   // pages and snapshots that went from device or host because their namespace was at its limit, not counted above
	QuotaRefused             int64   // turns and timelines refused with ErrQuota
	StepSeconds              float64 // sum over steps
	Model                    ModelInfo
}

// ModelInfo names what the engine runs.
type ModelInfo struct {
	Name, Digest, TokenizerDigest, ParityClass, Arithmetic string
	Context, Vocab                                         int
}
