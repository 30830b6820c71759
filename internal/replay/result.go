package replay

// Result is what a walk measured. Bytes are of pages and states on the device; tokens are of prompts.
type Result struct {
	Format   string `json:"format"`
	Geometry string `json:"geometry"`
	State    string `json:"state"`
	Policy   string `json:"policy"`
	Budget   int64  `json:"budget_bytes"`              // 0: none
	Percent  int64  `json:"percent_of_peak,omitempty"` // of a sweep

	Requests     int     `json:"requests"` // refused ones too: nothing of theirs is cached
	PromptTokens int64   `json:"prompt_tokens"`
	CachedTokens int64   `json:"cached_tokens"`
	KnownTokens  int64   `json:"known_tokens"` // in whole pages that were there, with or without a state
	HitRate      float64 `json:"hit_rate"`
	IdealTokens  int64   `json:"ideal_tokens"` // of an unlimited cache of whole pages
	IdealRate    float64 `json:"ideal_rate"`
	LineSharing  float64 `json:"line_sharing"` // distinct pages of all lines / pages of all lines

	PeakBytes        int64 `json:"peak_bytes"`
	PeakPages        int   `json:"peak_pages"`
	PeakStates       int   `json:"peak_states"`
	Snapshots        int   `json:"snapshots"`
	EvictedPages     int   `json:"evicted_pages"`
	EvictedSnapshots int   `json:"evicted_snapshots"`
	CopyOnExtend     int   `json:"copy_on_extend"`
	Forks            int   `json:"forks"`
	StateCopies      int   `json:"state_copies"`
	Waited           int   `json:"waited"`
	Refused          int   `json:"refused"`
	Starved          int   `json:"starved"`
	Parked           int   `json:"parked"`
	Shed             int   `json:"shed"`

	Sessions *SessionsResult `json:"sessions,omitempty"`
}

// found says what a timeline that is about to begin on a prompt has of it.
func (w *walker) found(s *seq) Served {
	return Served{Prompt: len(s.line), Cached: s.consumed, Known: min(w.match.Tokens, floorPage(len(s.line)-1))}
}

// serve counts a request whose prompt has run.
func (w *walker) serve(i int, got Served) {
	w.r.Requests++
	w.r.PromptTokens += int64(got.Prompt)
	w.r.CachedTokens += int64(got.Cached)
	w.r.KnownTokens += int64(got.Known)
	if w.o.Served != nil {
		w.o.Served(i, got)
	}
}

// refuse counts a request that could not run: nothing of its prompt was of use.
func (w *walker) refuse(i int) {
	w.r.Refused++
	w.serve(i, Served{Prompt: w.t.Requests[i].prompt})
}

func (w *walker) finish() {
	w.r.Format, w.r.Geometry, w.r.State, w.r.Policy, w.r.Budget = w.t.Format, w.o.Geometry.Name, w.o.Geometry.State, w.o.Policy, w.o.Budget
	if w.r.PromptTokens > 0 {
		w.r.HitRate = float64(w.r.CachedTokens) / float64(w.r.PromptTokens)
	}
	w.r.Sessions = w.resident.result()
}
