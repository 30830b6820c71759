package server

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"rocket/sessions"
)

// metrics is one server's registry. What the server counts itself is here;
// numbers of sessions, the ledger and the engine are read from the manager
// when somebody scrapes (collector.go).
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.HistogramVec
	sockets  prometheus.Gauge
	sse      prometheus.Gauge
	closes   *prometheus.CounterVec
	refused  prometheus.Counter
	proxied  prometheus.Counter
	dropped  prometheus.Counter

	turns     *prometheus.CounterVec
	ttft      prometheus.Histogram
	rate      prometheus.Histogram
	prompts   prometheus.Counter
	cached    prometheus.Counter
	unwatched prometheus.Counter
}

func newMetrics(s *Server) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "rocket_http_request_duration_seconds", Help: "Time of HTTP requests, without sockets and event streams.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		}, []string{"method", "route", "status"}),
		sockets: prometheus.NewGauge(prometheus.GaugeOpts{Name: "rocket_websocket_connections", Help: "Open WebSockets."}),
		sse:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "rocket_sse_connections", Help: "Open event streams."}),
		closes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rocket_websocket_closed_total", Help: "WebSockets that this server closed, by close code.",
		}, []string{"code"}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{Name: "rocket_unauthenticated_total", Help: "Requests without an API key that is good."}),
		proxied: prometheus.NewCounter(prometheus.CounterOpts{Name: "rocket_proxied_total", Help: "Calls and frames that were passed on to the server that has the session."}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "rocket_connections_dropped_total", Help: "Connections closed because too many were open: new ones, or ones without a request."}),
		turns: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rocket_turns_total", Help: "Turns that ended, by state and finish reason.",
		}, []string{"state", "finish_reason"}),
		ttft: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "rocket_turn_ttft_seconds", Help: "Time to the first token of completed turns, from their start.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}),
		rate: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "rocket_turn_tokens_per_second", Help: "Decoding rate of completed turns.",
			Buckets: []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000},
		}),
		prompts:   prometheus.NewCounter(prometheus.CounterOpts{Name: "rocket_turn_prompt_tokens_total", Help: "Tokens of the lines that completed turns began with."}),
		cached:    prometheus.NewCounter(prometheus.CounterOpts{Name: "rocket_turn_cached_tokens_total", Help: "Those of them that were not computed again."}),
		unwatched: prometheus.NewCounter(prometheus.CounterOpts{Name: "rocket_turns_uncounted_total", Help: "Lifecycle events that came too fast to be counted here."}),
	}
	m.registry.MustRegister(m.turns, m.ttft, m.rate, m.prompts, m.cached, m.unwatched, m.requests, m.sockets, m.sse, m.closes, m.refused, m.proxied, m.dropped, &collector{server: s},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// watchTurns counts the ends of turns until ctx ends.
func (m *metrics) watchTurns(ctx context.Context, watch *sessions.Watch) {
	for {
		events, lost, err := watch.Next(ctx)
		if err != nil {
			return // the server or the manager ends
		}
		m.unwatched.Add(float64(lost))
		for i := range events {
			m.turn(&events[i])
		}
	}
}

func (m *metrics) turn(e *sessions.Event) {
	switch e.Type {
	case sessions.EventTurnCompleted, sessions.EventTurnFailed, sessions.EventTurnCancelled, sessions.EventTurnInterrupted:
	default:
		return
	}
	m.turns.WithLabelValues(strings.TrimPrefix(string(e.Type), "turn."), e.FinishReason).Inc()
	if u := e.Usage; e.Type == sessions.EventTurnCompleted && u != nil {
		m.ttft.Observe(u.TTFTMillis / 1000)
		if u.CompletionTokens > 1 { // of one token there is no rate
			m.rate.Observe(u.TokensPerSecond)
		}
		m.prompts.Add(float64(u.PromptTokens))
		m.cached.Add(float64(u.CachedTokens))
	}
}

// request counts one request. Unknown routes share one label, so that a
// scanner cannot grow the registry.
func (m *metrics) request(method, route string, status int, took time.Duration, stream bool) {
	if stream {
		return
	}
	if route == "" || route == "/*" {
		route = "other"
	}
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPatch, http.MethodDelete:
	default:
		method = "other"
	}
	if status == 0 {
		status = http.StatusOK
	}
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Observe(took.Seconds())
}
