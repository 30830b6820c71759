package sessions

import (
	"encoding/json"
	"time"
)

// A bundle is a subtree as JSON Lines: a header, the sessions with parents
// first, then the turns, the runs of tokens and the events of each session in
// the same order, then a trailer. Every line is an object with a type. What a
// session at the top inherits is there too: its ancestors as deleted sessions
// that keep just that, which is what they would be had they been deleted.
const (
	bundleFormat  = "rocket.sessions"
	bundleVersion = 1
)

// Limits of a bundle, of those written and of those read. Past one an export is
// refused with CodeInvalid, an import too, with the line.
const (
	BundleSessionsMax  = TreeNodesMax + LineageNodesMax
	BundleTurnsMax     = 200_000
	BundleRunsMax      = 1_000_000
	BundleLineBytesMax = 64 << 20 // a turn's line has its request, its text and its log probabilities

	// bundleHeadBytesMax bounds the lines of sessions together: they are held in
	// memory, the others are not.
	bundleHeadBytesMax = 64 << 20

	// bundleRequestBytesMax bounds a turn's request: twice what a call may bring,
	// since JSON can be written in more bytes than it came in.
	bundleRequestBytesMax = 16 << 20
)

// What a bundle may say where a row has no natural bound. All are far from what
// the columns, and clients whose numbers are doubles, can hold: what was
// imported goes on, epochs and seqs rise.
const (
	bundleEpochMax = 1 << 48
	bundleSeqMax   = 1 << 48
	bundleYearMin  = 1970
	bundleYearMax  = 9998 // at_ms may lead into the next, and RFC 3339 ends with 9999

	turnErrorCodeBytesMax = 64
	turnErrorBytesMax     = 64 << 10
	coldReasonBytesMax    = 256
	usageFloatMax         = 1e15
)

// bundleTime tells whether a time of a bundle is one that can be written again.
func bundleTime(t time.Time) bool {
	year := t.UTC().Year()
	return year >= bundleYearMin && year <= bundleYearMax
}

// bundleTimes is bundleTime of those that are there.
func bundleTimes(times ...*time.Time) bool {
	for _, t := range times {
		if t != nil && !bundleTime(*t) {
			return false
		}
	}
	return true
}

const (
	lineHeader  = "header"
	lineSession = "session"
	lineTurn    = "turn"
	lineTokens  = "tokens"
	lineEvent   = "event"
	lineTrailer = "trailer"
)

type bundleHeader struct {
	Type            string    `json:"type"`
	Format          string    `json:"format"`
	Version         int       `json:"version"`
	ExportedAt      time.Time `json:"exported_at"`
	ID              string    `json:"id"` // the session that was exported; those before it are its ancestors
	Model           string    `json:"model"`
	ModelDigest     string    `json:"model_digest"`
	TokenizerDigest string    `json:"tokenizer_digest"`
	ParityClass     string    `json:"parity_class"`
	Sessions        int       `json:"sessions"` // lines of each kind
	Turns           int       `json:"turns"`
	TokenRuns       int       `json:"token_runs"`
	Events          int       `json:"events"`
}

type bundleSession struct {
	Type       string            `json:"type"`
	ID         string            `json:"id"`
	ParentID   *string           `json:"parent_id"`
	ForkedAt   *int              `json:"forked_at"`
	State      State             `json:"state"`
	Length     int               `json:"length"`
	TurnCount  int               `json:"turn_count"`
	Epoch      int64             `json:"epoch"`
	FirstSeq   int64             `json:"first_seq"`
	LastSeq    int64             `json:"last_seq"`
	GoneEpoch  int64             `json:"gone_epoch"`
	Title      string            `json:"title"`
	Labels     map[string]string `json:"labels"`
	Pin        bool              `json:"pin"`
	TTLSeconds *int              `json:"ttl_seconds"`
	CreatedAt  time.Time         `json:"created_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
	ClosedAt   *time.Time        `json:"closed_at"`
	DeletedAt  *time.Time        `json:"deleted_at"`
	KeptTo     *int              `json:"kept_to"` // of a deleted one: the prefix that others inherit
}

type bundleTurn struct {
	Type         string          `json:"type"`
	ID           string          `json:"id"`
	SessionID    string          `json:"session_id"`
	State        TurnState       `json:"state"`
	Request      json.RawMessage `json:"request"`
	Seed         int64           `json:"seed"`
	Prompt       []int32         `json:"prompt"`
	From         int             `json:"from"`
	To           int             `json:"to"`
	Text         string          `json:"text"`
	FinishReason string          `json:"finish_reason"`
	Usage        json.RawMessage `json:"usage"`
	Error        json.RawMessage `json:"error"`
	Logprobs     json.RawMessage `json:"logprobs"`
	CreatedAt    time.Time       `json:"created_at"`
	StartedAt    *time.Time      `json:"started_at"`
	EndedAt      time.Time       `json:"ended_at"`
}

type bundleRun struct {
	Type      string    `json:"type"`
	SessionID string    `json:"session_id"`
	TurnID    *string   `json:"turn_id"`
	From      int       `json:"from"`
	IDs       []int32   `json:"ids"`
	FirstSeq  int64     `json:"first_seq"`
	Cuts      []int16   `json:"cuts"`
	AtMS      []int32   `json:"at_ms"`
	Time      time.Time `json:"time"`
	Epoch     int64     `json:"epoch"`
}

type bundleEvent struct {
	Type      string          `json:"type"`
	SessionID string          `json:"session_id"`
	TurnID    *string         `json:"turn_id"`
	Seq       int64           `json:"seq"`
	Epoch     int64           `json:"epoch"`
	Event     EventType       `json:"event"`
	Time      time.Time       `json:"time"`
	Data      json.RawMessage `json:"data"`
}

type bundleTrailer struct {
	Type   string `json:"type"`
	Lines  int    `json:"lines"`  // all before this one
	SHA256 string `json:"sha256"` // of all bytes before this line, in hex
}
