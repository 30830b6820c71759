package server

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// scrapeTimeout bounds what a scrape asks of the ledger.
const scrapeTimeout = 5 * time.Second

// collector reads the manager's numbers once per scrape.
type collector struct{ server *Server }

// number is one metric made from Stats.
type number struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*Stats) float64
}

func gauge(name, help string, value func(*Stats) float64) number {
	return number{prometheus.NewDesc("rocket_"+name, help, nil, nil), prometheus.GaugeValue, value}
}

func counter(name, help string, value func(*Stats) float64) number {
	return number{prometheus.NewDesc("rocket_"+name, help, nil, nil), prometheus.CounterValue, value}
}

var (
	sessionsDesc = prometheus.NewDesc("rocket_sessions", "Sessions by state.", []string{"state"}, nil)
	restoredDesc = prometheus.NewDesc("rocket_prompt_tokens_total", "Tokens of lines by where their state came from.", []string{"source"}, nil)
	rowsDesc     = prometheus.NewDesc("rocket_rows_total", "Rows of the device's steps.", []string{"phase"}, nil)
	modelDesc    = prometheus.NewDesc("rocket_model_info", "What the engine runs.", []string{"name", "digest", "class", "arithmetic"}, nil)
)

var numbers = []number{
	gauge("sessions_live", "Sessions in memory.", func(s *Stats) float64 { return float64(s.Sessions.Live) }),
	gauge("log_readers", "Readers of event logs.", func(s *Stats) float64 { return float64(s.Sessions.Readers) }),
	counter("forks_total", "Children made by forks.", func(s *Stats) float64 { return float64(s.Sessions.Forks) }),
	gauge("turns_open", "Turns queued or running.", func(s *Stats) float64 { return float64(s.Turns.Open) }),
	gauge("queue_depth", "Turns that wait for the engine.", func(s *Stats) float64 { return float64(s.Turns.Queued) }),
	gauge("batch_running", "Turns in the engine's batch.", func(s *Stats) float64 { return float64(s.Turns.Running) }),
	gauge("batch_prefilling", "Turns of the batch in prefill.", func(s *Stats) float64 { return float64(s.Turns.Prefilling) }),
	gauge("pages_used", "Pages in use.", func(s *Stats) float64 { return float64(s.Pools.PagesUsed) }),
	gauge("pages_total", "Pages that there are.", func(s *Stats) float64 { return float64(s.Pools.PagesTotal) }),
	gauge("page_bytes", "Bytes of one page, padding included.", func(s *Stats) float64 { return float64(s.Pools.PageBytes) }),
	gauge("states_used", "Recurrent states in use, snapshots included.", func(s *Stats) float64 { return float64(s.Pools.StatesUsed) }),
	gauge("states_total", "Recurrent states that there is room for.", func(s *Stats) float64 { return float64(s.Pools.StatesTotal) }),
	gauge("state_bytes", "Bytes of one recurrent state.", func(s *Stats) float64 { return float64(s.Pools.StateBytes) }),
	gauge("host_bytes", "Bytes in the host tier.", func(s *Stats) float64 { return float64(s.Pools.HostBytes) }),
	gauge("host_bytes_max", "Room of the host tier.", func(s *Stats) float64 { return float64(s.Pools.HostBytesMax) }),
	gauge("disk_bytes", "Bytes of the disk tier's files.", func(s *Stats) float64 { return float64(s.Pools.DiskBytes) }),
	gauge("disk_bytes_max", "Room of the disk tier.", func(s *Stats) float64 { return float64(s.Pools.DiskBytesMax) }),
	counter("restores_failed_total", "Restores whose bytes could not be read or were corrupt.", func(s *Stats) float64 { return float64(s.Cache.RestoresFailed) }),
	counter("cache_checked_total", "Snapshots that check-cache looked at.", func(s *Stats) float64 { return float64(s.Cache.Checked) }),
	counter("cache_mismatches_total", "Snapshots that check-cache found wrong and dropped.", func(s *Stats) float64 { return float64(s.Cache.Mismatches) }),
	counter("cold_salted_total", "Lines that only another tenant's cache knew.", func(s *Stats) float64 { return float64(s.Cache.Salted) }),
	gauge("tenants_limited", "Tenants with a limit of resident bytes.", func(s *Stats) float64 { return float64(s.Resident.Limited) }),
	gauge("tenants_full", "Those that are at it.", func(s *Stats) float64 { return float64(s.Resident.Full) }),
	counter("quota_evicted_total", "Pages and states that tenants at their limits gave up.", func(s *Stats) float64 { return float64(s.Resident.Evicted) }),
	counter("quota_refused_total", "Turns and resumes refused because open turns filled a limit.", func(s *Stats) float64 { return float64(s.Resident.Refused) }),
	gauge("timelines", "Lines that the engine holds.", func(s *Stats) float64 { return float64(s.Pools.Timelines) }),
	gauge("timelines_cold", "Lines without state on the device.", func(s *Stats) float64 { return float64(s.Pools.TimelinesCold) }),
	counter("evicted_pages_total", "Pages evicted.", func(s *Stats) float64 { return float64(s.Pools.EvictedPages) }),
	counter("evicted_snapshots_total", "Snapshots evicted.", func(s *Stats) float64 { return float64(s.Pools.EvictedSnapshots) }),
	counter("snapshots_total", "Snapshots taken.", func(s *Stats) float64 { return float64(s.Pools.Snapshots) }),
	counter("tokens_generated_total", "Tokens sampled.", func(s *Stats) float64 { return float64(s.Tokens.Generated) }),
	counter("tokens_committed_total", "Tokens written to the ledger.", func(s *Stats) float64 { return float64(s.Tokens.Committed) }),
	gauge("tokens_pending", "Tokens generated and not committed yet.", func(s *Stats) float64 { return float64(s.Tokens.Pending) }),
	counter("tokens_preempted_total", "Tokens computed again because memory was short.", func(s *Stats) float64 { return float64(s.Tokens.Preempted) }),
	counter("preemptions_total", "Turns put back because memory was short.", func(s *Stats) float64 { return float64(s.Batch.Preemptions) }),
	counter("steps_total", "Steps of the device.", func(s *Stats) float64 { return float64(s.Batch.Steps) }),
	counter("step_seconds_total", "Time in steps.", func(s *Stats) float64 { return s.Batch.StepSeconds }),
	gauge("ledger_connections", "Connections to the ledger.", func(s *Stats) float64 { return float64(s.Ledger.Connections) }),
	gauge("ledger_down_seconds", "How long the ledger has not answered; 0: it answers.", func(s *Stats) float64 { return s.Ledger.DownSeconds }),
	counter("ledger_commits_total", "Commits of calls.", func(s *Stats) float64 { return float64(s.Ledger.Commits) }),
	counter("ledger_commit_seconds_total", "Time in them.", func(s *Stats) float64 { return s.Ledger.CommitSeconds }),
	counter("ledger_batches_total", "Commits of token appends.", func(s *Stats) float64 { return float64(s.Ledger.Batches) }),
	counter("ledger_batch_seconds_total", "Time in them.", func(s *Stats) float64 { return s.Ledger.BatchSeconds }),
}

