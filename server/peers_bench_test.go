package server

import (
	"context"
	"syscall"
	"testing"
	"time"

	"rocket/client"
)

// cpu is what this process, clients and servers together, has computed.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkCall shows what it costs that a call comes to the wrong server: a
// look into the ledger for who has the session, and another hop over loopback.
func BenchmarkCall(b *testing.B) {
	owner, other := twoWorlds(b, worldOptions{})
	s := owner.create("package main")
	ctx := context.Background()
	for _, at := range []struct {
		name string
		api  *client.Client
	}{{"owner", owner.api}, {"other", other.api}} {
		b.Run(at.name, func(b *testing.B) {
			before := cpu()
			defer func() { b.ReportMetric(float64(cpu()-before)/float64(b.N)/1e3, "cpu-us/op") }()
			for b.Loop() {
				if _, err := at.api.Get(ctx, s.ID); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("place", func(b *testing.B) {
		for b.Loop() {
			if p, err := other.manager.Place(ctx, "local", s.ID); err != nil || p.Here() {
				b.Fatal(p, err)
			}
		}
	})
	b.Run("place, own", func(b *testing.B) {
		for b.Loop() {
			if p, err := owner.manager.Place(ctx, "local", s.ID); err != nil || !p.Here() {
				b.Fatal(p, err)
			}
		}
	})
}
