package server

import (
	"context"

	"rocket/sessions"
)

// Stats are the numbers of GET /v1/stats; /metrics has the same ones. Counters
// are totals since the start.
type Stats struct {
	ServerID string        `json:"server_id"`
	Model    StatsModel    `json:"model"`
	Sessions StatsSessions `json:"sessions"`
	Turns    StatsTurns    `json:"turns"`
	Pools    StatsPools    `json:"pools"`
	Tokens   StatsTokens   `json:"tokens"`
	Cache    StatsCache    `json:"cache"`
	Resident StatsResident `json:"resident"`
	Batch    StatsBatch    `json:"batch"`
	Ledger   StatsLedger   `json:"ledger"`
}

// StatsModel names what the engine runs.
type StatsModel struct {
	Name         string `json:"name"`
	Digest       string `json:"digest"`
	Class        string `json:"class"`
	Arithmetic   string `json:"arithmetic" doc:"equal ids give equal bits"`
	ContextLimit int    `json:"context_limit"`
}

// StatsSessions counts sessions; live ones are in memory.
type StatsSessions struct {
	ByState map[string]int64 `json:"by_state"`
	Live    int              `json:"live"`
	Readers int              `json:"readers" doc:"of event logs"`
	Forks   int64            `json:"forks"`
}

// StatsTurns counts turns of this moment.
type StatsTurns struct {
	Open       int `json:"open"`
	Queued     int `json:"queued" doc:"waiting for the engine"`
	Running    int `json:"running" doc:"in the engine's batch"`
	Prefilling int `json:"prefilling"`
}

// StatsPools is memory, by kind and tier.
type StatsPools struct {
	PagesUsed        int   `json:"pages_used"`
	PagesTotal       int   `json:"pages_total"`
	PageBytes        int64 `json:"page_bytes" doc:"of one page of 128 tokens, padding included"`
	StatesUsed       int   `json:"states_used"`
	StatesTotal      int   `json:"states_total"`
	StateBytes       int64 `json:"state_bytes" doc:"of one recurrent state"`
	HostBytes        int64 `json:"host_bytes"`
	HostBytesMax     int64 `json:"host_bytes_max"`
	DiskBytes        int64 `json:"disk_bytes" doc:"of the disk tier's files"`
	DiskBytesMax     int64 `json:"disk_bytes_max" doc:"0: no disk tier"`
	Timelines        int   `json:"timelines" doc:"lines that the engine holds"`
	TimelinesCold    int   `json:"timelines_cold" doc:"of them without state on the device"`
	EvictedPages     int64 `json:"evicted_pages"`
	EvictedSnapshots int64 `json:"evicted_snapshots"`
	Snapshots        int64 `json:"snapshots" doc:"taken"`
}

// StatsTokens counts tokens by where their state came from.
type StatsTokens struct {
	Generated  int64 `json:"generated"`
	Device     int64 `json:"device"`
	Host       int64 `json:"host"`
	Disk       int64 `json:"disk"`
	Recomputed int64 `json:"recomputed"`
	Preempted  int64 `json:"preempted" doc:"computed again because memory was short"`
	Pending    int   `json:"pending" doc:"generated, not committed yet"`
	Committed  int64 `json:"committed"`
}

// StatsCache says how sound the cache proved to be.
type StatsCache struct {
	RestoresFailed int64 `json:"restores_failed" doc:"whose bytes could not be read or failed their checksum: recomputed"`
	Checked        int64 `json:"checked" doc:"snapshots that check-cache looked at"`
	Mismatches     int64 `json:"mismatches" doc:"those that were wrong: dropped"`
	Salted         int64 `json:"salted" doc:"lines that only another tenant's cache knew"`
}

// StatsResident says who takes the memory of device and host, and what the
// tenants' limits of it (rocket key limits) have led to.
type StatsResident struct {
	Limited int64         `json:"limited" doc:"tenants with a limit"`
	Full    int64         `json:"full" doc:"those of them that are at it"`
	Evicted int64         `json:"evicted" doc:"pages and states that tenants at their limits gave up"`
	Refused int64         `json:"refused" doc:"turns and resumes refused because open turns filled the limit"`
	Tenants []StatsTenant `json:"tenants" doc:"that called since the start, those with most first; 100 at most"`
}

// StatsTenant is what one tenant's lines take, in bytes.
type StatsTenant struct {
	Tenant      string `json:"tenant"`
	DeviceBytes int64  `json:"device_bytes"`
	HostBytes   int64  `json:"host_bytes"`
	DiskBytes   int64  `json:"disk_bytes" doc:"not limited"`
	LimitBytes  *int64 `json:"limit_bytes" doc:"of device and host together; null: none"`
}

