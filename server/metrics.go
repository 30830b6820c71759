package server

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
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
	}
	m.registry.MustRegister(m.requests, m.sockets, m.sse, m.closes, &collector{server: s},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
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
