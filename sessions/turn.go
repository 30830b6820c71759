package sessions

import (
	"encoding/json"
	"time"
)

// TurnState is a turn's persisted state. Queued and running are the open ones.
type TurnState string

const (
	TurnQueued      TurnState = "queued"
	TurnRunning     TurnState = "running"
	TurnCompleted   TurnState = "completed"
	TurnCancelled   TurnState = "cancelled"
	TurnFailed      TurnState = "failed"
	TurnInterrupted TurnState = "interrupted" // a crash; final
)

// Final tells whether a turn in this state has ended.
func (s TurnState) Final() bool { return s != TurnQueued && s != TurnRunning }

// Finish reasons.
const (
	FinishEndToken     = "end_token"
	FinishStopString   = "stop_string"
	FinishLength       = "length"
	FinishContextLimit = "context_limit"
	FinishToolCalls    = "tool_calls"
	FinishCancelled    = "cancelled"
	FinishInterrupted  = "interrupted"
	FinishError        = "error"
)

// Limits of one turn.
const (
	MaxTokensDefault = 256
	StopMax          = 16
	StopBytesMax     = 256
	LogprobsMax      = 20
	TopKMax          = 1 << 20
	TemperatureMax   = 10
	MTPDepthMax      = 7
	MessagesMax      = 10_000

	// SeedDrawnMax bounds drawn seeds, so that they survive a JSON number
	// in a language whose numbers are doubles.
	SeedDrawnMax = 1 << 53
)

// TurnRequest appends a prompt (Messages or Input, at most one) and decodes.
// Without text decoding just goes on.
type TurnRequest struct {
	Messages    []Message   `json:"messages,omitempty"`
	Input       *string     `json:"input,omitempty"`
	MaxTokens   *int        `json:"max_tokens,omitempty"` // default MaxTokensDefault
	Temperature *float64    `json:"temperature,omitempty"`
	TopP        *float64    `json:"top_p,omitempty"`
	TopK        *int        `json:"top_k,omitempty"`
	Seed        *int64      `json:"seed,omitempty"` // drawn when absent
	Stop        []string    `json:"stop,omitempty"`
	Logprobs    *int        `json:"logprobs,omitempty"`
	MTP         *MTPRequest `json:"mtp,omitempty"`
	IgnoreEOS   bool        `json:"ignore_eos,omitempty"`
}

// MTPRequest bounds speculation; it never changes tokens.
type MTPRequest struct {
	MaxDepth *int `json:"max_depth,omitempty"`
}

// Turn is one prompt and its continuation, [From, To) of the session's line.
type Turn struct {
	ID           string       `json:"id"`
	Object       string       `json:"object"` // always "turn"
	SessionID    string       `json:"session_id"`
	State        TurnState    `json:"state"`
	Text         string       `json:"text"`             // ends before a stop string
	Tokens       []int32      `json:"tokens,omitempty"` // generated ids; absent in lists
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
	Code    Code   `json:"code"`
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

// Usage counts a turn's tokens. CachedTokens is what was not recomputed.
type Usage struct {
	PromptTokens     int      `json:"prompt_tokens"`
	CompletionTokens int      `json:"completion_tokens"`
	CachedTokens     int      `json:"cached_tokens"`
	CacheWriteTokens int      `json:"cache_write_tokens"`
	BySource         Restored `json:"by_source"`
	ColdReason       string   `json:"cold_reason,omitempty"` // the first reason why tokens of the prompt were computed again
	ColdAt           *int     `json:"cold_at,omitempty"`     // the token from which on it holds
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

// TurnFilter pages through a session's turns, newest first.
type TurnFilter struct {
	Limit int    // 0: ListLimitDefault
	After string // the id that TurnPage.Next named
}

// TurnPage is one page of turns.
type TurnPage struct {
	Data    []Turn  `json:"data"`
	HasMore bool    `json:"has_more"`
	Next    *string `json:"next"`
}

// MarshalJSON keeps a null token list out of lists but an empty one in turns.
func (t Turn) MarshalJSON() ([]byte, error) {
	type plain Turn
	if t.Tokens == nil {
		return json.Marshal(plain(t))
	}
	return json.Marshal(struct {
		plain
		Tokens []int32 `json:"tokens"`
	}{plain(t), t.Tokens})
}
