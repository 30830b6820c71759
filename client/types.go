package client

import (
	"encoding/json"
	"time"
)

// The types of the wire, as /openapi.json describes them.

// Session is one line of tokens and its place in the lineage.
type Session struct {
	ID         string            `json:"id"`
	Object     string            `json:"object"`
	Model      string            `json:"model"`
	Title      string            `json:"title"`
	Labels     map[string]string `json:"labels"`
	State      string            `json:"state"` // idle, running, detached, closed
	ParentID   *string           `json:"parent_id"`
	RootID     string            `json:"root_id"`
	ForkedAt   *int              `json:"forked_at"`
	Length     int               `json:"length"`
	TurnCount  int               `json:"turn_count"`
	ChildCount int               `json:"child_count"`
	Residency  Residency         `json:"residency"`
	LastSeq    int64             `json:"last_seq"`
	Epoch      int64             `json:"epoch"`
	TTLSeconds *int              `json:"ttl_seconds"`
	Pin        bool              `json:"pin"`
	Elsewhere  bool              `json:"elsewhere,omitempty"` // another server has it; Residency is without what that one has in memory
	CreatedAt  time.Time         `json:"created_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
	ExpiresAt  *time.Time        `json:"expires_at"`
}

// Residency says where a session's bytes are, in tokens; Snapshots is a count.
type Residency struct {
	Device    int `json:"device"`
	Host      int `json:"host"`
	Disk      int `json:"disk"`
	Snapshots int `json:"snapshots"`
}

// Message is one chat message.
type Message struct {
	Role       string          `json:"role"`
	Content    string          `json:"content"`
	Name       string          `json:"name,omitempty"`
	ToolCallID string          `json:"tool_call_id,omitempty"`
	ToolCalls  json.RawMessage `json:"tool_calls,omitempty"`
}

// CreateRequest makes a root session, with Messages or Input or neither.
type CreateRequest struct {
	Model      string            `json:"model,omitempty"`
	Title      string            `json:"title,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Messages   []Message         `json:"messages,omitempty"`
	Input      *string           `json:"input,omitempty"`
	TTLSeconds *int              `json:"ttl_seconds,omitempty"`
	Pin        bool              `json:"pin,omitempty"`
}

// PatchRequest changes what is not nil.
type PatchRequest struct {
	Title      *string            `json:"title,omitempty"`
	Labels     *map[string]string `json:"labels,omitempty"`
	TTLSeconds *int               `json:"ttl_seconds,omitempty"`
	Pin        *bool              `json:"pin,omitempty"`
}

// SessionPage is one page of sessions; Next goes into ListOptions.After.
type SessionPage struct {
	Data    []Session `json:"data"`
	HasMore bool      `json:"has_more"`
	Next    *string   `json:"next"`
}

// Tree is a session and everything forked from it, parents first.
type Tree struct {
	Root  string `json:"root"`
	Nodes []Node `json:"nodes"`
}

// Node is a Session of a tree, or the place of a deleted one.
type Node struct {
	Session
	Deleted bool `json:"deleted,omitempty"`
}

// ForkRequest makes N children, or those of Children, at token offset At.
type ForkRequest struct {
	At       *int              `json:"at,omitempty"`
	N        *int              `json:"n,omitempty"`
	Children []ForkChild       `json:"children,omitempty"`
	Title    *string           `json:"title,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
}

// ForkChild is what one child has of its own.
type ForkChild struct {
	Title  *string           `json:"title,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
}

// ForkResult is the answer of a fork.
type ForkResult struct {
	Sessions     []Session `json:"sessions"`
	At           int       `json:"at"`
	SharedTokens int       `json:"shared_tokens"`
	ReplayTokens int       `json:"replay_tokens"`
}

// DetachRequest names the tier, "host" or "disk".
type DetachRequest struct {
	Tier string `json:"tier,omitempty"`
}

// Restored counts, in tokens, where a line's state came from.
type Restored struct {
	Device     int `json:"device"`
	Host       int `json:"host"`
	Disk       int `json:"disk"`
	Recomputed int `json:"recomputed"`
}

// ResumeResult is a session and what its resume brought back.
type ResumeResult struct {
	Session
	Restored Restored `json:"restored"`
}

// TokenRange is a piece of a line and its text.
type TokenRange struct {
	Tokens []int32  `json:"tokens"`
	Text   string   `json:"text"`
	Pieces []string `json:"pieces,omitempty"` // only where asked for
}

// TurnRequest appends a prompt and decodes; without text decoding goes on.
type TurnRequest struct {
	Messages    []Message   `json:"messages,omitempty"`
	Input       *string     `json:"input,omitempty"`
	MaxTokens   *int        `json:"max_tokens,omitempty"`
	Temperature *float64    `json:"temperature,omitempty"`
	TopP        *float64    `json:"top_p,omitempty"`
	TopK        *int        `json:"top_k,omitempty"`
	Seed        *int64      `json:"seed,omitempty"`
	Stop        []string    `json:"stop,omitempty"`
	Logprobs    *int        `json:"logprobs,omitempty"`
	MTP         *MTPRequest `json:"mtp,omitempty"`
	IgnoreEOS   bool        `json:"ignore_eos,omitempty"`
}