// statsTenantsMax bounds the list of tenants; those with least are left out.
const statsTenantsMax = 100

// StatsBatch says what the device's steps were made of.
type StatsBatch struct {
	Steps       int64   `json:"steps"`
	StepSeconds float64 `json:"step_seconds"`
	RowsPrefill int64   `json:"rows_prefill"`
	RowsDecode  int64   `json:"rows_decode"`
	Preemptions int64   `json:"preemptions"`
}

// StatsLedger says how the database does.
type StatsLedger struct {
	Connections    int     `json:"connections"`
	ConnectionsMax int     `json:"connections_max"`
	Commits        int64   `json:"commits"`
	CommitSeconds  float64 `json:"commit_seconds"`
	Batches        int64   `json:"batches" doc:"of token appends"`
	BatchSeconds   float64 `json:"batch_seconds"`
	DownSeconds    float64 `json:"down_seconds" doc:"0: it answers"`
}

// stats reads the manager's numbers. Without the ledger by_state is empty.
func (s *Server) stats(ctx context.Context) Stats {
	m := s.manager.Stats()
	e := m.Engine
	out := Stats{
		ServerID: m.ServerID,
		Model: StatsModel{Name: e.Model.Name, Digest: e.Model.Digest, Class: e.Model.ParityClass,
			Arithmetic: e.Model.Arithmetic, ContextLimit: e.Model.Context},
		Sessions: StatsSessions{ByState: map[string]int64{}, Live: m.SessionsLive, Readers: m.Readers, Forks: m.Forks},
		Turns:    StatsTurns{Open: m.TurnsOpen, Queued: e.QueueDepth, Running: e.Running, Prefilling: e.Prefilling},
		Pools: StatsPools{PagesUsed: e.PagesUsed, PagesTotal: e.PagesTotal, PageBytes: e.PageBytes,
			StatesUsed: e.SlotsUsed, StatesTotal: e.SlotsTotal, StateBytes: e.SlotBytes,
			HostBytes: e.HostBytes, HostBytesMax: e.HostBytesMax, DiskBytes: e.DiskBytes, DiskBytesMax: e.DiskBytesMax, Timelines: e.Seqs, TimelinesCold: e.SeqsCold,
			EvictedPages: e.EvictedPages, EvictedSnapshots: e.EvictedSnapshots, Snapshots: e.Snapshots},
		Tokens: StatsTokens{Generated: e.TokensGenerated, Device: e.TokensDevice, Host: e.TokensHost, Disk: e.TokensDisk,
			Recomputed: e.TokensRecomputed, Preempted: e.TokensPreempted, Pending: m.TokensPending, Committed: m.TokensFlushed},
		Cache: StatsCache{RestoresFailed: e.RestoresFailed, Checked: e.CheckedSnapshots, Mismatches: e.CheckMismatches, Salted: e.ColdSalted},
		Resident: StatsResident{Limited: int64(e.NamespacesLimited), Full: int64(e.NamespacesFull), Evicted: e.QuotaEvicted, Refused: e.QuotaRefused,
			Tenants: []StatsTenant{}},
		Batch: StatsBatch{Steps: e.Steps, StepSeconds: e.StepSeconds, RowsPrefill: e.RowsPrefill, RowsDecode: e.RowsDecode, Preemptions: e.Preemptions},
		Ledger: StatsLedger{Connections: m.LedgerConns, ConnectionsMax: m.LedgerConnsMax, Commits: m.Commits, CommitSeconds: m.CommitSeconds,
			Batches: m.Batches, BatchSeconds: m.BatchSeconds, DownSeconds: m.LedgerDown.Seconds()},
	}
	for _, t := range s.manager.TenantBytes() {
		if len(out.Resident.Tenants) == statsTenantsMax {
			break
		}
		out.Resident.Tenants = append(out.Resident.Tenants, StatsTenant{Tenant: t.Tenant, DeviceBytes: t.Device, HostBytes: t.Host, DiskBytes: t.Disk, LimitBytes: t.Limit})
	}
	counts, err := s.manager.CountByState(ctx)
	if err != nil {
		s.log.Debug("count sessions", "err", err) // /readyz says that the ledger is away
		return out
	}
	for _, state := range []sessions.State{sessions.StateIdle, sessions.StateRunning, sessions.StateDetached, sessions.StateClosed} {
		out.Sessions.ByState[string(state)] = counts[state]
	}
	return out
}

func (s *Server) getStats(ctx context.Context, _ *struct{}) (*body[Stats], error) {
	return &body[Stats]{Body: s.stats(ctx)}, nil
}

func (s *Server) openTurns() int { return s.manager.Stats().TurnsOpen }
