package sessions

import (
	"encoding/json"
	"time"
)

// State is a session's persisted state. Nothing in between is ever stored:
// recovery would need code for states that only matter while a process lives.
type State string

const (
	StateIdle     State = "idle"
	StateRunning  State = "running"
	StateDetached State = "detached"
	StateClosed   State = "closed"
)

// Limits of a session's own fields and of one call. Breaking one is an Error
// with CodeInvalid (or CodeLimit for the per-tenant ones) that names the field.
const (
	TitleBytesMax      = 512
	LabelsMax          = 32
	LabelKeyBytesMax   = 64
	LabelValueBytesMax = 512
	ForkChildrenMax    = 64
	TTLSecondsMax      = 10 * 365 * 24 * 3600
	ListLimitDefault   = 20
	ListLimitMax       = 200
	TreeNodesMax       = 20_000 // a larger tree must be asked for by depth

	SessionsPerTenantMax = 100_000
	TurnsPerTenantMax    = 256 // queued and running ones together
)

// Session is one line of tokens and its place in the lineage.
type Session struct {
	ID         string            `json:"id"`
	Object     string            `json:"object"` // always "session"
	Model      string            `json:"model"`
	Title      string            `json:"title"`
	Labels     map[string]string `json:"labels"` // never null
	State      State             `json:"state"`
	ParentID   *string           `json:"parent_id"`
	RootID     string            `json:"root_id"`
	ForkedAt   *int              `json:"forked_at"` // token offset in the parent's line; null for a root
	Length     int               `json:"length"`    // tokens of the whole line, inherited ones too
	TurnCount  int               `json:"turn_count"`
	ChildCount int               `json:"child_count"`
	Residency  Residency         `json:"residency"`
	LastSeq    int64             `json:"last_seq"`
	Epoch      int64             `json:"epoch"`
	TTLSeconds *int              `json:"ttl_seconds"` // idle seconds until the session closes; null: never
	Pin        bool              `json:"pin"`
	Elsewhere  bool              `json:"elsewhere,omitempty"` // another server has it; Residency is what the ledger knows of that one
	CreatedAt  time.Time         `json:"created_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
	ExpiresAt  *time.Time        `json:"expires_at"`
}

// Residency says where a session's bytes are, in tokens of its line;
// Snapshots is a count. It is reported after the fact and promises nothing.
type Residency struct {
	Device    int `json:"device"`
	Host      int `json:"host"`
	Disk      int `json:"disk"`
	Snapshots int `json:"snapshots"`
}

// Message is one chat message, rendered by the model's chat template.
type Message struct {
	Role       string          `json:"role"`
	Content    string          `json:"content"`
	Name       string          `json:"name,omitempty"`
	ToolCallID string          `json:"tool_call_id,omitempty"`
	ToolCalls  json.RawMessage `json:"tool_calls,omitempty"`
}

// CreateRequest makes a root session. Messages go through the chat template
// without a generation prompt, Input is raw text; at most one of them.
type CreateRequest struct {
	Model      string            `json:"model,omitempty"`
	Title      string            `json:"title,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Messages   []Message         `json:"messages,omitempty"`
	Input      *string           `json:"input,omitempty"`
	TTLSeconds *int              `json:"ttl_seconds,omitempty"`
	Pin        bool              `json:"pin,omitempty"`
}

// PatchRequest changes what is not nil. Labels replace the whole set.
// A TTLSeconds of 0 takes the limit away.
type PatchRequest struct {
	Title      *string            `json:"title,omitempty"`
	Labels     *map[string]string `json:"labels,omitempty"`
	TTLSeconds *int               `json:"ttl_seconds,omitempty"`
	Pin        *bool              `json:"pin,omitempty"`
}

// ListFilter selects sessions, newest first. Empty fields do not filter.
type ListFilter struct {
	State  State
	Root   string
	Parent string
	Labels map[string]string // every pair must be there
	Limit  int               // 0: ListLimitDefault
	After  string            // the id that Page.Next named
}

// SessionPage is one page of a list; Next goes into After.
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

// Node is a Session of a tree, or what is left of a deleted one: its place.
type Node struct {
	Session
	Deleted bool `json:"deleted,omitempty"`
}

// MarshalJSON gives a deleted node as {id, deleted:true} and its lineage only.
func (n Node) MarshalJSON() ([]byte, error) {
	if !n.Deleted {
		return json.Marshal(n.Session)
	}
	return json.Marshal(struct {
		ID       string  `json:"id"`
		Deleted  bool    `json:"deleted"`
		ParentID *string `json:"parent_id"`
		RootID   string  `json:"root_id"`
		ForkedAt *int    `json:"forked_at"`
	}{n.ID, true, n.ParentID, n.RootID, n.ForkedAt})
}

// ForkRequest makes children of a session at a token offset. N and Children
// exclude each other; with neither there is one child. Title and Labels are
// for children that name none of their own; without Labels a child has the
// parent's.
type ForkRequest struct {
	At       *int              `json:"at,omitempty"`
	N        *int              `json:"n,omitempty"`
	Children []ForkChild       `json:"children,omitempty"`
	Title    *string           `json:"title,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
}

// ForkChild is what one child of a fork has of its own.
type ForkChild struct {
	Title  *string           `json:"title,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
}

// ForkResult is the answer of a fork, after its commit. A child whose state
// could not be attached on the device is cold: SharedTokens is 0 then.
type ForkResult struct {
	Sessions     []Session `json:"sessions"`
	At           int       `json:"at"`
	SharedTokens int       `json:"shared_tokens"`
	ReplayTokens int       `json:"replay_tokens"`
}

// DetachRequest names the tier that takes the bytes: "host" (default), "disk".
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

// TokenRange is a piece of a line, [from, to), and its text.
type TokenRange struct {
	Tokens []int32  `json:"tokens"`
	Text   string   `json:"text"`
	Pieces []string `json:"pieces,omitempty"` // on demand: what each token adds to Text
}