// MTPRequest bounds speculation.
type MTPRequest struct {
	MaxDepth *int `json:"max_depth,omitempty"`
}

// Turn is one prompt and its continuation, [From, To) of the line.
type Turn struct {
	ID           string       `json:"id"`
	Object       string       `json:"object"`
	SessionID    string       `json:"session_id"`
	State        string       `json:"state"` // queued, running, completed, cancelled, failed, interrupted
	Text         string       `json:"text"`
	Tokens       []int32      `json:"tokens,omitempty"`
	Logprobs     []TokenProbs `json:"logprobs,omitempty"`
	FinishReason *string      `json:"finish_reason"`
	From         int          `json:"from"`
	To           int          `json:"to"`
	Seed         int64        `json:"seed"`
	Usage        *Usage       `json:"usage"`
	Error        *TurnError   `json:"error,omitempty"`
	Inherited    bool         `json:"inherited,omitempty"`
	CreatedAt    time.Time    `json:"created_at"`
	StartedAt    *time.Time   `json:"started_at"`
	EndedAt      *time.Time   `json:"ended_at"`
}

// TurnError says why a turn failed.
type TurnError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// TokenProbs is one generated token's log probability and the best others.
type TokenProbs struct {
	Token   int32       `json:"token"`
	Logprob float32     `json:"logprob"`
	Top     []TokenProb `json:"top,omitempty"`
}

// TokenProb is one candidate.
type TokenProb struct {
	Token   int32   `json:"token"`
	Logprob float32 `json:"logprob"`
}

// CacheCheck is what CheckCache found.
type CacheCheck struct {
	Seed       int64    `json:"seed"`
	Snapshots  int      `json:"snapshots"`
	Sampled    int      `json:"sampled"`
	Recomputed int      `json:"recomputed"`
	Pages      int      `json:"pages"`
	Stored     int      `json:"stored"`
	Skipped    int      `json:"skipped"`
	Mismatches []string `json:"mismatches"`
}

// Usage counts a turn's tokens.
type Usage struct {
	PromptTokens     int      `json:"prompt_tokens"`
	CompletionTokens int      `json:"completion_tokens"`
	CachedTokens     int      `json:"cached_tokens"`
	CacheWriteTokens int      `json:"cache_write_tokens"`
	BySource         Restored `json:"by_source"`
	ColdReason       string   `json:"cold_reason,omitempty"`
	ColdAt           *int     `json:"cold_at,omitempty"`
	MTP              MTPUsage `json:"mtp"`
	TTFTMillis       float64  `json:"ttft_ms"`
	TokensPerSecond  float64  `json:"tokens_per_second"`
}

// MTPUsage counts speculation.
type MTPUsage struct {
	Drafted            int     `json:"drafted"`
	Accepted           int     `json:"accepted"`
	MeanAcceptedLength float64 `json:"mean_accepted_length"`
}

// TurnPage is one page of turns, newest first.
type TurnPage struct {
	Data    []Turn  `json:"data"`
	HasMore bool    `json:"has_more"`
	Next    *string `json:"next"`
}

// Event is one entry of a session's log. Which optional fields are there
// depends on Type.
type Event struct {
	Seq       int64     `json:"seq"`
	Epoch     int64     `json:"epoch"`
	Type      string    `json:"type"`
	SessionID string    `json:"session_id"`
	TurnID    string    `json:"turn_id,omitempty"`
	Time      time.Time `json:"time"`

	ParentID     *string    `json:"parent_id,omitempty"`
	ForkedAt     *int       `json:"forked_at,omitempty"`
	RootID       string     `json:"root_id,omitempty"`
	Children     []string   `json:"children,omitempty"`
	At           *int       `json:"at,omitempty"`
	Tier         string     `json:"tier,omitempty"`
	Restored     *Restored  `json:"restored,omitempty"`
	Text         *string    `json:"text,omitempty"`
	Tokens       []int32    `json:"tokens,omitempty"`
	From         *int       `json:"from,omitempty"`
	To           *int       `json:"to,omitempty"`
	FinishReason string     `json:"finish_reason,omitempty"`
	Usage        *Usage     `json:"usage,omitempty"`
	Error        *TurnError `json:"error,omitempty"`
	LastSeq      *int64     `json:"last_seq,omitempty"`
}

// Final tells whether the event ends a turn.
func (e Event) Final() bool {
	switch e.Type {
	case "turn.completed", "turn.failed", "turn.cancelled", "turn.interrupted":
		return true
	}
	return false
}

// EventPage is a page of events, oldest first; Next goes into Position.From.
type EventPage struct {
	Data    []Event `json:"data"`
	HasMore bool    `json:"has_more"`
	Next    int64   `json:"next"`
	Epoch   int64   `json:"epoch"`
	LastSeq int64   `json:"last_seq"`
}

// Version is what a server is built from.
type Version struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Time    string `json:"time,omitempty"`
	Dirty   bool   `json:"dirty,omitempty"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}