// Describe is the list above; none of it depends on a scrape.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sessionsDesc, restoredDesc, rowsDesc, modelDesc} {
		ch <- d
	}
	for _, n := range numbers {
		ch <- n.desc
	}
}

// Collect reads everything once, so that the numbers belong together.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	s := c.server.stats(ctx)
	for _, n := range numbers {
		ch <- prometheus.MustNewConstMetric(n.desc, n.kind, n.value(&s))
	}
	for state, count := range s.Sessions.ByState {
		ch <- prometheus.MustNewConstMetric(sessionsDesc, prometheus.GaugeValue, float64(count), state)
	}
	for source, tokens := range map[string]int64{"device": s.Tokens.Device, "host": s.Tokens.Host, "disk": s.Tokens.Disk, "recomputed": s.Tokens.Recomputed} {
		ch <- prometheus.MustNewConstMetric(restoredDesc, prometheus.CounterValue, float64(tokens), source)
	}
	for phase, rows := range map[string]int64{"prefill": s.Batch.RowsPrefill, "decode": s.Batch.RowsDecode} {
		ch <- prometheus.MustNewConstMetric(rowsDesc, prometheus.CounterValue, float64(rows), phase)
	}
	ch <- prometheus.MustNewConstMetric(modelDesc, prometheus.GaugeValue, 1, s.Model.Name, s.Model.Digest, s.Model.Class, s.Model.Arithmetic)
}
